/* Watching processes; see watch.h. Reads /proc when a watch is made, one poll(2) to look. */
#include "common/xfer/watch.h"
#include "common/base/hash.h"
#include "common/base/status.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct identity {
    uint64_t host;  /* hash of the kernel's boot id */
    uint64_t space; /* inode of the process namespace */
    uint64_t pid;
    uint64_t start; /* clock ticks after boot */
};

static int read_file(const char *path, char *ret_text, size_t size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    if (fd < 0) {
        return -DMK_EIO;
    }
    n = read(fd, ret_text, size - 1);
    (void)close(fd);
    if (n <= 0) {
        return -DMK_EIO;
    }
    ret_text[n] = 0;
    return (int)n;
}

/* Field 22 of /proc/PID/stat, counted from behind the name, which may hold anything. */
static int read_start(uint64_t pid, uint64_t *ret_start)
{
    char path[40], text[1024];
    const char *at;

    (void)snprintf(path, sizeof(path), "/proc/%llu/stat", (unsigned long long)pid);
    if (read_file(path, text, sizeof(text)) < 0) {
        return -DMK_EIO;
    }
    at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    if (!at) {
        return -DMK_EIO;
    }
    *ret_start = strtoull(at + 1, NULL, 10);
    return 0;
}

static int read_identity(struct identity *ret)
{
    struct identity id = {.pid = (uint64_t)getpid()};
    char boot[64];
    struct stat st;
    const int n = read_file("/proc/sys/kernel/random/boot_id", boot, sizeof(boot));

    if (n < 0 || stat("/proc/self/ns/pid", &st) < 0 || read_start(id.pid, &id.start) < 0) {
        return -DMK_EIO;
    }
    id.host = dmk_hash64(boot, (size_t)n, 0);
    id.space = st.st_ino;
    *ret = id;
    return 0;
}

int dmk_watch_describe(uint8_t *ret_blob, size_t *ret_len)
{
    struct identity id;
    const int r = read_identity(&id);

    if (r < 0) {
        return r;
    }
    memcpy(ret_blob, &id, sizeof(id));
    *ret_len = sizeof(id);
    return 0;
}

int dmk_watch_open(struct dmk_bytes blob, struct dmk_watch *ret_watch)
{
    struct identity theirs, ours;
    uint64_t start;
    int fd;

    if (blob.len != sizeof(theirs)) {
        return -DMK_EFORMAT;
    }
    memcpy(&theirs, blob.data, sizeof(theirs));
    if (read_identity(&ours) < 0 || theirs.host != ours.host || theirs.space != ours.space ||
        theirs.pid == 0 || theirs.pid > INT32_MAX) {
        return -DMK_ENOTSUP;
    }
    fd = (int)syscall(SYS_pidfd_open, (pid_t)theirs.pid, 0u);
    if (fd < 0) {
        return -DMK_EPEER;
    }
    /* Read after the descriptor is open: it now names the process that this start time is of. */
    if (read_start(theirs.pid, &start) < 0 || start != theirs.start) {
        (void)close(fd);
        return -DMK_EPEER;
    }
    ret_watch->pidfd = fd;
    return 0;
}

bool dmk_watch_is_gone(const struct dmk_watch *watch)
{
    struct pollfd p = {.fd = watch->pidfd, .events = POLLIN};

    return poll(&p, 1, 0) > 0 && (p.revents & POLLIN) != 0;
}

void dmk_watch_close(struct dmk_watch *watch)
{
    if (watch->pidfd >= 0) {
        (void)close(watch->pidfd);
        watch->pidfd = -1;
    }
}
