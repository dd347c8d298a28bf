/* Cost of picking a token from a row of 201088 logits, one thread: bench_sample [ROUNDS].
 *
 * Rows: "peaked" as a model gives them (normal, spread 2.5, a few tokens far above), and "flat" (all within
 * one), which no cut-off shortens. Prints the median and the spread of ROUNDS in microseconds of CPU time,
 * beside the time to read the row once, which is the limit of any sampler. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/sample/reduce.h"
#include "common/sample/sample.h"

#define VOCAB      201088u
#define N_IDS      8192u
#define ROUNDS_MAX 1000

static double micros(void)
{
    struct timespec ts;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts); /* can not fail with this clock */
    return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static void print_times(const char *name, double *t, int n)
{
    qsort(t, (size_t)n, sizeof(*t), compare);
    (void)printf("  %-44s %8.0f  (%.0f to %.0f)\n", name, t[n / 2], t[0], t[n - 1]);
}

static void fill(float *x, bool flat)
{
    for (uint32_t i = 0; i < VOCAB; i++) {
        double sum = -6.0;

        for (uint64_t k = 0; k < 12; k++) {
            sum += dmk_rng_unit(1, k, i);
        }
        x[i] = flat ? (float)dmk_rng_unit(1, 0, i) : (float)sum * 2.5f;
    }
    for (uint32_t i = 0; i < 12 && !flat; i++) {
        x[i * 16001] = 18.0f - (float)i;
    }
}

struct kind {
    const char *name;
    struct dmk_sample_params p;
};

static const struct kind kinds[] = {
    {"greedy", {.top_p = 1.0f, .repetition_penalty = 1.0f}},
    {"greedy, 20 log-probabilities",
     {.top_p = 1.0f, .repetition_penalty = 1.0f, .logprobs = true, .top_logprobs = 20}},
    {"temperature 1", {.top_p = 1.0f, .repetition_penalty = 1.0f, .temperature = 1.0f}},
    {"temperature 1, min-p 0.05",
     {.top_p = 1.0f, .repetition_penalty = 1.0f, .temperature = 1.0f, .min_p = 0.05f}},
    {"temperature 0.7, top-p 0.95",
     {.top_p = 0.95f, .repetition_penalty = 1.0f, .temperature = 0.7f}},
    {"temperature 1, top-k 50",
     {.top_p = 1.0f, .repetition_penalty = 1.0f, .temperature = 1.0f, .top_k = 50}},
    {"temperature 1, top-k 1000, top-p 0.9",
     {.top_p = 0.9f, .repetition_penalty = 1.0f, .temperature = 1.0f, .top_k = 1000}},
    {"temperature 1, penalties over 8192 ids",
     {.top_p = 1.0f, .repetition_penalty = 1.1f, .temperature = 1.0f, .frequency_penalty = 0.5f}},
};

static int run(const float *x, int rounds)
{
    static double t[ROUNDS_MAX];
    static uint32_t ids[N_IDS];
    struct dmk_sampler *s;
    volatile float sink = 0.0f;

    if (dmk_sampler_new(VOCAB, &s) < 0) {
        return 1;
    }
    for (uint32_t i = 0; i < N_IDS; i++) {
        ids[i] = (uint32_t)(dmk_rng_unit(2, 0, i) * VOCAB);
    }
    for (int k = 0; k < rounds; k++) {
        const double start = micros();

        sink = sink + dmk_reduce_max(x, VOCAB).max;
        t[k] = micros() - start;
    }
    print_times("limit: the row read once for its largest", t, rounds);
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        for (int k = 0; k < rounds; k++) {
            const struct dmk_sample_context c = {
                .ids = ids, .n_prompt = 100, .n_ids = N_IDS - (uint32_t)k};
            struct dmk_sample_result r;
            const double start = micros();

            if (dmk_sample(s, &kinds[i].p, &c, x, &r) < 0) {
                return 1;
            }
            t[k] = micros() - start;
        }
        print_times(kinds[i].name, t, rounds);
    }
    dmk_sampler_free(&s);
    return 0;
}

int main(int argc, char **argv)
{
    const long rounds = argc > 1 ? strtol(argv[1], NULL, 10) : 51;
    float *x = malloc(VOCAB * sizeof(*x));
    int r = 0;

    if (!x || rounds < 1 || rounds > ROUNDS_MAX) {
        (void)fprintf(stderr, "usage: bench_sample [ROUNDS of 1 to %d]\n", ROUNDS_MAX);
        free(x);
        return 2;
    }
    for (int flat = 0; flat < 2 && r == 0; flat++) {
        fill(x, flat);
        (void)printf("%s row, microseconds of CPU time: median (lowest to highest) of %ld\n",
                     flat ? "flat" : "peaked", rounds);
        r = run(x, (int)rounds);
    }
    free(x);
    return r;
}
