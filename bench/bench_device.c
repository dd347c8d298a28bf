/* bench_device: prefill and decode of a full-size model with random weights or of a checkpoint, on one device or over
 * several.
 *
 *   bench_device [--preset gpt-oss-120b | --model DIR] [--prefill 1024,8192] [--batch 1,8,32] [--context 8192] [--runs 20]
 *                [--chunk 8192] [--tp N] [--dp N] [--experts mxfp4|fp8] [--commit HASH] [--machine NAME] [--driver NAME]
 *                [--date DATE] [--csv FILE]
 *
 * tp x dp ranks, each on a device of its own as far as there are any; a batch is that of all groups together.
 * Prefill: a prompt in chunks, no logits; decode: steps of a whole batch at one context, tokens picked on the
 * device, keys and values random. Times are the host's clock around dmk_engine_step, so everything that a worker
 * waits for is in them: plans, copies, launches. Rows of the CSV go to the file, a line each to stdout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/model/engine_internal.h"

#define MAX_LIST 16
#define MAX_RUNS 200

struct list {
    uint32_t n, value[MAX_LIST];
};

struct options {
    const char *preset, *model, *experts, *commit, *machine, *driver, *date, *csv;
    struct list prefill, batch, context;
    uint32_t runs, chunk, tp, dp;
};

struct bench {
    const struct options *o;
    struct dmk_engine *engine;
    FILE *csv;
    uint32_t *ids, *pages;
    uint32_t n_pages, max_batch;
};

static void die(const char *what)
{
    fprintf(stderr, "bench_device: %s\n", what);
    exit(1);
}

static struct list parse_list(const char *text)
{
    struct list l = {0};
    while (*text && l.n < MAX_LIST) {
        char *end;
        l.value[l.n++] = (uint32_t)strtoul(text, &end, 10);
        if (end == text) {
            die("a list wants numbers with commas between them");
        }
        text = *end == ',' ? end + 1 : end;
    }
    return l;
}

static uint32_t largest(const struct list *l)
{
    uint32_t max = 0;
    for (uint32_t i = 0; i < l->n; i++) {
        max = l->value[i] > max ? l->value[i] : max;
    }
    return max;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(struct bench *b, const char *phase, uint32_t batch, uint32_t context, double *ms,
                   uint32_t n)
{
    const struct options *o = b->o;
    qsort(ms, n, sizeof(ms[0]), compare_doubles);
    printf(
        "%s %s tp %u dp %u %s batch %u context %u: %.3f ms (%.3f to %.3f, n %u), %.0f tokens/s\n",
        o->preset, o->experts, o->tp, o->dp, phase, batch, context, ms[n / 2], ms[n / 10],
        ms[n * 9 / 10], n, (strcmp(phase, "decode") == 0 ? batch : context) / ms[n / 2] * 1e3);
    fflush(stdout);
    if (b->csv) {
        fprintf(b->csv, "%s,%s,%s,%s,%s,%s,%s,%u,%u,%u,%u,%u,%.4f,%.4f,%.4f,,,\n", o->date,
                o->commit, o->machine, o->driver, o->preset, o->experts, phase, o->tp,
                o->tp * o->dp, o->dp, batch, context, ms[n / 2], ms[n / 10], ms[n * 9 / 10]);
        fflush(b->csv);
    }
}

static void step_or_die(struct bench *b, const struct dmk_step *step)
{
    int status = dmk_engine_step(b->engine, step);
    if (status != 0) {
        const struct dmk_rank *r = &b->engine->ranks[0];
        fprintf(stderr, "bench_device: step failed: %d, %s\n", status,
                r->backend->ops->describe(r->backend, r->stream));
        exit(1);
    }
}

static void bench_prefill(struct bench *b, uint32_t n_tokens)
{
    double ms[MAX_RUNS];
    const uint32_t most = n_tokens > 65536 ? 1 : n_tokens > 16384 ? 3 : 7;
    const uint32_t runs = b->o->runs < most ? b->o->runs : most;
    for (uint32_t run = 0; run <= runs; run++) {
        const uint64_t start = dmk_clock_ns();
        for (uint32_t pos = 0; pos < n_tokens; pos += b->o->chunk) {
            const uint32_t n = n_tokens - pos < b->o->chunk ? n_tokens - pos : b->o->chunk;
            struct dmk_step_seq seq = {.ids = b->ids + pos,
                                       .n_tokens = n,
                                       .pos = pos,
                                       .full_pages = b->pages,
                                       .ring = {0, 1, 2},
                                       .n_ring = 3};
            step_or_die(b, &(struct dmk_step){.seqs = &seq, .n_seqs = 1});
        }
        if (run > 0) {
            ms[run - 1] = (double)(dmk_clock_ns() - start) * 1e-6;
        }
    }
    report(b, "prefill", 1, n_tokens, ms, runs);
}

static void bench_decode(struct bench *b, uint32_t batch, uint32_t context)
{
    double ms[MAX_RUNS];
    const uint32_t per_seq = dmk_kv_pages_for(context + 1), dp = b->o->dp;
    const uint32_t most = (batch + dp - 1) / dp; /* sequences of a group */
    const bool fits = (uint64_t)most * per_seq <= b->n_pages && batch <= b->max_batch;
    struct dmk_step_seq *seqs = calloc(batch, sizeof(*seqs));
    struct dmk_step_pick *picks = calloc(batch, sizeof(*picks));
    struct dmk_step_picked *out = calloc(batch, sizeof(*out));
    if (!seqs || !picks || !out) {
        die("no memory");
    }
    if (!fits) {
        printf("%s decode batch %u context %u: does not fit\n", b->o->preset, batch, context);
    }
    for (uint32_t run = 0; fits && run < b->o->runs + 4; run++) {
        for (uint32_t i = 0; i < batch; i++) {
            const uint32_t at = i % most; /* in its group */
            seqs[i] = (struct dmk_step_seq){.ids = b->ids + run * batch + i,
                                            .n_tokens = 1,
                                            .pos = context - 1,
                                            .full_pages = b->pages + (size_t)at * per_seq,
                                            .ring = {at * 3, at * 3 + 1, at * 3 + 2},
                                            .n_ring = 3,
                                            .logits = DMK_LOGITS_LAST,
                                            .dp = i / most};
            picks[i] = (struct dmk_step_pick){true, 1.0f, 0.0f, dmk_rng_unit(1, i, run)};
        }
        const uint64_t start = dmk_clock_ns();
        step_or_die(
            b, &(struct dmk_step){.seqs = seqs, .n_seqs = batch, .picks = picks, .picked = out});
        if (run >= 4) {
            ms[run - 4] = (double)(dmk_clock_ns() - start) * 1e-6;
        }
    }
    if (fits) {
        report(b, "decode", batch, context, ms, b->o->runs);
    }
    free(seqs);
    free(picks);
    free(out);
}

