/* A model made in memory, for tests of the engine: seeded weights, no files. */
#pragma once

#include "common/model/weights.h"

/* Two layers or more, head size 64, narrow: a step takes milliseconds with the plain kernels. */
struct dmk_shape small_shape(uint32_t n_layers);

struct dmk_weights *memory_weights(const struct dmk_shape *shape, enum dmk_expert_format format,
                                   uint64_t seed);
void memory_weights_free(struct dmk_weights *weights);
