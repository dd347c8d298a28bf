/* A step on devices: plans to the ranks, the parts of all layers in order, results back (device_io.c); and the graphs of
 * decode steps. On the engine's thread, which launches for all ranks and waits at the end.
 *
 * Where one reads what others have written, ranks meet first. A layer has a meeting after attention (of a group),
 * one after the choice of experts (of all, with more than one group), and one after the experts (of all). There are two
 * ways to meet. By events: every rank's stream records one behind its part and waits for those of the others. This
 * is right for ranks that share a device, where a kernel that waits could keep the one out that it waits for. And by
 * words in memory (dmk_meeting): the kernel that reads tells the others and waits to hear of them, which takes some
 * microseconds less. That is done in graphs, where each rank has a device of its own and all rows have room on it at
 * once. Not in steps that are launched kernel by kernel: the first launch of a kernel may load its code, which waits for
 * what runs on the device, and that must not be waiting for a launch that comes after.
 *
 * One meeting for each exchange is enough, there is no second one that says "I have read", because no two exchanges
 * in a row use the same memory:
 *
 *     sum     written by attend, read by choose, written again by attend of the next layer
 *     norm, chosen, weights   written by choose, read by others' experts, written again by finish and choose
 *     part    written by experts, read by finish, written again by experts of the next layer
 *
 * Between the reading and the next writing of each there lies another meeting of the same ranks or of more, in
 * which the readers took part after they had read. The next step begins when the host has waited for all. */
#include "common/model/device.h"

#include "common/base/assert.h"
#include "common/base/clock.h"

#define CAPTURE_NS (60 * 1000000000ull) /* at most, for all graphs */
#define TELL_ROWS  128 /* blocks of a kernel that waits: all run at once on any device */

/* What follows is launched on this rank's device. */
static void bind(struct dmk_rank *rank)
{
    if (rank->backend->ops->bind && rank->engine->n_ranks > 1) {
        rank->backend->ops->bind(rank->backend);
    }
}

static void record_here(struct dmk_rank *rank)
{
    rank->backend->ops->record(rank->backend, rank->stream, dmk_device_of(rank)->here);
}

static void wait_for(struct dmk_rank *rank, struct dmk_rank *other)
{
    if (rank != other) {
        rank->backend->ops->wait(rank->backend, rank->stream, dmk_device_of(other)->here);
    }
}

/* n ranks from the first one on wait for each other, unless the kernels behind this place do so. */
static void meet(struct dmk_rank *first, uint32_t n)
{
    if (first->engine->device->tell) {
        return;
    }
    for (uint32_t i = 0; i < n && n > 1; i++) {
        record_here(&first[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < n; j++) {
            wait_for(&first[i], &first[j]);
        }
    }
}

/* How ranks meet in a step whose plans are there, and the numbers of its meetings. */
static void plan_meetings(struct dmk_engine *engine, bool graph)
{
    struct dmk_device *dev = engine->device;
    uint32_t n_rows = 0;
    dmk_assert(dev);
    for (uint32_t g = 0; g < engine->conf.layout.dp; g++) {
        engine->plans[g].counts->meetings = dev->meetings;
        n_rows += engine->plans[g].n_rows;
    }
    dev->tell = graph && !engine->shares_devices && n_rows <= TELL_ROWS;
    dev->meetings += engine->shape.n_layers * DMK_MEETINGS;
}

/* The first waits for the others. */
static void join(struct dmk_rank *first, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        record_here(&first[i]);
        wait_for(first, &first[i]);
    }
}

/* The others wait for the first. */
static void fork_from(struct dmk_rank *first, uint32_t n)
{
    if (n > 1) {
        record_here(first);
    }
    for (uint32_t i = 1; i < n; i++) {
        wait_for(&first[i], first);
    }
}

static void each(struct dmk_engine *engine, void (*part)(struct dmk_rank *rank))
{
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        bind(&engine->ranks[r]);
        part(&engine->ranks[r]);
    }
}

static void each_of_layer(struct dmk_engine *engine,
                          void (*part)(struct dmk_rank *rank, uint32_t layer), uint32_t layer)
{
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        bind(&engine->ranks[r]);
        part(&engine->ranks[r], layer);
    }
}

