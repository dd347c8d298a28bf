/* The decode role of a worker: router messages become calls of the core, its events messages; steps run on
 * the engine's thread. */
#pragma once

#include "common/worker/worker.h"
#include "decode/conf.h"

/* Runs until the worker's end; returns the exit status. source: NULL for the engine that the options name. */
int dmk_decode_serve(const struct dmk_decode_options *options, uint32_t local_prefill_below,
                     const struct dmk_engine_source *source);
