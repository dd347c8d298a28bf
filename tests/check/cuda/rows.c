/* Row operations: all bits, but for the norm, whose sum has another order. */
#include <stdio.h>
#include <string.h>
#include "kernels/dtype.h"
#include "tests/check/cuda/device.h"

#define NORM_L2    2e-3 /* a bf16 result differs by one unit here and there */
#define NORM_WORST 0.04

static void embed(struct device *d, uint32_t n_rows, uint32_t hidden)
{
    struct twin table = twin_bf16(d, (size_t)100 * hidden, 1.0f), ids = twin_u32(d, n_rows, 100),
                x = twin_new(d, (size_t)n_rows * hidden * 2);
    d->ref.embed(&(struct dmk_embed_args){table.host, ids.host, x.host, n_rows, hidden}, NULL);
    d->cuda.embed(&(struct dmk_embed_args){table.dev, ids.dev, x.dev, n_rows, hidden}, d->stream);
    expect_bits(d, x, "embed");
    device_end(d, "embed");
}

static void norm(struct device *d, uint32_t n_rows, uint32_t hidden, bool pick)
{
    struct twin x = twin_bf16(d, (size_t)n_rows * hidden, 3.0f), scale = twin_bf16(d, hidden, 1.5f),
                rows = twin_u32(d, n_rows, n_rows), y = twin_new(d, (size_t)n_rows * hidden * 2);
    d->ref.rmsnorm(&(struct dmk_rmsnorm_args){x.host, pick ? rows.host : NULL, scale.host, y.host,
                                              n_rows, hidden, 1e-5f},
                   NULL);
    d->cuda.rmsnorm(&(struct dmk_rmsnorm_args){x.dev, pick ? rows.dev : NULL, scale.dev, y.dev,
                                               n_rows, hidden, 1e-5f},
                    d->stream);
    expect_bf16(d, y, NORM_L2, NORM_WORST, "rmsnorm");
    device_end(d, "rmsnorm");
}

/* The tree over the sums of some ranks, on the host. */
static void add_ranks(float *to, const struct twin *sums, uint32_t n_ranks, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float leaf[DMK_MAX_SOURCES] = {0};
        for (uint32_t r = 0; r < n_ranks; r++) {
            leaf[r] = ((const float *)sums[r].host)[i];
        }
        for (uint32_t width = n_ranks; width > 1; width /= 2) {
            for (uint32_t r = 0; r < width / 2; r++) {
                leaf[r] = leaf[2 * r] + leaf[2 * r + 1];
            }
        }
        to[i] = leaf[0];
    }
}

static void add_norm(struct device *d, uint32_t n_rows, uint32_t hidden, bool bias,
                     uint32_t n_ranks)
{
    const size_t n = (size_t)n_rows * hidden;
    struct twin x = twin_bf16(d, n, 4.0f), sum = twin_new(d, n * 4), sums[DMK_MAX_SOURCES],
                b = twin_bf16(d, hidden, 1.0f), scale = twin_bf16(d, hidden, 1.5f),
                y = twin_new(d, n * 2);
    struct dmk_add_norm_args args = {.x = x.dev,
                                     .n_ranks = n_ranks,
                                     .bias = bias ? b.dev : NULL,
                                     .scale = scale.dev,
                                     .y = y.dev,
                                     .n_rows = n_rows,
                                     .hidden = hidden,
                                     .eps = 1e-5f};
    for (uint32_t r = 0; r < n_ranks; r++) {
        sums[r] = twin_f32(d, n, 3.0f);
        args.sum[r] = sums[r].dev;
    }
    add_ranks(sum.host, sums, n_ranks, n);
    twin_send(d, sum); /* looked at with all others at the end */
    d->ref.residual(
        &(struct dmk_residual_args){x.host, sum.host, bias ? b.host : NULL, n_rows, hidden}, NULL);
    d->ref.rmsnorm(
        &(struct dmk_rmsnorm_args){x.host, NULL, scale.host, y.host, n_rows, hidden, 1e-5f}, NULL);
    d->cuda.add_norm(&args, d->stream);
    expect_bits(d, x, "add_norm: x");
    expect_bf16(d, y, NORM_L2, NORM_WORST, "add_norm: y");
    device_end(d, "add_norm");
}

