/* The host as a device: memory from the system, a team of threads for a stream.
 *
 * "cpu" runs the fastest kernels of this processor, "ref" the plain ones; both give the same bits. */
#include "common/backend/backend.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "common/backend/team.h"

struct cpu {
    struct dmk_backend base;
    struct dmk_team *team;
};

static int open_with(const struct dmk_backend_ops *ops, const struct dmk_backend_conf *conf,
                     struct dmk_backend **ret, struct dmk_error *reterr)
{
    struct cpu *cpu = calloc(1, sizeof(*cpu));
    if (!cpu) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the backend");
    }
    cpu->base.ops = ops;
    int status =
        dmk_team_new("kernel", conf->n_threads ? conf->n_threads : 1, !conf->oversubscribed,
                     dmk_kernels_scratch_bytes(conf->max_k), &cpu->team, reterr);
    if (status != 0) {
        free(cpu);
        return status;
    }
    *ret = &cpu->base;
    return 0;
}

static int open_cpu(const struct dmk_backend_conf *conf, struct dmk_backend **ret,
                    struct dmk_error *reterr)
{
    return open_with(&dmk_backend_cpu, conf, ret, reterr);
}

static int open_ref(const struct dmk_backend_conf *conf, struct dmk_backend **ret,
                    struct dmk_error *reterr)
{
    return open_with(&dmk_backend_ref, conf, ret, reterr);
}

static void close_cpu(struct dmk_backend *be)
{
    struct cpu *cpu = (struct cpu *)be;
    dmk_team_free(&cpu->team);
    free(cpu);
}

/* The number behind a key at the beginning of a line, or the file's first one where key is "". */
static bool read_number(const char *path, const char *key, uint64_t *ret)
{
    const size_t key_len = strlen(key);
    char line[256], *end;
    bool found = false;
    FILE *f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof(line), f)) {
        if (strncmp(line, key, key_len) == 0) {
            errno = 0;
            const uint64_t v = strtoull(line + key_len, &end, 10);
            found = end != line + key_len && errno == 0;
            *ret = found ? v : *ret;
        }
    }
    if (f) {
        fclose(f);
    }
    return found;
}

static int tell_memory(struct dmk_backend *be, struct dmk_backend_memory *ret)
{
    struct dmk_backend_memory m = {0};
    uint64_t limit = 0;
    (void)be;
    if (!read_number("/proc/meminfo", "MemTotal:", &m.total) ||
        !read_number("/proc/meminfo", "MemAvailable:", &m.free)) {
        return -DMK_EDEVICE;
    }
    m.total *= 1024;
    m.free *= 1024;
    /* "max" where there is none. What files hold of it comes free when it is wanted, so it is not looked at. */
    if (read_number("/sys/fs/cgroup/memory.max", "", &limit) && limit < m.total) {
        m.total = limit;
    }
    m.free = m.free < m.total ? m.free : m.total;
    *ret = m;
    return 0;
}

static int alloc_host(struct dmk_backend *be, enum dmk_mem mem, size_t bytes, void **ret_ptr)
{
    (void)be;
    (void)mem;
    void *ptr =
        mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ptr == MAP_FAILED) {
        return -DMK_ENOMEM;
    }
    madvise(ptr, bytes, MADV_HUGEPAGE); /* a wish; small pages serve as well */
    *ret_ptr = ptr;
    return 0;
}

static void free_host(struct dmk_backend *be, enum dmk_mem mem, void *ptr, size_t bytes)
{
    (void)be;
    (void)mem;
    if (ptr) {
        munmap(ptr, bytes ? bytes : 1);
    }
}

static struct dmk_stream *stream_of(struct dmk_backend *be, enum dmk_stream_id id)
{
    (void)id;
    return dmk_team_stream(((struct cpu *)be)->team);
}

static void copy_host(struct dmk_backend *be, struct dmk_stream *stream, void *dst, const void *src,
                      size_t bytes)
{
    (void)be;
    (void)stream;
    memcpy(dst, src, bytes);
}

static int sync_done(struct dmk_backend *be, struct dmk_stream *stream)
{
    (void)be;
    (void)stream;
    return 0;
}

static int event_new(struct dmk_backend *be, struct dmk_event **ret)
{
    *ret = (struct dmk_event *)be; /* everything has happened already: nothing to keep */
    return 0;
}

static void event_free(struct dmk_backend *be, struct dmk_event *event)
{
    (void)be;
    (void)event;
}

static void event_noop(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_event *event)
{
    (void)be;
    (void)stream;
    (void)event;
}

static int event_wait(struct dmk_backend *be, struct dmk_event *event)
{
    (void)be;
    (void)event;
    return 0;
}

static void kernels_fast(struct dmk_backend *be, struct dmk_kernels *ret_kernels)
{
    (void)be;
    dmk_kernels_cpu(ret_kernels);
}

static void kernels_plain(struct dmk_backend *be, struct dmk_kernels *ret_kernels)
{
    (void)be;
    dmk_kernels_ref(ret_kernels);
}

const struct dmk_backend_ops dmk_backend_cpu = {
    .name = "cpu",
    .open = open_cpu,
    .close = close_cpu,
    .memory = tell_memory,
    .alloc = alloc_host,
    .free = free_host,
    .stream = stream_of,
    .copy = copy_host,
    .sync = sync_done,
    .event_new = event_new,
    .event_free = event_free,
    .record = event_noop,
    .wait = event_noop,
    .wait_host = event_wait,
    .kernels = kernels_fast,
};

const struct dmk_backend_ops dmk_backend_ref = {
    .name = "ref",
    .open = open_ref,
    .close = close_cpu,
    .memory = tell_memory,
    .alloc = alloc_host,
    .free = free_host,
    .stream = stream_of,
    .copy = copy_host,
    .sync = sync_done,
    .event_new = event_new,
    .event_free = event_free,
    .record = event_noop,
    .wait = event_noop,
    .wait_host = event_wait,
    .kernels = kernels_plain,
};
