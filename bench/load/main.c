/* bench_load: a load generator for OpenAI-compatible servers: open loop (a trace, Poisson or even arrivals) or
 * closed loop (so many requests open at a time), streamed, one thread, with a report. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>
#include "bench/load/client.h"
#include "bench/load/plan.h"
#include "bench/load/report.h"
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/conf/conf.h"

#define LOG_WORDS (1u << 20) /* of a mock's step log */
#define ADDED_MAX (1u << 22)

struct options {
    char *host, *model, *trace, *html, *json, *commit, *step_log;
    uint32_t port, requests, concurrency, input, output, shared, seed;
    double rate, speedup;
    bool even, chat, ignore_eos;
    uint64_t limit_ms, ttft_limit_ms;
    double tpot_limit_ms;
};

#define AT(f) offsetof(struct options, f)

static const struct dmk_conf_option table[] = {
    {"host", DMK_CONF_STR, "127.0.0.1", 0, 0, NULL, "IPv4 address of the server", AT(host)},
    {"port", DMK_CONF_U32, "8000", 1, 65535, NULL, "its port", AT(port)},
    {"model", DMK_CONF_STR, "gpt-oss-tiny", 0, 0, NULL, "name of the model", AT(model)},
    {"chat", DMK_CONF_BOOL, "false", 0, 0, NULL, "chat completions instead of completions",
     AT(chat)},
    {"trace", DMK_CONF_STR, "", 0, 0, NULL,
     "arrivals and lengths from a file in Mooncake's JSONL format; empty: as the next options say",
     AT(trace)},
    {"speedup", DMK_CONF_DOUBLE, "1", 1e-6, 1e6, NULL, "how much faster the trace's clock runs",
     AT(speedup)},
    {"requests", DMK_CONF_U32, "100", 0, 10000000, NULL,
     "number of requests; of a trace at most, 0: all", AT(requests)},
    {"concurrency", DMK_CONF_U32, "0", 0, 60000, NULL,
     "closed loop: so many requests are open at a time; 0: open loop", AT(concurrency)},
    {"rate", DMK_CONF_DOUBLE, "10", 1e-6, 1e6, NULL, "open loop: requests a second", AT(rate)},
    {"even", DMK_CONF_BOOL, "false", 0, 0, NULL, "open loop: even arrivals instead of Poisson ones",
     AT(even)},
    {"input", DMK_CONF_U32, "512", 1, 131072, NULL, "tokens of a prompt", AT(input)},
    {"output", DMK_CONF_U32, "128", 1, 131072, NULL, "tokens of an answer", AT(output)},
    {"shared", DMK_CONF_U32, "0", 0, 131072, NULL,
     "leading tokens that all prompts share, in blocks of 512", AT(shared)},
    {"seed", DMK_CONF_U32, "1", 0, 4294967295.0, NULL, "seed of arrivals and texts", AT(seed)},
    {"ignore-eos", DMK_CONF_BOOL, "true", 0, 0, NULL, "answers have their full length",
     AT(ignore_eos)},
    {"limit", DMK_CONF_MS, "300s", 1, 86400000, NULL, "longest time of a request", AT(limit_ms)},
    {"ttft-limit", DMK_CONF_MS, "2s", 1, 86400000, NULL, "goodput: longest time to the first token",
     AT(ttft_limit_ms)},
    {"tpot-limit-ms", DMK_CONF_DOUBLE, "50", 0, 1e6, NULL,
     "goodput: longest mean time of a token after it, in ms", AT(tpot_limit_ms)},
    {"step-log", DMK_CONF_STR, "", 0, 0, NULL,
     "step log of the one mock decode worker behind the server: how long after its step a token is "
     "here",
     AT(step_log)},
    {"html", DMK_CONF_STR, "", 0, 0, NULL, "file for the report as a page", AT(html)},
    {"json", DMK_CONF_STR, "", 0, 0, NULL, "file for the report as JSON", AT(json)},
    {"commit", DMK_CONF_STR, "unknown", 0, 0, NULL, "what the report says was measured",
     AT(commit)},
};

static const struct dmk_conf_program program = {
    .name = "bench_load",
    .summary = "Puts load on an OpenAI-compatible server and reports latencies, rates and goodput.",
    .usage = "",
    .options = table,
    .n_options = sizeof(table) / sizeof(table[0]),
};

struct load {
    const struct options *options;
    struct plan plan;
    struct sockaddr_in to;
    struct client *clients; /* [n_slots] */
    uint32_t *free_slots;
    size_t n_slots, n_free, next;
    struct client_record *records; /* [plan.n] */
    int epoll;
    uint64_t start_ns;
    struct dmk_buf body, request;
    const uint64_t *steps; /* [LOG_WORDS] or NULL */
    uint64_t step;         /* one that had ended when last looked */
    double *added;
    size_t n_added;
};

