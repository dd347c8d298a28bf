/* bench_engine: how fast one engine decodes and prefills, beside what the machine's memory allows.
 *
 *   bench_engine --model DIR [--backend cpu] [--tp 1] [--threads 0] [--context 256] [--decode 32]
 *                [--prompt 512] [--runs 5] [--commit HASH]
 *
 * Decode: batch 1, tokens one after the other after `context` positions. The bytes of weights that one
 * token needs (four experts a layer) over the time of a token, against the read bandwidth that a plain
 * loop over 1 GiB gets with the same threads in the same run. Prefill: one chunk of `prompt` tokens
 * without logits, against the fused multiply-adds that the threads can do on registers. Printed: median,
 * lowest and highest run; bench/engine.py reads these lines. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "bench/limits.h"
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/model/engine.h"
#include "kernels/kernels.h"

#define MAX_RUNS 100

struct options {
    const char *model, *backend, *commit;
    uint32_t tp, threads, context, decode, prompt, runs;
};

static void die(const char *what)
{
    fprintf(stderr, "bench_engine: %s\n", what);
    exit(1);
}

/* Bytes of weights that one token reads; the embedding's one row does not count. */
static double bytes_per_token(const struct dmk_shape *s, bool mxfp4)
{
    double H = s->hidden, q = s->n_heads * 64.0, kv = s->n_kv_heads * 64.0, I = s->intermediate;
    double attn = 2.0 * (q * H + 2 * kv * H + q * H);
    double expert = (2 * I * H + H * I) * (mxfp4 ? 0.5 + 1.0 / 32 : 2.0);
    double layer = attn + 2.0 * s->n_experts * H + s->experts_per_token * expert;
    return layer * s->n_layers + 2.0 * s->vocab * H;
}

struct bench {
    struct dmk_engine *engine;
    uint32_t *ids, *pages;
    uint32_t max_tokens;
    float *logits;
};

static double run_step(struct bench *b, uint32_t pos, uint32_t n_tokens, bool logits)
{
    struct dmk_step_seq seq = {.ids = b->ids + pos,
                               .n_tokens = n_tokens,
                               .pos = pos,
                               .full_pages = b->pages,
                               .ring = {0, 1, 2},
                               .n_ring = 3,
                               .logits = logits ? DMK_LOGITS_LAST : DMK_LOGITS_NONE};
    struct dmk_step step = {.seqs = &seq, .n_seqs = 1, .logits = b->logits};
    uint64_t start = dmk_clock_ns();
    if (dmk_engine_step(b->engine, &step) != 0) {
        die("step failed");
    }
    return (double)(dmk_clock_ns() - start) * 1e-9;
}

static void prefill_to(struct bench *b, uint32_t n_tokens)
{
    for (uint32_t pos = 0; pos < n_tokens; pos += b->max_tokens) {
        run_step(b, pos, n_tokens - pos < b->max_tokens ? n_tokens - pos : b->max_tokens, false);
    }
}

static void print_machine(const char *commit)
{
    char line[256], model[256] = "unknown";
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof(line), f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            snprintf(model, sizeof(model), "%s", colon + 2);
            model[strcspn(model, "\n")] = 0;
            break;
        }
    }
    if (f) {
        fclose(f);
    }
    struct dmk_kernels kernels;
    dmk_kernels_cpu(&kernels);
    printf("machine: %s, %ld processors, kernels %s, commit %s\n", model,
           sysconf(_SC_NPROCESSORS_ONLN), kernels.name, commit);
}

static void bench_decode(struct bench *b, const struct options *o, double read_gbs)
{
    double seconds[MAX_RUNS], bytes;
    prefill_to(b, o->context);
    run_step(b, o->context, 1, true);
    for (uint32_t run = 0; run < o->runs; run++) {
        double sum = 0;
        for (uint32_t i = 0; i < o->decode; i++) {
            sum += run_step(b, o->context + i, 1, true);
        }
        seconds[run] = sum / o->decode;
    }
    struct bench_stats t = bench_summarise(seconds, o->runs);
    bytes = bytes_per_token(dmk_engine_shape(b->engine),
                            strncmp(dmk_engine_numerics(b->engine), "mxfp4", 5) == 0);
    printf("decode: %.2f tokens/s (%.2f to %.2f), batch 1, context %u, %.3f GB a token, %.1f GB/s, "
           "%.0f%% of read bandwidth\n",
           1 / t.median, 1 / t.max, 1 / t.min, o->context, bytes * 1e-9, bytes * 1e-9 / t.median,
           100 * bytes * 1e-9 / t.median / read_gbs);
}

