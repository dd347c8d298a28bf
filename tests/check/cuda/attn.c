/* Attention: chunks and single tokens, full and sliding layers, page orders, rings, fresh keys; memory that must not
 * be looked at is NaN. Rows alone and in company give the same bits. */
#include <stdio.h>
#include <string.h>
#include "kernels/attn_cut.h"
#include "tests/check/cuda/device.h"

#define ATTN_L2 6e-3 /* probabilities enter the product as bf16, the result is bf16 */
#define ATTN_WORST                                                                                 \
    0.1 /* a last bit of rows that see few keys, which are large beside the mean of all */
#define PAGE_BYTES 16384
#define MAX_SEQS   6

struct part {
    uint32_t pos, n_tokens;
};

struct attn_case {
    struct part parts[MAX_SEQS];
    uint32_t n_seqs, n_kv_heads, group;
    bool window, fresh;
    bool steep; /* scores far above the sinks, and far from each other */
};

struct arrays {
    struct twin qkv, pages, page_ids, seqs, tiles, splits, n_splits, sinks, out;
    uint32_t n_rows, n_tiles, n_splits_host, n_pages, width;
};

/* The key and value of a position go where attention will look for them. */
static void put_row(struct device *d, uint8_t *page, uint32_t slot)
{
    for (uint32_t part = 0; part < 2; part++) {
        uint16_t *row = (uint16_t *)(void *)(page + part * PAGE_BYTES / 2) + slot * 64;
        for (uint32_t i = 0; i < 64; i++) {
            uint32_t r = draw_u32(d, 1u << 16);
            row[i] = (uint16_t)((r & 0x807f) | (0x3e00 + (r & 0x0180))); /* 1/8 .. 2, both signs */
        }
    }
}

static void make_tiles(struct arrays *a, const struct attn_case *c, bool all)
{
    struct dmk_attn_tile *tiles = a->tiles.host;
    struct dmk_attn_split *splits = a->splits.host;
    a->n_tiles = a->n_splits_host = 0;
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        const struct part *p = &c->parts[i];
        for (uint32_t s = 0; !all && p->n_tokens == 1 && s <= p->pos / dmk_attn_split_keys(p->pos);
             s++) {
            splits[a->n_splits_host++] = (struct dmk_attn_split){i, s};
        }
        for (uint32_t first = 0, tile; (all || p->n_tokens > 1) && first < p->n_tokens;
             first += tile) {
            tile = dmk_attn_tile_tokens(p->pos + first, p->n_tokens - first);
            tiles[a->n_tiles++] = (struct dmk_attn_tile){i, first, tile};
        }
    }
    *(uint32_t *)a->n_splits.host = a->n_splits_host;
}

static struct arrays make_arrays(struct device *d, const struct attn_case *c)
{
    struct arrays a = {.width = (c->group + 2) * c->n_kv_heads * 64};
    uint32_t n_blocks = 0, taken = draw_u32(d, 5), n_ids = 0;
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        a.n_rows += c->parts[i].n_tokens;
        n_blocks += (c->parts[i].pos + c->parts[i].n_tokens + 63) / 64 + 10;
    }
    a.n_pages = n_blocks + 8;
    a.qkv = twin_bf16(d, (size_t)a.n_rows * a.width, c->steep ? 20.0f : 2.5f);
    a.pages = twin_new(d, (size_t)c->n_kv_heads * a.n_pages * PAGE_BYTES);
    a.page_ids = twin_new(d, a.n_pages * 4);
    a.seqs = twin_new(d, c->n_seqs * sizeof(struct dmk_attn_seq));
    a.tiles = twin_new(d, (a.n_rows + 8) * sizeof(struct dmk_attn_tile));
    a.splits = twin_new(d, (n_blocks + 8) * sizeof(struct dmk_attn_split));
    a.n_splits = twin_new(d, 16);
    a.sinks = twin_bf16(d, c->n_kv_heads * c->group, 4.0f);
    a.out = twin_new(d, (size_t)a.n_rows * c->n_kv_heads * c->group * 128);
    struct dmk_attn_seq *seqs = a.seqs.host;
    uint32_t *ids = a.page_ids.host, row = 0;
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        const struct part *p = &c->parts[i];
        const uint32_t blocks = (p->pos + p->n_tokens + 63) / 64;
        seqs[i] = (struct dmk_attn_seq){.row = row,
                                        .n_tokens = p->n_tokens,
                                        .pos = p->pos,
                                        .first_page = n_ids,
                                        .n_ring = 3 + i % 2};
        for (uint32_t r = 0; r < 4; r++) {
            seqs[i].ring[r] = taken + blocks + 3 - r;
        }
        for (uint32_t b = 0; b < blocks; b++) {
            ids[n_ids++] = taken + blocks - 1 - b;
        }
        const uint32_t first = c->window && p->pos > 127 ? (p->pos - 127) / 64 * 64 : 0;
        const uint32_t end = c->fresh ? p->pos : p->pos + p->n_tokens;
        for (uint32_t h = 0; h < c->n_kv_heads; h++) {
            for (uint32_t j = first; j < end; j++) {
                uint32_t page = c->window ? seqs[i].ring[j / 64 % seqs[i].n_ring]
                                          : ids[seqs[i].first_page + j / 64];
                put_row(d, (uint8_t *)a.pages.host + ((size_t)h * a.n_pages + page) * PAGE_BYTES,
                        j % 64);
            }
        }
        taken += blocks + 5;
        row += p->n_tokens;
    }
    twin_send(d, a.pages);
    twin_send(d, a.page_ids);
    twin_send(d, a.seqs);
    return a;
}

