/* Reading of small files; see file.h. No state. */
#include "common/base/file.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static struct dmk_file_stamp stamp_of(const struct stat *s)
{
    return (struct dmk_file_stamp){
        .device = s->st_dev,
        .inode = s->st_ino,
        .size = (uint64_t)s->st_size,
        .changed_ns = (uint64_t)s->st_ctim.tv_sec * 1000000000u + (uint64_t)s->st_ctim.tv_nsec,
    };
}

int dmk_file_read(const char *path, const char *name, size_t max_bytes, struct dmk_buf *out,
                  struct dmk_file_stamp *ret_stamp, struct dmk_error *reterr)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const size_t start = out->len;
    char chunk[4096];
    struct stat s;
    ssize_t n = 0;
    int rc = 0;

    if (fd < 0 || fstat(fd, &s) < 0) {
        rc = dmk_error_set(reterr, -DMK_ENOENT, "the %s file \"%s\" can not be opened: %m", name,
                           path);
        goto out;
    }
    while (rc == 0 && (n = read(fd, chunk, sizeof(chunk))) != 0) {
        if (n < 0 && errno != EINTR) {
            rc = dmk_error_set(reterr, -DMK_EIO, "the %s file \"%s\" can not be read: %m", name,
                               path);
        } else if (n > 0 && out->len - start + (size_t)n > max_bytes) {
            rc = dmk_error_set(reterr, -DMK_EFULL, "the %s file \"%s\" has more than %zu bytes",
                               name, path, max_bytes);
        } else if (n > 0) {
            dmk_buf_append(out, chunk, (size_t)n);
        }
    }
    if (rc == 0 && out->failed) {
        rc = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the %s file \"%s\"", name, path);
    }
    if (rc == 0 && ret_stamp) {
        *ret_stamp = stamp_of(&s);
    }
out:
    if (fd >= 0) {
        (void)close(fd);
    }
    return rc;
}

bool dmk_file_changed(const char *path, const struct dmk_file_stamp *stamp)
{
    struct dmk_file_stamp now;
    struct stat s;

    if (stat(path, &s) < 0) {
        return false;
    }
    now = stamp_of(&s);
    return now.device != stamp->device || now.inode != stamp->inode || now.size != stamp->size ||
           now.changed_ns != stamp->changed_ns;
}
