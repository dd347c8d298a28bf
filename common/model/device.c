/* Opening and closing an engine on devices: weights, the memory of steps, and the graphs; see device.h. */
#include "common/model/device.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"

static int new_event(struct dmk_rank *rank, struct dmk_event **ret, struct dmk_error *reterr)
{
    if (rank->backend->ops->event_new(rank->backend, ret) != 0) {
        *ret = NULL;
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the events of a step");
    }
    return 0;
}

static int open_events(struct dmk_engine *engine, struct dmk_error *reterr)
{
    struct dmk_device *dev = engine->device;
    int status = 0;
    for (size_t i = 0; i < sizeof(dev->layer_done) / sizeof(dev->layer_done[0]) && status == 0;
         i++) {
        status = new_event(&engine->ranks[0], &dev->layer_done[i], reterr);
    }
    for (uint32_t r = 0; r < engine->n_ranks && status == 0; r++) {
        status = new_event(&engine->ranks[r], &dev->ranks[r].here, reterr);
    }
    return status;
}

static int load_weights(struct dmk_engine *engine, struct dmk_error *reterr)
{
    struct dmk_device_load load = {0};
    int status = 0;
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        load.total += dmk_device_load_bytes(&engine->ranks[r]);
    }
    for (uint32_t r = 0; r < engine->n_ranks && status == 0; r++) {
        status = dmk_device_load(&engine->ranks[r], &load, reterr);
    }
    return status;
}

/* The memory of a rank's steps; that of results on the first of each group. */
static int open_rank(struct dmk_engine *engine, struct dmk_rank *rank, struct dmk_error *reterr)
{
    struct dmk_device_rank *dev = dmk_device_of(rank);
    const bool first = rank->index % engine->conf.layout.tp == 0;
    const size_t rows = engine->conf.prefill || !first ? 0 : engine->conf.max_logit_rows,
                 rope = (size_t)engine->n_positions * DMK_HEAD_DIM * sizeof(float);
    const struct {
        enum dmk_mem mem;
        size_t bytes;
        void *ret;
        const char *what;
    } parts[] = {
        {DMK_MEM_DEVICE, engine->plan_bytes, &dev->plan, "the step plan"},
        {DMK_MEM_DEVICE, rope, &dev->rope, "the rope table"},
        {DMK_MEM_DEVICE, engine->n_ranks * sizeof(*dev->heard), &dev->heard, "meetings"},
        {DMK_MEM_DEVICE, rows * engine->shape.vocab * sizeof(float), &dev->logits, "the logits"},
        {DMK_MEM_DEVICE, rows * sizeof(*dev->picked), &dev->picked, "picked tokens"},
        {DMK_MEM_HOST, rows * sizeof(*dev->picked), &dev->picked_host, "picked tokens"},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        int status = dmk_engine_alloc_mem(rank, parts[i].mem, parts[i].bytes, parts[i].ret,
                                          parts[i].what, reterr);
        if (status != 0) {
            return status;
        }
    }
    rank->backend->ops->copy(rank->backend, rank->stream, dev->rope, engine->rope, rope);
    int status = rank->backend->ops->sync(rank->backend, rank->stream);
    return status == 0
               ? 0
               : dmk_error_set(reterr, status, "the device of rank %u failed: %s", rank->index,
                               rank->backend->ops->describe(rank->backend, rank->stream));
}

int dmk_device_open(struct dmk_engine *engine, struct dmk_error *reterr)
{
    struct dmk_device *dev = calloc(1, sizeof(*dev));
    bool room = dev != NULL;
    engine->device = dev;
    for (uint32_t r = 0; r < engine->n_ranks && room; r++) {
        dev->ranks[r].layers = calloc(engine->shape.n_layers, sizeof(*dev->ranks[r].layers));
        room = dev->ranks[r].layers != NULL;
    }
    if (!room) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the engine");
    }
    int status = open_events(engine, reterr);
    if (status == 0) {
        status = load_weights(engine, reterr);
    }
    for (uint32_t r = 0; r < engine->n_ranks && status == 0; r++) {
        status = open_rank(engine, &engine->ranks[r], reterr);
    }
    if (status == 0) {
        status = dmk_engine_alloc_mem(&engine->ranks[0], DMK_MEM_HOST,
                                      engine->shape.vocab * sizeof(float), &dev->logits_host,
                                      "a row of logits", reterr);
    }
    if (status == 0) {
        status = dmk_engine_pages_fill(engine, reterr);
    }
    return status == 0 ? dmk_device_capture(engine, reterr) : status;
}

void dmk_device_close(struct dmk_engine *engine)
{
    struct dmk_device *dev = engine->device;
    if (!dev) {
        return;
    }
    struct dmk_backend *be = engine->ranks[0].backend;
    for (uint32_t i = 0; i < DMK_DEVICE_MAX_BUCKETS; i++) {
        if (dev->graphs[i]) {
            be->ops->graph_free(be, dev->graphs[i]);
        }
    }
    for (size_t i = 0; i < sizeof(dev->layer_done) / sizeof(dev->layer_done[0]); i++) {
        if (dev->layer_done[i]) {
            be->ops->event_free(be, dev->layer_done[i]);
        }
    }
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        if (dev->ranks[r].here) {
            be = engine->ranks[r].backend;
            be->ops->event_free(be, dev->ranks[r].here);
        }
        free(dev->ranks[r].layers);
    }
    free(dev);
    engine->device = NULL;
}
