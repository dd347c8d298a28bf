/* The host's kernels as operations that queue, fused entries included, for the device that is none. */
#pragma once

#include <stddef.h>
#include "kernels/kernels.h"

void fake_kernels(struct dmk_kernels *ret_kernels);

/* Of fake_device.c: fn runs later, with a copy of the arguments, and after ready (if there is one) has said yes: it is
 * asked when all before it in the stream has run, now and then. */
void fake_device_queue(struct dmk_stream *stream, bool (*ready)(const void *args),
                       void (*fn)(const void *args), const void *args, size_t bytes);
