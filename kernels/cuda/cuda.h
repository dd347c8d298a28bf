/* What all device operations share: launching, bf16, loads, reductions, tensor maps.
 *
 * For .cu files. Conventions of this folder:
 *  - Pointers are 16-byte aligned and row strides are multiples of 8 elements, unless an operation says less.
 *  - Every kernel begins with dmk_pdl_wait() before it reads or writes any global memory but weights, and may
 *    call dmk_pdl_next() once its work no longer needs the whole device. Every launch goes through
 *    dmk_cuda_launch, so a kernel's prologue overlaps the tail of the one before; the first behind a wait for another
 *    stream (rows.cu) has no such start.
 *  - A result depends on its own row only: grids may grow with the batch, the order of a sum may not.
 *  - No launch function waits, allocates or reads device memory: all can be captured in a graph. */
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include "kernels/cuda/stream.h"

static inline struct dmk_cuda_stream *dmk_cuda_of(struct dmk_stream *stream)
{
    return (struct dmk_cuda_stream *)stream;
}

/* Launches with programmatic dependent launch, in clusters of blocks. smem is dynamic shared memory; more than
 * 48 KiB is allowed. */
template <typename... P, typename... A>
static inline void dmk_cuda_launch_cluster(struct dmk_stream *stream, void (*kernel)(P...),
                                           dim3 grid, dim3 block, size_t smem, dim3 cluster,
                                           A... args)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    cudaError_t err = cudaSuccess;
    if (smem > 48 * 1024) {
        err = cudaFuncSetAttribute((const void *)kernel,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    }
    cudaLaunchAttribute attrs[2] = {};
    unsigned n_attrs = 0;
    /* Behind a wait for other streams, what must have finished is more than the kernel before. */
    if (!s->joined) {
        attrs[n_attrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attrs[n_attrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    s->joined = false;
    if (cluster.x * cluster.y * cluster.z > 1) {
        attrs[n_attrs].id = cudaLaunchAttributeClusterDimension;
        attrs[n_attrs].val.clusterDim.x = cluster.x;
        attrs[n_attrs].val.clusterDim.y = cluster.y;
        attrs[n_attrs++].val.clusterDim.z = cluster.z;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem;
    config.stream = s->stream;
    config.attrs = attrs;
    config.numAttrs = n_attrs;
    if (err == cudaSuccess) {
        err = cudaLaunchKernelEx(&config, kernel, (P)args...);
    }
    if (err != cudaSuccess && s->error == 0) {
        s->error = (int)err;
    }
}

/* The same without clusters. */
template <typename... P, typename... A>
static inline void dmk_cuda_launch(struct dmk_stream *stream, void (*kernel)(P...), dim3 grid,
                                   dim3 block, size_t smem, A... args)
{
    dmk_cuda_launch_cluster(stream, kernel, grid, block, smem, dim3(1, 1, 1), args...);
}

/* Waits until the kernels before this one have finished and their memory is visible. */
__device__ __forceinline__ void dmk_pdl_wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* The next kernel may begin its prologue. */
__device__ __forceinline__ void dmk_pdl_next()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

static inline uint32_t dmk_ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* ---- numbers ---- */

__device__ __forceinline__ float dmk_lo(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float dmk_hi(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ float dmk_bf16_f32(uint16_t x)
{
    return __uint_as_float((uint32_t)x << 16);
}

/* To nearest even; NaN stays NaN. */
__device__ __forceinline__ uint16_t dmk_f32_bf16(float x)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

/* Two at once: lo in the low half. */
__device__ __forceinline__ uint32_t dmk_pack_bf16(float lo, float hi)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&pair);
}

__device__ __forceinline__ float dmk_round_bf16(float x)
{
    return __bfloat162float(__float2bfloat16_rn(x));
}

/* dmk_expf of kernels/numeric.h, to the bit. */
__device__ __forceinline__ float dmk_cuda_expf(float x)
{
    float y = fminf(fmaxf(x, -87.3f), 89.0f);
    float t = fmaf(y, 0x1.715476p+0f, 0x1.8p23f);
    int32_t n = __float_as_int(t) - 0x4b400000;
    float nf = t - 0x1.8p23f;
    float r = fmaf(nf, 0x1.bd0106p-13f, fmaf(nf, -0x1.63p-1f, y));
    float p = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, __fmul_rn(r, r), r) + 1.0f;
    int32_t half = n >> 1;
    float s0 = __int_as_float((half + 127) << 23), s1 = __int_as_float((n - half + 127) << 23);
    return x != x ? x : x < -87.3f ? 0.0f : p * s0 * s1;
}

/* ---- memory ---- */

__device__ __forceinline__ uint32_t dmk_smem_u32(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void dmk_ldmatrix_x4(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
}

__device__ __forceinline__ void dmk_ldmatrix_x4(uint32_t (&r)[4], const void *p)
{
    dmk_ldmatrix_x4(r, dmk_smem_u32(p));
}

/* d[16][8] += a[16][16] * b[16][8], bf16 in, fp32 out. Lane 4g + t holds a at rows g, g + 8 and columns
 * 2t, 2t + 1, 2t + 8, 2t + 9; b at column g and those rows; d at rows g, g + 8 and columns 2t, 2t + 1. */
__device__ __forceinline__ void dmk_mma_bf16(float *d, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- sums ---- */

__device__ __forceinline__ float dmk_warp_sum(float x)
{
    for (int i = 16; i > 0; i >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, i);
    }
    return x;
}

/* Sum over the block, the same in all threads; warp sums are added in the order of warps. Two barriers. */
template <int THREADS> __device__ __forceinline__ float dmk_block_sum(float x)
{
    __shared__ float part[THREADS / 32];
    x = dmk_warp_sum(x);
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) {
        sum += part[i];
    }
    __syncthreads();
    return sum;
}

/* ---- the operations, one file a family ---- */

void dmk_cuda_embed(const struct dmk_embed_args *args, struct dmk_stream *stream);
void dmk_cuda_rmsnorm(const struct dmk_rmsnorm_args *args, struct dmk_stream *stream);
void dmk_cuda_residual(const struct dmk_residual_args *args, struct dmk_stream *stream);
void dmk_cuda_add_norm(const struct dmk_add_norm_args *args, struct dmk_stream *stream);
void dmk_cuda_gather(const struct dmk_gather_args *args, struct dmk_stream *stream);
void dmk_cuda_rope(const struct dmk_rope_args *args, struct dmk_stream *stream);
void dmk_cuda_rope_write(const struct dmk_rope_write_args *args, struct dmk_stream *stream);
void dmk_cuda_kv_write(const struct dmk_kv_write_args *args, struct dmk_stream *stream);
void dmk_cuda_page_copy(const struct dmk_page_copy_args *args, struct dmk_stream *stream);
void dmk_cuda_page_gather(const struct dmk_page_move_args *args, struct dmk_stream *stream);
void dmk_cuda_page_scatter(const struct dmk_page_move_args *args, struct dmk_stream *stream);
void dmk_cuda_linear(const struct dmk_linear_args *args, struct dmk_stream *stream);
/* Its way for many rows. How k is cut, in steps of 64: n pieces (the last may have fewer), or slices of a tree. */
struct dmk_cuda_pieces {
    uint32_t n, steps;
    bool tree;
};
void dmk_cuda_linear_many(const struct dmk_linear_args *args, struct dmk_cuda_pieces pieces,
                          struct dmk_stream *stream);
/* The same in FP8; the way for many rows wants x as codes and scales already. */
void dmk_cuda_linear_fp8(const struct dmk_linear_fp8_args *args, struct dmk_stream *stream);
void dmk_cuda_linear_fp8_many(const struct dmk_linear_fp8_args *args, struct dmk_cuda_pieces pieces,
                              struct dmk_stream *stream);
void dmk_cuda_attn(const struct dmk_attn_args *args, struct dmk_stream *stream);
void dmk_cuda_topk(const struct dmk_topk_args *args, struct dmk_stream *stream);
void dmk_cuda_moe_group(const struct dmk_moe_group_args *args, struct dmk_stream *stream);
void dmk_cuda_route(const struct dmk_route_args *args, struct dmk_stream *stream);
void dmk_cuda_moe_combine(const struct dmk_moe_combine_args *args, struct dmk_stream *stream);
void dmk_cuda_combine_norm(const struct dmk_combine_norm_args *args, struct dmk_stream *stream);
void dmk_cuda_sample(const struct dmk_sample_args *args, struct dmk_stream *stream);

/* The experts: packed weights go to the kernels of moe.h, others to the plain products. */
void dmk_cuda_moe_gate_up(const struct dmk_moe_gate_up_args *args, struct dmk_stream *stream);
void dmk_cuda_moe_down(const struct dmk_moe_down_args *args, struct dmk_stream *stream);
void dmk_cuda_moe_experts(const struct dmk_moe_experts_args *args, struct dmk_stream *stream);
struct dmk_moe_packed dmk_cuda_moe_packed(const struct dmk_expert_weights *w, uint32_t n_experts,
                                          bool gate_up);
void dmk_cuda_moe_pack(const struct dmk_moe_pack_args *args, struct dmk_stream *stream);

/* The plain expert products: right for every size, fast for none. */
void dmk_cuda_moe_gate_up_plain(const struct dmk_moe_gate_up_args *args, struct dmk_stream *stream);
void dmk_cuda_moe_down_plain(const struct dmk_moe_down_args *args, struct dmk_stream *stream);