static struct dmk_attn_args device_args(const struct arrays *a, const struct attn_case *c)
{
    const uint16_t *q = a->qkv.dev;
    return (struct dmk_attn_args){.q = q,
                                  .k = q + c->n_kv_heads * c->group * 64,
                                  .v = q + c->n_kv_heads * (c->group + 1) * 64,
                                  .pages = a->pages.dev,
                                  .page_ids = a->page_ids.dev,
                                  .seqs = a->seqs.dev,
                                  .tiles = a->tiles.dev,
                                  .sinks = a->sinks.dev,
                                  .out = a->out.dev,
                                  .n_seqs = c->n_seqs,
                                  .n_tiles = a->n_tiles,
                                  .n_kv_heads = c->n_kv_heads,
                                  .group = c->group,
                                  .n_pages = a->n_pages,
                                  .page_bytes = PAGE_BYTES,
                                  .n_rows = a->n_rows,
                                  .window = c->window ? 128 : 0,
                                  .fresh = c->fresh,
                                  .q_stride = a->width,
                                  .kv_stride = a->width,
                                  .splits = a->splits.dev,
                                  .n_splits = a->n_splits.dev,
                                  .max_splits = a->n_splits_host + 3};
}

/* The plain operation wants packed rows. */
static void run_plain(struct device *d, struct arrays *a, const struct attn_case *c)
{
    const uint32_t q = c->n_kv_heads * c->group * 64, kv = c->n_kv_heads * 64;
    struct twin rows[3] = {twin_new(d, (size_t)a->n_rows * q * 2),
                           twin_new(d, (size_t)a->n_rows * kv * 2),
                           twin_new(d, (size_t)a->n_rows * kv * 2)};
    for (uint32_t t = 0; t < a->n_rows; t++) {
        const uint16_t *from = (const uint16_t *)a->qkv.host + (size_t)t * a->width;
        memcpy((uint16_t *)rows[0].host + (size_t)t * q, from, q * 2);
        memcpy((uint16_t *)rows[1].host + (size_t)t * kv, from + q, kv * 2);
        memcpy((uint16_t *)rows[2].host + (size_t)t * kv, from + q + kv, kv * 2);
    }
    struct dmk_attn_args args = device_args(a, c);
    args.q = rows[0].host, args.k = rows[1].host, args.v = rows[2].host;
    args.pages = a->pages.host, args.page_ids = a->page_ids.host, args.seqs = a->seqs.host;
    args.tiles = a->tiles.host, args.sinks = a->sinks.host, args.out = a->out.host;
    args.q_stride = args.kv_stride = 0;
    args.splits = NULL;
    d->ref.attn(&args, NULL);
}

/* The same memory once more with other sequences (those of a.seqs.host) into another output. */
static void run_again(struct device *d, struct arrays *a, const struct attn_case *c,
                      struct twin out)
{
    make_tiles(a, c, false);
    twin_send(d, a->seqs);
    twin_send(d, a->tiles);
    twin_send(d, a->splits);
    twin_send(d, a->n_splits);
    struct dmk_attn_args args = device_args(a, c);
    args.out = out.dev;
    d->cuda.attn(&args, d->stream);
    d->be->ops->sync(d->be, d->stream);
}