/* A sum that one rank has rounded itself; then it is added without a bias. */
static void add_whole(struct device *d, uint32_t n_rows, uint32_t hidden)
{
    const size_t n = (size_t)n_rows * hidden;
    struct twin x = twin_bf16(d, n, 4.0f), whole = twin_bf16(d, n, 3.0f), sum = twin_new(d, n * 4),
                scale = twin_bf16(d, hidden, 1.5f), y = twin_new(d, n * 2);
    for (size_t i = 0; i < n; i++) {
        ((float *)sum.host)[i] = dmk_bf16_to_f32(((const uint16_t *)whole.host)[i]);
    }
    twin_send(d, sum);
    d->ref.residual(&(struct dmk_residual_args){x.host, sum.host, NULL, n_rows, hidden}, NULL);
    d->ref.rmsnorm(
        &(struct dmk_rmsnorm_args){x.host, NULL, scale.host, y.host, n_rows, hidden, 1e-5f}, NULL);
    d->cuda.add_norm(&(struct dmk_add_norm_args){.x = x.dev,
                                                 .whole = whole.dev,
                                                 .scale = scale.dev,
                                                 .y = y.dev,
                                                 .n_rows = n_rows,
                                                 .hidden = hidden,
                                                 .eps = 1e-5f},
                     d->stream);
    expect_bits(d, x, "add_norm, whole: x");
    expect_bf16(d, y, NORM_L2, NORM_WORST, "add_norm, whole: y");
    device_end(d, "add_norm, whole");
}

/* Rows of several groups, some of them without rows and with padding; a rank's experts in the middle. */
static void gather(struct device *d, uint32_t n_groups, uint32_t hidden)
{
    const uint32_t k = 4, n_experts = 32, expert_first = 8, n_local = 8;
    struct dmk_gather_args a = {.n_from = n_groups,
                                .k = k,
                                .hidden = hidden,
                                .expert_first = expert_first,
                                .n_experts = n_local};
    struct twin xs[DMK_MAX_SOURCES], ids[DMK_MAX_SOURCES], weights[DMK_MAX_SOURCES],
        live[DMK_MAX_SOURCES];
    for (uint32_t g = 0; g < n_groups; g++) {
        const uint32_t rows = g == 1 ? 0 : 1 + draw_u32(d, 40);
        a.from[g].first = a.n_rows;
        a.n_rows += rows;
        xs[g] = twin_bf16(d, (size_t)(rows + 1) * hidden, 1.0f);
        ids[g] = twin_u32(d, (size_t)(rows + 1) * k, n_experts);
        weights[g] = twin_f32(d, (size_t)(rows + 1) * k, 1.0f);
        live[g] = twin_u32(d, 1, rows + 1);
        a.from[g].x = xs[g].dev;
        a.from[g].ids = ids[g].dev;
        a.from[g].weights = weights[g].dev;
        a.from[g].n_live = live[g].dev;
    }
    struct twin x = twin_new(d, (size_t)a.n_rows * hidden * 2),
                chosen = twin_new(d, (size_t)a.n_rows * k * 4),
                weight = twin_new(d, (size_t)a.n_rows * k * 4);
    a.x = x.dev;
    a.ids = chosen.dev;
    a.weights = weight.dev;
    for (uint32_t g = 0; g < n_groups; g++) {
        const uint32_t end = g + 1 < n_groups ? a.from[g + 1].first : a.n_rows;
        for (uint32_t row = a.from[g].first; row < end; row++) {
            const uint32_t at = row - a.from[g].first;
            const bool lives = at < *(const uint32_t *)live[g].host;
            bool ours = false;
            for (uint32_t i = 0; i < k; i++) {
                const uint32_t id = lives ? ((uint32_t *)ids[g].host)[at * k + i] : DMK_NONE;
                ((uint32_t *)chosen.host)[row * k + i] = id;
                ((float *)weight.host)[row * k + i] =
                    lives ? ((float *)weights[g].host)[at * k + i] : 0.0f;
                ours = ours || id - expert_first < n_local;
            }
            if (ours) {
                memcpy((uint16_t *)x.host + (size_t)row * hidden,
                       (uint16_t *)xs[g].host + (size_t)at * hidden, (size_t)hidden * 2);
            }
        }
    }
    d->cuda.gather(&a, d->stream);
    expect_bits(d, x, "gather: x");
    expect_bits(d, chosen, "gather: ids");
    expect_bits(d, weight, "gather: weights");
    device_end(d, "gather");
}

