/* The sampler: against exact probabilities, against a slow reference over random parameters, and its
 * edges. */
#include "tests/unit/sample/sample_test.h"
#include "common/base/rng.h"
#include "common/sample/reduce.h"
#include <string.h>

#define VOCAB      (DMK_SAMPLE_BLOCK * 3 + 300)
#define MASK_WORDS ((VOCAB + 63) / 64)

static const struct dmk_sample_params plain = {
    .temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f};

static struct dmk_sampler *new_sampler(uint32_t vocab)
{
    struct dmk_sampler *s;

    assert_int_equal(dmk_sampler_new(vocab, &s), 0);
    return s;
}

/* One draw at a position; no penalty is on, so the ids are not read. */
static uint32_t draw(struct dmk_sampler *s, const struct dmk_sample_params *p, const float *x,
                     uint32_t position)
{
    const struct dmk_sample_context c = {.n_ids = position};
    struct dmk_sample_result r;

    assert_int_equal(dmk_sample(s, p, &c, x, &r), 0);
    return r.id;
}

/* The slow reference: fp64 and a full sort. */
struct reference {
    double share[VOCAB];   /* of each id among what min-p and top-k leave */
    uint32_t order[VOCAB]; /* what they leave: by logit descending, or by id where nothing is cut */
    uint32_t n;
    double top_p;
};

static const float *order_row;

static int compare(const void *a, const void *b)
{
    const uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;

    if (order_row[i] != order_row[k]) {
        return order_row[i] > order_row[k] ? -1 : 1;
    }
    return i < k ? -1 : i > k;
}

static void edit(float *x, const struct dmk_sample_params *p, const struct dmk_sample_context *c)
{
    for (uint32_t i = 0; i < VOCAB; i++) {
        uint32_t n_prompt = 0, n_answer = 0;

        for (uint32_t k = 0; k < c->n_banned; k++) {
            x[i] = c->banned[k] == i ? -INFINITY : x[i];
        }
        if (c->allowed && !(c->allowed[i / 64] >> i % 64 & 1)) {
            x[i] = -INFINITY;
        }
        for (uint32_t k = 0; k < p->n_bias; k++) {
            x[i] += p->bias_ids[k] == i ? p->bias_values[k] : 0.0f;
        }
        for (uint32_t k = 0; k < c->n_ids; k++) {
            n_prompt += c->ids[k] == i && k < c->n_prompt;
            n_answer += c->ids[k] == i && k >= c->n_prompt;
        }
        if (n_prompt + n_answer > 0) {
            x[i] = x[i] > 0 ? x[i] / p->repetition_penalty : x[i] * p->repetition_penalty;
        }
        if (n_answer > 0) {
            x[i] -= (float)n_answer * p->frequency_penalty;
            x[i] -= p->presence_penalty;
        }
    }
}

static void refer(struct reference *ref, const float *x, const struct dmk_sample_params *p)
{
    const bool cut = p->top_p < 1.0f || (p->top_k > 0 && p->top_k < VOCAB);
    double sum = 0.0;
    float max = -INFINITY;

    ref->n = 0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        max = x[i] > max ? x[i] : max;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        ref->share[i] = exp(((double)x[i] - max) / p->temperature);
        if (ref->share[i] >= p->min_p && ref->share[i] > 1e-37) {
            ref->order[ref->n++] = i;
        }
    }
    if (cut) {
        order_row = x;
        qsort(ref->order, ref->n, sizeof(*ref->order), compare);
        ref->n = p->top_k && p->top_k < ref->n ? p->top_k : ref->n;
    }
    for (uint32_t i = 0; i < ref->n; i++) {
        sum += ref->share[ref->order[i]];
    }
    for (uint32_t i = 0; i < ref->n; i++) {
        ref->share[ref->order[i]] /= sum;
    }
    ref->top_p = p->top_p;
}

