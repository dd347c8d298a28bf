/* convert.journal: a line of JSON for the run, then one for each file that is done; see internal.h.
 *
 * A line is appended and synced after the file has its name, so what it says holds whenever it is there. The
 * last line may be cut off by a crash; it is then not counted, and the next one begins a line of its own. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/file.h"
#include "common/json/json.h"
#include "tools/convert/internal.h"

#define MAX_BYTES (256u << 20)

static int append(struct convert_run *run, json_t *line, struct dmk_error *reterr)
{
    char *text = line ? json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    struct dmk_buf out;
    int r = 0, err = 0;

    json_decref(line);
    dmk_buf_init(&out, 0);
    dmk_buf_printf(&out, "%s\n", text ? text : "");
    if (!text || out.failed) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a line of the journal");
    } else if ((err = convert_write_all(run->journal_fd, out.data, out.len)) == 0 &&
               fdatasync(run->journal_fd) < 0) {
        err = errno;
    }
    if (err) {
        r = convert_write_failed(run, DMK_MANIFEST_JOURNAL, err, reterr);
    }
    dmk_buf_fini(&out);
    free(text);
    return r;
}

static json_t *describe_inexact(const struct convert_done *d)
{
    json_t *list = json_array();

    for (uint32_t i = 0; i < d->n_inexact; i++) {
        const struct dmk_inexact *e = &d->inexact[i];

        (void)json_array_append_new(list, json_pack("[I, I, b, I, f]", (json_int_t)e->layer,
                                                    (json_int_t)e->expert, (int)e->gate_up,
                                                    (json_int_t)e->n_blocks, e->largest_error));
    }
    return list;
}

int convert_journal_add(struct convert_run *run, uint32_t file, struct dmk_error *reterr)
{
    const struct convert_done *d = &run->done[file];
    char hex[33];
    int r;

    dmk_id128_format(d->checksum, hex);
    (void)pthread_mutex_lock(run->journal_lock);
    r = append(run,
               json_pack("{s:s, s:I, s:s, s:o}", "file", run->cut->files[file].name, "size",
                         (json_int_t)d->n_bytes, "xxh3_128", hex, "inexact", describe_inexact(d)),
               reterr);
    (void)pthread_mutex_unlock(run->journal_lock);
    return r;
}

static bool read_inexact(const json_t *list, struct convert_done *d)
{
    const size_t n = json_array_size(list);

    if (n == 0) {
        return true;
    }
    d->inexact = calloc(n, sizeof(d->inexact[0]));
    if (!d->inexact) {
        return false;
    }
    d->n_inexact = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        const json_t *e = json_array_get(list, i);

        if (json_array_size(e) != 5) {
            return false;
        }
        d->inexact[i] = (struct dmk_inexact){
            .layer = (uint32_t)json_integer_value(json_array_get(e, 0)),
            .expert = (uint32_t)json_integer_value(json_array_get(e, 1)),
            .gate_up = json_is_true(json_array_get(e, 2)),
            .n_blocks = (uint64_t)json_integer_value(json_array_get(e, 3)),
            .largest_error = json_real_value(json_array_get(e, 4)),
        };
    }
    return true;
}

/* Takes what a line says; a line that says nothing clear is as good as none, its file is made again. */
static void read_line(struct convert_run *run, struct dmk_str text)
{
    json_t *line = NULL;
    struct convert_done d = {.noted = true};
    const char *name, *hex;

    if (dmk_json_parse(text, DMK_MANIFEST_JOURNAL, 4, &line, NULL) < 0) {
        return;
    }
    name = json_string_value(json_object_get(line, "file"));
    hex = json_string_value(json_object_get(line, "xxh3_128"));
    d.n_bytes = (uint64_t)json_integer_value(json_object_get(line, "size"));
    for (uint32_t i = 0; name && hex && i < run->cut->n_files; i++) {
        if (strcmp(run->cut->files[i].name, name) != 0 || run->done[i].noted) {
            continue;
        }
        if (d.n_bytes == run->cut->files[i].n_bytes &&
            dmk_id128_parse(hex, strlen(hex), &d.checksum) &&
            read_inexact(json_object_get(line, "inexact"), &d)) {
            run->done[i] = d;
        } else {
            free(d.inexact);
        }
        break;
    }
    json_decref(line);
}

