/* Random weights made on the device; the same bytes for the same seed. */
#include "kernels/cuda/cuda.h"

__device__ __forceinline__ uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* The sum of four even numbers out of 16 bits each: a bell of standard deviation 1. */
__device__ __forceinline__ float bell(uint64_t r)
{
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        sum += (float)((r >> (16 * i)) & 0xffff) * (1.0f / 32768.0f) - 1.0f;
    }
    return sum * 0.8660254f;
}

__global__ void fill_kernel(uint4 *dst, size_t n, enum dmk_cuda_fill kind, float scale, uint64_t seed)
{
    dmk_pdl_wait();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t word[4];
        for (int w = 0; w < 4; w++) {
            const uint64_t r = mix(mix(seed ^ (i * 4 + w)) ^ seed);
            switch (kind) {
            case DMK_CUDA_FILL_BF16:
                word[w] = dmk_pack_bf16(bell(r) * scale, bell(mix(r)) * scale);
                break;
            case DMK_CUDA_FILL_CODES:
                word[w] = (uint32_t)r;
                break;
            case DMK_CUDA_FILL_SCALES:
                word[w] = 0x78787878u + ((uint32_t)r & 0x03030303u);
                break;
            case DMK_CUDA_FILL_ONES:
                word[w] = 0x3f803f80u;
                break;
            case DMK_CUDA_FILL_E4M3:
                word[w] = ((uint32_t)r & 0x9f9f9f9fu) | 0x20202020u;
                break;
            case DMK_CUDA_FILL_F32:
                word[w] = __float_as_uint(scale);
                break;
            }
        }
        dst[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

extern "C" void dmk_cuda_fill(struct dmk_cuda_stream *stream, void *dst, size_t bytes, enum dmk_cuda_fill kind,
                              float scale, uint64_t seed)
{
    if (bytes >= 16) {
        dmk_cuda_launch(&stream->base, fill_kernel, stream->n_sms * 8, 256, 0, (uint4 *)dst, bytes / 16, kind,
                        scale, seed);
    }
}