static void meet_groups(struct dmk_engine *engine)
{
    const struct dmk_layout layout = engine->conf.layout;
    for (uint32_t g = 0; g < layout.dp; g++) {
        meet(&engine->ranks[g * layout.tp], layout.tp);
    }
}

/* Behind the rank's part of attention, which has written the pages, and before the last meeting of the layer. */
static void stage_pages(struct dmk_rank *rank, uint32_t layer, const struct dmk_step_stage *stage)
{
    const struct dmk_step_plan *p = &rank->engine->plans[rank->group];
    const struct dmk_kv_layout *l = &rank->kv.layout, *to = &rank->stage.layout;
    const uint32_t at = dmk_shape_kind_index(layer);
    struct dmk_page_move_args args = {.n_arrays = l->n_local_heads, .page_bytes = l->page_bytes};
    if (dmk_shape_layer_is_full(layer)) {
        args.pool = (uint8_t *)rank->kv.full + dmk_kv_full_offset(l, at, 0, 0);
        args.piece = (uint8_t *)rank->stage.full + dmk_kv_full_offset(to, at, 0, stage->full_at);
        args.ids = (uint32_t *)dmk_device_at(rank, p->page_ids) + stage->first_block;
        args.n_ids = stage->end_block - stage->first_block;
        args.n_pages = l->n_full_pages;
        args.piece_pages = to->n_full_pages;
    } else if (stage->window) {
        args.pool = (uint8_t *)rank->kv.window + dmk_kv_window_offset(l, at, 0, 0);
        args.piece =
            (uint8_t *)rank->stage.window + dmk_kv_window_offset(to, at, 0, stage->window_at);
        args.ids = dmk_device_at(rank, p->seqs[0].ring);
        args.n_ids = p->seqs[0].n_ring;
        args.n_pages = l->n_window_pages;
        args.piece_pages = to->n_window_pages;
    }
    rank->kernels.page_gather(&args, rank->stream);
}

static void run_layer(struct dmk_engine *engine, uint32_t layer, const struct dmk_step_stage *stage)
{
    each_of_layer(engine, dmk_device_attend, layer);
    for (uint32_t r = 0; stage && r < engine->n_ranks; r++) {
        bind(&engine->ranks[r]);
        stage_pages(&engine->ranks[r], layer, stage);
    }
    meet_groups(engine);
    each_of_layer(engine, dmk_device_choose, layer);
    if (engine->conf.layout.dp > 1) {
        meet(engine->ranks, engine->n_ranks);
    }
    each_of_layer(engine, dmk_device_experts, layer);
    if (engine->n_ranks > 1) {
        meet(engine->ranks, engine->n_ranks);
        each_of_layer(engine, dmk_device_finish, layer);
    }
}

/* Logits of the wanted rows and their tokens, on the first rank of each group. */
static void run_head(struct dmk_engine *engine)
{
    const struct dmk_layout layout = engine->conf.layout;
    uint32_t n_logits = 0;
    for (uint32_t g = 0; g < layout.dp; g++) {
        n_logits += engine->plans[g].n_logit_rows;
    }
    if (n_logits == 0) {
        return;
    }
    each(engine, dmk_device_head);
    for (uint32_t g = 0; g < layout.dp; g++) {
        struct dmk_rank *first = &engine->ranks[g * layout.tp];
        join(first, layout.tp);
        bind(first);
        dmk_device_pick(first);
    }
}

/* Launches layer by layer. With on_layer the host follows a few layers behind the device's queue, so that it hears
 * of a finished layer soon and of a cancel before much more is queued. Rank 0 has finished a layer when it has met
 * all others behind their parts of it, so its events speak for all. */
