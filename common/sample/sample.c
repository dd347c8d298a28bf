/* The sampler; see sample.h. One thread per sampler. */
#include "common/sample/sample.h"
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "common/sample/reduce.h"
#include "common/sample/select.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SEEN 0x80000000u /* of a count: the id is in the prompt or the answer */

struct dmk_sampler {
    uint32_t vocab, n_blocks;
    float *work;                           /* [vocab] the row with bias and penalties */
    uint32_t *count;                       /* [vocab] all 0 between calls */
    float *block_max;                      /* [n_blocks] */
    double *block_sum;                     /* [n_blocks] */
    float *weight;                         /* [vocab] of candidates, or of a block */
    struct dmk_candidate *candidate, *tmp; /* [vocab] */
};

int dmk_sampler_new(uint32_t vocab, struct dmk_sampler **ret)
{
    struct dmk_sampler *s = calloc(1, sizeof(*s));

    dmk_assert(vocab > 0);
    if (!s) {
        return -DMK_ENOMEM;
    }
    s->vocab = vocab;
    s->n_blocks = (vocab + DMK_SAMPLE_BLOCK - 1) / DMK_SAMPLE_BLOCK;
    s->work = malloc(vocab * sizeof(*s->work));
    s->count = calloc(vocab, sizeof(*s->count));
    s->block_max = malloc(s->n_blocks * sizeof(*s->block_max));
    s->block_sum = malloc(s->n_blocks * sizeof(*s->block_sum));
    s->weight = malloc(vocab * sizeof(*s->weight));
    s->candidate = malloc(vocab * sizeof(*s->candidate));
    s->tmp = malloc(vocab * sizeof(*s->tmp));
    if (!s->work || !s->count || !s->block_max || !s->block_sum || !s->weight || !s->candidate ||
        !s->tmp) {
        dmk_sampler_free(&s);
        return -DMK_ENOMEM;
    }
    *ret = s;
    return 0;
}

void dmk_sampler_free(struct dmk_sampler **sampler)
{
    struct dmk_sampler *s = sampler ? *sampler : NULL;

    if (!s) {
        return;
    }
    free(s->work);
    free(s->count);
    free(s->block_max);
    free(s->block_sum);
    free(s->weight);
    free(s->candidate);
    free(s->tmp);
    free(s);
    *sampler = NULL;
}

static uint32_t block_len(const struct dmk_sampler *s, uint32_t block)
{
    const uint32_t left = s->vocab - block * DMK_SAMPLE_BLOCK;

    return left < DMK_SAMPLE_BLOCK ? left : DMK_SAMPLE_BLOCK;
}

/* Fills the block maxima and gives the largest of all. */
static int find_max(struct dmk_sampler *s, const float *x, float *ret_max)
{
    float max = -INFINITY;

    for (uint32_t b = 0; b < s->n_blocks; b++) {
        const struct dmk_block_max m = dmk_reduce_max(x + b * DMK_SAMPLE_BLOCK, block_len(s, b));

        if (m.broken) {
            return -DMK_EFORMAT;
        }
        s->block_max[b] = m.max;
        max = m.max > max ? m.max : max;
    }
    if (max == -INFINITY) {
        return -DMK_ENOENT;
    }
    *ret_max = max;
    return 0;
}

/* Fills the block sums and gives their sum; at least 1, which is what the largest logit weighs. */
static double find_sum(struct dmk_sampler *s, const float *x, float max, float scale,
                       float min_weight)
{
    double sum = 0.0;

    for (uint32_t b = 0; b < s->n_blocks; b++) {
        s->block_sum[b] =
            dmk_reduce_sum(x + b * DMK_SAMPLE_BLOCK, block_len(s, b), max, scale, min_weight);
        sum += s->block_sum[b];
    }
    return sum;
}

/* The lowest id among the largest. */
static uint32_t find_argmax(const struct dmk_sampler *s, const float *x, float max)
{
    for (uint32_t b = 0; b < s->n_blocks; b++) {
        const uint32_t start = b * DMK_SAMPLE_BLOCK;

        if (s->block_max[b] < max) {
            continue;
        }
        for (uint32_t i = start; i < start + block_len(s, b); i++) {
            if (x[i] == max) {
                return i;
            }
        }
    }
    dmk_unreachable("the largest logit is nowhere");
}

/* Log-probabilities of the row whose maxima were just found. Returns the log of the sum of exp. */
static double report(struct dmk_sampler *s, const float *x, float max, uint32_t n_top,
                     struct dmk_sample_result *ret)
{
    const double log_sum = (double)max + log(find_sum(s, x, max, 1.0f, 0.0f));
    const struct dmk_row row = {x, s->vocab, s->block_max};
    struct dmk_candidate top[DMK_SAMPLE_MAX_TOP];

    dmk_assert(n_top <= DMK_SAMPLE_MAX_TOP);
    ret->n_top = dmk_select_top(&row, n_top, top);
    for (uint32_t i = 0; i < ret->n_top; i++) {
        ret->top[i] = (struct dmk_sample_top){top[i].id, (float)((double)top[i].x - log_sum)};
    }
    return log_sum;
}

