/* Page transfer between two processes of this machine: bench_xfer [--device | --two-devices] [COMMIT]
 *
 * For each transport and for runs of 1, 4, 16 and 128 pages of 16 KiB, puts 64 MiB (256 MiB by CUDA IPC) with a
 * bound of puts under way, then flushes; a sample is that whole. Beside it the same bytes by memcpy in this process, in
 * the same run. Prints the median of the samples, and the least and most, in GB/s. With --device both pools lie in the
 * first GPU's memory and the copies beside are the device's own, one for each run of pages. With --two-devices the pool
 * that is written lies in the second GPU's memory, also for the copies, and CUDA IPC alone is measured. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>
#include "common/backend/backend.h"
#include "common/base/clock.h"
#include "common/xfer/xfer.h"

#define PAGE_BYTES  ((size_t)16384)
#define HOST_POOL   ((size_t)64 << 20)
#define DEVICE_POOL ((size_t)2 << 30) /* a pass takes another part of it, which no cache holds */
#define IPC_PASS    ((size_t)256 << 20)
#define OTHER_PASS  ((size_t)64 << 20)
#define IN_FLIGHT   256
#define SAMPLES     9
#define LIMIT_NS    (20 * DMK_NS_PER_S)

enum place { HOST, DEVICE, TWO_DEVICES };

struct introduction {
    uint8_t address[DMK_XFER_ADDRESS_MAX], key[DMK_XFER_KEY_MAX];
    size_t address_len, key_len;
    uint64_t base;
};

struct side {
    const struct dmk_xfer_ops *ops;
    struct dmk_xfer *x;
    struct dmk_xfer_mem *reg;
    struct dmk_xfer_ep *ep;
    struct dmk_backend *device; /* NULL: the pool is host memory */
    struct dmk_backend *beside; /* where the copies go to; device, or the second one */
    uint8_t *pool;
    size_t pool_bytes, pass_bytes;
    bool answered, broken, flushed;
    uint32_t n_in_flight;
};

_Noreturn static void give_up(const char *what)
{
    (void)fprintf(stderr, "bench_xfer: %s\n", what);
    exit(1);
}

static void on_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct side *s = ud;

    if (s->ep) {
        s->answered = true;
    } else {
        (void)s->ops->send(ep, message); /* the target answers the greeting */
    }
}

static void on_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    (void)ep;
    (void)status;
    ((struct side *)ud)->broken = true;
}

static void on_put(void *ud, int status)
{
    struct side *s = ud;

    s->n_in_flight--;
    s->broken |= status < 0;
}

static void on_flush(void *ud, int status)
{
    struct side *s = ud;

    s->flushed = true;
    s->broken |= status < 0;
}

