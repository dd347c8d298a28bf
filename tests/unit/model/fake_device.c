/* Queues, events and graphs of the device that is none, and its scheduler; see fake_device.h. */
#include "tests/unit/model/fake_device.h"

#include <stdlib.h>
#include <string.h>
#include "common/backend/backend.h"
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "tests/unit/model/fake_kernels.h"

#define MAX_STREAMS 32

enum kind { RUN, RECORD, WAIT, GRAPH };

struct op {
    struct op *next; /* of its stream */
    enum kind kind;
    void (*fn)(const void *args); /* RUN */
    bool (*ready)(const void *args);
    struct dmk_event *event; /* RECORD, WAIT */
    uint64_t ticket;         /* what a record gives the event and a wait wants of it */
    struct op *target;       /* a captured wait: the record of the graph that it waits for */
    bool done;               /* a captured record, in the run of the graph */
    struct dmk_graph *graph; /* GRAPH */
    _Alignas(16) uint8_t args[];
};

struct dmk_event {
    uint64_t n_recorded, n_done;
    struct op *captured; /* the last record, where that was part of a capture */
};

/* What is queued in each stream. */
struct queues {
    struct op *first[MAX_STREAMS], *last[MAX_STREAMS];
};

struct dmk_graph {
    struct queues nodes;
};

struct fake_stream {
    struct dmk_stream base;
    uint32_t id;
    bool captures;
    struct op
        *unseen; /* in a capture: the last operation, until the first stream has waited for it */
};

struct fake {
    struct dmk_backend base;
    uint32_t device;
    struct fake_stream streams[2];
};

static struct {
    uint64_t seed, n_draws;
    bool share;
    uint64_t total, others, used[MAX_STREAMS]; /* bytes of each device's memory */
    struct fake_stream *streams[MAX_STREAMS];
    struct queues queues;
    struct dmk_graph *capture;
    struct fake_stream *origin; /* where the capture began */
    struct fake_device_stats stats;
} sim;

void fake_device_seed(uint64_t seed)
{
    sim.seed = seed;
}

void fake_device_memory(uint64_t total, uint64_t others)
{
    sim.total = total;
    sim.others = others;
}

void fake_device_share(bool share)
{
    sim.share = share;
}

struct fake_device_stats fake_device_stats(void)
{
    return sim.stats;
}

static uint32_t draw(uint32_t below)
{
    return (uint32_t)(dmk_rng_u64(sim.seed, 99, sim.n_draws++) % below);
}

static struct fake_stream *stream_of(struct dmk_stream *stream)
{
    return (struct fake_stream *)(void *)stream;
}

static struct op *new_op(enum kind kind, size_t bytes)
{
    struct op *op = calloc(1, sizeof(*op) + bytes);
    dmk_assert(op);
    op->kind = kind;
    return op;
}

static void append(struct fake_stream *s, struct op *op)
{
    struct queues *q = sim.capture ? &sim.capture->nodes : &sim.queues;
    if (sim.capture) {
        dmk_assert(s->captures); /* else it would run now, and not be part of the graph */
        s->unseen = op;
    }
    if (q->first[s->id]) {
        q->last[s->id]->next = op;
    } else {
        q->first[s->id] = op;
    }
    q->last[s->id] = op;
}

void fake_device_queue(struct dmk_stream *stream, bool (*ready)(const void *args),
                       void (*fn)(const void *args), const void *args, size_t bytes)
{
    struct op *op = new_op(RUN, bytes);
    op->ready = ready;
    op->fn = fn;
    memcpy(op->args, args, bytes);
    append(stream_of(stream), op);
    sim.stats.n_kernels++;
}

/* ---- running ---- */

static bool can_run(const struct op *op)
{
    if (!op || op->kind != WAIT) {
        return op && (!op->ready || op->ready(op->args));
    }
    return op->target ? op->target->done : op->event->n_done >= op->ticket;
}

/* Takes an operation that can run off one of the queues: of the favoured one if it can, and now and then another
 * one is favoured. NULL: none can. */
static struct op *take(struct op **first, uint32_t *favoured)
{
    const uint32_t from = draw(6) == 0 ? draw(MAX_STREAMS) : *favoured;
    for (uint32_t i = 0; i < MAX_STREAMS; i++) {
        const uint32_t at = (from + i) % MAX_STREAMS;
        struct op *op = first[at];
        if (can_run(op)) {
            *favoured = at;
            first[at] = op->next;
            return op;
        }
    }
    return NULL;
}