static int run_eager(struct dmk_engine *engine, const struct dmk_step *step)
{
    struct dmk_device *dev = engine->device;
    struct dmk_rank *rank = &engine->ranks[0];
    struct dmk_backend *be = rank->backend;
    const uint32_t n_layers = engine->shape.n_layers,
                   ring = sizeof(dev->layer_done) / sizeof(dev->layer_done[0]);
    const uint32_t ahead = 3;
    int status = 0;
    each(engine, dmk_device_begin);
    for (uint32_t layer = 0; layer < n_layers + ahead && status == 0; layer++) {
        if (layer < n_layers) {
            if (step->cancel && atomic_load(step->cancel)) {
                status = dmk_device_sync(engine);
                return status == 0 ? -DMK_ECANCELLED : status;
            }
            run_layer(engine, layer, step->stage);
            be->ops->record(be, rank->stream, dev->layer_done[layer % ring]);
        }
        if (layer >= ahead && (step->on_layer || step->cancel)) {
            status = be->ops->wait_host(be, dev->layer_done[(layer - ahead) % ring]);
            if (status == 0 && step->on_layer) {
                step->on_layer(step->ud, layer - ahead);
            }
        }
    }
    run_head(engine);
    return status;
}

uint32_t dmk_device_bucket(uint32_t n_rows, uint32_t *ret_index)
{
    uint32_t size = 1, index = 0;
    while (size < n_rows) {
        uint32_t step = 1;
        while (step * 16 <= size) {
            step *= 2;
        }
        size += step;
        index++;
    }
    *ret_index = index;
    return size;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* The largest batch of a group that a graph may have: what the arrays hold. */
static uint32_t most_rows(const struct dmk_engine_conf *conf)
{
    const uint32_t rows = conf->prefill ? 0 : conf->max_logit_rows;
    return min_u32(min_u32(conf->max_step_seqs, conf->max_step_tokens), rows);
}

/* The last bucket is as large as the arrays. */
static uint32_t bucket_in(const struct dmk_engine_conf *conf, uint32_t n_rows, uint32_t *ret_index)
{
    return min_u32(dmk_device_bucket(n_rows, ret_index), most_rows(conf));
}

uint32_t dmk_device_moe_rows(const struct dmk_engine_conf *conf)
{
    return conf->layout.dp * most_rows(conf);
}

/* Rows of the bucket that nobody asked for: no page, no expert, no sequence. The splits of its rows are counted on
 * the device. */
static void pad_plan(const struct dmk_engine *engine, struct dmk_step_plan *p, uint32_t n_rows)
{
    p->counts->n_live = p->n_rows;
    for (uint32_t i = p->n_rows; i < n_rows; i++) {
        p->ids[i] = p->positions[i] = p->slot[i] = 0;
        p->full_page[i] = p->window_page[i] = DMK_NONE;
        p->seqs[i] = (struct dmk_attn_seq){.row = i, .n_ring = 3};
        p->logit_rows[i] = i;
    }
    p->n_rows = p->n_seqs = p->n_logit_rows = p->n_singles = n_rows;
    p->max_splits = n_rows * engine->max_row_splits;
}

/* All ranks' work of a decode step of n_rows in each group, as one graph of rank 0's stream. */
static int capture(struct dmk_engine *engine, struct dmk_graph **ret_graph)
{
    struct dmk_rank *first = &engine->ranks[0];
    struct dmk_backend *be = first->backend;
    bind(first);
    int status = be->ops->graph_begin(be, first->stream);
    if (status != 0) {
        return status;
    }
    fork_from(first, engine->n_ranks);
    each(engine, dmk_device_begin);
    for (uint32_t layer = 0; layer < engine->shape.n_layers; layer++) {
        run_layer(engine, layer, NULL);
    }
    run_head(engine);
    join(first, engine->n_ranks);
    return be->ops->graph_end(be, first->stream, ret_graph);
}

/* The graph runs on rank 0's stream; all others wait for it, and it for what they have queued before. */
static int run_graph(struct dmk_engine *engine, struct dmk_graph *graph)
{
    struct dmk_rank *first = &engine->ranks[0];
    join(first, engine->n_ranks);
    bind(first);
    int status = first->backend->ops->graph_run(first->backend, first->stream, graph);
    fork_from(first, engine->n_ranks);
    return status;
}

/* The graph for this step, with its size, or NULL: all rows are single tokens whose logits are wanted. */
static struct dmk_graph *find_graph(const struct dmk_engine *engine, const struct dmk_step *step,
                                    uint32_t *ret_size)
{
    uint32_t most = 0, index;
    for (uint32_t g = 0; g < engine->conf.layout.dp; g++) {
        const struct dmk_step_plan *p = &engine->plans[g];
        if (p->n_tiles > 0 || p->n_logit_rows != p->n_rows) {
            return NULL;
        }
        most = p->n_rows > most ? p->n_rows : most;
    }
    if (most == 0 || most > most_rows(&engine->conf) || step->on_layer) {
        return NULL;
    }
    *ret_size = bucket_in(&engine->conf, most, &index);
    return index < DMK_DEVICE_MAX_BUCKETS ? engine->device->graphs[index] : NULL;
}

int dmk_device_step(struct dmk_engine *engine, const struct dmk_step *step)
{
    const uint32_t n_groups = engine->conf.layout.dp;
    struct dmk_backend *be = engine->ranks[0].backend;
    uint32_t n_logits[DMK_ENGINE_MAX_RANKS] = {0}, n_rows = 0, size = 0, at = 0;
    if (be->ops->bind) {
        be->ops->bind(be);
    }
    struct dmk_graph *graph = find_graph(engine, step, &size);
    for (uint32_t g = 0; g < n_groups; g++) {
        struct dmk_step_plan *p = &engine->plans[g];
        n_logits[g] = p->n_logit_rows;
        n_rows += p->n_rows;
        p->counts->n_live = p->n_rows;
        if (graph) {
            pad_plan(engine, p, size);
        }
        dmk_device_plan_picks(p, step->picks ? step->picks + at : NULL, n_logits[g]);
        at += n_logits[g];
    }
    plan_meetings(engine, graph != NULL);
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        bind(&engine->ranks[r]);
        dmk_device_send_plan(&engine->ranks[r]);
        dmk_device_copy_pages(&engine->ranks[r], step);
    }
    if (n_rows == 0) {
        return dmk_device_sync(engine); /* copies alone */
    }
    int status = graph ? run_graph(engine, graph) : run_eager(engine, step);
    return status == 0 ? dmk_device_fetch(engine, step, n_logits) : status;
}