/* Whether id is what unit picks; a token whose border is within fp32's reach of it counts too. */
static bool agrees(const struct reference *ref, uint32_t id, double unit)
{
    const double slack = 2e-6;
    double total = 0.0, before = 0.0;
    uint32_t n = 0;

    while (n < ref->n && (n == 0 || total < ref->top_p - slack)) {
        total += ref->share[ref->order[n++]];
    }
    for (uint32_t i = 0; i < ref->n; i++) {
        const double share = ref->share[ref->order[i]];

        if (ref->order[i] == id) {
            /* Near the border of the nucleus the total may hold one token more. */
            const double most = (i < n ? total : total + share) + slack;

            return (i < n || before < ref->top_p + slack) && before <= unit * most + slack &&
                   before + share >= unit * total - slack;
        }
        before += share;
    }
    return false;
}

/* What a random turn of the test against the reference consists of. */
struct turn {
    struct dmk_sample_params p;
    struct dmk_sample_context c;
    uint32_t ids[30], bias_ids[5], banned[3];
    float bias[5];
    uint64_t mask[MASK_WORDS];
};

static void make_turn(struct turn *t, int number, struct random *r)
{
    *t = (struct turn){.p = plain, .c = {.choice = random_below(r, 4)}};
    t->p.seed = (uint64_t)number * 77;
    t->p.temperature = number % 7 == 0 ? 0.0f : (float)exp(random_unit(r) * 4.0 - 3.0);
    t->p.top_k = random_below(r, 2) ? 0 : 1 + random_below(r, random_below(r, 2) ? 4 : VOCAB);
    t->p.top_p = random_below(r, 2) ? 1.0f : (float)random_unit(r) * 0.999f + 0.0005f;
    t->p.min_p = random_below(r, 2) ? 0.0f : (float)random_unit(r) * 0.3f;
    if (random_below(r, 2)) {
        for (uint32_t i = 0; i < 30; i++) {
            t->ids[i] = random_below(r, 20);
        }
        t->c.ids = t->ids;
        t->c.n_ids = random_below(r, 31);
        t->c.n_prompt = random_below(r, t->c.n_ids + 1);
        t->p.frequency_penalty = (float)random_unit(r) * 4 - 2;
        t->p.presence_penalty = (float)random_unit(r) * 4 - 2;
        t->p.repetition_penalty = 0.5f + (float)random_unit(r);
    }
    if (random_below(r, 2)) {
        for (uint32_t i = 0; i < 5; i++) {
            t->bias_ids[i] = random_below(r, 8); /* some twice */
            t->bias[i] = i == 4 ? -INFINITY : (float)random_unit(r) * 20 - 10;
        }
        t->p.n_bias = 5;
        t->p.bias_ids = t->bias_ids;
        t->p.bias_values = t->bias;
        for (uint32_t i = 0; i < 3; i++) {
            t->banned[i] = random_below(r, VOCAB);
        }
        t->c.banned = t->banned;
        t->c.n_banned = 3;
    }
    if (random_below(r, 4) == 0) {
        for (uint32_t i = 0; i < MASK_WORDS; i++) {
            t->mask[i] = dmk_rng_u64(r->seed, 2, r->n) & dmk_rng_u64(r->seed, 3, r->n);
            r->n++;
        }
        t->c.allowed = t->mask;
    }
}

