/* Plain attention with sinks over paged keys and values, one query head at a time. */
#include "kernels/ref/ref.h"

#define D DMK_KERNEL_HEAD_DIM
#define B DMK_KERNEL_PAGE

/* Key (and, 64 rows further on in a page, value) of position j for one KV head. */
static void find_key(const struct dmk_attn_args *a, const struct dmk_attn_seq *seq,
                     uint32_t kv_head, uint32_t j, const uint16_t **ret_k, const uint16_t **ret_v)
{
    if (a->fresh && j >= seq->pos) {
        size_t at = ((size_t)(seq->row + j - seq->pos) * a->n_kv_heads + kv_head) * D;
        *ret_k = a->k + at;
        *ret_v = a->v + at;
        return;
    }
    uint32_t block = j / B;
    uint32_t page =
        a->window ? seq->ring[block % seq->n_ring] : a->page_ids[seq->first_page + block];
    const uint8_t *at = a->pages + ((size_t)kv_head * a->n_pages + page) * a->page_bytes;
    *ret_k = (const uint16_t *)(const void *)at + (j % B) * D;
    *ret_v = *ret_k + B * D;
}

static void attend(const struct dmk_attn_args *a, const struct dmk_attn_seq *seq, uint32_t token,
                   uint32_t kv_head, uint32_t g)
{
    size_t head = ((size_t)(seq->row + token) * a->n_kv_heads + kv_head) * a->group + g;
    const uint16_t *q = a->q + head * D;
    uint32_t p = seq->pos + token;
    uint32_t first = a->window && p + 1 > a->window ? p + 1 - a->window : 0;
    float m = dmk_bf16_to_f32(a->sinks[kv_head * a->group + g]), l = 1.0f, acc[D] = {0};

    for (uint32_t block = first / B; block <= p / B; block++) {
        uint32_t lo = block * B > first ? block * B : first;
        uint32_t hi = block * B + B < p + 1 ? block * B + B : p + 1;
        float s[B], lane[DMK_LANES] = {0}, max = m;
        const uint16_t *k, *v;
        for (uint32_t j = lo; j < hi; j++) {
            find_key(a, seq, kv_head, j, &k, &v);
            float dot = 0.0f;
            for (uint32_t d = 0; d < D; d++) {
                dot = fmaf(dmk_bf16_to_f32(q[d]), dmk_bf16_to_f32(k[d]), dot);
            }
            s[j % B] = dot * 0.125f;
            max = s[j % B] > max ? s[j % B] : max;
        }
        float c = dmk_expf(m - max);
        for (uint32_t d = 0; d < D; d++) {
            acc[d] *= c;
        }
        for (uint32_t j = lo; j < hi; j++) {
            float weight = dmk_expf(s[j % B] - max);
            lane[j % DMK_LANES] += weight;
            find_key(a, seq, kv_head, j, &k, &v);
            for (uint32_t d = 0; d < D; d++) {
                acc[d] = fmaf(weight, dmk_bf16_to_f32(v[d]), acc[d]);
            }
        }
        l = l * c + dmk_lanes_sum(lane);
        m = max;
    }
    for (uint32_t d = 0; d < D; d++) {
        a->out[head * D + d] = dmk_f32_to_bf16(acc[d] / l);
    }
}

void dmk_ref_attn(const struct dmk_attn_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t i = 0; i < a->n_seqs; i++) {
        for (uint32_t t = 0; t < a->seqs[i].n_tokens; t++) {
            for (uint32_t h = 0; h < a->n_kv_heads; h++) {
                for (uint32_t g = 0; g < a->group; g++) {
                    attend(a, &a->seqs[i], t, h, g);
                }
            }
        }
    }
}