static void run_graph(struct dmk_graph *graph)
{
    struct op *first[MAX_STREAMS], *op;
    uint32_t favoured = draw(MAX_STREAMS);
    for (uint32_t i = 0; i < MAX_STREAMS; i++) {
        first[i] = graph->nodes.first[i];
        for (op = first[i]; op; op = op->next) {
            op->done = false;
        }
    }
    while ((op = take(first, &favoured)) != NULL) {
        op->done = op->kind == RECORD;
        if (op->kind == RUN) {
            op->fn(op->args);
        }
    }
    for (uint32_t i = 0; i < MAX_STREAMS; i++) {
        dmk_assert(!first[i]); /* a wait that nothing ends */
    }
}

static void run_one(void)
{
    static uint32_t favoured;
    struct op *op = take(sim.queues.first, &favoured);
    dmk_assert(op); /* a wait that nothing ends */
    if (op->kind == RUN) {
        op->fn(op->args);
    } else if (op->kind == RECORD) {
        op->event->n_done = op->ticket;
    } else if (op->kind == GRAPH) {
        run_graph(op->graph);
    }
    free(op);
}

/* ---- the table ---- */

static int open_fake(const struct dmk_backend_conf *conf, struct dmk_backend **ret,
                     struct dmk_error *reterr)
{
    struct fake *fake = calloc(1, sizeof(*fake));
    (void)reterr;
    dmk_assert(fake);
    fake->base.ops = &dmk_backend_cuda;
    fake->device = sim.share ? 0 : conf->device;
    dmk_assert(fake->device < MAX_STREAMS);
    for (int i = 0; i < 2; i++) {
        uint32_t id = 0;
        while (sim.streams[id]) {
            id++;
        }
        dmk_assert(id < MAX_STREAMS);
        sim.streams[id] = &fake->streams[i];
        fake->streams[i].id = id;
    }
    *ret = &fake->base;
    return 0;
}

static void close_fake(struct dmk_backend *be)
{
    struct fake *fake = (struct fake *)be;
    for (int i = 0; i < 2; i++) {
        dmk_assert(!sim.queues.first[fake->streams[i].id]);
        sim.streams[fake->streams[i].id] = NULL;
    }
    free(fake);
}

static void bind(struct dmk_backend *be)
{
    (void)be;
}

static int tell_memory(struct dmk_backend *be, struct dmk_backend_memory *ret)
{
    const uint32_t device = ((struct fake *)be)->device;
    const uint64_t used = sim.others + sim.used[device];
    *ret = (struct dmk_backend_memory){sim.total, used < sim.total ? sim.total - used : 0, device};
    return 0;
}

static int alloc_fake(struct dmk_backend *be, enum dmk_mem mem, size_t bytes, void **ret_ptr)
{
    sim.used[((struct fake *)be)->device] += mem == DMK_MEM_DEVICE ? bytes : 0;
    *ret_ptr = aligned_alloc(256, (bytes + 256) / 256 * 256);
    dmk_assert(*ret_ptr);
    memset(*ret_ptr, 0, bytes);
    sim.stats.n_allocs++;
    return 0;
}

static void free_fake(struct dmk_backend *be, enum dmk_mem mem, void *ptr, size_t bytes)
{
    sim.used[((struct fake *)be)->device] -= mem == DMK_MEM_DEVICE ? bytes : 0;
    free(ptr);
}

static struct dmk_stream *get_stream(struct dmk_backend *be, enum dmk_stream_id id)
{
    return &((struct fake *)be)->streams[id].base;
}

struct copy {
    void *dst;
    const void *src;
    size_t bytes;
};

static void run_copy(const void *args)
{
    const struct copy *c = args;
    memcpy(c->dst, c->src, c->bytes);
}

static void copy(struct dmk_backend *be, struct dmk_stream *stream, void *dst, const void *src,
                 size_t bytes)
{
    const struct copy c = {dst, src, bytes};
    (void)be;
    fake_device_queue(stream, NULL, run_copy, &c, sizeof(c));
}

static int sync_stream(struct dmk_backend *be, struct dmk_stream *stream)
{
    (void)be;
    dmk_assert(!sim.capture);
    while (sim.queues.first[stream_of(stream)->id]) {
        run_one();
    }
    return 0;
}

