/* The host's kernels as operations that queue, fused entries included, for the device that is none. */
#pragma once

#include <stddef.h>
#include "kernels/kernels.h"

void fake_kernels(struct dmk_kernels *ret_kernels);

/* Of fake_device.c: fn runs later, with a copy of the arguments. */
void fake_device_queue(struct dmk_stream *stream, void (*fn)(const void *args), const void *args,
                       size_t bytes);