static void test_reference(void **state)
{
    struct dmk_sampler *s = new_sampler(VOCAB);
    struct random r = {20261129, 0};
    float *x = malloc(VOCAB * sizeof(*x)), *y = malloc(VOCAB * sizeof(*y));
    struct reference *ref = malloc(sizeof(*ref));

    (void)state;
    print_message("seed %llu\n", (unsigned long long)r.seed);
    for (int number = 0; number < 400; number++) {
        const float spread = (float)exp(random_unit(&r) * 4.0 - 1.5);
        struct dmk_sample_result out;
        struct turn t;

        make_turn(&t, number, &r);
        for (uint32_t i = 0; i < VOCAB; i++) {
            x[i] = number % 5 == 0 ? (float)random_below(&r, 6) : random_normal(&r) * spread;
        }
        memcpy(y, x, VOCAB * sizeof(*x));
        assert_int_equal(dmk_sample_params_check(&t.p, VOCAB, NULL), 0);
        assert_int_equal(dmk_sample(s, &t.p, &t.c, x, &out), 0);
        assert_memory_equal(x, y, VOCAB * sizeof(*x));
        edit(y, &t.p, &t.c);
        if (t.p.temperature == 0.0f) {
            for (uint32_t i = 0; i < VOCAB; i++) {
                assert_true(y[i] < y[out.id] || (y[i] == y[out.id] && i >= out.id));
            }
            continue;
        }
        refer(ref, y, &t.p);
        if (!agrees(ref, out.id, dmk_rng_unit(t.p.seed, (uint64_t)t.c.choice << 8, t.c.n_ids))) {
            print_error("turn %d: id %u with T %g, k %u, p %g, min %g\n", number, out.id,
                        (double)t.p.temperature, t.p.top_k, (double)t.p.top_p, (double)t.p.min_p);
            fail();
        }
    }
    free(x);
    free(y);
    free(ref);
    dmk_sampler_free(&s);
}

/* Chi-square over many positions; the bound is four standard deviations above the expectation. */
static void check_distribution(const struct dmk_sample_params *p, const float *x, uint32_t vocab,
                               const double *share)
{
    struct dmk_sampler *s = new_sampler(vocab);
    uint32_t *seen = calloc(vocab, sizeof(*seen));
    const uint32_t n = 40000;
    double chi = 0.0, rest = 0.0;
    uint32_t n_classes = 0, n_rest = 0;

    for (uint32_t i = 0; i < n; i++) {
        seen[draw(s, p, x, i)]++;
    }
    for (uint32_t i = 0; i < vocab; i++) {
        const double want = share[i] * n;

        if (share[i] == 0.0) {
            assert_int_equal(seen[i], 0);
        } else if (want < 8.0) {
            rest += want;
            n_rest += seen[i];
        } else {
            chi += (seen[i] - want) * (seen[i] - want) / want;
            n_classes++;
        }
    }
    if (rest > 0.0) {
        chi += (n_rest - rest) * (n_rest - rest) / rest;
        n_classes++;
    }
    print_message("chi-square %.1f over %u classes\n", chi, n_classes);
    assert_true(n_classes > 1);
    assert_true(chi < n_classes - 1 + 4.0 * sqrt(2.0 * (n_classes - 1)));
    free(seen);
    dmk_sampler_free(&s);
}

static void test_distribution(void **state)
{
    const uint32_t vocab = 2000;
    float *x = malloc(vocab * sizeof(*x)), max = -INFINITY;
    double *share = malloc(vocab * sizeof(*share));
    struct random r = {5, 0};

    (void)state;
    for (uint32_t i = 0; i < vocab; i++) {
        x[i] = random_normal(&r) * 2.0f;
        max = x[i] > max ? x[i] : max;
    }
    for (int turn = 0; turn < 3; turn++) {
        struct dmk_sample_params p = plain;
        double sum = 0.0;

        p.seed = 100 + (uint64_t)turn;
        p.temperature = turn == 1 ? 0.6f : 1.0f;
        p.min_p = turn == 2 ? 0.02f : 0.0f;
        for (uint32_t i = 0; i < vocab; i++) {
            share[i] = exp(((double)x[i] - max) / p.temperature);
            share[i] = share[i] >= p.min_p ? share[i] : 0.0;
            sum += share[i];
        }
        for (uint32_t i = 0; i < vocab; i++) {
            share[i] /= sum;
        }
        check_distribution(&p, x, vocab, share);
    }
    free(x);
    free(share);
}

