/* Sampling: the token that common/sample picks, for every kind of row. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "common/sample/sample.h"
#include "tests/check/cuda/device.h"

static void rows(struct device *d, uint32_t n_rows, uint32_t vocab, float spread)
{
    struct twin logits = twin_f32(d, (size_t)n_rows * vocab, spread),
                params = twin_new(d, n_rows * sizeof(struct dmk_sample_row)),
                out = twin_new(d, n_rows * sizeof(struct dmk_sample_out));
    struct dmk_sample_row *p = params.host;
    struct dmk_sample_out *got = malloc(out.bytes);
    struct dmk_sampler *sampler;
    uint32_t *ids = calloc(64, sizeof(*ids));
    float *x = logits.host;
    dmk_assert(got && ids && dmk_sampler_new(vocab, &sampler) == 0);
    for (uint32_t i = 0; i < n_rows; i++) {
        float *row = x + (size_t)i * vocab;
        switch (i % 6) {
        case 1: /* equal largest logits */
            row[vocab / 3] = row[vocab / 2] = row[vocab - 1] = spread + 1.0f;
            break;
        case 2: /* most can not be picked */
            for (uint32_t j = 0; j < vocab; j++) {
                row[j] = j % 977 == 5 ? row[j] : -INFINITY;
            }
            break;
        case 3:
            row[draw_u32(d, vocab)] = i % 4 == 3 ? NAN : INFINITY;
            break;
        case 4:
            for (uint32_t j = 0; j < vocab && i > 6; j++) {
                row[j] = -INFINITY;
            }
            break;
        default:
            break;
        }
    }
    twin_send(d, logits);
    for (uint32_t i = 0; i < n_rows; i++) {
        const float temperature = i % 3 == 0 ? 0.0f : 0.25f + 0.5f * (float)(i % 5);
        p[i].scale = temperature > 0.0f ? 1.0f / temperature : 0.0f;
        p[i].min_p = i % 4 == 2 ? 0.05f : 0.0f;
        p[i].unit = dmk_rng_unit(d->seed + i, DMK_DRAW_TOKEN, 7);
    }
    twin_send(d, params);
    d->cuda.sample(&(struct dmk_sample_args){logits.dev, params.dev, out.dev, n_rows, vocab},
                   d->stream);
    device_fetch(d, got, out.dev, out.bytes);
    for (uint32_t i = 0; i < n_rows; i++) {
        const struct dmk_sample_params sp = {
            .temperature = p[i].scale > 0.0f ? 0.25f + 0.5f * (float)(i % 5) : 0.0f,
            .top_p = 1.0f,
            .min_p = p[i].min_p,
            .repetition_penalty = 1.0f,
            .seed = d->seed + i,
            .logprobs = true};
        const struct dmk_sample_context context = {.ids = ids, .n_ids = 7, .n_prompt = 7};
        struct dmk_sample_result want = {0};
        int status = dmk_sample(sampler, &sp, &context, x + (size_t)i * vocab, &want);
        const int code = status == -DMK_EFORMAT ? 1 : status == -DMK_ENOENT ? 2 : 0;
        char how[160];
        const float logprob =
            code ? 0.0f : (float)((double)got[i].logit - ((double)got[i].max + log(got[i].sum)));
        if (got[i].status != code ||
            (code == 0 && (got[i].id != want.id || logprob != want.logprob))) {
            snprintf(how, sizeof(how),
                     "row %u: status %d id %u logprob %.9g instead of %d, %u, %.9g", i,
                     got[i].status, got[i].id, logprob, code, want.id, want.logprob);
            fail(d, "sample", how);
        }
    }
    dmk_sampler_free(&sampler);
    free(ids);
    free(got);
    device_end(d, "sample");
}

static void run_sample(struct device *d, void *ud)
{
    d->cuda.sample(ud, d->stream);
}

static void bench(struct device *d, uint32_t n)
{
    char what[64];
    const uint32_t vocab = 201088;
    struct twin logits = twin_device(d, (size_t)n * vocab * 4),
                params = twin_new(d, n * sizeof(struct dmk_sample_row)),
                out = twin_new(d, n * sizeof(struct dmk_sample_out));
    struct dmk_sample_row *p = params.host;
    for (uint32_t i = 0; i < n; i++) {
        p[i] = (struct dmk_sample_row){1.0f, 0.0f, 0.37};
    }
    twin_send(d, params);
    d->be->ops->fill(d->be, d->stream, logits.dev, logits.bytes, DMK_FILL_BF16, 4.0f, d->seed);
    struct dmk_sample_args args = {logits.dev, params.dev, out.dev, n, vocab};
    snprintf(what, sizeof(what), "sample %u rows", n);
    device_bench(d, what, run_sample, &args, (double)logits.bytes * 3, 0);
    device_end(d, what);
}

void check_sample(struct device *d)
{
    if (d->bench) {
        bench(d, 1);
        bench(d, 128);
        return;
    }
    rows(d, 12, 1571, 3.0f);
    rows(d, 13, 1572, 8.0f);
    rows(d, 7, 100, 2.0f);
    rows(d, 24, 201088, 6.0f);
}
