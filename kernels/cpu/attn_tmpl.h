/* Attention: one item is a tile of tokens of one sequence, one KV head and up to eight of its query heads.
 *
 * Blocks of 64 keys are loaded once for the tile: keys turned to [dimension][key], so that the sum over
 * dimensions runs in order with a key in each lane, values as they are, with a dimension in each lane.
 * Whatever a lane computes for a key that its token does not see is thrown away, never multiplied by 0. */
#pragma once

#include "kernels/cpu/dot_tmpl.h"

#define D      DMK_KERNEL_HEAD_DIM
#define KEYS   DMK_KERNEL_PAGE
#define HEADS  8 /* query heads of an item */
#define GROUPV 4 /* vectors side by side for each head */

struct attn_scratch {
    _Alignas(64) float k[D][KEYS];
    _Alignas(64) float v[KEYS][D];
    _Alignas(64) float q[DMK_ATTN_TILE][HEADS][D];
    _Alignas(64) float acc[DMK_ATTN_TILE][HEADS][D];
    _Alignas(64) float p[HEADS][KEYS]; /* scores, then probabilities */
    _Alignas(64) float m[DMK_ATTN_TILE][HEADS];
    _Alignas(64) float l[DMK_ATTN_TILE][HEADS];
};

struct attn_task {
    const struct dmk_attn_args *a;
    uint32_t n_head_blocks; /* items of one (tile, KV head) */
};

INLINE void transpose8(__m256 r[8])
{
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/* Keys and values of positions [lo, hi) of one block; other columns of k become 0. */
static void load_block(const struct dmk_attn_args *a, const struct dmk_attn_seq *seq,
                       uint32_t kv_head, uint32_t lo, uint32_t hi, struct attn_scratch *s)
{
    static const uint16_t zeros[D];
    const uint16_t *key[KEYS];
    uint32_t block = lo / KEYS;
    const uint16_t *page = NULL;
    if (!a->fresh || lo < seq->pos) {
        uint32_t id =
            a->window ? seq->ring[block % seq->n_ring] : a->page_ids[seq->first_page + block];
        page = (const uint16_t *)(const void *)(a->pages + ((size_t)kv_head * a->n_pages + id) *
                                                               a->page_bytes);
    }
    for (uint32_t i = 0; i < KEYS; i++) {
        uint32_t j = block * KEYS + i;
        const uint16_t *value = zeros;
        key[i] = zeros;
        if (j < lo || j >= hi) {
            continue;
        }
        if (a->fresh && j >= seq->pos) {
            size_t at = ((size_t)(seq->row + j - seq->pos) * a->n_kv_heads + kv_head) * D;
            key[i] = a->k + at;
            value = a->v + at;
        } else {
            key[i] = page + i * D;
            value = page + KEYS * D + i * D;
        }
        for (uint32_t d = 0; d < D; d += VL) {
            vf_store(&s->v[i][d], vf_bf16(value + d));
        }
    }
    for (uint32_t i = 0; i < KEYS; i += 8) {
        for (uint32_t d = 0; d < D; d += 8) {
            __m256 r[8];
            for (uint32_t n = 0; n < 8; n++) {
                __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(key[i + n] + d));
                r[n] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
            }
            transpose8(r);
            for (uint32_t n = 0; n < 8; n++) {
                _mm256_store_ps(&s->k[d + n][i], r[n]);
            }
        }
    }
}