/* Four tokens of 0.4, 0.3, 0.2, 0.1: the nucleus of 0.6 is the first two, of 0.75 the first three. */
static void test_nucleus(void **state)
{
    const float x[8] = {-INFINITY,  logf(0.1f), logf(0.4f), -INFINITY,
                        logf(0.3f), logf(0.2f), -90.0f,     -90.0f};
    struct dmk_sample_params p = plain;
    double share[8] = {0};

    (void)state;
    p.seed = 7;
    share[2] = 4.0 / 7.0;
    share[4] = 3.0 / 7.0;
    p.top_p = 0.6f;
    check_distribution(&p, x, 8, share);
    p.top_p = 1.0f;
    p.top_k = 2;
    check_distribution(&p, x, 8, share);
    p.top_k = 3; /* 4/9 + 3/9 reaches 0.77 */
    p.top_p = 0.77f;
    check_distribution(&p, x, 8, share);
    share[2] = 4.0 / 9.0;
    share[4] = 3.0 / 9.0;
    share[5] = 2.0 / 9.0;
    p.top_k = 0;
    p.top_p = 0.75f;
    check_distribution(&p, x, 8, share);
    p.min_p = 0.45f; /* leaves 0.4, 0.3 and 0.2 */
    p.top_p = 0.999f;
    check_distribution(&p, x, 8, share);
}

/* The same seed, choice and position give the same token, whatever was sampled in between; others are
 * independent of it. */
static void test_determinism(void **state)
{
    struct dmk_sampler *a = new_sampler(VOCAB), *b = new_sampler(VOCAB);
    float *x = calloc(VOCAB, sizeof(*x));
    struct dmk_sample_params p = plain, q = plain;
    uint32_t same_seed = 0, same_choice = 0, same_position = 0;

    (void)state;
    q.seed = 1;
    for (uint32_t i = 0; i < 2000; i++) {
        struct dmk_sample_context c = {.n_ids = i, .choice = 0};
        struct dmk_sample_result one, two;

        p.top_p = i % 2 ? 0.5f : 1.0f;
        q.top_p = p.top_p;
        assert_int_equal(dmk_sample(a, &p, &c, x, &one), 0);
        (void)draw(b, &q, x, 1234567 + i);
        assert_int_equal(dmk_sample(b, &p, &c, x, &two), 0);
        assert_int_equal(one.id, two.id);
        assert_int_equal(dmk_sample(b, &q, &c, x, &two), 0);
        same_seed += one.id == two.id;
        c.choice = 1;
        assert_int_equal(dmk_sample(b, &p, &c, x, &two), 0);
        same_choice += one.id == two.id;
        c = (struct dmk_sample_context){.n_ids = i + 1};
        assert_int_equal(dmk_sample(b, &p, &c, x, &two), 0);
        same_position += one.id == two.id;
    }
    /* By chance less than one of 2000. */
    assert_true(same_seed < 10 && same_choice < 10 && same_position < 10);
    free(x);
    dmk_sampler_free(&a);
    dmk_sampler_free(&b);
}

static void test_ties(void **state)
{
    struct dmk_sampler *s = new_sampler(VOCAB);
    float *x = calloc(VOCAB, sizeof(*x));
    struct dmk_sample_params p = plain;

    (void)state;
    p.temperature = 0.0f;
    assert_int_equal(draw(s, &p, x, 0), 0);
    x[0] = -0.0f; /* equals +0 */
    assert_int_equal(draw(s, &p, x, 0), 0);
    x[VOCAB - 1] = 1.0f;
    assert_int_equal(draw(s, &p, x, 0), VOCAB - 1);
    x[DMK_SAMPLE_BLOCK] = 1.0f;
    assert_int_equal(draw(s, &p, x, 0), DMK_SAMPLE_BLOCK);
    x[DMK_SAMPLE_BLOCK - 1] = 1.0f;
    assert_int_equal(draw(s, &p, x, 0), DMK_SAMPLE_BLOCK - 1);
    /* top-k 1 and a tiny nucleus are greedy at any temperature, ties included. */
    p.temperature = 50.0f;
    for (uint32_t i = 0; i < 20; i++) {
        p.top_k = 1;
        p.top_p = 1.0f;
        assert_int_equal(draw(s, &p, x, i), DMK_SAMPLE_BLOCK - 1);
        p.top_k = 0;
        p.top_p = 1e-7f;
        assert_int_equal(draw(s, &p, x, i), DMK_SAMPLE_BLOCK - 1);
    }
    /* min-p 1 keeps exactly the largest ones. */
    p = plain;
    p.min_p = 1.0f;
    for (uint32_t i = 0; i < 50; i++) {
        assert_true(x[draw(s, &p, x, i)] == 1.0f);
    }
    free(x);
    dmk_sampler_free(&s);
}

