/* A role for tests of the shell: no model, no core. Each prompt token is answered by itself, one a step.
 * Counters are written on the worker's loop and read by the test. */
#pragma once

#include <semaphore.h>
#include <stdatomic.h>
#include "common/worker/worker.h"

struct test_role {
    /* Set before the start. */
    bool fail_open_engine, fail_step, bad_logits;
    bool never_idle;
    unsigned n_blocks;           /* listed */
    const char *prompt_numerics; /* NULL: as its numerics */
    /* The engine's thread waits for these when hold is set. */
    atomic_bool hold_open, hold_step;
    sem_t open_gate, step_gate;

    /* Every generate is answered with this failure; NULL: with its prompt. */
    _Atomic(const struct dmk_failed *) fail_with;

    atomic_int n_open, n_close, n_engine_closed, n_engine_steps, n_generate, n_cancel, n_gone,
        n_drain, n_poke, n_tick;
    atomic_int n_quiet, n_closed_word, n_peer_report;
    atomic_int lose_blocks; /* the next take of block events says that some were lost */
    atomic_int lose_others; /* so does the next take that brings some */
    atomic_int n_changes;   /* block changes to be told */

    struct dmk_engine_source source; /* its own engine */
    struct dmk_worker *worker;
    struct dmk_shape shape;
    /* The one request that runs. */
    bool busy, stepped;
    uint32_t router;
    struct dmk_request_id id;
    uint32_t ids[64], n_ids, at;
};

struct dmk_worker_role test_role_make(struct test_role *role);
