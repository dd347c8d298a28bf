/* Writing a synthetic checkpoint: threads fill and write pieces of 4 MiB, in any order.
 *
 * Everything goes into a folder beside the target that takes the target's name at the end, so that a
 * reader sees a whole checkpoint or none. */
#include "tools/tinymodel/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#include "common/text/tokenizer.h"

#define PIECE_BYTES         (4u << 20)
#define MAX_TOKENIZER_BYTES (128u << 20)
#define MAX_THREADS         64u
#define MAX_PATH            4096u

struct writer {
    const struct tm_plan *plan;
    int *fds;              /* [n_files] */
    uint64_t *data_starts; /* [n_files] where the data section begins */
    uint64_t *first_piece; /* [n_tensors + 1] pieces before a tensor's own */
    atomic_ullong next_piece, done_bytes;
    atomic_int failure; /* the first errno, 0 while all is well */
};

static int write_at(int fd, const void *data, size_t len, uint64_t offset)
{
    const char *p = data;

    while (len > 0) {
        const ssize_t n = pwrite(fd, p, len, (off_t)offset);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return n < 0 ? errno : EIO;
        }
        p += n;
        len -= (size_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}

/* The tensor that a piece belongs to: the last one whose first piece is not beyond it. */
static uint32_t find_tensor(const struct writer *w, uint64_t piece)
{
    uint32_t lo = 0, hi = w->plan->n_tensors;

    while (hi - lo > 1) {
        const uint32_t mid = lo + (hi - lo) / 2;

        if (w->first_piece[mid] <= piece) {
            lo = mid;
        } else {
            hi = mid;
        }
    }
    return lo;
}

static void write_piece(struct writer *w, uint64_t piece, uint8_t *buffer)
{
    const uint32_t i = find_tensor(w, piece);
    const struct tm_tensor *t = &w->plan->tensors[i];
    const uint64_t begin = (piece - w->first_piece[i]) * PIECE_BYTES;
    const uint64_t n = t->n_bytes - begin < PIECE_BYTES ? t->n_bytes - begin : PIECE_BYTES;
    int err, none = 0;

    tm_fill_bytes(w->plan, t, begin, n, buffer);
    err = write_at(w->fds[t->file], buffer, n, w->data_starts[t->file] + t->offset + begin);
    if (err) {
        (void)atomic_compare_exchange_strong(&w->failure, &none, err);
    }
    atomic_fetch_add(&w->done_bytes, n);
}

static void *run_pieces(void *arg)
{
    struct writer *w = arg;
    const uint64_t n_pieces = w->first_piece[w->plan->n_tensors];
    uint8_t *buffer = malloc(PIECE_BYTES);
    int none = 0;
    uint64_t piece;

    if (!buffer) {
        (void)atomic_compare_exchange_strong(&w->failure, &none, ENOMEM);
        return NULL;
    }
    while (atomic_load(&w->failure) == 0 &&
           (piece = atomic_fetch_add(&w->next_piece, 1)) < n_pieces) {
        write_piece(w, piece, buffer);
    }
    free(buffer);
    return NULL;
}

/* The caller only watches and reports. */
static int run_threads(struct writer *w, struct dmk_error *reterr)
{
    const struct dmk_tinymodel_conf *conf = w->plan->conf;
    const long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t want = conf->n_threads ? conf->n_threads : (uint32_t)(n_cpus > 0 ? n_cpus : 1);
    pthread_t threads[MAX_THREADS];
    uint32_t n = 0;

    want = want < MAX_THREADS ? want : MAX_THREADS;
    while (n < want && pthread_create(&threads[n], NULL, run_pieces, w) == 0) {
        n++;
    }
    if (n == 0) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no thread could be started to write %s",
                             conf->out);
    }
    while (conf->on_progress && atomic_load(&w->failure) == 0 &&
           atomic_load(&w->done_bytes) < w->plan->total_bytes) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        conf->on_progress(conf->ud, atomic_load(&w->done_bytes), w->plan->total_bytes);
    }
    while (n > 0) {
        (void)pthread_join(threads[--n], NULL);
    }
    if (atomic_load(&w->failure)) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be written: %s", conf->out,
                             strerror(atomic_load(&w->failure)));
    }
    return 0;
}

static int write_text(const char *dir, const char *name, const struct dmk_buf *text,
                      struct dmk_error *reterr)
{
    char path[MAX_PATH];
    int fd, err;