static void test_top_k_exact(void **state)
{
    struct dmk_sampler *s = new_sampler(VOCAB);
    float *x = calloc(VOCAB, sizeof(*x));
    struct dmk_sample_params p = plain;
    uint32_t seen[10] = {0};

    (void)state;
    /* All equal: exactly the ten lowest ids, each of them. */
    p.top_k = 10;
    for (uint32_t i = 0; i < 500; i++) {
        const uint32_t id = draw(s, &p, x, i);

        assert_true(id < 10);
        seen[id]++;
    }
    for (int i = 0; i < 10; i++) {
        assert_true(seen[i] > 20);
    }
    p.top_k = VOCAB + 5; /* off */
    assert_true(draw(s, &p, x, 3) < VOCAB);
    free(x);
    dmk_sampler_free(&s);
}

/* Ends with a status for every broken row, on every path. */
static void test_broken(void **state)
{
    static const float bad[] = {NAN, INFINITY};
    struct dmk_sampler *s = new_sampler(VOCAB);
    float *x = calloc(VOCAB, sizeof(*x));
    const uint32_t banned[] = {17};
    uint64_t mask[MASK_WORDS] = {0};

    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        struct dmk_sample_params p = plain;
        struct dmk_sample_context c = {.n_ids = 0};
        struct dmk_sample_result r;

        p.temperature = kind == 0 ? 0.0f : 1.0f;
        p.top_p = kind == 2 ? 0.9f : 1.0f;
        p.top_k = kind == 3 ? 5 : 0;
        for (int b = 0; b < 2; b++) {
            for (uint32_t at = 0; at < VOCAB; at += 999) {
                x[at] = bad[b];
                assert_int_equal(dmk_sample(s, &p, &c, x, &r), -DMK_EFORMAT);
                assert_int_equal(dmk_sample_score(s, x, 3, 1, &r), -DMK_EFORMAT);
                x[at] = 0.0f;
            }
        }
        c.allowed = mask;
        assert_int_equal(dmk_sample(s, &p, &c, x, &r), -DMK_ENOENT);
        mask[0] = 1u << 17;
        assert_int_equal(dmk_sample(s, &p, &c, x, &r), 0);
        assert_int_equal(r.id, 17);
        c.banned = banned;
        c.n_banned = 1;
        assert_int_equal(dmk_sample(s, &p, &c, x, &r), -DMK_ENOENT);
        mask[0] = 0;
        for (uint32_t i = 0; i < VOCAB; i++) {
            x[i] = -INFINITY;
        }
        c = (struct dmk_sample_context){.n_ids = 0};
        assert_int_equal(dmk_sample(s, &p, &c, x, &r), -DMK_ENOENT);
        x[4000] = -1e30f; /* one finite logit is enough */
        assert_int_equal(dmk_sample(s, &p, &c, x, &r), 0);
        assert_int_equal(r.id, 4000);
        memset(x, 0, VOCAB * sizeof(*x));
    }
    free(x);
    dmk_sampler_free(&s);
}

