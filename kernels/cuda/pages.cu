/* Pages between a pool and one contiguous piece, in either direction.
 *
 * A block moves a page at a time, each thread four vectors of 16 bytes whose loads are all under way before the first
 * store: with the blocks that fit on an SM that is more than memory's latency needs. Pages are read and written once, so
 * neither direction keeps them in the first-level cache. */
#include "kernels/cuda/cuda.h"

#define THREADS 256
#define DEPTH   4 /* vectors of a thread under way; THREADS * DEPTH * 16 bytes are a page of bf16 keys and values */

static __device__ __forceinline__ uint4 load(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

template <bool GATHER> __global__ void __launch_bounds__(THREADS) page_move_kernel(struct dmk_page_move_args a)
{
    dmk_pdl_wait();
    const uint32_t n = a.n_arrays * a.n_ids, n_vectors = a.page_bytes / 16;
    const uint32_t piece_pages = a.piece_pages ? a.piece_pages : a.n_ids;
    for (uint32_t at = blockIdx.x; at < n; at += gridDim.x) {
        const uint32_t array = at / a.n_ids, i = at - array * a.n_ids;
        uint4 *paged = (uint4 *)(a.pool + ((size_t)array * a.n_pages + a.ids[i]) * a.page_bytes);
        uint4 *piece = (uint4 *)(a.piece + ((size_t)array * piece_pages + i) * a.page_bytes);
        const uint4 *from = GATHER ? paged : piece;
        uint4 *to = GATHER ? piece : paged;
        for (uint32_t v = threadIdx.x; v < n_vectors; v += THREADS * DEPTH) {
            uint4 held[DEPTH];
#pragma unroll
            for (uint32_t d = 0; d < DEPTH; d++) {
                if (v + d * THREADS < n_vectors) {
                    held[d] = load(from + v + d * THREADS);
                }
            }
#pragma unroll
            for (uint32_t d = 0; d < DEPTH; d++) {
                if (v + d * THREADS < n_vectors) {
                    __stcs(to + v + d * THREADS, held[d]);
                }
            }
        }
    }
}

static uint32_t n_blocks(const struct dmk_page_move_args *args, struct dmk_stream *stream)
{
    const uint64_t pages = (uint64_t)args->n_arrays * args->n_ids, most = (uint64_t)dmk_cuda_of(stream)->n_sms * 32;
    return (uint32_t)(pages < most ? pages : most);
}

void dmk_cuda_page_gather(const struct dmk_page_move_args *args, struct dmk_stream *stream)
{
    if (args->n_ids > 0 && args->n_arrays > 0) {
        dmk_cuda_launch(stream, page_move_kernel<true>, n_blocks(args, stream), THREADS, 0, *args);
    }
}

void dmk_cuda_page_scatter(const struct dmk_page_move_args *args, struct dmk_stream *stream)
{
    if (args->n_ids > 0 && args->n_arrays > 0) {
        dmk_cuda_launch(stream, page_move_kernel<false>, n_blocks(args, stream), THREADS, 0, *args);
    }
}