    if (text->failed) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s/%s: no memory for its text", dir, name);
    }
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be made: %s", path, strerror(errno));
    }
    err = write_at(fd, text->data, text->len, 0);
    if (close(fd) < 0 && !err) {
        err = errno;
    }
    return err ? dmk_error_set(reterr, -DMK_EIO, "%s: can not be written: %s", path, strerror(err))
               : 0;
}

static int write_small_files(const struct tm_plan *plan, const char *dir, struct dmk_error *reterr)
{
    const struct dmk_tinymodel_conf *conf = plan->conf;
    struct dmk_vocab *vocab = NULL;
    struct dmk_buf text;
    int r;

    dmk_buf_init(&text, 0);
    tm_text_config(plan, &text);
    r = write_text(dir, "config.json", &text, reterr);
    if (r == 0) {
        dmk_buf_reset(&text);
        tm_text_generation(plan, &text);
        r = write_text(dir, "generation_config.json", &text, reterr);
    }
    if (r == 0 && plan->n_files > 1) {
        dmk_buf_reset(&text);
        tm_text_index(plan, &text);
        r = write_text(dir, "model.safetensors.index.json", &text, reterr);
    }
    if (r == 0 && conf->vocab) {
        dmk_buf_reset(&text);
        r = dmk_vocab_open(conf->vocab, &vocab, reterr);
        if (r == 0) {
            text.max_len = MAX_TOKENIZER_BYTES;
            dmk_vocab_write_hf(vocab, &text);
            dmk_vocab_close(&vocab);
            r = write_text(dir, "tokenizer.json", &text, reterr);
        }
    }
    dmk_buf_fini(&text);
    return r;
}

/* Makes a data file with its header. */
static int start_file(struct writer *w, const char *dir, uint32_t file, struct dmk_error *reterr)
{
    struct dmk_buf header;
    char path[MAX_PATH + 64], name[48];
    uint8_t length[8];
    int err = 0;

    dmk_buf_init(&header, 0);
    tm_text_header(w->plan, file, &header);
    tm_file_name(w->plan, file, name);
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    for (int i = 0; i < 8; i++) {
        length[i] = (uint8_t)((uint64_t)header.len >> (8 * i));
    }
    w->data_starts[file] = 8 + header.len;
    w->fds[file] = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (w->fds[file] < 0) {
        err = errno;
    } else if (header.failed) {
        err = ENOMEM;
    } else {
        err = write_at(w->fds[file], length, 8, 0);
        err = err ? err : write_at(w->fds[file], header.data, header.len, 8);
    }
    dmk_buf_fini(&header);
    return err ? dmk_error_set(reterr, -DMK_EIO, "%s: can not be written: %s", path, strerror(err))
               : 0;
}

static int write_data_files(const struct tm_plan *plan, const char *dir, struct dmk_error *reterr)
{
    struct writer w = {.plan = plan};
    int r = 0;

    w.fds = malloc(plan->n_files * sizeof(w.fds[0]));
    w.data_starts = calloc(plan->n_files, sizeof(w.data_starts[0]));
    w.first_piece = calloc(plan->n_tensors + 1, sizeof(w.first_piece[0]));
    if (!w.fds || !w.data_starts || !w.first_piece) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to write it", plan->conf->out);
        goto out;
    }
    for (uint32_t f = 0; f < plan->n_files; f++) {
        w.fds[f] = -1;
    }
    for (uint32_t i = 0; i < plan->n_tensors; i++) {
        w.first_piece[i + 1] =
            w.first_piece[i] + (plan->tensors[i].n_bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    }
    for (uint32_t f = 0; f < plan->n_files && r == 0; f++) {
        r = start_file(&w, dir, f, reterr);
    }
    if (r == 0) {
        r = run_threads(&w, reterr);
    }
    for (uint32_t f = 0; f < plan->n_files; f++) {
        if (w.fds[f] >= 0 && close(w.fds[f]) < 0 && r == 0) {
            r = dmk_error_set(reterr, -DMK_EIO, "%s: can not be written: %s", plan->conf->out,
                              strerror(errno));
        }
    }
out:
    free(w.fds);
    free(w.data_starts);
    free(w.first_piece);
    return r;
}

/* Removes a folder that holds files only; -1 with errno set when it holds anything else. */
static int remove_folder(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;
    int r = 0;

    if (!d) {
        return -1;
    }
    while (r == 0 && (e = readdir(d))) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            r = unlinkat(dirfd(d), e->d_name, 0);
        }
    }
    closedir(d);
    return r < 0 ? r : rmdir(dir);
}