static void fill_pages(struct bench *b)
{
    for (uint32_t i = 0; i < b->engine->n_ranks; i++) {
        struct dmk_rank *r = &b->engine->ranks[i];
        const struct dmk_backend_ops *ops = r->backend->ops;
        ops->bind(r->backend);
        ops->fill(r->backend, r->stream, r->kv.full, dmk_kv_full_bytes(&r->kv.layout),
                  DMK_FILL_BF16, 1.0f, 5);
        ops->fill(r->backend, r->stream, r->kv.window, dmk_kv_window_bytes(&r->kv.layout),
                  DMK_FILL_BF16, 1.0f, 6);
        ops->sync(r->backend, r->stream);
    }
}

static struct options parse(int argc, char **argv)
{
    struct options o = {.preset = "gpt-oss-120b",
                        .experts = "mxfp4",
                        .commit = "unknown",
                        .machine = "H200",
                        .driver = "unknown",
                        .date = "unknown",
                        .runs = 20,
                        .chunk = 8192,
                        .tp = 1,
                        .dp = 1};
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        const struct {
            const char *name;
            const char **value;
        } texts[] = {{"--preset", &o.preset}, {"--model", &o.model},     {"--experts", &o.experts},
                     {"--commit", &o.commit}, {"--machine", &o.machine}, {"--driver", &o.driver},
                     {"--date", &o.date},     {"--csv", &o.csv}};
        const struct {
            const char *name;
            struct list *value;
        } lists[] = {{"--prefill", &o.prefill}, {"--batch", &o.batch}, {"--context", &o.context}};
        for (size_t n = 0; n < sizeof(texts) / sizeof(texts[0]); n++) {
            if (strcmp(name, texts[n].name) == 0) {
                *texts[n].value = value;
            }
        }
        for (size_t n = 0; n < sizeof(lists) / sizeof(lists[0]); n++) {
            if (strcmp(name, lists[n].name) == 0) {
                *lists[n].value = parse_list(value);
            }
        }
        const struct {
            const char *name;
            uint32_t *value;
        } numbers[] = {
            {"--runs", &o.runs}, {"--chunk", &o.chunk}, {"--tp", &o.tp}, {"--dp", &o.dp}};
        for (size_t n = 0; n < sizeof(numbers) / sizeof(numbers[0]); n++) {
            if (strcmp(name, numbers[n].name) == 0) {
                *numbers[n].value = (uint32_t)strtoul(value, NULL, 10);
            }
        }
    }
    o.preset = o.model ? "checkpoint" : o.preset;
    if (o.runs == 0 || o.runs > MAX_RUNS || o.chunk == 0) {
        die("--runs is 1 to 200, --chunk at least 1");
    }
    return o;
}

