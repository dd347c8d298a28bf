/* What a worker's core needs to know of an engine. The cores see this and not the engine itself, so that
 * tests and a simulator can put something smaller in its place. */
#pragma once

#include <string.h>
#include "common/base/hash.h"
#include "common/model/engine.h"
#include "common/xfer/xfer.h"

#define DMK_PORT_MAX_RANKS 8

/* Where an engine that picks tokens itself is asked for one. */
struct dmk_engine_pick {
    uint32_t row;        /* among the step's rows of logits */
    const uint32_t *ids; /* prompt and answer so far */
    uint32_t n_prompt, n_ids;
    bool may_end; /* an end id may be picked */
    /* NULL, or what may be picked: bit id % 64 of word id / 64. It goes before may_end. */
    const uint64_t *allowed;
};

struct dmk_engine_port {
    const struct dmk_shape *shape;
    struct dmk_layout layout; /* dp groups of tp ranks */
    const char *numerics;     /* of what it computes */
    /* Of the prompts that prefill workers compute for a decode worker. Where it is another id than numerics, this
     * engine computes no prompts whose pages are shared. Not NULL. */
    const char *prompt_numerics;
    struct dmk_id128 model_id;
    uint32_t n_ranks;
    const struct dmk_kv_mem *kv[DMK_PORT_MAX_RANKS];
    enum dmk_mem_kind mem_kind; /* of the pages */
    const struct dmk_kv_mem
        *stage[DMK_PORT_MAX_RANKS]; /* host memory for dmk_step.stage, or NULL */
    /* Where pages are a device's, else NULL: see dmk_engine_bind and dmk_engine_wait_devices. */
    void (*bind)(void *engine);
    int (*wait_devices)(void *engine);
    /* As dmk_engine_step; called by one thread at a time. */
    int (*step)(void *engine, const struct dmk_step *step);
    /* NULL: tokens are sampled from the logits of the step. Else the step writes no logits (they are NULL),
     * and this gives the token of one of its rows, on the same thread, before the next step. */
    uint32_t (*pick)(void *engine, const struct dmk_engine_pick *pick);
    bool samples; /* steps take dmk_step.picks */
    void *engine;
};

/* Whether prompts come as pages of another id than the engine's own. */
static inline bool dmk_engine_port_is_mixed(const struct dmk_engine_port *port)
{
    return strcmp(port->prompt_numerics, port->numerics) != 0;
}

/* Another engine than the one that the worker's options name. open runs on the engine's thread, and close
 * too, after a good open. */
struct dmk_engine_source {
    int (*open)(void *ud, struct dmk_engine_port *ret_port, struct dmk_error *reterr);
    void (*close)(void *ud);
    void *ud;
};

static inline int dmk_engine_port_step(void *engine, const struct dmk_step *step)
{
    return dmk_engine_step((struct dmk_engine *)engine, step);
}

static inline void dmk_engine_port_bind(void *engine)
{
    dmk_engine_bind((struct dmk_engine *)engine);
}

static inline int dmk_engine_port_wait_devices(void *engine)
{
    return dmk_engine_wait_devices((struct dmk_engine *)engine);
}

static inline struct dmk_engine_port dmk_engine_port_from(struct dmk_engine *engine,
                                                          struct dmk_layout layout)
{
    struct dmk_engine_port port = {
        .shape = dmk_engine_shape(engine),
        .layout = layout,
        .numerics = dmk_engine_numerics(engine),
        .prompt_numerics = dmk_engine_prompt_numerics(engine),
        .n_ranks = dmk_engine_n_ranks(engine),
        .step = dmk_engine_port_step,
        .samples = dmk_engine_samples(engine),
        .engine = engine,
    };

    if (dmk_engine_pages_on_device(engine)) {
        port.mem_kind = DMK_MEM_KIND_CUDA;
        port.bind = dmk_engine_port_bind;
        port.wait_devices = dmk_engine_port_wait_devices;
    }
    dmk_engine_model_id(engine, &port.model_id);
    for (uint32_t r = 0; r < port.n_ranks && r < DMK_PORT_MAX_RANKS; r++) {
        port.kv[r] = dmk_engine_kv(engine, r);
        port.stage[r] = dmk_engine_stage(engine, r);
    }
    return port;
}
