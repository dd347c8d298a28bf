/* A CUDA device as the operations see it: the queue they run in and the memory that they may scribble on.
 *
 * The one header of this folder that plain C may include; everything else here is for .cu files.
 * common/backend/cuda.c opens the device and fills the struct; every launch is made by the thread that
 * drives the rank. */
#pragma once

#include <cuda_runtime_api.h>
#include "kernels/kernels.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define DMK_CUDA_WORKSPACE_BYTES ((size_t)512 << 20)
#define DMK_CUDA_COUNTERS        (1u << 20)

struct dmk_cuda_stream {
    struct dmk_stream base; /* first; n_threads 0, run NULL */
    cudaStream_t stream;
    int device;
    uint32_t n_sms;
    bool
        shared; /* other ranks run on the device: no kernel may wait for blocks that have not begun */
    bool joined; /* a wait for another stream was queued, and no kernel since */
    int error;   /* the first cudaError_t of a launch; sticky */
    /* Partial results inside one operation. The next operation of the stream may overwrite all of it, so
     * it is touched only after cudaGridDependencySynchronize and never carries anything over. */
    uint8_t *workspace; /* [DMK_CUDA_WORKSPACE_BYTES], device memory, 1 KiB aligned */
    /* Arrival counts inside one operation: all 0 between operations, whoever raises one puts it back. */
    uint32_t *counters; /* [DMK_CUDA_COUNTERS], device memory */
    /* cuTensorMapEncodeTiled, found through the runtime so that nothing links with libcuda. */
    void *encode_tiled;
};

/* The table of device operations. */
void dmk_kernels_cuda(struct dmk_kernels *ret_kernels);

/* Memory of `bytes` (a multiple of 16) becomes what dmk_fill says, on the device: random weights for benches
 * of full-size models that no disk holds. */
enum dmk_cuda_fill {
    DMK_CUDA_FILL_BF16,   /* bf16, close to normal, standard deviation `scale` */
    DMK_CUDA_FILL_CODES,  /* random bytes: MXFP4 codes */
    DMK_CUDA_FILL_SCALES, /* UE8M0 bytes around 2^-6 */
    DMK_CUDA_FILL_ONES,   /* bf16 1.0 */
    DMK_CUDA_FILL_E4M3,   /* random codes of +-1/8 to +-1.875 */
    DMK_CUDA_FILL_F32,    /* floats of `scale` */
};
void dmk_cuda_fill(struct dmk_cuda_stream *stream, void *dst, size_t bytes, enum dmk_cuda_fill kind,
                   float scale, uint64_t seed);

#if defined(__cplusplus)
}
#endif
