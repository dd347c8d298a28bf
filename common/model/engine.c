/* The engine: opens a model over its ranks, runs steps, says what it is.
 *
 * On hosts ranks are threads of a team, and rank 0 is whoever calls dmk_engine_step; on devices they are streams,
 * which that thread fills (device.h). All memory is taken here at start and given back at close. */
#include "common/model/engine_internal.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/backend/team.h"
#include "common/base/assert.h"
#include "common/model/device.h"
#include "common/model/rope.h"

static uint32_t count_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) {
        return 1;
    }
    return CPU_COUNT(&set) > 0 ? (uint32_t)CPU_COUNT(&set) : 1;
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static int refuse_alloc(const struct dmk_rank *rank, enum dmk_mem mem, size_t bytes,
                        const char *what, struct dmk_error *reterr)
{
    const double gib = 1073741824.0;
    const struct dmk_engine *engine = rank->engine;
    struct dmk_backend_memory m;
    uint64_t held = 0;
    if (mem == DMK_MEM_HOST || rank->backend->ops->memory(rank->backend, &m) != 0) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for %s of rank %u: %zu bytes", what,
                             rank->index, bytes);
    }
    for (uint32_t i = 0; i < engine->n_allocs; i++) {
        const struct dmk_engine_alloc *a = &engine->allocs[i];
        held += a->backend == rank->backend && a->mem == mem ? a->bytes : 0;
    }
    return dmk_error_set(reterr, -DMK_ENOMEM,
                         "no memory for %s of rank %u: %.2f GiB are wanted, %.2f of %.1f GiB are "
                         "free and %.2f are this rank's; give it fewer pages, shorter steps, more "
                         "ranks, or a device that others use less",
                         what, rank->index, (double)bytes / gib, (double)m.free / gib,
                         (double)m.total / gib, (double)held / gib);
}

int dmk_engine_alloc_mem(struct dmk_rank *rank, enum dmk_mem mem, size_t bytes, void *ret_ptr,
                         const char *what, struct dmk_error *reterr)
{
    struct dmk_engine *engine = rank->engine;
    void *ptr;
    dmk_assert(engine->n_allocs < engine->max_allocs);
    if (rank->backend->ops->alloc(rank->backend, mem, bytes, &ptr) != 0) {
        return refuse_alloc(rank, mem, bytes, what, reterr);
    }
    engine->allocs[engine->n_allocs++] = (struct dmk_engine_alloc){rank->backend, mem, ptr, bytes};
    memcpy(ret_ptr, &ptr, sizeof(ptr));
    return 0;
}

