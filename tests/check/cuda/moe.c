/* Routing to the bit; expert products near the plain ones, packed or not; skewed, empty and full experts; the same
 * bits for a row alone and in company. */
#include <stdio.h>
#include <string.h>
#include "kernels/dtype.h"
#include "tests/check/cuda/device.h"

#define Z_L2    5e-3
#define Z_WORST 0.08
#define Y_L2    2e-5
#define Y_WORST 3e-4

struct plan_twins {
    struct twin begin, row, weight, row_slots, group, row_at;
};

static struct plan_twins new_plan(struct device *d, uint32_t n_rows, uint32_t k, uint32_t n_experts)
{
    const size_t n = (size_t)n_rows * k * 4;
    return (struct plan_twins){twin_new(d, (n_experts + 1) * 4),
                               twin_new(d, n),
                               twin_new(d, n),
                               twin_new(d, n),
                               twin_new(d, n),
                               twin_new(d, n_experts * 4)};
}

static struct dmk_moe_plan side(const struct plan_twins *p, bool host)
{
    if (host) {
        return (struct dmk_moe_plan){p->begin.host,     p->row.host,   p->weight.host,
                                     p->row_slots.host, p->group.host, p->row_at.host};
    }
    return (struct dmk_moe_plan){p->begin.dev,     p->row.dev,   p->weight.dev,
                                 p->row_slots.dev, p->group.dev, p->row_at.dev};
}

static void topk(struct device *d, uint32_t n_rows, uint32_t n_experts, uint32_t k)
{
    char what[64];
    struct twin scores = twin_bf16(d, (size_t)n_rows * n_experts, 4.0f),
                ids = twin_new(d, (size_t)n_rows * k * 4),
                weights = twin_new(d, (size_t)n_rows * k * 4);
    uint16_t *s = scores.host;
    for (size_t i = 0; i < (size_t)n_rows * n_experts; i++) {
        s[i] &= i % 3 ? 0xffe0 : 0xffff; /* many ties */
    }
    twin_send(d, scores);
    snprintf(what, sizeof(what), "topk %u of %u, %u rows", k, n_experts, n_rows);
    d->ref.topk(&(struct dmk_topk_args){scores.host, ids.host, weights.host, n_rows, n_experts, k},
                NULL);
    d->cuda.topk(&(struct dmk_topk_args){scores.dev, ids.dev, weights.dev, n_rows, n_experts, k},
                 d->stream);
    expect_bits(d, ids, what);
    expect_bits(d, weights, what);
    device_end(d, what);
}

/* skew: how many experts the choices fall on. */
static void fill_choices(struct device *d, uint32_t *ids, uint32_t n_rows, uint32_t k,
                         uint32_t n_experts, uint32_t skew)
{
    for (uint32_t t = 0; t < n_rows; t++) {
        const uint32_t first = draw_u32(d, skew), step = 1 + draw_u32(d, 3) * 2;
        for (uint32_t i = 0; i < k; i++) {
            ids[t * k + i] = (first + i * step) % (skew < k * 6 ? k * 6 : skew) % n_experts;
        }
    }
}

static void group(struct device *d, uint32_t n_rows, uint32_t n_experts, uint32_t skew,
                  uint32_t n_live)
{
    char what[64];
    const uint32_t k = 4;
    struct plan_twins plan = new_plan(d, n_rows, k, n_experts);
    struct twin ids = twin_new(d, (size_t)n_rows * k * 4),
                weights = twin_f32(d, (size_t)n_rows * k, 1.0f), live = twin_new(d, 16);
    fill_choices(d, ids.host, n_rows, k, 2 * n_experts, skew);
    *(uint32_t *)live.host = n_live;
    twin_send(d, ids);
    twin_send(d, live);
    snprintf(what, sizeof(what), "group %u rows, %u live, %u experts", n_rows, n_live, n_experts);
    /* Ours are every second half of the experts; the others belong to someone else. */
    d->ref.moe_group(&(struct dmk_moe_group_args){ids.host, weights.host, side(&plan, true), n_rows,
                                                  k, n_experts / 2, n_experts, n_experts / 4,
                                                  live.host},
                     NULL);
    memset(plan.row_at.host, 0xff, plan.row_at.bytes); /* working memory of the host only */
    d->cuda.moe_group(&(struct dmk_moe_group_args){ids.dev, weights.dev, side(&plan, false), n_rows,
                                                   k, n_experts / 2, n_experts, n_experts / 4,
                                                   live.dev},
                      d->stream);
    expect_bits(d, plan.begin, what);
    expect_bits(d, plan.row, what);
    expect_bits(d, plan.weight, what);
    expect_bits(d, plan.row_slots, what);
    expect_bits(d, plan.group, what);
    device_end(d, what);
}

