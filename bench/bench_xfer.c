/* Page transfer between two processes of this machine: bench_xfer [COMMIT]
 *
 * For tcp and shared memory and for runs of 1, 4, 16 and 128 pages of 16 KiB, puts 64 MiB with at most 64 puts
 * under way, then flushes; a sample is that whole. Beside it the same bytes by memcpy in this process, in
 * the same run. Prints the median of the samples, and the least and most, in GB/s. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>
#include "common/base/clock.h"
#include "common/xfer/xfer.h"

#define PAGE_BYTES ((size_t)16384)
#define POOL_PAGES ((size_t)4096)
#define POOL_BYTES (POOL_PAGES * PAGE_BYTES)
#define IN_FLIGHT  64
#define SAMPLES    9
#define LIMIT_NS   (20 * DMK_NS_PER_S)

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
    uint8_t *pool;
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

static void open_side(struct side *s, const char *transport)
{
    const struct dmk_xfer_conf conf = {.transport = transport,
                                       .events = {on_message, on_closed, s}};
    struct dmk_error err;

    s->ops = dmk_xfer_find("ucx");
    s->pool = mmap(NULL, POOL_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (s->pool == MAP_FAILED) {
        give_up("no memory");
    }
    if (s->ops->open(&conf, &s->x, &err) < 0 ||
        s->ops->mem_register(s->x, s->pool, POOL_BYTES, DMK_MEM_HOST, &s->reg, &err) < 0) {
        give_up(err.text);
    }
}

_Noreturn static void run_target(const char *transport, int out)
{
    struct side s = {0};
    struct introduction intro = {0};

    (void)alarm(120);
    open_side(&s, transport);
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

/* GB/s of one pass over the pool in puts of `run` pages. */
static double put_pool(struct side *s, struct dmk_xfer_key *key, uint64_t base, size_t run)
{
    const uint64_t start_ns = dmk_clock_ns(), end_ns = start_ns + LIMIT_NS;

    for (size_t page = 0; page < POOL_PAGES; page += run) {
        while (s->n_in_flight >= IN_FLIGHT) {
            move_on(s, end_ns);
        }
        s->n_in_flight++;
        if (s->ops->put(s->ep, s->reg, s->pool + page * PAGE_BYTES, run * PAGE_BYTES, key,
                        base + page * PAGE_BYTES, on_put, s) < 0) {
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
    return (double)POOL_BYTES / (double)(dmk_clock_ns() - start_ns);
}

static double copy_pool(uint8_t *to, const uint8_t *from, size_t run)
{
    const uint64_t start_ns = dmk_clock_ns();

    for (size_t page = 0; page < POOL_PAGES; page += run) {
        memcpy(to + page * PAGE_BYTES, from + page * PAGE_BYTES, run * PAGE_BYTES);
    }
    return (double)POOL_BYTES / (double)(dmk_clock_ns() - start_ns);
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
    (void)printf("%-5s %4zu pages  %6.2f GB/s (%5.2f to %5.2f)   memcpy %6.2f GB/s (%5.2f to "
                 "%5.2f)   %3.0f%%\n",
                 transport, run, rates[SAMPLES / 2], rates[0], rates[SAMPLES - 1],
                 copies[SAMPLES / 2], copies[0], copies[SAMPLES - 1],
                 100 * rates[SAMPLES / 2] / copies[SAMPLES / 2]);
    (void)fflush(stdout);
}

static void run_transport(const char *transport)
{
    static const size_t runs[] = {1, 4, 16, 128};
    struct side s = {0};
    struct introduction intro;
    struct dmk_xfer_key *key;
    struct dmk_error err;
    uint8_t *other = malloc(POOL_BYTES);
    int fds[2];
    pid_t child;

    if (!other || pipe(fds) < 0) {
        give_up("no memory or no pipe");
    }
    (void)fflush(stdout);
    child = fork(); /* before UCX is opened: it does not survive one */
    if (child == 0) {
        (void)close(fds[0]);
        run_target(transport, fds[1]);
    }
    (void)close(fds[1]);
    if (child < 0 || read(fds[0], &intro, sizeof(intro)) != (ssize_t)sizeof(intro)) {
        give_up("the target did not start");
    }
    open_side(&s, transport);
    memset(s.pool, 1, POOL_BYTES);
    memset(other, 2, POOL_BYTES);
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

        (void)put_pool(&s, key, intro.base, runs[r]); /* warm-up */
        for (int i = 0; i < SAMPLES; i++) {
            rates[i] = put_pool(&s, key, intro.base, runs[r]);
            copies[i] = copy_pool(other, s.pool, runs[r]);
        }
        print_row(transport, runs[r], rates, copies);
    }
    (void)kill(child, SIGKILL);
    (void)waitpid(child, NULL, 0);
    s.ops->key_free(&key);
    s.ops->mem_unregister(s.x, &s.reg);
    s.ops->close(s.x);
    (void)munmap(s.pool, POOL_BYTES);
    (void)close(fds[0]);
    free(other);
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
                 "of %zu MiB each, at most %d "
                 "puts under way; median (least to most), percentage of memcpy\n",
                 cpu, sysconf(_SC_NPROCESSORS_ONLN), u.release, load, commit, SAMPLES,
                 POOL_BYTES >> 20, IN_FLIGHT);
}

int main(int argc, char **argv)
{
    print_machine(argc > 1 ? argv[1] : "not given");
    run_transport("tcp");
    run_transport("shm");
    return 0;
}