int dmk_engine_acts_alloc(struct dmk_engine *engine, struct dmk_rank *rank,
                          struct dmk_error *reterr)
{
    const struct dmk_shape *s = &engine->shape;
    const size_t T = engine->conf.max_step_tokens, bf16 = sizeof(uint16_t), u32 = sizeof(uint32_t);
    const size_t n_kv = (size_t)rank->shard.n_kv_heads * DMK_HEAD_DIM;
    const size_t n_q = n_kv * (s->n_heads / s->n_kv_heads), M = engine->max_moe_rows;
    const size_t slots = M * s->experts_per_token;
    const size_t R = engine->conf.prefill ? 0 : engine->conf.max_logit_rows;
    const size_t G = engine->conf.layout.dp > 1 ? M : 0; /* rows that come from groups */
    const bool joined = rank->backend->ops->async;
    const size_t codes = engine->conf.fp8_dense ? T > R ? T : R : 0; /* rows of FP8 activations */
    const size_t groups =
        max_u32(dmk_fp8_groups(s->hidden),
                rank->shard.n_kv_heads * dmk_fp8_groups(s->n_heads / s->n_kv_heads * DMK_HEAD_DIM));
    const size_t P = joined && engine->n_ranks > 1 ? M : G; /* rows of a partial sum of experts */
    struct dmk_acts *a = &rank->acts;
    struct {
        void *ret;
        size_t bytes;
    } parts[] = {
        {&a->x, T * s->hidden * bf16},
        {&a->norm, T * s->hidden * bf16},
        {&a->q, T * (n_q + (joined ? 2 * n_kv : 0)) * bf16},
        {&a->k, joined ? 0 : T * n_kv * bf16},
        {&a->v, joined ? 0 : T * n_kv * bf16},
        {&a->heads, T * n_q * bf16},
        {&a->sum, T * s->hidden * sizeof(float)},
        {&a->scores, T * s->n_experts * bf16},
        {&a->chosen, slots * u32},
        {&a->weights, slots * sizeof(float)},
        {&a->moe.expert_begin, (rank->shard.n_experts + 1) * u32},
        {&a->moe.slot_row, slots * u32},
        {&a->moe.slot_weight, slots * sizeof(float)},
        {&a->moe.row_slots, slots * u32},
        {&a->moe.slot_group, slots * u32},
        {&a->moe.row_at, rank->shard.n_experts * u32},
        {&a->z, slots * s->intermediate * bf16},
        {&a->y, slots * s->hidden * sizeof(float)},
        {&a->last, R * s->hidden * bf16},
        {&a->codes, codes * (n_q > s->hidden ? n_q : s->hidden)},
        {&a->code_scales, codes * groups * sizeof(float)},
        {&a->got.x, G * s->hidden * bf16},
        {&a->got.ids, G * s->experts_per_token * u32},
        {&a->got.weights, G * s->experts_per_token * sizeof(float)},
        {&a->part, P * s->hidden * sizeof(float)},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        int status = dmk_engine_alloc_mem(rank, DMK_MEM_DEVICE, parts[i].bytes, parts[i].ret,
                                          "the activations", reterr);
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

/* Dense weights in FP8; groups of ranks have the same, of which the first one's serve all. */
static int open_dense(struct dmk_engine *engine, struct dmk_rank *rank, struct dmk_error *reterr)
{
    const struct dmk_shape *s = &engine->shape;
    if (!rank->kernels.linear_fp8) {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "dense weights in FP8 are not supported on backend '%s'",
                             engine->conf.backend);
    }
    int status = dmk_engine_dense_check(s, engine->conf.backend, reterr);
    if (status != 0) {
        return status;
    }
    if (!rank->weights.layers) {
        return 0; /* random ones */
    }
    if (rank->group == 0) {
        return dmk_weights_dense_rank(engine->weights, engine->conf.layout, rank->index,
                                      !engine->conf.prefill, &rank->weights, reterr);
    }
    const struct dmk_rank_weights *same =
        &engine->ranks[rank->index % engine->conf.layout.tp].weights;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        struct dmk_layer_weights *l = &rank->weights.layers[i];
        l->q8 = same->layers[i].q8;
        l->k8 = same->layers[i].k8;
        l->v8 = same->layers[i].v8;
        l->o8 = same->layers[i].o8;
    }
    rank->weights.head8 = same->head8;
    return 0;
}

static int open_rank(struct dmk_engine *engine, uint32_t index, const struct dmk_backend_conf *conf,
                     struct dmk_error *reterr)
{
    struct dmk_rank *rank = &engine->ranks[index];
    rank->engine = engine;
    rank->index = index;
    rank->group = index / engine->conf.layout.tp;
    rank->shard = dmk_layout_shard(&engine->shape, engine->conf.layout, index);
    int status =
        dmk_weights_of_rank(engine->weights, engine->conf.layout, index, &rank->weights, reterr);
    if (status != 0 ||
        (status = dmk_backend_open(engine->conf.backend, conf, &rank->backend, reterr)) != 0) {
        return status;
    }
    if (!rank->backend->ops->async && engine->weights->expert_format == DMK_EXPERTS_FP8 &&
        (status = dmk_weights_expand_rank(engine->weights, &rank->weights, rank->shard.n_experts,
                                          reterr)) != 0) {
        return status;
    }
    rank->stream = rank->backend->ops->stream(rank->backend, DMK_STREAM_COMPUTE);
    rank->backend->ops->kernels(rank->backend, &rank->kernels);
    if (engine->conf.fp8_dense && (status = open_dense(engine, rank, reterr)) != 0) {
        return status;
    }
    engine->max_moe_rows = engine->conf.max_step_tokens;
    if (rank->backend->ops->async) {
        engine->max_moe_rows = max_u32(engine->max_moe_rows, dmk_device_moe_rows(&engine->conf));
    }
    if (engine->conf.memory_percent <=
        0) { /* before the weights: what does not fit is seen early */
        status = dmk_engine_pages_alloc(rank, reterr);
    }
    return status == 0 ? dmk_engine_acts_alloc(engine, rank, reterr) : status;
}