/* Both in one, against one after the other. */
static void route(struct device *d, uint32_t n_rows, uint32_t n_experts, uint32_t n_live)
{
    char what[64];
    const uint32_t k = 4, first = n_experts / 4, n_local = n_experts / 2;
    struct plan_twins plan = new_plan(d, n_rows, k, n_local);
    struct twin scores = twin_bf16(d, (size_t)n_rows * n_experts, 4.0f),
                ids = twin_new(d, (size_t)n_rows * k * 4),
                weights = twin_new(d, (size_t)n_rows * k * 4), live = twin_new(d, 16);
    *(uint32_t *)live.host = n_live;
    twin_send(d, live);
    snprintf(what, sizeof(what), "route %u rows, %u live, %u experts", n_rows, n_live, n_experts);
    d->ref.topk(&(struct dmk_topk_args){scores.host, ids.host, weights.host, n_rows, n_experts, k},
                NULL);
    d->ref.moe_group(&(struct dmk_moe_group_args){ids.host, weights.host, side(&plan, true), n_rows,
                                                  k, first, n_local, n_local / 4, live.host},
                     NULL);
    d->cuda.route(&(struct dmk_route_args){{scores.dev, ids.dev, weights.dev, n_rows, n_experts, k},
                                           {ids.dev, weights.dev, side(&plan, false), n_rows, k,
                                            first, n_local, n_local / 4, live.dev}},
                  d->stream);
    expect_bits(d, ids, what);
    expect_bits(d, weights, what);
    expect_bits(d, plan.begin, what);
    expect_bits(d, plan.row, what);
    expect_bits(d, plan.weight, what);
    expect_bits(d, plan.row_slots, what);
    expect_bits(d, plan.group, what);
    device_end(d, what);
}

/* A grouping with every expert local, on both sides. */
static struct plan_twins grouped(struct device *d, uint32_t n_rows, uint32_t k, uint32_t n_experts,
                                 uint32_t skew)
{
    struct plan_twins plan = new_plan(d, n_rows, k, n_experts);
    struct twin ids = twin_new(d, (size_t)n_rows * k * 4),
                weights = twin_f32(d, (size_t)n_rows * k, 1.0f);
    fill_choices(d, ids.host, n_rows, k, n_experts, skew < n_experts ? skew : n_experts);
    d->ref.moe_group(&(struct dmk_moe_group_args){ids.host, weights.host, side(&plan, true), n_rows,
                                                  k, 0, n_experts,
                                                  n_experts < 8 ? 1 : n_experts / 8, NULL},
                     NULL);
    twin_send(d, plan.begin);
    twin_send(d, plan.row);
    twin_send(d, plan.weight);
    twin_send(d, plan.row_slots);
    twin_send(d, plan.group);
    return plan;
}