static void run_case(struct device *d, const struct attn_case *c)
{
    char what[128];
    struct arrays a = make_arrays(d, c);
    int at =
        snprintf(what, sizeof(what), "%s%s%s, %u heads of %u:", c->window ? "sliding" : "full",
                 c->fresh ? ", fresh" : "", c->steep ? ", steep" : "", c->n_kv_heads, c->group);
    for (uint32_t i = 0; i < c->n_seqs && at < 110; i++) {
        at += snprintf(what + at, sizeof(what) - (size_t)at, " %u+%u", c->parts[i].pos,
                       c->parts[i].n_tokens);
    }
    make_tiles(&a, c, true);
    run_plain(d, &a, c);
    make_tiles(&a, c, false);
    twin_send(d, a.tiles);
    twin_send(d, a.splits);
    twin_send(d, a.n_splits);
    struct dmk_attn_args args = device_args(&a, c);
    d->cuda.attn(&args, d->stream);
    expect_bf16(d, a.out, ATTN_L2, ATTN_WORST, what);
    const size_t row = (size_t)c->n_kv_heads * c->group * 128;
    struct dmk_attn_seq *seqs = a.seqs.host;
    struct twin alone = twin_new(d, a.out.bytes);
    /* Each sequence by itself: the others are padding. */
    for (uint32_t i = 0; i < c->n_seqs && c->n_seqs > 1; i++) {
        struct attn_case one = *c;
        for (uint32_t j = 0; j < c->n_seqs; j++) {
            seqs[j].n_tokens = one.parts[j].n_tokens = j == i ? c->parts[j].n_tokens : 0;
        }
        run_again(d, &a, &one, alone);
        expect_same(d, (char *)alone.dev + seqs[i].row * row, (char *)a.out.dev + seqs[i].row * row,
                    c->parts[i].n_tokens * row, "a sequence by itself");
    }
    /* The last token of each chunk as a decode step would do it. */
    for (uint32_t i = 0; i < c->n_seqs && !c->fresh; i++) {
        struct attn_case one = *c;
        const struct dmk_attn_seq seq = seqs[i];
        for (uint32_t j = 0; j < c->n_seqs; j++) {
            seqs[j].n_tokens = one.parts[j].n_tokens = j == i;
        }
        uint32_t last = c->parts[i].n_tokens - 1;
        seqs[i].row = seq.row + last;
        seqs[i].pos = one.parts[i].pos = seq.pos + last;
        run_again(d, &a, &one, alone);
        expect_same(d, (char *)alone.dev + seqs[i].row * row, (char *)a.out.dev + seqs[i].row * row,
                    row, "the last token by itself");
        seqs[i] = seq;
    }
    device_end(d, what);
}

struct bench {
    struct dmk_attn_args args;
};

static void run_attn(struct device *d, void *ud)
{
    d->cuda.attn(ud, d->stream);
}

static void bench(struct device *d, uint32_t n_seqs, uint32_t pos, uint32_t n_tokens, bool window)
{
    char what[64];
    const uint32_t blocks = (pos + n_tokens + 63) / 64, n_kv = 8, group = 8, width = 80 * 64;
    const uint32_t n_pages = n_seqs * blocks,
                   most_tiles = n_seqs * (n_tokens / DMK_ATTN_TILE_WIDE + 3);
    const uint32_t row_splits = n_tokens == 1 ? pos / dmk_attn_split_keys(pos) + 1 : 0;
    struct twin qkv = twin_device(d, (size_t)n_seqs * n_tokens * width * 2),
                pages = twin_device(d, (size_t)n_kv * n_pages * PAGE_BYTES),
                ids = twin_new(d, n_pages * 4),
                seqs = twin_new(d, n_seqs * sizeof(struct dmk_attn_seq)),
                tiles = twin_new(d, most_tiles * sizeof(struct dmk_attn_tile)),
                splits = twin_new(d, (n_seqs * row_splits + 1) * sizeof(struct dmk_attn_split)),
                count = twin_new(d, 16), sinks = twin_bf16(d, 64, 1.0f),
                out = twin_device(d, (size_t)n_seqs * n_tokens * 8192);
    struct dmk_attn_seq *s = seqs.host;
    struct dmk_attn_tile *t = tiles.host;
    struct dmk_attn_split *p = splits.host;
    for (uint32_t i = 0; i < n_seqs; i++) {
        s[i] = (struct dmk_attn_seq){
            i * n_tokens, n_tokens, pos, i * blocks, {i * 3, i * 3 + 1, i * 3 + 2}, 3};
        for (uint32_t b = 0; b < blocks; b++) {
            ((uint32_t *)ids.host)[i * blocks + b] = i * blocks + b;
        }
        for (uint32_t f = 0, tile; n_tokens > 1 && f < n_tokens; f += tile) {
            tile = dmk_attn_tile_tokens(pos + f, n_tokens - f);
            *t++ = (struct dmk_attn_tile){i, f, tile};
        }
        for (uint32_t f = 0; f < row_splits; f++) {
            *p++ = (struct dmk_attn_split){i, f};
        }
    }
    *(uint32_t *)count.host = n_seqs * row_splits;
    twin_send(d, ids);
    twin_send(d, seqs);
    twin_send(d, tiles);
    twin_send(d, splits);
    twin_send(d, count);
    d->be->ops->fill(d->be, d->stream, qkv.dev, qkv.bytes, DMK_FILL_BF16, 1.0f, d->seed);
    d->be->ops->fill(d->be, d->stream, pages.dev, pages.bytes, DMK_FILL_BF16, 1.0f, d->seed + 1);
    const uint16_t *q = qkv.dev;
    struct dmk_attn_args args = {.q = q,
                                 .k = q + 4096,
                                 .v = q + 4608,
                                 .pages = pages.dev,
                                 .page_ids = ids.dev,
                                 .seqs = seqs.dev,
                                 .tiles = tiles.dev,
                                 .sinks = sinks.dev,
                                 .out = out.dev,
                                 .n_seqs = n_seqs,
                                 .n_tiles = (uint32_t)(t - (struct dmk_attn_tile *)tiles.host),
                                 .n_kv_heads = n_kv,
                                 .group = group,
                                 .n_pages = n_pages,
                                 .page_bytes = PAGE_BYTES,
                                 .n_rows = n_seqs * n_tokens,
                                 .window = window ? 128 : 0,
                                 .fresh = window && n_tokens > 1,
                                 .q_stride = width,
                                 .kv_stride = width,
                                 .splits = splits.dev,
                                 .n_splits = count.dev,
                                 .max_splits = n_seqs * row_splits};
    snprintf(what, sizeof(what), "%s %u x (%u + %u)", window ? "sliding" : "full", n_seqs, pos,
             n_tokens);
    double keys = window ? 128.0 : n_tokens > 1 ? pos + n_tokens / 2.0 : pos + 1.0;
    double read = window ? (n_tokens > 1 ? n_tokens + 128.0 : 128.0) : pos + n_tokens;
    device_bench(d, what, run_attn, &args, n_seqs * (read * n_kv * 256.0 + n_tokens * 16384.0),
                 4.0 * n_seqs * n_tokens * keys * 64 * 64);
    device_end(d, what);
}

