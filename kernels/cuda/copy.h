/* Shared memory of sm_90 by 32-bit address, arrival barriers, and the copy engine: runs of bytes, boxes of a matrix.
 *
 * Thin and without state: a function is one instruction or one loop around it. A wait that never ends is a fault of
 * the caller; there is no time-out on the device. */
#pragma once

#include "kernels/cuda/cuda.h"

/* ---- shared memory ---- */

__device__ __forceinline__ uint4 dmk_lds128(uint32_t addr)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(addr)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 dmk_lds64(uint32_t addr)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t dmk_lds32(uint32_t addr)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
    return v;
}

__device__ __forceinline__ void dmk_sts128(uint32_t addr, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

/* ---- arrival barriers ---- */

__device__ __forceinline__ void dmk_mbar_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

/* After mbar_init and before the first use by the copy engine or another warp (a barrier follows). */
__device__ __forceinline__ void dmk_mbar_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void dmk_mbar_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void dmk_mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* One arrival for the whole warp, after what its lanes did before. */
__device__ __forceinline__ void dmk_mbar_arrive_warp(uint32_t bar)
{
    __syncwarp();
    asm volatile("{\n.reg .pred one;\n"
                 "elect.sync _|one, 0xffffffff;\n"
                 "@one mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(bar)
                 : "memory");
}

__device__ __forceinline__ void dmk_mbar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again%=;\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* The same by pointer. */
__device__ __forceinline__ void dmk_mbar_init(uint64_t *bar, uint32_t count)
{
    dmk_mbar_init(dmk_smem_u32(bar), count);
}

__device__ __forceinline__ void dmk_mbar_expect(uint64_t *bar, uint32_t bytes)
{
    dmk_mbar_expect(dmk_smem_u32(bar), bytes);
}

__device__ __forceinline__ void dmk_mbar_arrive(uint64_t *bar)
{
    dmk_mbar_arrive(dmk_smem_u32(bar));
}

__device__ __forceinline__ void dmk_mbar_wait(uint64_t *bar, uint32_t parity)
{
    dmk_mbar_wait(dmk_smem_u32(bar), parity);
}

/* ---- numbers ---- */

/* One of 4 bytes, global to shared, without waiting. */
__device__ __forceinline__ void dmk_copy_4(void *dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dmk_smem_u32(dst)), "l"(src)
                 : "memory");
}

/* Arrives once, as one of those that the barrier was made for, when this thread's copies so far have. */
__device__ __forceinline__ void dmk_copy_arrive(uint64_t *bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(dmk_smem_u32(bar))
                 : "memory");
}

/* ---- runs of bytes ---- */

/* Global to shared, completes `bytes` on the barrier. Addresses and size are multiples of 16. */
__device__ __forceinline__ void dmk_bulk_load(uint32_t dst, const void *src, uint32_t bytes,
                                              uint32_t bar, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void dmk_bulk_store(void *dst, uint32_t src, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(dst),
                 "r"(src), "r"(bytes)
                 : "memory");
}

/* The source of earlier bulk stores of this thread may be written again. */
__device__ __forceinline__ void dmk_bulk_store_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void dmk_bulk_store_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ uint64_t dmk_policy_evict_first()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t dmk_policy_evict_normal()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Ordinary stores to shared memory become visible to the tensor cores and the copy engine. */
__device__ __forceinline__ void dmk_fence_async_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- boxes of a matrix ---- */

__device__ __forceinline__ void dmk_tma_load_2d(void *dst, const CUtensorMap *map, uint64_t *bar,
                                                int32_t x, int32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(dmk_smem_u32(dst)),
                 "l"(map), "r"(dmk_smem_u32(bar)), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void dmk_tma_load_3d(void *dst, const CUtensorMap *map, uint64_t *bar,
                                                int32_t x, int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dmk_smem_u32(dst)),
                 "l"(map), "r"(dmk_smem_u32(bar)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void dmk_tma_load_4d(void *dst, const CUtensorMap *map, uint64_t *bar,
                                                int32_t x, int32_t y, int32_t z, int32_t w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dmk_smem_u32(dst)),
                 "l"(map), "r"(dmk_smem_u32(bar)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* A map of a row-major matrix [rows][cols] (row stride in elements of `bytes` bytes) in boxes of box_rows x 128 bytes,
 * 128-byte swizzle; outside reads as zero. Host code; false and s->error when it can not be. */
static inline bool dmk_tensor_map(struct dmk_cuda_stream *s, CUtensorMap *ret,
                                  CUtensorMapDataType type, uint32_t bytes, const void *base,
                                  uint64_t rows, uint64_t cols, uint64_t stride, uint32_t box_rows)
{
    typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                  const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                  const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    cuuint64_t dims[2] = {cols, rows}, strides[1] = {stride * bytes};
    cuuint32_t box[2] = {128 / bytes, box_rows}, steps[2] = {1, 1};
    CUresult r = ((encode_fn)s->encode_tiled)(
        ret, type, 2, const_cast<void *>(base), dims, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS && s->error == 0) {
        s->error = (int)cudaErrorInvalidValue;
    }
    return r == CUDA_SUCCESS;
}

static inline bool dmk_tensor_map_bf16(struct dmk_cuda_stream *s, CUtensorMap *ret,
                                       const void *base, uint64_t rows, uint64_t cols,
                                       uint64_t stride, uint32_t box_rows)
{
    return dmk_tensor_map(s, ret, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, rows, cols, stride,
                          box_rows);
}

static inline bool dmk_tensor_map_bytes(struct dmk_cuda_stream *s, CUtensorMap *ret,
                                        const void *base, uint64_t rows, uint64_t cols,
                                        uint64_t stride, uint32_t box_rows)
{
    return dmk_tensor_map(s, ret, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, base, rows, cols, stride,
                          box_rows);
}
