/* Attention: window edges, rings, fresh keys, page orders, groups of any size, unused memory full of NaN. */
#include <stdio.h>
#include <string.h>
#include "tests/check/check.h"

#define PAGE_BYTES 16384
#define MAX_SEQS   4

struct seq_case {
    uint32_t pos, n_tokens;
};

struct attn_case {
    struct seq_case seqs[MAX_SEQS];
    uint32_t n_seqs, n_kv_heads, group;
    bool window;
};

/* Writes one key and value where attention will look for it; everything else stays NaN. */
static void put_row(struct check *c, uint8_t *page, uint32_t slot)
{
    for (uint32_t part = 0; part < 2; part++) {
        uint16_t *row = (uint16_t *)(void *)(page + part * PAGE_BYTES / 2) + slot * 64;
        c->stream_id++;
        for (uint32_t d = 0; d < 64; d++) {
            uint32_t r = check_u32(c, 1u << 16);
            row[d] = (uint16_t)((r & 0x807f) | (0x3e00 + (r & 0x0180))); /* 1/8 .. 2, both signs */
        }
    }
}

/* Fills args (all but out) for a case. */
static void make_args(struct check *c, const struct attn_case *s, struct dmk_attn_args *a)
{
    const uint32_t n_pages = 400;
    struct dmk_attn_seq *seqs = check_buf(c, s->n_seqs * sizeof(*seqs));
    uint32_t *page_ids = check_buf(c, n_pages * sizeof(*page_ids));
    uint8_t *pages = check_buf(c, (size_t)s->n_kv_heads * n_pages * PAGE_BYTES);
    uint32_t n_rows = 0, n_ids = 0, n_tiles = 0, taken = check_u32(c, 7);
    memset(seqs, 0, s->n_seqs * sizeof(*seqs));
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        const struct seq_case *q = &s->seqs[i];
        uint32_t blocks = (q->pos + q->n_tokens + 63) / 64;
        seqs[i] = (struct dmk_attn_seq){.row = n_rows,
                                        .n_tokens = q->n_tokens,
                                        .pos = q->pos,
                                        .first_page = n_ids,
                                        .n_ring = 3 + i % 2};
        for (uint32_t r = 0; r < 4; r++) {
            seqs[i].ring[r] = n_pages - 1 - taken - r * 2;
        }
        for (uint32_t b = 0; b < blocks; b++) {
            page_ids[n_ids++] = taken + blocks - 1 - b;
        }
        for (uint32_t h = 0; h < s->n_kv_heads; h++) {
            uint32_t first = s->window ? (q->pos > 127 ? q->pos - 127 : 0) : 0;
            uint32_t end = s->window ? q->pos : q->pos + q->n_tokens;
            for (uint32_t j = first; j < end; j++) {
                uint32_t page = s->window ? seqs[i].ring[j / 64 % seqs[i].n_ring]
                                          : page_ids[seqs[i].first_page + j / 64];
                put_row(c, pages + ((size_t)h * n_pages + page) * PAGE_BYTES, j % 64);
            }
        }
        taken += blocks + 8;
        n_rows += q->n_tokens;
        n_tiles += (q->n_tokens + DMK_ATTN_TILE - 1) / DMK_ATTN_TILE;
    }
    struct dmk_attn_tile *tiles = check_buf(c, n_tiles * sizeof(*tiles));
    uint32_t at = 0;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        for (uint32_t first = 0; first < s->seqs[i].n_tokens; first += DMK_ATTN_TILE) {
            uint32_t left = s->seqs[i].n_tokens - first;
            tiles[at++] =
                (struct dmk_attn_tile){i, first, left < DMK_ATTN_TILE ? left : DMK_ATTN_TILE};
        }
    }
    *a = (struct dmk_attn_args){
        .q = check_bf16(c, (size_t)n_rows * s->n_kv_heads * s->group * 64, 3.0f),
        .k = s->window ? check_bf16(c, (size_t)n_rows * s->n_kv_heads * 64, 2.0f) : NULL,
        .v = s->window ? check_bf16(c, (size_t)n_rows * s->n_kv_heads * 64, 2.0f) : NULL,
        .pages = pages,
        .page_ids = page_ids,
        .seqs = seqs,
        .tiles = tiles,
        .sinks = check_bf16(c, (size_t)s->n_kv_heads * s->group, 4.0f),
        .n_seqs = s->n_seqs,
        .n_tiles = n_tiles,
        .n_kv_heads = s->n_kv_heads,
        .group = s->group,
        .n_pages = n_pages,
        .page_bytes = PAGE_BYTES,
        .window = s->window ? 128 : 0,
        .fresh = s->window,
    };
}