void check_attn(struct device *d)
{
    if (d->bench) {
        const uint32_t batches[] = {1, 8, 32, 128};
        for (size_t i = 0; i < 4; i++) {
            bench(d, batches[i], 8191, 1, false);
            bench(d, batches[i], 8191, 1, true);
        }
        bench(d, 8, 32767, 1, false);
        bench(d, 1, 0, 1024, false);
        bench(d, 1, 0, 8192, false);
        bench(d, 1, 0, 8192, true);
        return;
    }
    static const struct attn_case cases[] = {
        {{{0, 1}}, 1, 1, 8, false, false},
        {{{0, 5}}, 1, 2, 8, false, false},
        {{{0, 16}, {0, 17}, {63, 2}}, 3, 2, 8, false, false},
        {{{100, 70}, {64, 64}, {0, 200}}, 3, 2, 8, false, false},
        {{{63, 1}, {64, 1}, {0, 1}, {500, 1}, {511, 1}, {512, 1}}, 6, 2, 8, false, false},
        {{{1300, 1}, {30, 20}, {2047, 1}, {700, 33}}, 4, 2, 8, false, false},
        {{{300, 1}, {20, 3}}, 2, 3, 2, false, false},
        {{{5000, 1}}, 1, 8, 8, false, false},
        {{{0, 1}, {127, 1}, {128, 1}, {129, 1}, {190, 1}, {1000, 1}}, 6, 2, 8, true, false},
        {{{0, 1}, {127, 1}, {128, 1}, {129, 1}, {190, 1}, {1000, 1}}, 6, 2, 8, true, true},
        {{{0, 300}, {128, 5}, {1000, 100}, {77, 1}}, 4, 2, 8, true, true},
        {{{127, 2}, {126, 3}, {64, 64}, {191, 129}}, 4, 1, 4, true, true},
        {{{200, 30}, {127, 64}, {0, 100}, {1023, 2}}, 4, 2, 8, true, false},
        {{{0, 1100}, {500, 13}, {1530, 7}}, 3, 2, 8, false, false},
        {{{8150, 50}}, 1, 1, 8, false, false},
        {{{DMK_ATTN_LONG - 30, 50}, {DMK_ATTN_LONG - 1, 1}, {DMK_ATTN_LONG, 1}},
         3,
         1,
         8,
         false,
         false},
        {{{DMK_ATTN_VERY_LONG - 10, 20}, {DMK_ATTN_VERY_LONG - 1, 1}}, 2, 1, 8, false, false},
        {{{0, 1100}, {500, 13}, {1530, 7}, {2047, 1}}, 4, 2, 8, false, false, true},
        {{{0, 300}, {128, 5}, {1000, 100}, {77, 1}}, 4, 2, 8, true, true, true},
        {{{200, 30}, {127, 64}, {0, 100}, {1023, 1}}, 4, 2, 8, true, false, true},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        run_case(d, &cases[i]);
    }
}