static bool ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), len = strlen(end);

    return n >= len && strcmp(name + n - len, end) == 0;
}

/* A folder may be replaced when it holds a config.json, weights and no folders, or nothing. */
static int check_target(const struct dmk_tinymodel_conf *conf, struct dmk_error *reterr)
{
    bool has_config = false, has_weights = false, has_other = false, has_folder = false;
    struct dirent *e;
    struct stat st;
    DIR *d;

    if (lstat(conf->out, &st) < 0) {
        return errno == ENOENT ? 0
                               : dmk_error_set(reterr, -DMK_EIO, "%s: can not be looked at: %s",
                                               conf->out, strerror(errno));
    }
    if (!conf->force) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: exists already; --force replaces it",
                             conf->out);
    }
    if (S_ISLNK(st.st_mode)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: is a link; name the folder that it leads to",
                             conf->out);
    }
    d = opendir(conf->out);
    if (!d) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: is no folder that could be replaced",
                             conf->out);
    }
    while ((e = readdir(d))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        has_other = true;
        has_config = has_config || strcmp(e->d_name, "config.json") == 0;
        has_weights = has_weights || ends_with(e->d_name, ".safetensors");
        has_folder = has_folder || (fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
                                    S_ISDIR(st.st_mode));
    }
    closedir(d);
    if (has_folder || (has_other && !(has_config && has_weights))) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "%s: does not look like a checkpoint (%s); remove it by hand",
                             conf->out,
                             has_folder    ? "it holds folders"
                             : !has_config ? "no config.json"
                                           : "no .safetensors");
    }
    return 0;
}

static int check_space(const struct tm_plan *plan, const char *dir, struct dmk_error *reterr)
{
    struct statvfs fs;
    uint64_t free_bytes;

    if (statvfs(dir, &fs) < 0) {
        return 0; /* writing will tell */
    }
    free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (free_bytes < plan->total_bytes) {
        return dmk_error_set(reterr, -DMK_EFULL, "%s: %.1f GB are needed but %.1f GB are free",
                             plan->conf->out, (double)plan->total_bytes / 1e9,
                             (double)free_bytes / 1e9);
    }
    return 0;
}

/* Puts the finished folder in the target's place. */
static int take_place(const char *temp, const char *out, struct dmk_error *reterr)
{
    char old[MAX_PATH];
    struct stat st;
    const bool replace = lstat(out, &st) == 0;

    (void)snprintf(old, sizeof(old), "%.4000s.old-%ld", out, (long)getpid());
    if (replace && rename(out, old) < 0) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be moved aside: %s", out,
                             strerror(errno));
    }
    if (rename(temp, out) < 0) {
        const int err = errno;

        if (replace) {
            (void)rename(old, out);
        }
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be renamed to %s: %s", temp, out,
                             strerror(err));
    }
    if (replace && remove_folder(old) < 0) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: the replaced folder can not be removed: %s",
                             old, strerror(errno));
    }
    return 0;
}

static int write_folder(const struct tm_plan *plan, struct dmk_error *reterr)
{
    const char *out = plan->conf->out;
    char temp[MAX_PATH];
    int r;

    (void)snprintf(temp, sizeof(temp), "%.4000s.tmp-%ld", out, (long)getpid());
    if (mkdir(temp, 0755) < 0) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be made: %s%s", temp, strerror(errno),
                             errno == EEXIST ? "; remove it if no other run is making it" : "");
    }
    if ((r = check_space(plan, temp, reterr)) < 0 ||
        (r = write_small_files(plan, temp, reterr)) < 0 ||
        (r = write_data_files(plan, temp, reterr)) < 0 || (r = take_place(temp, out, reterr)) < 0) {
        (void)remove_folder(temp);
    }
    return r;
}

int dmk_tinymodel_write(const struct dmk_tinymodel_conf *conf, uint64_t *ret_bytes,
                        struct dmk_error *reterr)
{
    struct tm_plan plan = {0};
    int r;

    if (strlen(conf->out) == 0 || strlen(conf->out) > MAX_PATH - 100) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the folder's path is %s",
                             conf->out[0] ? "too long" : "empty");
    }
    if ((r = dmk_shape_check(&conf->shape, reterr)) < 0 || (r = check_target(conf, reterr)) < 0 ||
        (r = tm_plan_make(conf, &plan, reterr)) < 0) {
        return r;
    }
    r = write_folder(&plan, reterr);
    if (r == 0) {
        *ret_bytes = plan.total_bytes;
    }
    tm_plan_free(&plan);
    return r;
}
