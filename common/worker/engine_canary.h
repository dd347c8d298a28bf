/* A short run of an engine before the worker says that it is ready: a prompt, and for decode workers a token.
 *
 * Owner: the engine's thread, after a good open and before any page is given out: it writes to the first
 * pages of the pools. */
#pragma once

#include "common/worker/engine_port.h"

/* max_step_tokens as the engine was opened with. A failed step, and logits that are not finite, are errors. */
int dmk_engine_canary(const struct dmk_engine_port *port, bool decode, uint32_t max_step_tokens,
                      struct dmk_error *reterr);