static void test_logprobs(void **state)
{
    struct dmk_sampler *s = new_sampler(VOCAB);
    float *x = malloc(VOCAB * sizeof(*x)), max = -INFINITY;
    const uint32_t ids[] = {5, 5, 6}, banned[] = {77};
    struct random r = {11, 0};
    struct dmk_sample_params p = plain;
    struct dmk_sample_context c = {
        .ids = ids, .n_ids = 3, .n_prompt = 1, .banned = banned, .n_banned = 1};
    struct dmk_sample_result out;
    double sum = 0.0;

    (void)state;
    for (uint32_t i = 0; i < VOCAB; i++) {
        x[i] = random_normal(&r) * 3.0f;
        max = x[i] > max ? x[i] : max;
    }
    x[77] = x[4321] = max + 0.25f; /* a tie at the top of the report */
    for (uint32_t i = 0; i < VOCAB; i++) {
        sum += exp((double)x[i]);
    }
    p.logprobs = true;
    p.top_logprobs = 20;
    p.frequency_penalty = 1.5f;
    p.temperature = 0.3f;
    p.top_k = 3;
    assert_int_equal(dmk_sample(s, &p, &c, x, &out), 0);
    assert_int_not_equal(out.id, 77);
    assert_true(fabs(out.logprob - ((double)x[out.id] - log(sum))) < 1e-5);
    /* Of the raw row: what is banned is reported all the same. */
    assert_int_equal(out.n_top, 20);
    assert_int_equal(out.top[0].id, 77);
    assert_int_equal(out.top[1].id, 4321);
    for (uint32_t i = 0; i < 20; i++) {
        const uint32_t id = out.top[i].id;
        uint32_t above = 0;

        for (uint32_t k = 0; k < VOCAB; k++) {
            above += x[k] > x[id] || (x[k] == x[id] && k < id);
        }
        assert_int_equal(above, i);
        assert_true(fabs(out.top[i].logprob - ((double)x[id] - log(sum))) < 1e-5);
    }
    assert_int_equal(dmk_sample_score(s, x, 2222, 3, &out), 0);
    assert_int_equal(out.id, 2222);
    assert_int_equal(out.n_top, 3);
    assert_true(fabs(out.logprob - ((double)x[2222] - log(sum))) < 1e-5);
    p.logprobs = false;
    assert_int_equal(dmk_sample(s, &p, &c, x, &out), 0);
    assert_int_equal(out.n_top, 0);
    assert_true(out.logprob == 0.0f);
    free(x);
    dmk_sampler_free(&s);
}

/* A small vocabulary has fewer to report, and an only token has probability 1. */
static void test_logprobs_small(void **state)
{
    const float x[3] = {-INFINITY, 2.5f, -INFINITY};
    struct dmk_sampler *s = new_sampler(3);
    struct dmk_sample_result out;

    (void)state;
    assert_int_equal(dmk_sample_score(s, x, 1, 20, &out), 0);
    assert_int_equal(out.n_top, 1);
    assert_true(out.logprob == 0.0f);
    assert_int_equal(dmk_sample_score(s, x, 0, 20, &out), 0);
    assert_true(out.logprob == -INFINITY);
    dmk_sampler_free(&s);
}

/* The formulas by hand: argmax flips exactly where the penalty says. */
static void test_penalties(void **state)
{
    const float x[4] = {3.0f, 2.0f, -1.0f, -4.0f};
    const uint32_t ids[] = {0, 2, 0, 0}; /* prompt: 0; answer: 2, 0, 0 */
    const struct {
        float frequency, presence, repetition;
        uint32_t n_ids, want;
    } cases[] = {
        {0.49f, 0.0f, 1.0f, 4, 0},                            /* 3 - 2 * 0.49 > 2 */
        {0.51f, 0.0f, 1.0f, 4, 1}, {0.0f, 0.99f, 1.0f, 4, 0}, /* once, however often it came */
        {0.0f, 1.01f, 1.0f, 4, 1}, {0.0f, 0.0f, 1.49f, 4, 0},
        {0.0f, 0.0f, 1.51f, 4, 1}, /* 3 / 1.51 < 2 */
        {0.0f, 0.0f, 1.51f, 1, 1}, /* the prompt alone counts for repetition */
        {2.0f, 2.0f, 1.0f, 1, 0},  /* and for nothing else */
    };
    struct dmk_sampler *s = new_sampler(4);

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct dmk_sample_context c = {.ids = ids, .n_prompt = 1, .n_ids = cases[i].n_ids};
        struct dmk_sample_params p = plain;
        struct dmk_sample_result r;

        p.temperature = 0.0f;
        p.frequency_penalty = cases[i].frequency;
        p.presence_penalty = cases[i].presence;
        p.repetition_penalty = cases[i].repetition;
        assert_int_equal(dmk_sample(s, &p, &c, x, &r), 0);
        assert_int_equal(r.id, cases[i].want);
    }
    dmk_sampler_free(&s);
}