/* A step of padding only: every kernel runs, no page and no caller's memory is written. */
static int warm(struct dmk_engine *engine, uint32_t size, struct dmk_graph **graph)
{
    int status = 0;
    for (uint32_t g = 0; g < engine->conf.layout.dp; g++) {
        struct dmk_step_plan *p = &engine->plans[g];
        dmk_engine_plan_empty(engine, g);
        pad_plan(engine, p, size);
        dmk_device_plan_picks(p, NULL, 0);
    }
    plan_meetings(engine, graph != NULL);
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        bind(&engine->ranks[r]);
        dmk_device_send_plan(&engine->ranks[r]);
    }
    if (!graph) {
        status = run_eager(engine, &(struct dmk_step){0});
    } else if ((status = capture(engine, graph)) == 0) {
        status = run_graph(engine, *graph);
    }
    int end = dmk_device_sync(engine);
    return status == 0 ? end : status;
}

int dmk_device_capture(struct dmk_engine *engine, struct dmk_error *reterr)
{
    struct dmk_engine_graphs *c = &engine->device->captured;
    struct dmk_backend *be = engine->ranks[0].backend;
    const uint32_t most = most_rows(&engine->conf);
    const uint64_t start = dmk_clock_ns();
    int status = 0;
    if (most == 0 || !be->ops->graph_begin) {
        return 0;
    }
    be->ops->bind(be);
    status = warm(engine, 1, NULL); /* by events, with all code loaded before anything waits */
    for (uint32_t n = 1, index; n <= most && status == 0;) {
        const uint32_t size = bucket_in(&engine->conf, n, &index);
        if (index >= DMK_DEVICE_MAX_BUCKETS) {
            break;
        }
        c->n_wanted++;
        if (dmk_clock_ns() - start < CAPTURE_NS) {
            status = warm(engine, size, &engine->device->graphs[index]);
            c->n_graphs++;
        }
        n = size + 1;
    }
    c->seconds = (double)(dmk_clock_ns() - start) * 1e-9;
    if (status != 0) {
        return dmk_error_set(reterr, status, "decode graph %u could not be made: %s", c->n_graphs,
                             be->ops->describe(be, engine->ranks[0].stream));
    }
    return 0;
}
