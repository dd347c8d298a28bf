/* The folder that a conversion fills: what may be in it, and how a file gets its name there; see internal.h. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "tools/convert/internal.h"

/* Taken along as they are: the engine reads the first two, the router or other programs the rest. */
const char *const convert_small_files[CONVERT_N_SMALL] = {
    "config.json",           "generation_config.json",  "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "o200k_base.tiktoken",
};

static bool ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), len = strlen(end);

    return n >= len && strcmp(name + n - len, end) == 0;
}

/* Whether a conversion may have made a file of this name, manifest and journal aside. */
static bool is_ours(const char *name)
{
    bool ours = ends_with(name, ".safetensors") || ends_with(name, ".part");

    for (size_t i = 0; i < CONVERT_N_SMALL; i++) {
        ours = ours || strcmp(name, convert_small_files[i]) == 0;
    }
    return ours;
}

/* Calls fn for every entry; 0 or what it returned first. */
static int each_entry(struct convert_run *run, int (*fn)(struct convert_run *run, const char *name),
                      struct dmk_error *reterr)
{
    const int fd = openat(run->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    struct dirent *e;
    int r = 0;

    if (!d) {
        if (fd >= 0) {
            (void)close(fd);
        }
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be listed: %s", run->conf->dst,
                             strerror(errno));
    }
    while (r == 0 && (e = readdir(d))) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            r = fn(run, e->d_name);
        }
    }
    closedir(d);
    return r;
}

static int count_entry(struct convert_run *run, const char *name)
{
    (void)run;
    (void)name;
    return 1;
}

static int remove_ours(struct convert_run *run, const char *name)
{
    if (is_ours(name)) {
        (void)unlinkat(run->dir_fd, name, 0); /* a rest is overwritten or in nobody's way */
    }
    return 0;
}

static int remove_part(struct convert_run *run, const char *name)
{
    if (ends_with(name, ".part")) {
        (void)unlinkat(run->dir_fd, name, 0);
    }
    return 0;
}

bool convert_folder_has(const struct convert_run *run, const char *name)
{
    return faccessat(run->dir_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

int convert_folder_open(struct convert_run *run, struct dmk_error *reterr)
{
    const char *dst = run->conf->dst;

    if (mkdir(dst, 0755) < 0 && errno != EEXIST) {
        return dmk_error_set(reterr, -DMK_EIO, "%s: can not be made: %s", dst, strerror(errno));
    }
    run->dir_fd = open(dst, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return run->dir_fd >= 0
               ? 0
               : dmk_error_set(reterr, -DMK_EIO, "%s: can not be opened as a folder: %s", dst,
                               strerror(errno));
}

/* A manifest.json of another program makes a folder nobody's conversion. */
static bool has_our_manifest(const struct convert_run *run)
{
    const int fd = openat(run->dir_fd, DMK_MANIFEST_NAME, O_RDONLY | O_CLOEXEC);
    char begin[64];
    ssize_t n = -1;

    if (fd >= 0) {
        n = read(fd, begin, sizeof(begin));
        (void)close(fd);
    }
    return n > 0 &&
           memmem(begin, (size_t)n, DMK_MANIFEST_FORMAT, strlen(DMK_MANIFEST_FORMAT)) != NULL;
}

int convert_folder_check(struct convert_run *run, struct dmk_error *reterr)
{
    const bool known = convert_folder_has(run, DMK_MANIFEST_NAME)
                           ? has_our_manifest(run)
                           : convert_folder_has(run, DMK_MANIFEST_JOURNAL);
    const int r = known ? 0 : each_entry(run, count_entry, reterr);

    return r <= 0 ? r
                  : dmk_error_set(reterr, -DMK_EINVAL,
                                  "%s: is not empty and holds no conversion; name another folder",
                                  run->conf->dst);
}

int convert_folder_empty(struct convert_run *run, struct dmk_error *reterr)
{
    if (ftruncate(run->journal_fd, 0) < 0) {
        return convert_write_failed(run, DMK_MANIFEST_JOURNAL, errno, reterr);
    }
    /* First: without it nothing else counts. */
    if (unlinkat(run->dir_fd, DMK_MANIFEST_NAME, 0) < 0 && errno != ENOENT) {
        return convert_write_failed(run, DMK_MANIFEST_NAME, errno, reterr);
    }
    return each_entry(run, remove_ours, reterr);
}

int convert_take_name(struct convert_run *run, const char *name, struct dmk_error *reterr)
{
    char part[96];

    (void)snprintf(part, sizeof(part), "%s.part", name);
    if (renameat(run->dir_fd, part, run->dir_fd, name) < 0 || fsync(run->dir_fd) < 0) {
        return convert_write_failed(run, name, errno, reterr);
    }
    return 0;
}

int convert_put_file(struct convert_run *run, const char *name, struct dmk_str text,
                     struct dmk_error *reterr)
{
    char part[96];
    int fd, err;

    (void)snprintf(part, sizeof(part), "%s.part", name);
    fd = openat(run->dir_fd, part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) {
        return convert_write_failed(run, part, errno, reterr);
    }
    err = convert_write_all(fd, text.data, text.len);
    if (!err && fsync(fd) < 0) {
        err = errno;
    }
    (void)close(fd);
    if (err) {
        (void)unlinkat(run->dir_fd, part, 0);
        return convert_write_failed(run, name, err, reterr);
    }
    return convert_take_name(run, name, reterr);
}

int convert_folder_tidy(struct convert_run *run, struct dmk_error *reterr)
{
    return each_entry(run, remove_part, reterr);
}
