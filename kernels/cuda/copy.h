/* Arrival barriers and the copy engine of sm_90: boxes of a matrix on their way to shared memory. */
#pragma once

#include "kernels/cuda/cuda.h"

__device__ __forceinline__ void dmk_mbar_init(uint64_t *bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(dmk_smem_u32(bar)), "r"(count)
                 : "memory");
}

/* After mbar_init and before the first use by the copy engine or another warp (a barrier follows). */
__device__ __forceinline__ void dmk_mbar_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void dmk_mbar_expect(uint64_t *bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(dmk_smem_u32(bar)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void dmk_mbar_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(dmk_smem_u32(bar)) : "memory");
}

__device__ __forceinline__ void dmk_mbar_wait(uint64_t *bar, uint32_t phase)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(dmk_smem_u32(bar)),
                 "r"(phase)
                 : "memory");
}

__device__ __forceinline__ void dmk_tma_load_2d(void *dst, const CUtensorMap *map, uint64_t *bar,
                                                int32_t x, int32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(dmk_smem_u32(dst)),
                 "l"(map), "r"(dmk_smem_u32(bar)), "r"(x), "r"(y)
                 : "memory");
}

/* A map of a row-major matrix [rows][cols] of bf16 (row stride in elements) in boxes of box_rows x 64
 * columns, 128-byte swizzle; outside reads as zero. Host code; false and s->error when it can not be. */
static inline bool dmk_tensor_map_bf16(struct dmk_cuda_stream *s, CUtensorMap *ret,
                                       const void *base, uint64_t rows, uint64_t cols,
                                       uint64_t stride, uint32_t box_rows)
{
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                  const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                  const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    cuuint64_t dims[2] = {cols, rows}, strides[1] = {stride * 2};
    cuuint32_t box[2] = {64, box_rows}, steps[2] = {1, 1};
    CUresult r = ((encode_fn)s->encode_tiled)(
        ret, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(base), dims, strides, box,
        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS && s->error == 0) {
        s->error = (int)cudaErrorInvalidValue;
    }
    return r == CUDA_SUCCESS;
}