static bool has_penalty(const struct dmk_sample_params *p)
{
    return p->frequency_penalty != 0.0f || p->presence_penalty != 0.0f ||
           p->repetition_penalty != 1.0f;
}

/* Counts are made from the ids at each call, in two passes over them: no state beside the sequence. */
static void apply_penalties(struct dmk_sampler *s, const struct dmk_sample_params *p,
                            const struct dmk_sample_context *c)
{
    for (uint32_t i = 0; i < c->n_ids; i++) {
        dmk_assert(c->ids[i] < s->vocab);
        s->count[c->ids[i]] = (s->count[c->ids[i]] + (i >= c->n_prompt)) | SEEN;
    }
    for (uint32_t i = 0; i < c->n_ids; i++) {
        const uint32_t id = c->ids[i];
        const uint32_t n = s->count[id] & ~SEEN;
        float x = s->work[id];

        if (s->count[id] == 0) {
            continue; /* done at its first place */
        }
        s->count[id] = 0;
        if (p->repetition_penalty != 1.0f) {
            x = x > 0.0f ? x / p->repetition_penalty : x * p->repetition_penalty;
        }
        if (n > 0) {
            x = x - (float)n * p->frequency_penalty - p->presence_penalty;
        }
        s->work[id] = x;
    }
}

/* Word by word: in most masks nearly all bits of a word are alike. */
static void apply_mask(struct dmk_sampler *s, const uint64_t *allowed)
{
    for (uint32_t w = 0; w * 64 < s->vocab; w++) {
        const uint32_t n = s->vocab - w * 64 < 64 ? s->vocab - w * 64 : 64;
        float *x = s->work + (size_t)w * 64;

        if (allowed[w] == UINT64_MAX) {
            continue;
        }
        for (uint32_t i = 0; i < n; i++) {
            x[i] = allowed[w] >> i & 1 ? x[i] : -INFINITY;
        }
    }
}

/* The row to pick from: the logits themselves, or a copy with bans, mask, bias and penalties. */
static const float *edit_row(struct dmk_sampler *s, const struct dmk_sample_params *p,
                             const struct dmk_sample_context *c, const float *logits)
{
    const bool penalty = has_penalty(p) && c->n_ids > 0;

    if (p->n_bias == 0 && c->n_banned == 0 && !c->allowed && !penalty) {
        return logits;
    }
    memcpy(s->work, logits, s->vocab * sizeof(*s->work));
    for (uint32_t i = 0; i < c->n_banned; i++) {
        dmk_assert(c->banned[i] < s->vocab);
        s->work[c->banned[i]] = -INFINITY;
    }
    if (c->allowed) {
        apply_mask(s, c->allowed);
    }
    for (uint32_t i = 0; i < p->n_bias; i++) {
        dmk_assert(p->bias_ids[i] < s->vocab);
        s->work[p->bias_ids[i]] += p->bias_values[i];
    }
    if (penalty) {
        apply_penalties(s, p, c);
    }
    return s->work;
}

/* The first of n weights at which the running sum passes target; the last positive one when rounding keeps
 * it from passing. */
static uint32_t walk(const float *weight, uint32_t n, double target)
{
    double sum = 0.0;
    uint32_t last = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (weight[i] > 0.0f) {
            sum += weight[i];
            last = i;
            if (sum > target) {
                break;
            }
        }
    }
    return last;
}

/* Picks among all tokens that min-p leaves: first the block, then the row in it. */
static uint32_t draw_all(struct dmk_sampler *s, const float *x, float max, float scale, float min_p,
                         double unit)
{
    const double target = unit * find_sum(s, x, max, scale, min_p);
    double before = 0.0, sum = 0.0;
    uint32_t block = 0;

    for (uint32_t b = 0; b < s->n_blocks; b++) {
        if (s->block_sum[b] > 0.0) {
            block = b;
            before = sum;
            sum += s->block_sum[b];
            if (sum > target) {
                break;
            }
        }
    }
    dmk_reduce_weights(x + block * DMK_SAMPLE_BLOCK, block_len(s, block), max, scale, min_p,
                       s->weight);
    return block * DMK_SAMPLE_BLOCK + walk(s->weight, block_len(s, block), target - before);
}

/* Fills candidate and weight with the n tokens above cutoff, in the order of ids; returns n. */
static uint32_t gather(struct dmk_sampler *s, const struct dmk_row *row, float cutoff,
                       double *ret_sum, float max, float scale)
{
    const uint32_t n = dmk_select_above(row, cutoff, s->candidate);
    double sum = 0.0;

    for (uint32_t i = 0; i < n; i++) {
        s->weight[i] = s->candidate[i].x;
    }
    dmk_reduce_weights(s->weight, n, max, scale, 0.0f, s->weight);
    for (uint32_t i = 0; i < n; i++) {
        sum += s->weight[i];
    }
    *ret_sum = sum;
    return n;
}

/* Picks among the largest tokens that top-k and top-p leave. Candidates are gathered above a cutoff that
 * is lowered until they hold what is needed, so that usually only few are sorted. */