static void combine(struct device *d, uint32_t n_rows, uint32_t hidden)
{
    char what[64];
    const uint32_t k = 4, n_experts = 32;
    const size_t n = (size_t)n_rows * hidden;
    struct plan_twins plan = grouped(d, n_rows, k, n_experts, n_experts);
    struct twin y = twin_f32(d, n * k, 5.0f), out = twin_new(d, n * 4), x = twin_bf16(d, n, 2.0f),
                scale = twin_bf16(d, hidden, 1.0f), norm = twin_new(d, n * 2);
    snprintf(what, sizeof(what), "combine %u x %u", n_rows, hidden);
    struct dmk_moe_combine_args ref = {y.host, side(&plan, true), out.host, n_rows, k, hidden, 8},
                                dev = {y.dev, side(&plan, false), out.dev, n_rows, k, hidden, 8};
    d->ref.moe_combine(&ref, NULL);
    d->cuda.moe_combine(&dev, d->stream);
    expect_bits(d, out, what);
    d->ref.residual(&(struct dmk_residual_args){x.host, out.host, NULL, n_rows, hidden}, NULL);
    d->ref.rmsnorm(
        &(struct dmk_rmsnorm_args){x.host, NULL, scale.host, norm.host, n_rows, hidden, 1e-5f},
        NULL);
    d->cuda.combine_norm(&(struct dmk_combine_norm_args){dev, x.dev, scale.dev, norm.dev, 1e-5f},
                         d->stream);
    expect_bits(d, x, "combine_norm: x");
    expect_bf16(d, norm, 2e-3, 0.04, "combine_norm: y");
    device_end(d, what);
}

struct experts {
    struct dmk_expert_weights host, dev;
    uint32_t n_experts;
};

static struct experts make_experts(struct device *d, enum dmk_weight_format format,
                                   uint32_t n_experts, uint32_t rows, uint32_t cols, bool wide)
{
    const size_t n = (size_t)n_experts * rows * cols;
    struct experts e = {.n_experts = n_experts};
    struct twin bias = twin_bf16(d, (size_t)n_experts * rows, 2.0f);
    e.host = e.dev = (struct dmk_expert_weights){.format = format, .rows = rows, .cols = cols};
    e.host.bias = bias.host;
    e.dev.bias = bias.dev;
    if (format == DMK_WEIGHT_BF16) {
        struct twin w = twin_bf16(d, n, 0.2f);
        e.host.blocks = w.host;
        e.dev.blocks = w.dev;
    } else {
        struct twin w = twin_bytes(d, n / 2, 0, 256),
                    s = twin_bytes(d, n / 32, wide ? 100 : 118, wide ? 24 : 6);
        e.host.blocks = w.host, e.host.scales = s.host;
        e.dev.blocks = w.dev, e.dev.scales = s.dev;
    }
    return e;
}

/* Repacks the device's side where the table wants that; false where it does not take the matrix. */
static bool pack_experts(struct device *d, struct experts *e, bool gate_up)
{
    if (!d->cuda.moe_packed) {
        return false;
    }
    struct dmk_moe_packed bytes = d->cuda.moe_packed(&e->dev, e->n_experts, gate_up);
    if (bytes.blocks == 0) {
        return false;
    }
    struct twin blocks = twin_new(d, bytes.blocks),
                scales = twin_new(d, bytes.scales ? bytes.scales : 16);
    d->cuda.moe_pack(
        &(struct dmk_moe_pack_args){e->dev, e->n_experts, gate_up, blocks.dev, scales.dev},
        d->stream);
    e->dev.format = bytes.format;
    e->dev.packed = true;
    e->dev.blocks = blocks.dev;
    e->dev.scales = bytes.scales ? scales.dev : NULL;
    return true;
}

struct moe_case {
    enum dmk_weight_format format;
    uint32_t n_rows, n_experts, hidden, inter, skew;
    bool wide, pack;
};