static size_t out_bytes(const struct attn_case *s)
{
    size_t n_rows = 0;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        n_rows += s->seqs[i].n_tokens;
    }
    return n_rows * s->n_kv_heads * s->group * 64 * 2;
}

static void check_case(struct check *c, const struct attn_case *s)
{
    char what[96];
    struct dmk_attn_args a, b;
    size_t bytes = out_bytes(s);
    make_args(c, s, &a);
    b = a;
    a.out = check_buf(c, bytes);
    b.out = check_buf(c, bytes);
    snprintf(what, sizeof(what), "%u seqs, pos %u + %u, %u kv heads of %u, window %d", s->n_seqs,
             s->seqs[0].pos, s->seqs[0].n_tokens, s->n_kv_heads, s->group, s->window);
    c->ref.attn(&a, c->stream);
    c->fast.attn(&b, c->stream);
    check_equal(c, a.out, b.out, bytes, 2, what);
    for (size_t i = 0; i < bytes / 2; i++) {
        if ((a.out[i] & 0x7f80) == 0x7f80) {
            uint16_t none = 0;
            check_equal(c, &none, &a.out[i], 2, 2, "the plain output is not finite");
            break;
        }
    }
    check_end(c, what);
}

struct bench {
    struct check *c;
    struct dmk_attn_args args;
};

static void run_bench(void *ud)
{
    struct bench *b = ud;
    b->c->fast.attn(&b->args, b->c->stream);
}

static void bench_case(struct check *c, const char *what, const struct attn_case *s, double keys)
{
    struct bench b = {.c = c};
    make_args(c, s, &b.args);
    b.args.out = check_buf(c, out_bytes(s));
    double flops = 4.0 * 64 * s->n_kv_heads * s->group * keys;
    check_bench(c, what, run_bench, &b, s->n_kv_heads * 256.0 * keys, flops);
    check_end(c, what);
}

void check_attn(struct check *c)
{
    if (c->bench) {
        bench_case(c, "attn decode, 4096 keys", &(struct attn_case){{{4095, 1}}, 1, 8, 8, false},
                   4096);
        bench_case(c, "attn prefill 64 at 2048", &(struct attn_case){{{2048, 64}}, 1, 8, 8, false},
                   64 * 2080.0);
        bench_case(c, "attn window decode", &(struct attn_case){{{4095, 1}}, 1, 8, 8, true}, 128);
        return;
    }
    const uint32_t edges[] = {0, 1, 63, 64, 65, 126, 127, 128, 129, 191, 192, 193, 300};
    for (size_t i = 0; i < sizeof(edges) / sizeof(edges[0]); i++) {
        for (int window = 0; window < 2; window++) {
            check_case(c, &(struct attn_case){{{edges[i], 1}}, 1, 1, 2, window});
            check_case(c,
                       &(struct attn_case){
                           {{edges[i], 1 + check_u32(c, 40)}}, 1, 2, 1 + check_u32(c, 5), window});
        }
    }
    for (int window = 0; window < 2; window++) {
        check_case(c, &(struct attn_case){{{0, 270}}, 1, 1, 3, window});
        check_case(c, &(struct attn_case){{{5, 3}, {130, 17}, {700, 1}}, 3, 2, 8, window});
        check_case(c,
                   &(struct attn_case){{{90, 2}, {0, 1}, {63, 33}, {200, 65}}, 4, 1, 11, window});
    }
}