static void bench_prefill(struct bench *b, const struct options *o, double fma_gflops)
{
    double rate[MAX_RUNS];
    run_step(b, 0, o->prompt, false); /* every expert is in memory from here on */
    for (uint32_t run = 0; run < o->runs; run++) {
        rate[run] = o->prompt / run_step(b, 0, o->prompt, false);
    }
    struct bench_stats t = bench_summarise(rate, o->runs);
    const struct dmk_shape *s = dmk_engine_shape(b->engine);
    double H = s->hidden, width = (2.0 * s->n_heads + 2.0 * s->n_kv_heads) * 64;
    double macs = s->n_layers *
                  (width * H + s->n_experts * H + 3.0 * s->experts_per_token * s->intermediate * H);
    double gflops = 2e-9 * macs * t.median;
    printf("prefill: %.1f tokens/s (%.1f to %.1f), one chunk of %u, %.0f GFLOP/s in matrices",
           t.median, t.min, t.max, o->prompt, gflops);
    if (fma_gflops > 0) {
        printf(", %.0f%% of fma", 100 * gflops / fma_gflops);
    }
    printf("\n");
}

static uint32_t number(const char *text, const char *name)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (*end || end == text || value > 1000000) {
        fprintf(stderr, "bench_engine: %s wants a number, not '%s'\n", name, text);
        exit(2);
    }
    return (uint32_t)value;
}

static struct options parse(int argc, char **argv)
{
    struct options o = {.backend = "cpu",
                        .commit = "unknown",
                        .tp = 1,
                        .context = 256,
                        .decode = 32,
                        .prompt = 512,
                        .runs = 5};
    struct {
        const char *name;
        uint32_t *value;
    } numbers[] = {{"--tp", &o.tp},         {"--threads", &o.threads}, {"--context", &o.context},
                   {"--decode", &o.decode}, {"--prompt", &o.prompt},   {"--runs", &o.runs}};
    struct {
        const char *name;
        const char **value;
    } texts[] = {{"--model", &o.model}, {"--backend", &o.backend}, {"--commit", &o.commit}};
    for (int i = 1; i < argc; i += 2) {
        bool known = false;
        if (i + 1 == argc) {
            die("an option lacks its value");
        }
        for (size_t n = 0; n < sizeof(texts) / sizeof(texts[0]); n++) {
            if (strcmp(argv[i], texts[n].name) == 0) {
                *texts[n].value = argv[i + 1];
                known = true;
            }
        }
        for (size_t n = 0; n < sizeof(numbers) / sizeof(numbers[0]); n++) {
            if (strcmp(argv[i], numbers[n].name) == 0) {
                *numbers[n].value = number(argv[i + 1], argv[i]);
                known = true;
            }
        }
        if (!known) {
            fprintf(stderr, "bench_engine: unknown option %s\n", argv[i]);
            exit(2);
        }
    }
    if (!o.model || o.runs == 0 || o.runs > MAX_RUNS) {
        die("usage: --model DIR [--backend cpu] [--tp 1] [--threads 0] [--context 256] [--decode "
            "32] "
            "[--prompt 512] [--runs 1..100]");
    }
    if (o.threads == 0) {
        o.threads = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    }
    return o;
}

int main(int argc, char **argv)
{
    struct options o = parse(argc, argv);
    uint32_t positions = o.context + o.decode + 1 > o.prompt ? o.context + o.decode + 1 : o.prompt;
    uint32_t n_pages = dmk_kv_pages_for(positions) + 1;
    struct dmk_engine_conf conf = {.model_dir = o.model,
                                   .backend = o.backend,
                                   .layout = {o.tp, 1},
                                   .n_threads = o.threads,
                                   .n_full_pages = n_pages,
                                   .n_window_pages = 3,
                                   .max_step_tokens = o.prompt > 512 ? o.prompt : 512,
                                   .max_step_seqs = 1,
                                   .max_logit_rows = 1};
    struct bench b = {.max_tokens = conf.max_step_tokens};
    struct dmk_error error;
    if (dmk_engine_open(&conf, &b.engine, &error) != 0) {
        die(error.text);
    }
    b.ids = calloc(positions, sizeof(uint32_t));
    b.pages = calloc(n_pages, sizeof(uint32_t));
    b.logits = malloc(dmk_engine_shape(b.engine)->vocab * sizeof(float));
    if (!b.ids || !b.pages || !b.logits) {
        die("no memory");
    }
    for (uint32_t i = 0; i < positions; i++) {
        b.ids[i] = (uint32_t)(dmk_rng_u64(1, 2, i) % dmk_engine_shape(b.engine)->vocab);
    }
    for (uint32_t i = 0; i < n_pages; i++) {
        b.pages[i] = i;
    }
    print_machine(o.commit);
    struct bench_stats bandwidth = bench_read_gbs(o.threads, o.runs);
    struct bench_stats fma = bench_fma_gflops(o.threads, o.runs);
    printf("memory: %.1f GB/s read (%.1f to %.1f), %u threads\n", bandwidth.median, bandwidth.min,
           bandwidth.max, o.threads);
    if (fma.median > 0) {
        printf("fma: %.1f GFLOP/s on registers (%.1f to %.1f), %u threads\n", fma.median, fma.min,
               fma.max, o.threads);
    }
    if (o.decode) {
        bench_decode(&b, &o, bandwidth.median);
    }
    if (o.prompt) {
        bench_prefill(&b, &o, fma.median);
    }
    dmk_engine_close(&b.engine);
    free(b.ids);
    free(b.pages);
    free(b.logits);
    return 0;
}