static int event_new(struct dmk_backend *be, struct dmk_event **ret)
{
    (void)be;
    *ret = calloc(1, sizeof(**ret));
    dmk_assert(*ret);
    sim.stats.n_events++;
    return 0;
}

static void event_free(struct dmk_backend *be, struct dmk_event *event)
{
    (void)be;
    free(event);
}

static void record(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_event *event)
{
    struct op *op = new_op(RECORD, 0);
    (void)be;
    op->event = event;
    op->ticket = sim.capture ? 0 : ++event->n_recorded;
    event->captured = sim.capture ? op : NULL;
    append(stream_of(stream), op);
}

static void wait_event(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_event *event)
{
    struct fake_stream *s = stream_of(stream);
    struct op *op = new_op(WAIT, 0);
    (void)be;
    op->event = event;
    op->ticket = event->n_recorded;
    op->target = event->captured;
    dmk_assert((sim.capture != NULL) == (event->captured != NULL));
    if (sim.capture) {
        s->captures = true;
        for (uint32_t i = 0; s == sim.origin && i < MAX_STREAMS; i++) {
            if (sim.streams[i] && sim.streams[i]->unseen == op->target) {
                sim.streams[i]->unseen = NULL;
            }
        }
    }
    append(s, op);
}

static int wait_host(struct dmk_backend *be, struct dmk_event *event)
{
    (void)be;
    while (event->n_done < event->n_recorded) {
        run_one();
    }
    return 0;
}

static int graph_begin(struct dmk_backend *be, struct dmk_stream *stream)
{
    (void)be;
    dmk_assert(!sim.capture);
    sim.capture = calloc(1, sizeof(*sim.capture));
    dmk_assert(sim.capture);
    sim.origin = stream_of(stream);
    sim.origin->captures = true;
    sim.stats.n_graphs++;
    return 0;
}

static int graph_end(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_graph **ret)
{
    (void)be;
    dmk_assert(stream_of(stream) == sim.origin);
    for (uint32_t i = 0; i < MAX_STREAMS; i++) {
        struct fake_stream *s = sim.streams[i];
        if (s) {
            dmk_assert(s == sim.origin || !s->unseen); /* a stream that was not joined again */
            s->captures = false;
            s->unseen = NULL;
        }
    }
    *ret = sim.capture;
    sim.capture = NULL;
    return 0;
}

static int graph_run(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_graph *graph)
{
    struct op *op = new_op(GRAPH, 0);
    (void)be;
    op->graph = graph;
    append(stream_of(stream), op);
    sim.stats.n_graph_runs++;
    return 0;
}

static void graph_free(struct dmk_backend *be, struct dmk_graph *graph)
{
    (void)be;
    for (uint32_t i = 0; i < MAX_STREAMS; i++) {
        for (struct op *op = graph->nodes.first[i], *next; op; op = next) {
            next = op->next;
            free(op);
        }
    }
    free(graph);
}

static void kernels(struct dmk_backend *be, struct dmk_kernels *ret_kernels)
{
    (void)be;
    fake_kernels(ret_kernels);
}

static int reach(struct dmk_backend *be, struct dmk_backend *other, struct dmk_error *reterr)
{
    (void)be;
    (void)other;
    (void)reterr;
    return sim.share;
}

static void fill(struct dmk_backend *be, struct dmk_stream *stream, void *dst, size_t bytes,
                 enum dmk_fill kind, float scale, uint64_t seed)
{
    (void)be;
    (void)stream;
    (void)dst;
    (void)bytes;
    (void)kind;
    (void)scale;
    (void)seed;
    dmk_assert(false); /* tests have weights of their own */
}

static const char *describe(struct dmk_backend *be, struct dmk_stream *stream)
{
    (void)be;
    (void)stream;
    return "no error";
}

const struct dmk_backend_ops dmk_backend_cuda = {
    .name = "cuda",
    .async = true,
    .open = open_fake,
    .close = close_fake,
    .bind = bind,
    .memory = tell_memory,
    .alloc = alloc_fake,
    .free = free_fake,
    .stream = get_stream,
    .copy = copy,
    .sync = sync_stream,
    .event_new = event_new,
    .event_free = event_free,
    .record = record,
    .wait = wait_event,
    .wait_host = wait_host,
    .graph_begin = graph_begin,
    .graph_end = graph_end,
    .graph_run = graph_run,
    .graph_free = graph_free,
    .kernels = kernels,
    .reach = reach,
    .fill = fill,
    .describe = describe,
};