static void residual(struct device *d, uint32_t n_rows, uint32_t hidden)
{
    const size_t n = (size_t)n_rows * hidden;
    struct twin x = twin_bf16(d, n, 4.0f), sum = twin_f32(d, n, 3.0f);
    d->ref.residual(&(struct dmk_residual_args){x.host, sum.host, NULL, n_rows, hidden}, NULL);
    d->cuda.residual(&(struct dmk_residual_args){x.dev, sum.dev, NULL, n_rows, hidden}, d->stream);
    expect_bits(d, x, "residual");
    device_end(d, "residual");
}

static struct twin make_table(struct device *d, uint32_t n_positions)
{
    return twin_f32(d, (size_t)n_positions * 64, 1.35f);
}

static void rope(struct device *d, uint32_t n_rows, uint32_t n_heads)
{
    struct twin x = twin_bf16(d, (size_t)n_rows * n_heads * 64, 8.0f), table = make_table(d, 50),
                positions = twin_u32(d, n_rows, 50);
    d->ref.rope(&(struct dmk_rope_args){x.host, positions.host, table.host, n_rows, n_heads}, NULL);
    d->cuda.rope(&(struct dmk_rope_args){x.dev, positions.dev, table.dev, n_rows, n_heads},
                 d->stream);
    expect_bits(d, x, "rope");
    device_end(d, "rope");
}

/* Rows of queries, keys and values against rope of each part and kv_write; then kv_write from the same rows. */
static void rope_write(struct device *d, uint32_t n_rows, uint32_t n_q, uint32_t n_kv, bool write)
{
    const uint32_t n_pages = n_rows + 3, page_bytes = 16384, width = (n_q + 2 * n_kv) * 64;
    struct twin qkv = twin_bf16(d, (size_t)n_rows * width, 8.0f), table = make_table(d, 50),
                positions = twin_u32(d, n_rows, 50), page = twin_new(d, n_rows * 4),
                slot = twin_u32(d, n_rows, 64),
                pages = twin_new(d, (size_t)n_kv * n_pages * page_bytes),
                k = twin_new(d, (size_t)n_rows * n_kv * 128),
                v = twin_new(d, (size_t)n_rows * n_kv * 128);
    uint16_t *rows = qkv.host;
    uint32_t *page_of = page.host;
    for (uint32_t t = 0; t < n_rows; t++) {
        page_of[t] = t % 5 == 3 ? DMK_NONE : n_pages - 1 - t;
        uint16_t *row = rows + (size_t)t * width;
        uint32_t *position = (uint32_t *)positions.host + t;
        d->ref.rope(&(struct dmk_rope_args){row, position, table.host, 1, n_q + n_kv}, NULL);
        memcpy((uint16_t *)k.host + (size_t)t * n_kv * 64, row + n_q * 64, n_kv * 128);
        memcpy((uint16_t *)v.host + (size_t)t * n_kv * 64, row + (n_q + n_kv) * 64, n_kv * 128);
    }
    twin_send(d, page);
    struct dmk_kv_write_args w = {k.host, v.host, page.host, slot.host,  pages.host,
                                  n_rows, n_kv,   n_pages,   page_bytes, 0};
    d->ref.kv_write(&w, NULL);
    d->cuda.rope_write(&(struct dmk_rope_write_args){qkv.dev, positions.dev, table.dev, page.dev,
                                                     slot.dev, write ? pages.dev : NULL, n_rows,
                                                     n_q, n_kv, n_pages, page_bytes},
                       d->stream);
    if (!write) {
        w = (struct dmk_kv_write_args){(uint16_t *)qkv.dev + n_q * 64,
                                       (uint16_t *)qkv.dev + (n_q + n_kv) * 64,
                                       page.dev,
                                       slot.dev,
                                       pages.dev,
                                       n_rows,
                                       n_kv,
                                       n_pages,
                                       page_bytes,
                                       width};
        d->cuda.kv_write(&w, d->stream);
    }
    expect_bits(d, qkv, "rope_write: rows");
    expect_bits(d, pages, write ? "rope_write: pages" : "kv_write: pages");
    device_end(d, "rope_write");
}