/* 1 when the first line is of this run, 0 when there is no whole first line, negative when it is of another. */
static int check_first(const struct convert_run *run, struct dmk_str text, struct dmk_id128 stamp,
                       struct dmk_error *reterr)
{
    struct dmk_id128 was = {0};
    json_t *line = NULL;
    const char *hex;

    if (text.len == 0 || dmk_json_parse(text, DMK_MANIFEST_JOURNAL, 4, &line, NULL) < 0) {
        return 0;
    }
    hex = json_string_value(json_object_get(line, "run"));
    if (hex && dmk_id128_parse(hex, strlen(hex), &was) && dmk_id128_equal(was, stamp)) {
        json_decref(line);
        return 1;
    }
    json_decref(line);
    return dmk_error_set(
        reterr, -DMK_EMISMATCH,
        "%s: holds an unfinished conversion with other options or of another checkpoint; "
        "--force starts anew",
        run->conf->dst);
}

/* A line starts here; next is behind its end. Without an end it was cut off, and nothing is left. */
static bool next_line(struct dmk_str text, size_t *at, struct dmk_str *ret_line)
{
    const char *start = text.data + *at;
    const char *end = *at < text.len ? memchr(start, '\n', text.len - *at) : NULL;

    if (!end) {
        return false;
    }
    *ret_line = (struct dmk_str){start, (size_t)(end - start)};
    *at += ret_line->len + 1;
    return true;
}

static int read_journal(struct convert_run *run, struct dmk_id128 stamp, const char *path,
                        struct dmk_error *reterr)
{
    struct dmk_buf text;
    struct dmk_str line = {0};
    size_t at = 0;
    int r;

    dmk_buf_init(&text, MAX_BYTES);
    r = dmk_file_read(path, "journal", MAX_BYTES, &text, NULL, reterr);
    if (r == 0) {
        r = next_line(dmk_buf_str(&text), &at, &line) ? check_first(run, line, stamp, reterr) : 0;
    }
    if (r == 1) {
        while (next_line(dmk_buf_str(&text), &at, &line)) {
            read_line(run, line);
        }
        const int err = at < text.len ? convert_write_all(run->journal_fd, "\n", 1) : 0;

        r = err ? convert_write_failed(run, DMK_MANIFEST_JOURNAL, err, reterr) : r;
    } else if (r == 0 && ftruncate(run->journal_fd, 0) < 0) {
        r = convert_write_failed(run, DMK_MANIFEST_JOURNAL, errno, reterr);
    }
    dmk_buf_fini(&text);
    return r;
}

int convert_journal_open(struct convert_run *run, struct dmk_error *reterr)
{
    struct stat st;
    bool removed, ended;

    run->journal_fd =
        openat(run->dir_fd, DMK_MANIFEST_JOURNAL, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (run->journal_fd < 0) {
        return convert_write_failed(run, DMK_MANIFEST_JOURNAL, errno, reterr);
    }
    if (flock(run->journal_fd, LOCK_EX | LOCK_NB) < 0) {
        return errno == EWOULDBLOCK
                   ? dmk_error_set(reterr, -DMK_EAGAIN, "%s: another process is converting into it",
                                   run->conf->dst)
                   : dmk_error_set(reterr, -DMK_EIO, "%s/%s: can not be locked: %s", run->conf->dst,
                                   DMK_MANIFEST_JOURNAL, strerror(errno));
    }
    /* Whoever had the lock may have ended just before, and removed the file or left none to be found. */
    removed = fstat(run->journal_fd, &st) < 0 || st.st_nlink == 0;
    ended = !run->conf->force && convert_folder_has(run, DMK_MANIFEST_NAME);
    if (ended && !removed) {
        (void)unlinkat(run->dir_fd, DMK_MANIFEST_JOURNAL, 0);
    }
    if (ended || removed) {
        return dmk_error_set(
            reterr, -DMK_EAGAIN,
            "%s: another process has converted into it just now; run the same command again",
            run->conf->dst);
    }
    return 0;
}

int convert_journal_read(struct convert_run *run, struct dmk_id128 stamp, struct dmk_error *reterr)
{
    char path[4096], hex[33];
    int r;

    (void)snprintf(path, sizeof(path), "%.4000s/" DMK_MANIFEST_JOURNAL, run->conf->dst);
    r = read_journal(run, stamp, path, reterr);
    if (r != 0) {
        return r < 0 ? r : 0;
    }
    dmk_id128_format(stamp, hex);
    return append(run, json_pack("{s:s}", "run", hex), reterr);
}