/* A temperature that is nearly none: no overflow in 1 / t, and what greedy picks, ties included. */
static void test_tiny_temperatures(void **state)
{
    static const float tiny[] = {1e-5f, 1e-8f, 1e-30f, 1e-44f, 0.0f, -0.0f};
    static float x[VOCAB];
    struct random random = {.seed = 7};
    struct dmk_sampler *s = new_sampler(VOCAB);

    (void)state;
    for (uint32_t row = 0; row < 20; row++) {
        const struct dmk_sample_context c = {.n_ids = row};
        struct dmk_sample_params p = plain;
        struct dmk_sample_result want, got;
        uint32_t best = 0;

        for (uint32_t i = 0; i < VOCAB; i++) {
            x[i] = 5.0f * random_normal(&random);
            best = x[i] > x[best] ? i : best;
        }
        if (row % 2) { /* equals at the top, and one that is less by as little as can be */
            x[random_below(&random, VOCAB)] = x[best];
            x[random_below(&random, VOCAB)] = nextafterf(x[best], -INFINITY);
        }
        p.seed = row;
        p.logprobs = true;
        p.top_p = row % 3 ? 1.0f : 0.9f;
        p.min_p = row % 5 ? 0.0f : 0.05f;
        p.temperature = 0.0f;
        assert_int_equal(dmk_sample(s, &p, &c, x, &want), 0);
        for (size_t t = 0; t < sizeof(tiny) / sizeof(tiny[0]); t++) {
            struct dmk_error e;

            p.temperature = tiny[t];
            assert_int_equal(dmk_sample_params_check(&p, VOCAB, &e), 0);
            assert_int_equal(dmk_sample(s, &p, &c, x, &got), 0);
            assert_int_equal(got.id, want.id);
            assert_true(isfinite(got.logprob) && got.logprob == want.logprob);
        }
        p.temperature = 2e-5f; /* the smallest that is drawn from: finite, and one of the largest */
        assert_int_equal(dmk_sample(s, &p, &c, x, &got), 0);
        assert_true(isfinite(got.logprob) && x[got.id] >= x[want.id] - 0.01f);
    }
    dmk_sampler_free(&s);
}