int main(int argc, char **argv)
{
    const struct options o = parse(argc, argv);
    const uint32_t max_batch = largest(&o.batch) > 1 ? largest(&o.batch) : 1;
    uint64_t n_pages = dmk_kv_pages_for(largest(&o.prefill)) + 1;
    /* As many pages as the largest batch wants at the shortest context, and more only if one sequence does. */
    for (uint32_t c = 0; c < o.context.n; c++) {
        const uint64_t per_seq = dmk_kv_pages_for(o.context.value[c] + 1);
        uint64_t want = per_seq * max_batch;
        while (want > 17000) {
            want /= 2;
        }
        n_pages = want > n_pages ? want : n_pages;
    }
    struct dmk_engine_conf conf = {.model_dir = o.model,
                                   .random_preset = o.model ? NULL : o.preset,
                                   .random_seed = 1,
                                   .fp8_experts = strcmp(o.experts, "fp8") == 0,
                                   .backend = "cuda",
                                   .layout = {o.tp, o.dp},
                                   .n_full_pages = (uint32_t)n_pages,
                                   .n_window_pages = 3 * max_batch,
                                   .max_step_tokens =
                                       o.prefill.n && o.chunk > max_batch ? o.chunk : max_batch,
                                   .max_step_seqs = max_batch,
                                   .max_logit_rows = max_batch};
    struct bench b = {.o = &o, .n_pages = (uint32_t)n_pages, .max_batch = max_batch};
    struct dmk_error error = {0};
    const uint64_t start = dmk_clock_ns();
    if (dmk_engine_open(&conf, &b.engine, &error) != 0) {
        die(error.text);
    }
    b.csv = o.csv ? fopen(o.csv, "a") : NULL;
    b.ids = calloc(300000, sizeof(uint32_t));
    b.pages = calloc(n_pages, sizeof(uint32_t));
    if (!b.ids || !b.pages) {
        die("no memory");
    }
    for (uint32_t i = 0; i < 300000; i++) {
        b.ids[i] = (uint32_t)(dmk_rng_u64(1, 2, i) % dmk_engine_shape(b.engine)->vocab);
    }
    for (uint32_t i = 0; i < n_pages; i++) {
        b.pages[i] = i;
    }
    fill_pages(&b);
    printf("%s: ready in %.1f s, %u decode graphs in %.2f s\n", o.preset,
           (double)(dmk_clock_ns() - start) * 1e-9, dmk_engine_graphs(b.engine).n_graphs,
           dmk_engine_graphs(b.engine).seconds);
    for (uint32_t c = 0; c < o.context.n; c++) {
        for (uint32_t i = 0; i < o.batch.n; i++) {
            bench_decode(&b, o.batch.value[i], o.context.value[c]);
        }
    }
    for (uint32_t i = 0; i < o.prefill.n; i++) {
        bench_prefill(&b, o.prefill.value[i]);
    }
    if (b.csv) {
        fclose(b.csv);
    }
    dmk_engine_close(&b.engine);
    free(b.ids);
    free(b.pages);
    return 0;
}
