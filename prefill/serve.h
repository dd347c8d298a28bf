/* The prefill role of a worker: router messages become calls of the core, its events messages; steps run on
 * the engine's thread. */
#pragma once

#include "common/worker/worker.h"
#include "prefill/conf.h"

/* Runs until the worker's end; returns the exit status. source: NULL for the engine that the options name. */
int dmk_prefill_serve(const struct dmk_prefill_options *options,
                      const struct dmk_engine_source *source);