/* The token is the last digit of its step's number: the newest step that ended with it. */
static void note_step(void *ud, char first, uint64_t now_ns)
{
    struct load *l = ud;
    uint64_t s = l->step;

    while (s + 1 < LOG_WORDS && __atomic_load_n(&l->steps[s + 1], __ATOMIC_ACQUIRE) != 0) {
        s++;
    }
    l->step = s;
    while (s > 0 && (s % 10 != (uint64_t)(first - '0') || l->steps[s] > now_ns)) {
        s--;
    }
    if (s > 0 && first >= '0' && first <= '9' && l->n_added < ADDED_MAX) {
        l->added[l->n_added++] = (double)(now_ns - l->steps[s]) / 1e6;
    }
}

static int open_log(struct load *l, struct dmk_error *reterr)
{
    const int fd = open(l->options->step_log, O_RDONLY | O_CLOEXEC);
    void *p = fd < 0 ? MAP_FAILED
                     : mmap(NULL, LOG_WORDS * sizeof(uint64_t), PROT_READ, MAP_SHARED, fd, 0);

    if (fd >= 0) {
        (void)close(fd);
    }
    if (p == MAP_FAILED) {
        return dmk_error_set(reterr, -DMK_EIO, "the step log \"%s\" can not be read: %s",
                             l->options->step_log, strerror(errno));
    }
    l->steps = p;
    l->added = calloc(ADDED_MAX, sizeof(*l->added));
    dmk_assert(l->added);
    return 0;
}

static void build_request(struct load *l, const struct plan_request *r)
{
    const struct options *o = l->options;

    dmk_buf_reset(&l->body);
    dmk_buf_printf(&l->body,
                   "{\"model\":\"%s\",\"stream\":true,\"stream_options\":{\"include_usage\":true},"
                   "\"temperature\":0,\"ignore_eos\":%s,\"max_tokens\":%u,",
                   o->model, o->ignore_eos ? "true" : "false", r->n_out);
    dmk_buf_puts(&l->body,
                 o->chat ? "\"messages\":[{\"role\":\"user\",\"content\":\"" : "\"prompt\":\"");
    plan_prompt(r, &l->body);
    dmk_buf_puts(&l->body, o->chat ? "\"}]}" : "\"}");
    dmk_buf_reset(&l->request);
    dmk_buf_printf(&l->request,
                   "POST /v1/%s HTTP/1.1\r\nHost: %s:%u\r\nConnection: close\r\n"
                   "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                   o->chat ? "chat/completions" : "completions", o->host, o->port, l->body.len);
    dmk_buf_append_str(&l->request, dmk_buf_str(&l->body));
}

static void end_client(struct load *l, uint32_t slot, uint64_t now)
{
    client_close(&l->clients[slot], now);
    l->clients[slot].record = NULL;
    l->free_slots[l->n_free++] = slot;
}

static void begin(struct load *l, uint64_t now)
{
    const size_t i = l->next++;
    const struct plan_request *r = &l->plan.requests[i];
    struct client_record *record = &l->records[i];
    const uint32_t slot = l->free_slots[--l->n_free];
    struct client *c = &l->clients[slot];
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u32 = slot};

    *record = (struct client_record){.due_ns = l->plan.closed ? now : l->start_ns + r->at_ns,
                                     .n_asked = r->n_out};
    build_request(l, r);
    record->start_ns = dmk_clock_ns();
    c->on_text = l->steps ? note_step : NULL;
    c->ud = l;
    if (client_open(c, &l->to, record, dmk_buf_str(&l->request)) < 0 ||
        epoll_ctl(l->epoll, EPOLL_CTL_ADD, c->fd, &event) < 0) {
        end_client(l, slot, dmk_clock_ns());
    }
}

/* Begins what is due; how long nothing is, in ms. */
static int begin_due(struct load *l)
{
    for (;;) {
        const uint64_t now = dmk_clock_ns();
        uint64_t due;

        if (l->next == l->plan.n || l->n_free == 0 ||
            (l->plan.closed && l->n_slots - l->n_free >= l->plan.closed)) {
            return 100;
        }
        due = l->plan.closed ? now : l->start_ns + l->plan.requests[l->next].at_ns;
        if (due > now) {
            const uint64_t ms = (due - now) / DMK_NS_PER_MS;

            return ms < 100 ? (int)ms : 100;
        }
        begin(l, now);
    }
}

static void give_up_late(struct load *l)
{
    const uint64_t now = dmk_clock_ns();

    for (uint32_t s = 0; s < l->n_slots; s++) {
        struct client *c = &l->clients[s];

        if (c->record && now > c->record->start_ns + l->options->limit_ms * DMK_NS_PER_MS) {
            client_fail(c, "no end within the limit");
            end_client(l, s, now);
        }
    }
}

static void run(struct load *l)
{
    struct epoll_event events[256];
    uint64_t looked = 0;

    l->start_ns = dmk_clock_ns();
    while (l->next < l->plan.n || l->n_free < l->n_slots) {
        const int wait = begin_due(l);
        const int n = epoll_wait(l->epoll, events, 256, wait);

        for (int i = 0; i < n; i++) {
            struct client *c = &l->clients[events[i].data.u32];
            const uint64_t now = dmk_clock_ns();

            if (c->record && client_step(c, (events[i].events & EPOLLOUT) != 0, now)) {
                end_client(l, events[i].data.u32, now);
            }
        }
        if (dmk_clock_ns() - looked > DMK_NS_PER_S) {
            looked = dmk_clock_ns();
            give_up_late(l);
        }
    }
}