static uint32_t draw_best(struct dmk_sampler *s, const float *x, float max,
                          const struct dmk_sample_params *p, double unit)
{
    const struct dmk_row row = {x, s->vocab, s->block_max};
    const float scale = 1.0f / p->temperature;
    const uint32_t k = p->top_k && p->top_k < s->vocab ? p->top_k : s->vocab;
    const bool by_count = k < s->vocab;
    double need = 0.0, have = 0.0, sum = 0.0;
    float cutoff, depth = 4.0f * p->temperature;
    uint32_t n, keep;

    if (!by_count) {
        need = p->top_p * find_sum(s, x, max, scale, p->min_p);
    }
    cutoff = by_count ? dmk_select_cutoff(&row, k) : -INFINITY;
    if (cutoff > -INFINITY) {
        n = gather(s, &row, cutoff, &have, max, scale);
    } else {
        do {
            cutoff = depth < 1e4f ? max - depth : -INFINITY;
            depth *= 4.0f;
            n = gather(s, &row, cutoff, &have, max, scale);
        } while ((by_count ? n < k : have < need) && cutoff > -INFINITY);
    }
    dmk_select_sort(s->candidate, s->tmp, n);
    n = n < k ? n : k;
    for (uint32_t i = 0; i < n; i++) {
        s->weight[i] = s->candidate[i].x;
    }
    dmk_reduce_weights(s->weight, n, max, scale, p->min_p, s->weight);
    if (by_count) {
        for (uint32_t i = 0; i < n; i++) {
            need += s->weight[i];
        }
        need *= p->top_p;
    }
    for (keep = 0; keep < n && s->weight[keep] > 0.0f && (keep == 0 || sum < need); keep++) {
        sum += s->weight[keep];
    }
    return s->candidate[walk(s->weight, keep, unit * sum)].id;
}

bool dmk_sample_plain(const struct dmk_sample_params *params,
                      const struct dmk_sample_context *context, uint32_t vocab,
                      struct dmk_sample_draw *ret)
{
    const uint64_t stream = (uint64_t)context->choice << 8 | DMK_DRAW_TOKEN;
    const bool greedy = params->temperature < DMK_SAMPLE_GREEDY;

    if (params->n_bias > 0 || context->n_banned > 0 || context->allowed ||
        (has_penalty(params) && context->n_ids > 0) ||
        (params->logprobs && params->top_logprobs > 0)) {
        return false;
    }
    if (!greedy && (params->top_p < 1.0f || (params->top_k != 0 && params->top_k < vocab))) {
        return false;
    }
    *ret = (struct dmk_sample_draw){0};
    if (!greedy) {
        ret->scale = 1.0f / params->temperature;
        ret->min_p = params->min_p;
        ret->unit = dmk_rng_unit(params->seed, stream, context->n_ids);
    }
    return true;
}

void dmk_sample_plain_result(const struct dmk_sample_params *params, uint32_t id, float logit,
                             float max, double sum, struct dmk_sample_result *ret)
{
    const double log_sum = (double)max + log(sum);

    ret->id = id;
    ret->n_top = 0;
    ret->logprob = params->logprobs ? (float)((double)logit - log_sum) : 0.0f;
}

int dmk_sample(struct dmk_sampler *sampler, const struct dmk_sample_params *params,
               const struct dmk_sample_context *context, const float *logits,
               struct dmk_sample_result *ret)
{
    const uint64_t stream = (uint64_t)context->choice << 8 | DMK_DRAW_TOKEN;
    const float *x;
    double log_sum = 0.0, unit;
    uint32_t id;
    float max;
    int r = find_max(sampler, logits, &max);

    if (r < 0) {
        return r;
    }
    if (params->logprobs) {
        log_sum = report(sampler, logits, max, params->top_logprobs, ret);
    } else {
        ret->n_top = 0;
    }
    x = edit_row(sampler, params, context, logits);
    if (x != logits) {
        r = find_max(sampler, x, &max);
        if (r < 0) {
            return r;
        }
    }
    if (params->temperature <= DMK_SAMPLE_GREEDY) {
        id = find_argmax(sampler, x, max);
    } else {
        unit = dmk_rng_unit(params->seed, stream, context->n_ids);
        if (params->top_p >= 1.0f && (params->top_k == 0 || params->top_k >= sampler->vocab)) {
            id = draw_all(sampler, x, max, 1.0f / params->temperature, params->min_p, unit);
        } else {
            id = draw_best(sampler, x, max, params, unit);
        }
    }
    ret->id = id;
    ret->logprob = params->logprobs ? (float)((double)logits[id] - log_sum) : 0.0f;
    return 0;
}

int dmk_sample_score(struct dmk_sampler *sampler, const float *logits, uint32_t id, uint32_t n_top,
                     struct dmk_sample_result *ret)
{
    float max;
    const int r = find_max(sampler, logits, &max);

    dmk_assert(id < sampler->vocab);
    if (r < 0) {
        return r;
    }
    ret->logprob = (float)((double)logits[id] - report(sampler, logits, max, n_top, ret));
    ret->id = id;
    return 0;
}