static int check_conf(const struct dmk_engine_conf *c, const struct dmk_shape *shape,
                      struct dmk_error *reterr)
{
    int status = dmk_layout_check(shape, c->layout, c->prefill, reterr);
    if (status != 0) {
        return status;
    }
    if (c->fp8_experts && strcmp(c->backend, "cuda") != 0) {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "FP8 experts run on backend 'cuda' only, not on '%s'", c->backend);
    }
    const struct {
        const char *name;
        uint32_t value, min, max;
    } bounds[] = {
        {"max_step_tokens", c->max_step_tokens, 1, 1u << 20},
        {"max_step_seqs", c->max_step_seqs, 1, 1u << 16},
        {"max_logit_rows", c->max_logit_rows, c->prefill ? 0 : 1, 1u << 20},
        {"n_full_pages", c->n_full_pages, 1, 1u << 28},
        {"n_window_pages", c->n_window_pages, DMK_WINDOW_RING, 1u << 28},
        {"n_threads", c->n_threads, 0, 1024},
    };
    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++) {
        if (bounds[i].value < bounds[i].min || bounds[i].value > bounds[i].max) {
            return dmk_error_set(reterr, -DMK_EINVAL, "engine option %s is %u but must be %u to %u",
                                 bounds[i].name, bounds[i].value, bounds[i].min, bounds[i].max);
        }
    }
    return 0;
}

/* Ranks of devices read each other's memory. */
static int reach_all(struct dmk_engine *engine, struct dmk_error *reterr)
{
    for (uint32_t i = 0; i < engine->n_ranks; i++) {
        for (uint32_t j = 0; j < engine->n_ranks; j++) {
            struct dmk_backend *be = engine->ranks[i].backend, *other = engine->ranks[j].backend;
            int status = i == j ? 0 : be->ops->reach(be, other, reterr);
            if (status < 0) {
                return status;
            }
            engine->shares_devices = engine->shares_devices || status > 0;
        }
    }
    return 0;
}

static int open_ranks(struct dmk_engine *engine, struct dmk_error *reterr)
{
    const struct dmk_shape *s = &engine->shape;
    uint32_t n_cores = count_cores();
    uint32_t n_threads = engine->conf.n_threads ? engine->conf.n_threads : n_cores;
    uint32_t per_rank = max_u32(n_threads / engine->n_ranks, 1);
    struct dmk_backend_conf conf = {
        .n_ranks = engine->n_ranks,
        .n_threads = per_rank,
        .oversubscribed = per_rank * engine->n_ranks > n_cores,
        .max_k = max_u32(max_u32(s->hidden, s->intermediate), s->n_heads * DMK_HEAD_DIM),
    };
    for (uint32_t i = 0; i < engine->n_ranks; i++) {
        conf.device = i;
        int status = open_rank(engine, i, &conf, reterr);
        if (status != 0) {
            return status;
        }
    }
    if (engine->ranks[0].backend->ops->async) {
        return reach_all(engine, reterr);
    }
    const struct dmk_coll_conf coll = {
        .group_ranks = engine->conf.layout.tp,
        .n_groups = engine->conf.layout.dp,
        .max_rows = engine->conf.max_step_tokens,
        .oversubscribed = conf.oversubscribed,
    };
    int status = dmk_coll_local_new(&coll, &engine->coll, reterr);
    if (status != 0) {
        return status;
    }
    return dmk_team_new("rank", engine->n_ranks, !conf.oversubscribed, 0, &engine->team, reterr);
}