static void page_copy(struct device *d)
{
    const uint32_t n_arrays = 5, n_pages = 7, page_bytes = 16384;
    struct twin pool = twin_bytes(d, (size_t)n_arrays * n_pages * page_bytes, 0, 256);
    struct dmk_page_copy_args args = {
        .pool = pool.dev,
        .pairs = {{1, 2}, {2, 6}, {0, 1}}, /* the second builds on the first */
        .n_pairs = 3,
        .n_arrays = n_arrays,
        .n_pages = n_pages,
        .page_bytes = page_bytes};
    for (uint32_t a = 0; a < n_arrays; a++) {
        for (uint32_t i = 0; i < args.n_pairs; i++) {
            uint8_t *array = (uint8_t *)pool.host + (size_t)a * n_pages * page_bytes;
            memcpy(array + args.pairs[i].dst * page_bytes, array + args.pairs[i].src * page_bytes,
                   page_bytes);
        }
    }
    d->cuda.page_copy(&args, d->stream);
    expect_bits(d, pool, "page_copy");
    device_end(d, "page_copy");
}

static void run_rope_write(struct device *d, void *ud)
{
    d->cuda.rope_write(ud, d->stream);
}

static void bench_rope(struct device *d, uint32_t n)
{
    char what[64];
    const uint32_t n_pages = n / 64 + 1, width = 80 * 64;
    struct twin qkv = twin_device(d, (size_t)n * width * 2), table = make_table(d, 50),
                positions = twin_u32(d, n, 50), page = twin_u32(d, n, n_pages),
                slot = twin_u32(d, n, 64), pages = twin_device(d, (size_t)8 * n_pages * 16384);
    struct dmk_rope_write_args args = {
        qkv.dev, positions.dev, table.dev, page.dev, slot.dev, pages.dev, n, 64, 8, n_pages, 16384};
    snprintf(what, sizeof(what), "rope_write %u rows", n);
    device_bench(d, what, run_rope_write, &args, (double)n * (72 * 256.0 + 8 * 128.0 + 16 * 128.0),
                 0);
    device_end(d, what);
}

static void run_add_norm(struct device *d, void *ud)
{
    d->cuda.add_norm(ud, d->stream);
}

static void bench(struct device *d, uint32_t n)
{
    char what[64];
    const uint32_t H = 2880;
    struct twin x = twin_device(d, (size_t)n * H * 2), sum = twin_device(d, (size_t)n * H * 4),
                scale = twin_bf16(d, H, 1.0f), y = twin_device(d, (size_t)n * H * 2);
    struct dmk_add_norm_args args = {.x = x.dev,
                                     .sum = {sum.dev},
                                     .n_ranks = 1,
                                     .bias = scale.dev,
                                     .scale = scale.dev,
                                     .y = y.dev,
                                     .n_rows = n,
                                     .hidden = H,
                                     .eps = 1e-5f};
    snprintf(what, sizeof(what), "add_norm %u x %u", n, H);
    device_bench(d, what, run_add_norm, &args, (double)n * H * 10, 0);
    args.whole = sum.dev;
    snprintf(what, sizeof(what), "add_norm, whole %u x %u", n, H);
    device_bench(d, what, run_add_norm, &args, (double)n * H * 8, 0);
    device_end(d, what);
}

void check_rows(struct device *d)
{
    const uint32_t rows[] = {1, 2, 7, 33, 130}, hiddens[] = {32, 96, 2880, 6144};
    if (d->bench) {
        bench(d, 1);
        bench(d, 128);
        bench(d, 8192);
        bench_rope(d, 1);
        bench_rope(d, 128);
        bench_rope(d, 8192);
        return;
    }
    for (size_t i = 0; i < 5; i++) {
        for (size_t h = 0; h < 4; h++) {
            embed(d, rows[i], hiddens[h]);
            norm(d, rows[i], hiddens[h], h % 2);
            for (uint32_t ranks = 1; ranks <= 8; ranks *= 2) {
                add_norm(d, rows[i], hiddens[h], i % 2, ranks);
            }
            add_whole(d, rows[i], hiddens[h]);
            residual(d, rows[i], hiddens[h]);
        }
        rope(d, rows[i], 1 + draw_u32(d, 70));
        rope_write(d, rows[i], 16, 2, true);
        rope_write(d, rows[i], 64, 8, false);
    }
    for (uint32_t groups = 2; groups <= 8; groups *= 2) {
        gather(d, groups, 96);
        gather(d, groups, 2880);
    }
    page_copy(d);
}