static void products(struct device *d, const struct moe_case *c)
{
    char what[96];
    const uint32_t k = 4, slots = c->n_rows * k;
    struct plan_twins plan = grouped(d, c->n_rows, k, c->n_experts, c->skew);
    struct experts up = make_experts(d, c->format, c->n_experts, 2 * c->inter, c->hidden, c->wide),
                   down = make_experts(d, c->format, c->n_experts, c->hidden, c->inter, c->wide);
    struct twin x = twin_bf16(d, (size_t)c->n_rows * c->hidden, 2.0f),
                z = twin_new(d, (size_t)slots * c->inter * 2),
                y = twin_new(d, (size_t)slots * c->hidden * 4), z2 = twin_new(d, z.bytes);
    if (c->pack && (!pack_experts(d, &up, true) || !pack_experts(d, &down, false))) {
        device_end(d, "not packed");
        return;
    }
    snprintf(what, sizeof(what), "experts format %d%s, %u rows on %u of %u, %u x %u", c->format,
             c->pack ? " packed" : "", c->n_rows, c->skew, c->n_experts, c->hidden, c->inter);
    struct dmk_moe_gate_up_args gu = {up.host, x.host, side(&plan, true), z.host, c->n_experts,
                                      1.702f,  7.0f,   c->n_rows},
                                gd = {up.dev, x.dev, side(&plan, false), z.dev, c->n_experts,
                                      1.702f, 7.0f,  c->n_rows};
    d->ref.moe_gate_up(&gu, NULL);
    d->cuda.moe_gate_up(&gd, d->stream);
    expect_bf16(d, z, Z_L2, Z_WORST, what);
    /* down works on the same z on both sides. */
    twin_send(d, z);
    d->ref.moe_down(&(struct dmk_moe_down_args){down.host, z.host, side(&plan, true), y.host,
                                                c->n_experts, c->n_rows},
                    NULL);
    d->cuda.moe_down(&(struct dmk_moe_down_args){down.dev, z.dev, side(&plan, false), y.dev,
                                                 c->n_experts, c->n_rows},
                     d->stream);
    expect_f32(d, y, Y_L2, Y_WORST, what);
    (void)z2;
    device_end(d, what);
}

struct bench {
    struct dmk_moe_gate_up_args up;
    struct dmk_moe_down_args down;
};

static void run_experts(struct device *d, void *ud)
{
    struct bench *b = ud;
    d->cuda.moe_gate_up(&b->up, d->stream);
    d->cuda.moe_down(&b->down, d->stream);
}

static void run_route(struct device *d, void *ud)
{
    d->cuda.route(ud, d->stream);
}

static void run_combine(struct device *d, void *ud)
{
    d->cuda.combine_norm(ud, d->stream);
}

static void bench_route(struct device *d, uint32_t n)
{
    char what[64];
    const uint32_t k = 4, E = 128, H = 2880;
    struct plan_twins plan = grouped(d, n, k, E, E);
    struct twin scores = twin_bf16(d, (size_t)n * E, 4.0f), ids = twin_new(d, (size_t)n * k * 4),
                weights = twin_new(d, (size_t)n * k * 4), y = twin_device(d, (size_t)n * k * H * 4),
                x = twin_device(d, (size_t)n * H * 2), scale = twin_bf16(d, H, 1.0f),
                norm = twin_device(d, (size_t)n * H * 2);
    struct dmk_route_args route = {
        {scores.dev, ids.dev, weights.dev, n, E, k},
        {ids.dev, weights.dev, side(&plan, false), n, k, 0, E, E / 8, NULL}};
    struct dmk_combine_norm_args combine = {
        {y.dev, side(&plan, false), NULL, n, k, H, 8}, x.dev, scale.dev, norm.dev, 1e-5f};
    d->be->ops->fill(d->be, d->stream, y.dev, y.bytes, DMK_FILL_BF16, 0.01f, d->seed);
    d->be->ops->fill(d->be, d->stream, x.dev, x.bytes, DMK_FILL_BF16, 1.0f, d->seed);
    snprintf(what, sizeof(what), "route %u rows", n);
    device_bench(d, what, run_route, &route, (double)n * (E * 2.0 + k * 32.0), 0);
    snprintf(what, sizeof(what), "combine_norm %u rows", n);
    device_bench(d, what, run_combine, &combine, (double)n * H * (4.0 * k + 6.0), 0);
    device_end(d, what);
}