int dmk_engine_open_weights(const struct dmk_engine_conf *conf, struct dmk_weights *weights,
                            struct dmk_engine **ret, struct dmk_error *reterr)
{
    int status = check_conf(conf, &weights->shape, reterr);
    if (status != 0) {
        return status;
    }
    struct dmk_engine *engine = calloc(1, sizeof(*engine));
    uint32_t n_ranks = conf->layout.tp * conf->layout.dp;
    uint32_t max_allocs = n_ranks * (DMK_ENGINE_RANK_ALLOCS + weights->shape.n_layers);
    if (!engine || !(engine->allocs = calloc(max_allocs, sizeof(*engine->allocs)))) {
        free(engine);
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the engine");
    }
    engine->conf = *conf;
    engine->weights = weights;
    engine->shape = weights->shape;
    engine->n_ranks = n_ranks;
    engine->max_allocs = max_allocs;
    uint64_t pageable =
        conf->memory_percent > 0 ? UINT32_MAX : (uint64_t)conf->n_full_pages * DMK_PAGE_TOKENS;
    engine->n_positions =
        pageable < engine->shape.max_positions ? (uint32_t)pageable : engine->shape.max_positions;
    status = dmk_engine_name_numerics(engine, reterr);
    if (status == 0) {
        status = open_ranks(engine, reterr);
    }
    if (status == 0) {
        status = dmk_engine_plan_alloc(engine, reterr);
    }
    if (status == 0) {
        size_t bytes = (size_t)engine->n_positions * DMK_HEAD_DIM * sizeof(float);
        status = dmk_engine_alloc_mem(&engine->ranks[0], DMK_MEM_HOST, bytes, &engine->rope,
                                      "the rope table", reterr);
    }
    if (status != 0) {
        dmk_engine_close(&engine);
        return status;
    }
    dmk_rope_table(&engine->shape, engine->n_positions, engine->rope);
    status = engine->ranks[0].backend->ops->async ? dmk_device_open(engine, reterr)
                                                  : dmk_engine_pages_fill(engine, reterr);
    if (status != 0) {
        dmk_engine_close(&engine);
        return status;
    }
    *ret = engine;
    return 0;
}

/* A model of published dimensions whose weights are made on the device. */
static int open_random(const struct dmk_engine_conf *conf, struct dmk_engine **ret,
                       struct dmk_error *reterr)
{
    struct dmk_weights *weights = calloc(1, sizeof(*weights));
    if (!weights) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the engine");
    }
    int status = dmk_shape_preset(conf->random_preset, &weights->shape, reterr);
    if (status == 0 && strcmp(conf->backend, "cuda") != 0) {
        status = dmk_error_set(reterr, -DMK_ENOTSUP,
                               "random weights are made on a device only, not on backend '%s'",
                               conf->backend);
    }
    weights->expert_format = DMK_EXPERTS_MXFP4;
    status = status == 0 ? dmk_engine_open_weights(conf, weights, ret, reterr) : status;
    if (status != 0) {
        dmk_weights_close(&weights);
        return status;
    }
    (*ret)->owns_weights = true;
    return 0;
}

/* A device's weights are counted twice, once when they are read and once when they are sent. */
struct progress {
    const struct dmk_engine_conf *conf;
    bool sending, async;
    uint64_t read; /* bytes, when they are sent */
};

static void on_progress(void *ud, uint64_t done, uint64_t total)
{
    struct progress *p = ud;
    const uint64_t rest = p->async && !p->sending ? total : 0;
    p->read = p->sending ? p->read : done;
    if (p->conf->on_progress) {
        p->conf->on_progress(p->conf->ud, p->sending ? p->read + done : done,
                             p->sending ? p->read + total : total + rest);
    }
}

int dmk_engine_open(const struct dmk_engine_conf *conf, struct dmk_engine **ret,
                    struct dmk_error *reterr)
{
    if (conf->random_preset) {
        return open_random(conf, ret, reterr);
    }
    struct progress progress = {.conf = conf, .async = strcmp(conf->backend, "cuda") == 0};
    struct dmk_engine_conf watched = *conf;
    const struct dmk_weights_conf weights_conf = {.dir = conf->model_dir,
                                                  .prefault = true,
                                                  .no_verify = conf->no_verify,
                                                  .no_head = conf->prefill,
                                                  .layout = &conf->layout,
                                                  .on_progress = on_progress,
                                                  .ud = &progress};
    struct dmk_weights *weights;
    int status = dmk_weights_open(&weights_conf, &weights, reterr);
    if (status != 0) {
        return status;
    }
    progress.sending = true;
    watched.on_progress = on_progress;
    watched.ud = &progress;
    status = dmk_engine_open_weights(&watched, weights, ret, reterr);
    if (status != 0) {
        dmk_weights_close(&weights);
        return status;
    }
    (*ret)->conf.on_progress = conf->on_progress;
    (*ret)->conf.ud = conf->ud;
    (*ret)->owns_weights = true;
    return 0;
}