/* Which rows may be picked elsewhere, and that such a pick gives the sampler's own result. */
static void test_plain(void **state)
{
    (void)state;
    static float x[VOCAB];
    const uint32_t banned = 3, bias_id = 5;
    const float bias = 1.0f;
    const uint64_t allowed[MASK_WORDS] = {~0ull};
    struct dmk_sample_params p = plain;
    struct dmk_sample_context c = {.n_ids = 9, .n_prompt = 4, .choice = 2};
    struct dmk_sample_draw draw;
    struct dmk_sampler *s = new_sampler(VOCAB);
    struct dmk_sample_result want, got;
    double sum = 0.0;

    p.seed = 77;
    p.min_p = 0.25f;
    p.temperature = 0.5f;
    assert_true(dmk_sample_plain(&p, &c, VOCAB, &draw));
    assert_true(draw.scale == 2.0f && draw.min_p == 0.25f);
    assert_true(draw.unit == dmk_rng_unit(77, 2ull << 8 | DMK_DRAW_TOKEN, 9));
    p.temperature = 0.0f;
    p.top_k = 4;
    p.top_p = 0.5f; /* nothing to a greedy row */
    assert_true(dmk_sample_plain(&p, &c, VOCAB, &draw));
    assert_true(draw.scale == 0.0f);
    p.temperature = 1.0f;
    assert_false(dmk_sample_plain(&p, &c, VOCAB, &draw));
    p.top_k = 0;
    assert_false(dmk_sample_plain(&p, &c, VOCAB, &draw));
    p.top_p = 1.0f;
    assert_true(dmk_sample_plain(&p, &c, VOCAB, &draw));
    c.banned = &banned;
    c.n_banned = 1;
    assert_false(dmk_sample_plain(&p, &c, VOCAB, &draw));
    c.n_banned = 0;
    c.allowed = allowed;
    assert_false(dmk_sample_plain(&p, &c, VOCAB, &draw));
    c.allowed = NULL;
    p.n_bias = 1;
    p.bias_ids = &bias_id;
    p.bias_values = &bias;
    assert_false(dmk_sample_plain(&p, &c, VOCAB, &draw));
    p.n_bias = 0;
    p.presence_penalty = 0.5f;
    assert_false(dmk_sample_plain(&p, &c, VOCAB, &draw));
    p.presence_penalty = 0.0f;
    p.logprobs = true;
    p.top_logprobs = 2;
    assert_false(dmk_sample_plain(&p, &c, VOCAB, &draw));

    p.top_logprobs = 0;
    p.temperature = 0.0f;
    for (uint32_t i = 0; i < VOCAB; i++) {
        x[i] = (float)(i * 7919 % VOCAB) * 0.002f;
    }
    assert_int_equal(dmk_sample(s, &p, &c, x, &want), 0);
    for (uint32_t b = 0; b < VOCAB; b += DMK_SAMPLE_BLOCK) {
        const uint32_t n = VOCAB - b < DMK_SAMPLE_BLOCK ? VOCAB - b : DMK_SAMPLE_BLOCK;

        sum += dmk_reduce_sum(x + b, n, x[want.id], 1.0f, 0.0f);
    }
    dmk_sample_plain_result(&p, want.id, x[want.id], x[want.id], sum, &got);
    assert_true(got.id == want.id && got.logprob == want.logprob && got.n_top == 0);
    dmk_sampler_free(&s);
}

static void test_params(void **state)
{
    const uint32_t ids[] = {3, 99};
    const float values[] = {-INFINITY, 5.0f}, nan_values[] = {NAN, 0.0f};
    struct dmk_sample_params p;
    struct dmk_error e;

#define REFUSED(field, value, word)                                                                \
    do {                                                                                           \
        p = plain;                                                                                 \
        p.field = value;                                                                           \
        assert_int_equal(dmk_sample_params_check(&p, 100, &e), -DMK_EINVAL);                       \
        assert_non_null(strstr(e.text, word));                                                     \
    } while (0)
    (void)state;
    p = plain;
    assert_int_equal(dmk_sample_params_check(&p, 100, &e), 0);
    REFUSED(temperature, -0.1f, "temperature");
    REFUSED(temperature, NAN, "temperature");
    REFUSED(temperature, INFINITY, "temperature");
    REFUSED(top_p, 0.0f, "top_p");
    REFUSED(top_p, 1.01f, "not 1.01");
    REFUSED(min_p, -0.5f, "min_p");
    REFUSED(frequency_penalty, NAN, "frequency_penalty");
    REFUSED(presence_penalty, -INFINITY, "presence_penalty");
    REFUSED(repetition_penalty, 0.0f, "repetition_penalty");
    REFUSED(top_logprobs, 21, "21");
    REFUSED(n_bias, 1025, "1025");
    p = plain;
    p.n_bias = 2;
    p.bias_ids = ids;
    p.bias_values = values;
    assert_int_equal(dmk_sample_params_check(&p, 100, &e), 0);
    assert_int_equal(dmk_sample_params_check(&p, 99, &e), -DMK_EINVAL);
    assert_non_null(strstr(e.text, "99"));
    p.bias_values = nan_values;
    assert_int_equal(dmk_sample_params_check(&p, 100, &e), -DMK_EINVAL);
#undef REFUSED
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_nucleus),
        cmocka_unit_test(test_determinism),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_top_k_exact),
        cmocka_unit_test(test_broken),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_logprobs_small),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_params),
        cmocka_unit_test(test_tiny_temperatures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