static uint8_t *get_pool(struct dmk_backend *device, size_t bytes)
{
    void *pool = mmap(NULL, device ? 1 : bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (pool == MAP_FAILED ||
        (device && device->ops->alloc(device, DMK_MEM_DEVICE, bytes, &pool) < 0)) {
        give_up("no memory");
    }
    return pool;
}

static struct dmk_backend *open_device(uint32_t number)
{
    struct dmk_backend *device;
    struct dmk_error err;

    if (dmk_backend_open("cuda", &(struct dmk_backend_conf){.device = number, .max_k = 32}, &device,
                         &err) < 0) {
        give_up(err.text);
    }
    return device;
}

/* The second device, whose memory the first one's copies shall reach. */
static struct dmk_backend *open_second(struct dmk_backend *first)
{
    struct dmk_backend *second = open_device(1);
    struct dmk_error err;
    const int same = first->ops->reach(first, second, &err);

    if (same != 0) {
        give_up(same > 0 ? "--two-devices needs two GPUs but one is visible" : err.text);
    }
    return second;
}

static void open_side(struct side *s, const char *transport, enum place place, bool target)
{
    const enum dmk_mem_kind kind = place == HOST ? DMK_MEM_KIND_HOST : DMK_MEM_KIND_CUDA;
    const struct dmk_xfer_conf conf = {
        .transport = transport, .mem_kind = kind, .events = {on_message, on_closed, s}};
    struct dmk_error err;

    s->ops = dmk_xfer_find("ucx");
    if (place != HOST) {
        s->device = open_device(target && place == TWO_DEVICES ? 1 : 0);
        s->beside = target || place == DEVICE ? s->device : open_second(s->device);
    }
    s->pool_bytes = place == HOST ? HOST_POOL : DEVICE_POOL;
    s->pass_bytes = place != HOST && strcmp(transport, "cuda") == 0 ? IPC_PASS : OTHER_PASS;
    s->pool = get_pool(s->device, s->pool_bytes);
    if (s->ops->open(&conf, &s->x, &err) < 0 ||
        s->ops->mem_register(s->x, s->pool, s->pool_bytes, kind, &s->reg, &err) < 0) {
        give_up(err.text);
    }
}

_Noreturn static void run_target(const char *transport, enum place place, int out)
{
    struct side s = {0};
    struct introduction intro = {0};

    (void)alarm(120);
    open_side(&s, transport, place, true);
    intro.base = (uintptr_t)s.pool;
    if (s.ops->address(s.x, intro.address, &intro.address_len) < 0 ||
        s.ops->mem_pack(s.x, s.reg, intro.key, &intro.key_len) < 0 ||
        write(out, &intro, sizeof(intro)) != (ssize_t)sizeof(intro)) {
        give_up("the target cannot introduce itself");
    }
    for (;;) {
        (void)s.ops->progress(s.x);
    }
}

static void move_on(struct side *s, uint64_t end_ns)
{
    (void)s->ops->progress(s->x);
    if (s->broken || dmk_clock_ns() > end_ns) {
        give_up(s->broken ? "the endpoint broke" : "a transfer did not end in time");
    }
}

/* GB/s of one pass over a part of the pool in puts of `run` pages. */
static double put_pool(struct side *s, struct dmk_xfer_key *key, uint64_t base, size_t run,
                       size_t sample)
{
    const uint64_t start_ns = dmk_clock_ns(), end_ns = start_ns + LIMIT_NS;
    const size_t begin = sample * s->pass_bytes % s->pool_bytes;

    for (size_t at = begin; at < begin + s->pass_bytes; at += run * PAGE_BYTES) {
        while (s->n_in_flight >= IN_FLIGHT) {
            move_on(s, end_ns);
        }
        s->n_in_flight++;
        if (s->ops->put(s->ep, s->reg, s->pool + at, run * PAGE_BYTES, key, base + at, on_put, s) <
            0) {
            give_up("a put was refused");
        }
    }
    s->flushed = false;
    if (s->ops->flush(s->ep, on_flush, s) < 0) {
        give_up("a flush was refused");
    }
    while (!s->flushed || s->n_in_flight > 0) {
        move_on(s, end_ns);
    }
    return (double)s->pass_bytes / (double)(dmk_clock_ns() - start_ns);
}

static double copy_pool(struct side *s, uint8_t *other, size_t run, size_t sample)
{
    const struct dmk_backend_ops *ops = s->device ? s->device->ops : NULL;
    struct dmk_stream *stream = ops ? ops->stream(s->device, DMK_STREAM_COPY) : NULL;
    const size_t begin = sample * s->pass_bytes % s->pool_bytes, bytes = run * PAGE_BYTES;
    const uint64_t start_ns = dmk_clock_ns();

    for (size_t at = begin; at < begin + s->pass_bytes; at += bytes) {
        if (ops) {
            ops->copy(s->device, stream, other + at, s->pool + at, bytes);
        } else {
            memcpy(other + at, s->pool + at, bytes);
        }
    }
    if (ops && ops->sync(s->device, stream) < 0) {
        give_up("the device failed");
    }
    return (double)s->pass_bytes / (double)(dmk_clock_ns() - start_ns);
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void print_row(const char *transport, size_t run, double *rates, double *copies)
{
    qsort(rates, SAMPLES, sizeof(double), compare);
    qsort(copies, SAMPLES, sizeof(double), compare);
    (void)printf("%-5s %4zu pages  %6.2f GB/s (%5.2f to %5.2f)   copy %7.2f GB/s (%5.2f to "
                 "%5.2f)   %3.0f%%\n",
                 transport, run, rates[SAMPLES / 2], rates[0], rates[SAMPLES - 1],
                 copies[SAMPLES / 2], copies[0], copies[SAMPLES - 1],
                 100 * rates[SAMPLES / 2] / copies[SAMPLES / 2]);
    (void)fflush(stdout);
}

static void run_transport(const char *transport, enum place place)
{
    static const size_t runs[] = {1, 4, 16, 128};
    struct side s = {0};
    struct introduction intro;
    struct dmk_xfer_key *key;
    struct dmk_error err;
    uint8_t *other;
    int fds[2];
    pid_t child;

    if (pipe(fds) < 0) {
        give_up("no pipe");
    }
    (void)fflush(stdout);
    child = fork(); /* before UCX and CUDA are opened: they do not survive one */
    if (child == 0) {
        (void)close(fds[0]);
        run_target(transport, place, fds[1]);
    }
    (void)close(fds[1]);
    if (child < 0 || read(fds[0], &intro, sizeof(intro)) != (ssize_t)sizeof(intro)) {
        give_up("the target did not start");
    }
    open_side(&s, transport, place, false);
    other = get_pool(s.beside, s.pool_bytes);
    if (place != HOST) {
        s.device->ops->bind(s.device); /* the transport works with the thread's device */
    } else {
        memset(s.pool, 1, s.pool_bytes);
        memset(other, 2, s.pool_bytes);
    }
    if (s.ops->ep_connect(s.x, (struct dmk_bytes){intro.address, intro.address_len}, &s.ep, &err) <
            0 ||
        s.ops->key_unpack(s.ep, (struct dmk_bytes){intro.key, intro.key_len}, &key) < 0 ||
        s.ops->send(s.ep, (struct dmk_bytes){(const uint8_t *)"hello", 5}) < 0) {
        give_up("the endpoint did not open");
    }
    for (const uint64_t end_ns = dmk_clock_ns() + LIMIT_NS; !s.answered;) {
        move_on(&s, end_ns);
    }
    for (size_t r = 0; r < sizeof(runs) / sizeof(runs[0]); r++) {
        double rates[SAMPLES], copies[SAMPLES];

        (void)put_pool(&s, key, intro.base, runs[r], 0); /* warm-up */
        (void)copy_pool(&s, other, runs[r], 0);
        for (size_t i = 0; i < SAMPLES; i++) {
            rates[i] = put_pool(&s, key, intro.base, runs[r], i + 1);
            copies[i] = copy_pool(&s, other, runs[r], i + 1);
        }
        print_row(transport, runs[r], rates, copies);
    }
    (void)kill(child, SIGKILL);
    (void)waitpid(child, NULL, 0);
    s.ops->key_free(&key);
    s.ops->mem_unregister(s.x, &s.reg);
    s.ops->close(s.x);
    if (place !=
        HOST) { /* closing it would end what a second transport needs: the process ends soon */
        s.device->ops->free(s.device, DMK_MEM_DEVICE, s.pool, s.pool_bytes);
        s.beside->ops->free(s.beside, DMK_MEM_DEVICE, other, s.pool_bytes);
    } else {
        (void)munmap(s.pool, s.pool_bytes);
        (void)munmap(other, s.pool_bytes);
    }
    (void)close(fds[0]);
}

/* Each in a process of its own, since none may fork once it has CUDA. */
static int run_apart(const char *transport, enum place place)
{
    int status = 1;
    const pid_t pid = fork();

    if (pid == 0) {
        run_transport(transport, place);
        exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) < 0) {
        give_up("no process");
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
}

static void print_machine(const char *commit)
{
    struct utsname u;
    double load = 0;
    char line[256], cpu[256] = "unknown CPU";
    FILE *f = fopen("/proc/cpuinfo", "r");

    while (f && fgets(line, sizeof(line), f)) {
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':')) {
            (void)snprintf(cpu, sizeof(cpu), "%.*s", (int)strcspn(strchr(line, ':') + 2, "\n"),
                           strchr(line, ':') + 2);
            break;
        }
    }
    if (f) {
        (void)fclose(f);
    }
    if (uname(&u) < 0 || getloadavg(&load, 1) < 1) {
        give_up("no uname or load");
    }
    (void)printf("machine: %s, %ld CPUs, Linux %s, load %.1f at the start\ncommit: %s\n%d samples "
                 "of 64 MiB each (256 MiB by CUDA IPC), at most %d "
                 "puts under way; median (least to most), percentage of the copy\n",
                 cpu, sysconf(_SC_NPROCESSORS_ONLN), u.release, load, commit, SAMPLES, IN_FLIGHT);
    (void)fflush(stdout);
}

int main(int argc, char **argv)
{
    static const char *const words[] = {"", "--device", "--two-devices"};
    enum place place = HOST;
    int failed = 0;

    for (uint32_t i = DEVICE; argc > 1 && i <= TWO_DEVICES; i++) {
        place = strcmp(argv[1], words[i]) == 0 ? (enum place)i : place;
    }
    if (argc > 1 && place == HOST && argv[1][0] == '-') {
        (void)fprintf(stderr, "usage: bench_xfer [--device | --two-devices] [COMMIT]\n");
        return 2;
    }
    print_machine(argc > 1 + (place != HOST) ? argv[1 + (place != HOST)] : "not given");
    if (place != HOST) {
        failed |= run_apart("cuda", place);
    }
    if (place != TWO_DEVICES) {
        failed |= run_apart("tcp", place);
    }
    if (place == HOST) {
        failed |= run_apart("shm", place);
    }
    return failed;
}