/* p[h][j] = sum over d of q[h][d] * k[d][j], for n_heads heads and GROUPV vectors of keys from `first`. */
INLINE void score_heads(struct attn_scratch *s, const float (*q)[D], uint32_t h0,
                        const uint32_t n_heads, uint32_t first)
{
    vf acc[HEADS_R][GROUPV];
#pragma GCC unroll 8
    for (uint32_t h = 0; h < n_heads; h++) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < GROUPV; i++) {
            acc[h][i] = vf_zero();
        }
    }
    for (uint32_t d = 0; d < D; d++) {
        vf k[GROUPV];
#pragma GCC unroll 8
        for (uint32_t i = 0; i < GROUPV; i++) {
            k[i] = vf_load(&s->k[d][first + i * VL]);
        }
#pragma GCC unroll 8
        for (uint32_t h = 0; h < n_heads; h++) {
            vf qd = vf_set1(q[h0 + h][d]);
#pragma GCC unroll 8
            for (uint32_t i = 0; i < GROUPV; i++) {
                acc[h][i] = vf_fma(qd, k[i], acc[h][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t h = 0; h < n_heads; h++) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < GROUPV; i++) {
            vf_store(&s->p[h0 + h][first + i * VL], acc[h][i]);
        }
    }
}

/* acc[h][d] += p[h][j] * v[j][d] for keys [lo, hi), GROUPV vectors of dimensions from `first`. */
INLINE void add_values(struct attn_scratch *s, float (*acc)[D], uint32_t h0, const uint32_t n_heads,
                       uint32_t first, uint32_t lo, uint32_t hi)
{
    vf sum[HEADS_R][GROUPV];
#pragma GCC unroll 8
    for (uint32_t h = 0; h < n_heads; h++) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < GROUPV; i++) {
            sum[h][i] = vf_load(&acc[h0 + h][first + i * VL]);
        }
    }
    for (uint32_t j = lo; j < hi; j++) {
        vf v[GROUPV];
#pragma GCC unroll 8
        for (uint32_t i = 0; i < GROUPV; i++) {
            v[i] = vf_load(&s->v[j][first + i * VL]);
        }
#pragma GCC unroll 8
        for (uint32_t h = 0; h < n_heads; h++) {
            vf weight = vf_set1(s->p[h0 + h][j]);
#pragma GCC unroll 8
            for (uint32_t i = 0; i < GROUPV; i++) {
                sum[h][i] = vf_fma(weight, v[i], sum[h][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t h = 0; h < n_heads; h++) {
#pragma GCC unroll 8
        for (uint32_t i = 0; i < GROUPV; i++) {
            vf_store(&acc[h0 + h][first + i * VL], sum[h][i]);
        }
    }
}

/* Scores of one head become probabilities against the new maximum; returns what the old sums are worth. */
static float soften(float p[KEYS], uint32_t lo, uint32_t hi, float *m, float *l)
{
    float lanes[DMK_LANES], max = *m;
    for (uint32_t j = 0; j < KEYS; j += VL) {
        vf_store(p + j, vf_mul(vf_load(p + j), vf_set1(0.125f)));
    }
    for (uint32_t j = 0; j < lo; j++) {
        p[j] = -INFINITY;
    }
    for (uint32_t j = hi; j < KEYS; j++) {
        p[j] = -INFINITY;
    }
    vf best = vf_load(p);
    for (uint32_t j = VL; j < KEYS; j += VL) {
        best = vf_max(best, vf_load(p + j));
    }
    vf_store(lanes, best);
    for (uint32_t i = 0; i < VL; i++) {
        max = lanes[i] > max ? lanes[i] : max;
    }
    for (uint32_t j = 0; j < KEYS; j += VL) {
        vf_store(p + j, vf_exp(vf_sub(vf_load(p + j), vf_set1(max))));
    }
    for (uint32_t i = 0; i < DMK_LANES; i++) {
        lanes[i] = p[i] + p[i + 16] + p[i + 32] + p[i + 48];
    }
    float c = dmk_expf(*m - max);
    *l = *l * c + dmk_lanes_sum(lanes);
    *m = max;
    return c;
}

/* One token and one loaded block. */
static void attend_block(struct attn_scratch *s, uint32_t token, uint32_t n_heads, uint32_t lo,
                         uint32_t hi)
{
    const uint32_t step = GROUPV * VL;
    for (uint32_t first = 0; first < KEYS; first += step) {
        uint32_t h = 0;
        for (; h + HEADS_R <= n_heads; h += HEADS_R) {
            score_heads(s, s->q[token], h, HEADS_R, first);
        }
        for (; h < n_heads; h++) {
            score_heads(s, s->q[token], h, 1, first);
        }
    }
    for (uint32_t h = 0; h < n_heads; h++) {
        float c = soften(s->p[h], lo, hi, &s->m[token][h], &s->l[token][h]);
        for (uint32_t d = 0; d < D; d++) {
            s->acc[token][h][d] *= c;
        }
    }
    for (uint32_t first = 0; first < D; first += step) {
        uint32_t h = 0;
        for (; h + HEADS_R <= n_heads; h += HEADS_R) {
            add_values(s, s->acc[token], h, HEADS_R, first, lo, hi);
        }
        for (; h < n_heads; h++) {
            add_values(s, s->acc[token], h, 1, first, lo, hi);
        }
    }
}

static uint32_t first_visible(const struct dmk_attn_args *a, uint32_t p)
{
    return a->window && p + 1 > a->window ? p + 1 - a->window : 0;
}

static void attn_item(const void *args, uint32_t item, void *scratch)
{
    const struct attn_task *task = args;
    const struct dmk_attn_args *a = task->a;
    struct attn_scratch *s = scratch;
    uint32_t g0 = item % task->n_head_blocks * HEADS;
    uint32_t n_heads = a->group - g0 < HEADS ? a->group - g0 : HEADS;
    item /= task->n_head_blocks;
    uint32_t kv_head = item % a->n_kv_heads;
    /* The last tile first: it is the longest of a prompt. */
    const struct dmk_attn_tile *tile = &a->tiles[a->n_tiles - 1 - item / a->n_kv_heads];
    const struct dmk_attn_seq *seq = &a->seqs[tile->seq];
    uint32_t p0 = seq->pos + tile->first, p1 = p0 + tile->n_tokens; /* positions of the tile */
    size_t head0 = (size_t)kv_head * a->group + g0, n_q = (size_t)a->n_kv_heads * a->group;

    for (uint32_t t = 0; t < tile->n_tokens; t++) {
        const uint16_t *q = a->q + ((seq->row + tile->first + t) * n_q + head0) * D;
        for (uint32_t h = 0; h < n_heads; h++) {
            s->m[t][h] = dmk_bf16_to_f32(a->sinks[head0 + h]);
            s->l[t][h] = 1.0f;
            for (uint32_t d = 0; d < D; d += VL) {
                vf_store(&s->q[t][h][d], vf_bf16(q + h * D + d));
                vf_store(&s->acc[t][h][d], vf_zero());
            }
        }
    }
    for (uint32_t block = first_visible(a, p0) / KEYS; block <= (p1 - 1) / KEYS; block++) {
        uint32_t base = block * KEYS, tile_lo = first_visible(a, p0);
        load_block(a, seq, kv_head, base > tile_lo ? base : tile_lo,
                   base + KEYS < p1 ? base + KEYS : p1, s);
        for (uint32_t t = 0; t < tile->n_tokens; t++) {
            uint32_t p = p0 + t, lo = first_visible(a, p), hi = p + 1;
            lo = lo > base ? lo - base : 0;
            hi = hi > base ? hi - base : 0;
            hi = hi < KEYS ? hi : KEYS;
            if (lo < hi) {
                attend_block(s, t, n_heads, lo, hi);
            }
        }
    }
    for (uint32_t t = 0; t < tile->n_tokens; t++) {
        uint16_t *out = a->out + ((seq->row + tile->first + t) * n_q + head0) * D;
        for (uint32_t h = 0; h < n_heads; h++) {
            float l = s->l[t][h];
            for (uint32_t d = 0; d < D; d++) {
                out[h * D + d] = dmk_f32_to_bf16(s->acc[t][h][d] / l);
            }
        }
    }
}

static void run_attn(const struct dmk_attn_args *a, struct dmk_stream *stream)
{
    struct attn_task task = {a, (a->group + HEADS - 1) / HEADS};
    stream->run(stream, attn_item, &task, a->n_tiles * a->n_kv_heads * task.n_head_blocks);
}
