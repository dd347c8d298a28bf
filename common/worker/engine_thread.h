/* The thread that the engine lives on: it opens it, runs its steps, closes it; one job at a time. */
#pragma once

#include "common/loop/loop.h"

struct dmk_engine_thread;

struct dmk_engine_thread *dmk_engine_thread_new(struct dmk_loop *loop);
/* No job may run. */
void dmk_engine_thread_free(struct dmk_engine_thread **thread);

/* Loop only: runs run there, then done on the loop. No job may run (asserted). */
void dmk_engine_thread_run(struct dmk_engine_thread *thread, dmk_loop_fn run, dmk_loop_fn done,
                           void *ud);
/* From the call of run until just before done. */
bool dmk_engine_thread_busy(const struct dmk_engine_thread *thread);
/* How long the job that runs has taken; 0 when none does. */
uint64_t dmk_engine_thread_age_ns(const struct dmk_engine_thread *thread);