static int prepare(struct load *l, struct dmk_error *reterr)
{
    const struct options *o = l->options;
    const struct plan_conf conf = {.trace = o->trace,
                                   .speedup = o->speedup,
                                   .n_requests = o->requests,
                                   .rate = o->rate,
                                   .even = o->even,
                                   .concurrency = o->concurrency,
                                   .n_in = o->input,
                                   .n_out = o->output,
                                   .n_shared = o->shared,
                                   .seed = o->seed};
    struct rlimit files;
    int rc = plan_make(&conf, &l->plan, reterr);

    if (rc < 0) {
        return rc;
    }
    l->to = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)o->port)};
    if (inet_pton(AF_INET, o->host, &l->to.sin_addr) != 1) {
        return dmk_error_set(reterr, -DMK_EINVAL, "host is \"%s\": an IPv4 address is wanted",
                             o->host);
    }
    (void)getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
    l->n_slots = l->plan.closed ? l->plan.closed : 4096;
    if (l->n_slots + 32 > files.rlim_cur) {
        l->n_slots = files.rlim_cur - 32;
    }
    l->clients = calloc(l->n_slots, sizeof(*l->clients));
    l->free_slots = calloc(l->n_slots, sizeof(*l->free_slots));
    l->records = calloc(l->plan.n, sizeof(*l->records));
    l->epoll = epoll_create1(EPOLL_CLOEXEC);
    dmk_assert(l->clients && l->free_slots && l->records && l->epoll >= 0);
    for (uint32_t s = 0; s < l->n_slots; s++) {
        l->free_slots[l->n_free++] = (uint32_t)(l->n_slots - 1 - s);
    }
    return o->step_log[0] ? open_log(l, reterr) : 0;
}

static void describe_machine(char *out, size_t cap)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256], model[200] = "unknown CPU";
    struct utsname name = {0};

    while (file && fgets(line, sizeof(line), file)) {
        const char *colon = strchr(line, ':');

        if (colon && strncmp(line, "model name", 10) == 0) {
            (void)snprintf(model, sizeof(model), "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
            break;
        }
    }
    if (file) {
        (void)fclose(file);
    }
    (void)uname(&name);
    (void)snprintf(out, cap, "%s, %ld cores, %s %s", model, sysconf(_SC_NPROCESSORS_ONLN),
                   name.sysname, name.release);
}

static void write_file(const char *path, const struct report *report,
                       void (*write)(const struct report *, FILE *))
{
    FILE *file = path[0] ? fopen(path, "w") : NULL;

    if (file) {
        write(report, file);
    }
    if (path[0] && (!file || fclose(file) != 0)) {
        (void)fprintf(stderr, "bench_load: \"%s\" can not be written: %s\n", path, strerror(errno));
    }
}

static int measure(const struct options *o, const char *command)
{
    struct load l = {.options = o, .epoll = -1};
    struct dmk_error err;
    struct report report;
    char machine[400];
    int status = 1;

    dmk_buf_init(&l.body, 0);
    dmk_buf_init(&l.request, 0);
    if (prepare(&l, &err) < 0) {
        (void)fprintf(stderr, "bench_load: %s\n", err.text);
    } else {
        const struct report_conf conf = {machine, command, o->commit, (double)o->ttft_limit_ms,
                                         o->tpot_limit_ms};

        describe_machine(machine, sizeof(machine));
        run(&l);
        report_make(&conf, l.records, l.plan.n, l.added, l.n_added, &report);
        report_text(&report, stdout);
        write_file(o->json, &report, report_json);
        write_file(o->html, &report, report_html);
        status = report.n_ok == report.n ? 0 : 1;
        report_free(&report);
    }
    if (l.epoll >= 0) {
        (void)close(l.epoll);
    }
    plan_free(&l.plan);
    free(l.clients);
    free(l.free_slots);
    free(l.records);
    free(l.added);
    dmk_buf_fini(&l.body);
    dmk_buf_fini(&l.request);
    return status;
}

int main(int argc, char **argv)
{
    struct options options = {0};
    struct dmk_error err = {0};
    struct dmk_buf command;
    int rc, status = 0;

    (void)signal(SIGPIPE, SIG_IGN);
    dmk_buf_init(&command, 0);
    for (int i = 0; i < argc; i++) {
        dmk_buf_printf(&command, "%s%s", i > 0 ? " " : "", argv[i]);
    }
    rc = dmk_conf_load(&program, argc, argv, &options, NULL, &err);
    if (rc < 0) {
        (void)fprintf(stderr, "bench_load: %s\n", err.text);
        status = 2;
    } else if (rc == 0) {
        status = measure(&options, command.data);
    }
    dmk_conf_free(&program, &options);
    dmk_buf_fini(&command);
    return status;
}