static void bench(struct device *d, uint32_t n_rows)
{
    char what[64];
    const uint32_t k = 4, E = 128, H = 2880;
    struct plan_twins plan = grouped(d, n_rows, k, E, E);
    const size_t up_n = (size_t)E * 5760 * H, down_n = (size_t)E * H * H;
    struct twin ub = twin_device(d, up_n / 2), us = twin_device(d, up_n / 32),
                db = twin_device(d, down_n / 2), ds = twin_device(d, down_n / 32),
                bias = twin_device(d, (size_t)E * 5760 * 2),
                x = twin_device(d, (size_t)n_rows * H * 2),
                z = twin_device(d, (size_t)n_rows * k * H * 2),
                y = twin_device(d, (size_t)n_rows * k * H * 4);
    const struct dmk_backend_ops *ops = d->be->ops;
    ops->fill(d->be, d->stream, ub.dev, ub.bytes, DMK_FILL_CODES, 0, d->seed);
    ops->fill(d->be, d->stream, us.dev, us.bytes, DMK_FILL_SCALES, 0, d->seed);
    ops->fill(d->be, d->stream, db.dev, db.bytes, DMK_FILL_CODES, 0, d->seed);
    ops->fill(d->be, d->stream, ds.dev, ds.bytes, DMK_FILL_SCALES, 0, d->seed);
    ops->fill(d->be, d->stream, bias.dev, bias.bytes, DMK_FILL_BF16, 0.1f, d->seed);
    ops->fill(d->be, d->stream, x.dev, x.bytes, DMK_FILL_BF16, 1.0f, d->seed);
    struct experts up = {.dev = {.format = DMK_WEIGHT_MXFP4,
                                 .blocks = ub.dev,
                                 .scales = us.dev,
                                 .bias = bias.dev,
                                 .rows = 5760,
                                 .cols = H},
                         .n_experts = E},
                   down = {.dev = {.format = DMK_WEIGHT_MXFP4,
                                   .blocks = db.dev,
                                   .scales = ds.dev,
                                   .bias = bias.dev,
                                   .rows = H,
                                   .cols = H},
                           .n_experts = E};
    pack_experts(d, &up, true);
    pack_experts(d, &down, false);
    struct bench b = {{up.dev, x.dev, side(&plan, false), z.dev, E, 1.702f, 7.0f, n_rows},
                      {down.dev, z.dev, side(&plan, false), y.dev, E, n_rows}};
    const uint32_t *begin = plan.begin.host;
    double n_used = 0;
    for (uint32_t e = 0; e < E; e++) {
        n_used += begin[e + 1] > begin[e];
    }
    snprintf(what, sizeof(what), "experts of 120b, %u rows on %.0f", n_rows, n_used);
    device_bench(d, what, run_experts, &b, n_used * 24.88e6 * 0.53125, 2.0 * n_rows * k * 24.88e6);
    device_end(d, what);
}

void check_moe(struct device *d)
{
    if (d->bench) {
        const uint32_t rows[] = {1, 8, 32, 128, 1024, 8192};
        bench_route(d, 1);
        bench_route(d, 128);
        bench_route(d, 8192);
        for (size_t i = 0; i < 6; i++) {
            bench(d, rows[i]);
        }
        return;
    }
    const uint32_t rows[] = {1, 3, 8, 100, 128, 257, 1000};
    for (size_t i = 0; i < 7; i++) {
        topk(d, rows[i], 32, 4);
        topk(d, rows[i], 128, 4);
        topk(d, rows[i], 8, 2);
        group(d, rows[i], 32, 64, rows[i]);
        group(d, rows[i], 16, 5, rows[i] / 2);
        group(d, rows[i], 128, 256, rows[i]);
        combine(d, rows[i], 96);
        route(d, rows[i], 32, rows[i]);
        route(d, rows[i], 128, rows[i] / 2);
        route(d, rows[i], 256, rows[i]);
    }
    combine(d, 5, 2880);
    for (int pack = 0; pack < 2; pack++) {
        for (int format = pack; format < 2; format++) {
            products(d, &(struct moe_case){format, 1, 8, 64, 32, 8, false, pack});
            products(d, &(struct moe_case){format, 9, 8, 96, 160, 8, format, pack});
            products(d, &(struct moe_case){format, 70, 8, 128, 64, 5, false, pack});
            products(d, &(struct moe_case){format, 200, 4, 320, 288, 4, format, pack});
        }
        products(d, &(struct moe_case){DMK_WEIGHT_MXFP4, 1, 8, 2880, 2880, 8, false, pack});
        products(d, &(struct moe_case){DMK_WEIGHT_MXFP4, 5, 8, 2880, 2880, 8, true, pack});
    }
}