void dmk_engine_close(struct dmk_engine **ptr)
{
    struct dmk_engine *engine = *ptr;
    if (!engine) {
        return;
    }
    dmk_team_free(&engine->team);
    dmk_device_close(engine);
    for (uint32_t i = 0; i < engine->n_allocs; i++) {
        struct dmk_engine_alloc *alloc = &engine->allocs[i];
        alloc->backend->ops->free(alloc->backend, alloc->mem, alloc->ptr, alloc->bytes);
    }
    free(engine->allocs);
    for (uint32_t i = 0; i < engine->n_ranks; i++) {
        dmk_backend_close(&engine->ranks[i].backend);
        dmk_weights_rank_release(&engine->ranks[i].weights);
    }
    if (engine->coll) {
        dmk_coll_free(&engine->coll);
    }
    if (engine->owns_weights) {
        dmk_weights_close(&engine->weights);
    }
    free(engine);
    *ptr = NULL;
}

static void run_rank(void *ud, uint32_t thread)
{
    struct dmk_engine *engine = ud;
    struct dmk_rank *rank = &engine->ranks[thread];
    rank->status = dmk_forward(rank, &engine->plans[rank->group], engine->step);
}

int dmk_engine_step(struct dmk_engine *engine, const struct dmk_step *step)
{
    dmk_engine_plan(engine, step);
    if (engine->device) {
        return dmk_device_step(engine, step);
    }
    engine->step = step;
    dmk_team_each(engine->team, run_rank, engine);
    engine->step = NULL;
    for (uint32_t i = 0; i < engine->n_ranks; i++) {
        if (engine->ranks[i].status != 0) {
            return engine->ranks[i].status;
        }
    }
    return 0;
}

struct dmk_engine_graphs dmk_engine_graphs(const struct dmk_engine *engine)
{
    return engine->device ? engine->device->captured : (struct dmk_engine_graphs){0};
}

bool dmk_engine_shares_devices(const struct dmk_engine *engine)
{
    return engine->shares_devices;
}

bool dmk_engine_samples(const struct dmk_engine *engine)
{
    return engine->device && engine->ranks[0].kernels.sample;
}

const struct dmk_shape *dmk_engine_shape(const struct dmk_engine *engine)
{
    return &engine->shape;
}

uint32_t dmk_engine_n_ranks(const struct dmk_engine *engine)
{
    return engine->n_ranks;
}

const struct dmk_kv_mem *dmk_engine_kv(const struct dmk_engine *engine, uint32_t rank)
{
    dmk_assert(rank < engine->n_ranks);
    return &engine->ranks[rank].kv;
}

bool dmk_engine_pages_on_device(const struct dmk_engine *engine)
{
    return engine->ranks[0].backend->ops->async;
}

void dmk_engine_bind(struct dmk_engine *engine)
{
    struct dmk_backend *be = engine->ranks[0].backend;
    if (be->ops->bind) {
        be->ops->bind(be);
    }
}

int dmk_engine_wait_devices(struct dmk_engine *engine)
{
    for (uint32_t i = 0; i < engine->n_ranks; i++) {
        struct dmk_backend *be = engine->ranks[i].backend;
        int status = be->ops->wait_all ? be->ops->wait_all(be) : 0;
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

const struct dmk_kv_mem *dmk_engine_stage(const struct dmk_engine *engine, uint32_t rank)
{
    dmk_assert(rank < engine->n_ranks);
    return engine->ranks[rank].stage.full ? &engine->ranks[rank].stage : NULL;
}
