/* Attention with sinks over paged keys and values: which kernel takes which sequence, and the maps of a call's
 * arrays for the copy engine.
 *
 * Sequences of several tokens come as tiles and go to attn_prefill.cu, those of one token to attn_decode.cu. Both
 * do the arithmetic of attn_math.cuh to the bit, so a token's result does not depend on which of them had it,
 * nor on chunks, splits or company. */
#include "kernels/cuda/attn.cuh"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* bf16 in rows of 64 elements, 128-byte swizzle. strides in elements, of dimensions 1 and up. */
static bool encode(struct dmk_cuda_stream *s, CUtensorMap *map, const void *base, uint32_t rank,
                   const uint64_t *dims, const uint64_t *strides, const uint32_t *box)
{
    cuuint64_t size[4], stride[3];
    cuuint32_t box_size[4], step[4];
    for (uint32_t i = 0; i < rank; i++) {
        size[i] = dims[i];
        box_size[i] = box[i];
        step[i] = 1;
        if (i > 0) {
            stride[i - 1] = strides[i - 1] * 2;
        }
    }
    CUresult r = ((encode_fn)s->encode_tiled)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void *>(base), size, stride,
        box_size, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS && s->error == 0) {
        s->error = (int)cudaErrorInvalidValue;
    }
    return r == CUDA_SUCCESS;
}

bool attn_make_maps(const struct dmk_attn_args *a, uint32_t q_tokens, uint32_t page_rows,
                    struct dmk_cuda_stream *stream, struct attn_maps *ret_maps)
{
    const uint64_t head = DMK_KERNEL_HEAD_DIM, group = a->group, n_kv = a->n_kv_heads,
                   rows = a->n_rows;
    const uint64_t q_stride = a->q_stride ? a->q_stride : n_kv * group * head;
    const uint64_t kv_stride = a->kv_stride ? a->kv_stride : n_kv * head;

    const uint64_t q_dims[] = {head, group, n_kv, rows},
                   q_strides[] = {head, group * head, q_stride};
    const uint32_t q_box[] = {DMK_KERNEL_HEAD_DIM, 8, 1, q_tokens};
    const uint64_t page_dims[] = {head, n_kv * a->n_pages * 128}, page_strides[] = {head};
    const uint32_t page_box[] = {DMK_KERNEL_HEAD_DIM, page_rows};
    const uint64_t kv_dims[] = {head, n_kv, rows}, kv_strides[] = {head, kv_stride};
    const uint32_t kv_box[] = {DMK_KERNEL_HEAD_DIM, 1, DMK_KERNEL_PAGE};
    if (!encode(stream, &ret_maps->q, a->q, 4, q_dims, q_strides, q_box) ||
        !encode(stream, &ret_maps->pages, a->pages, 2, page_dims, page_strides, page_box)) {
        return false;
    }
    if (!a->fresh) {
        ret_maps->k = ret_maps->v = ret_maps->pages; /* never read */
        return true;
    }
    return encode(stream, &ret_maps->k, a->k, 3, kv_dims, kv_strides, kv_box) &&
           encode(stream, &ret_maps->v, a->v, 3, kv_dims, kv_strides, kv_box);
}

void dmk_cuda_attn(const struct dmk_attn_args *args, struct dmk_stream *stream)
{
    struct dmk_cuda_stream *s = dmk_cuda_of(stream);
    if (args->group > 8 || args->page_bytes != ATTN_PAGE_BYTES) {
        s->error = s->error ? s->error : (int)cudaErrorInvalidValue;
        return;
    }
    if (args->n_tiles > 0) {
        attn_prefill_sm90(args, stream);
    }
    if (args->splits && args->n_seqs > 0) {
        attn_decode_sm90(args, stream);
    }
}
