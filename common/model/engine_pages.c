/* Page memory of an engine's ranks: as many pages as the conf says, taken before the weights, or as many as there is memory
 * for when everything else is there. */
#include "common/model/engine_internal.h"

#include "common/base/assert.h"

#define GIB 1073741824.0
/* What a device's driver, graphs and transport take beside the engine's own memory. */
#define DEVICE_EXTRA ((uint64_t)1 << 30)

struct dmk_kv_layout dmk_engine_page_layout(const struct dmk_shape *shape, uint32_t kv_head_first,
                                            uint32_t n_local_heads)
{
    return (struct dmk_kv_layout){
        .n_full_layers = dmk_shape_n_full_layers(shape),
        .n_window_layers = dmk_shape_n_window_layers(shape),
        .n_kv_heads = shape->n_kv_heads,
        .kv_head_first = kv_head_first,
        .n_local_heads = n_local_heads,
        .page_bytes = 2 * DMK_PAGE_TOKENS * DMK_HEAD_DIM * sizeof(uint16_t),
    };
}

static struct dmk_kv_layout page_layout(const struct dmk_rank *rank)
{
    struct dmk_kv_layout layout = dmk_engine_page_layout(
        &rank->engine->shape, rank->shard.kv_head_first, rank->shard.n_kv_heads);
    layout.n_full_pages = rank->engine->conf.n_full_pages;
    layout.n_window_pages = rank->engine->conf.n_window_pages;
    return layout;
}

static int alloc_stage(struct dmk_rank *rank, struct dmk_error *reterr)
{
    const struct dmk_engine_conf *conf = &rank->engine->conf;
    struct dmk_kv_mem *stage = &rank->stage;
    if (!rank->backend->ops->async || conf->n_stage_full_pages == 0) {
        return 0;
    }
    stage->layout = rank->kv.layout;
    stage->layout.n_full_pages = conf->n_stage_full_pages;
    stage->layout.n_window_pages = conf->n_stage_window_pages;
    int status = dmk_engine_alloc_mem(rank, DMK_MEM_HOST, dmk_kv_full_bytes(&stage->layout),
                                      &stage->full, "the staging of full pages", reterr);
    if (status == 0) {
        status = dmk_engine_alloc_mem(rank, DMK_MEM_HOST, dmk_kv_window_bytes(&stage->layout),
                                      &stage->window, "the staging of window pages", reterr);
    }
    return status;
}

int dmk_engine_pages_alloc(struct dmk_rank *rank, struct dmk_error *reterr)
{
    struct dmk_kv_mem *kv = &rank->kv;
    kv->layout = page_layout(rank);
    int status = dmk_engine_alloc_mem(rank, DMK_MEM_DEVICE, dmk_kv_full_bytes(&kv->layout),
                                      &kv->full, "the full page pool", reterr);
    if (status == 0) {
        status = dmk_engine_alloc_mem(rank, DMK_MEM_DEVICE, dmk_kv_window_bytes(&kv->layout),
                                      &kv->window, "the window page pool", reterr);
    }
    return status == 0 ? alloc_stage(rank, reterr) : status;
}

/* What the engine holds of a rank's device, and how many ranks share that. */
struct share {
    struct dmk_backend_memory memory;
    uint64_t taken;
    uint32_t n_ranks;
};

static int find_share(const struct dmk_rank *rank, struct share *ret, struct dmk_error *reterr)
{
    const struct dmk_engine *engine = rank->engine;
    const bool async = rank->backend->ops->async;
    struct share s = {.taken = async ? DEVICE_EXTRA : dmk_weights_bytes(engine->weights)};
    struct dmk_backend_memory of_other;
    int status = rank->backend->ops->memory(rank->backend, &s.memory);
    for (uint32_t r = 0; r < engine->n_ranks && status == 0; r++) {
        struct dmk_backend *other = engine->ranks[r].backend;
        status = other->ops->memory(other, &of_other);
        if (status != 0 || of_other.device != s.memory.device) {
            continue;
        }
        s.n_ranks++;
        for (uint32_t i = 0; i < engine->n_allocs; i++) {
            const struct dmk_engine_alloc *a = &engine->allocs[i];
            const bool counts = a->backend == other && (a->mem == DMK_MEM_DEVICE || !async);
            s.taken += counts ? a->bytes : 0;
        }
    }
    if (status != 0) {
        return dmk_error_set(reterr, status, "the memory of rank %u can not be asked for",
                             rank->index);
    }
    *ret = s;
    return 0;
}

/* Rounded up to a tenth, so that it suffices. */
static double percent_of(uint64_t bytes, uint64_t total)
{
    const uint64_t tenths = (uint64_t)((double)bytes * 1000.0 / (double)total) + 1;
    return (double)tenths / 10.0;
}

/* The bytes that the share leaves for the pages of a rank. */
static int find_room(const struct dmk_rank *rank, uint64_t *ret_bytes, struct dmk_error *reterr)
{
    const struct dmk_engine_conf *conf = &rank->engine->conf;
    const struct dmk_kv_layout layout = page_layout(rank);
    struct share s = {0};
    int status = find_share(rank, &s, reterr);
    if (status != 0) {
        return status;
    }
    const uint64_t total = s.memory.total,
                   whole = (uint64_t)((double)total * conf->memory_percent / 100.0);
    const uint64_t least = s.taken + s.n_ranks * dmk_kv_least_bytes(&layout, conf->n_pool_seqs);
    if (least > total) {
        return dmk_error_set(
            reterr, -DMK_ENOMEM,
            "the model and the smallest pools for %u sequences take %.1f GiB but the memory of "
            "rank %u is %.1f GiB: use more ranks, fewer sequences or shorter steps",
            conf->n_pool_seqs, (double)least / GIB, rank->index, (double)total / GIB);
    }
    if (least > whole) {
        return dmk_error_set(
            reterr, -DMK_ENOMEM,
            "%.10g%% of the %.1f GiB of rank %u are %.1f GiB but the model and the smallest "
            "pools for %u sequences take %.1f GiB: give %.1f%% or more",
            conf->memory_percent, (double)total / GIB, rank->index, (double)whole / GIB,
            conf->n_pool_seqs, (double)least / GIB, percent_of(least, total));
    }
    const uint64_t room = whole - s.taken;
    const uint64_t extra =
        rank->backend->ops->async ? DEVICE_EXTRA / 2 : 0; /* the rest is in use */
    const uint64_t there = s.memory.free > extra ? s.memory.free - extra : 0;
    if (room > there) {
        return dmk_error_set(
            reterr, -DMK_ENOMEM,
            "%.10g%% of the %.1f GiB of rank %u leave %.1f GiB for pages but only %.1f GiB are "
            "free: other programs hold the rest; end them, or give %.1f%% or less",
            conf->memory_percent, (double)total / GIB, rank->index, (double)room / GIB,
            (double)there / GIB, percent_of(s.taken + there, total) - 0.2);
    }
    dmk_assert(s.n_ranks > 0); /* the rank itself */
    *ret_bytes = room / s.n_ranks;
    return 0;
}

int dmk_engine_pages_fill(struct dmk_engine *engine, struct dmk_error *reterr)
{
    struct dmk_kv_layout layout = page_layout(&engine->ranks[0]);
    uint64_t room = 0, least_room = UINT64_MAX;
    if (engine->conf.memory_percent <= 0) {
        return 0;
    }
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        int status = find_room(&engine->ranks[r], &room, reterr);
        if (status != 0) {
            return status;
        }
        least_room = room < least_room ? room : least_room;
    }
    /* All ranks have as many heads, and room for the least pools was seen. */
    int status = dmk_kv_fit(&layout, least_room, engine->conf.n_pool_seqs);
    dmk_assert(status == 0);
    engine->conf.n_full_pages = layout.n_full_pages;
    engine->conf.n_window_pages = layout.n_window_pages;
    for (uint32_t r = 0; r < engine->n_ranks && status == 0; r++) {
        status = dmk_engine_pages_alloc(&engine->ranks[r], reterr);
    }
    return status;
}
