/* bench_device: prefill and decode of a full-size model with random weights or of a checkpoint, on one device or over
 * several; bench_device --help tells the options.
 *
 * tp x dp ranks, each on a device of its own as far as there are any; a batch is that of all groups together.
 * Prefill: a prompt in chunks, no logits; decode: steps of a whole batch at one context, tokens picked on the
 * device, keys and values random. Times are the host's clock around dmk_engine_step, so everything that a worker
 * waits for is in them: plans, copies, launches. Rows of the CSV go to the file, a line each to stdout. A case whose
 * pages find no room beside the weights gets a row too: "does not fit". */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/clock.h"
#include "common/base/rng.h"
#include "common/model/engine_internal.h"

#define MAX_LIST 16
#define MAX_RUNS 200
#define N_IDS    300000 /* random tokens; a prompt or the steps of a batch take them from the start */

static const char usage[] =
    "usage: bench_device [OPTION]...\n"
    "  --preset NAME     gpt-oss-120b (default) or gpt-oss-20b, random weights\n"
    "  --model DIR       a checkpoint instead\n"
    "  --experts FORMAT  mxfp4 (default) or fp8\n"
    "  --dense FORMAT    of attention's projections and the head: bf16 (default) or fp8\n"
    "  --tp N, --dp N    ranks of a group and groups (default 1)\n"
    "  --prefill LIST    tokens of prompts, as 1024,8192\n"
    "  --chunk N         tokens of a step of a prompt (default 8192)\n"
    "  --batch LIST      sequences of decode steps, each at each --context\n"
    "  --context LIST    tokens of each sequence before its step\n"
    "  --runs N          1 to 200 (default 20)\n"
    "  --csv FILE        rows are appended, with --date, --commit, --machine and --driver as "
    "given\n";

struct list {
    uint32_t n, value[MAX_LIST];
};

struct options {
    const char *preset, *model, *experts, *dense, *commit, *machine, *driver, *date, *csv;
    char formats[24]; /* of the experts, and "-dense8" where dense weights are FP8 */
    struct list prefill, batch, context;
    uint32_t runs, chunk, tp, dp;
};

struct bench {
    const struct options *o;
    struct dmk_engine *engine;
    FILE *csv;
    uint32_t *ids, *pages;
    uint64_t n_pages; /* of a group */
    uint32_t max_batch;
};

static void die(const char *what)
{
    fprintf(stderr, "bench_device: %s\n", what);
    exit(1);
}

static struct list parse_list(const char *text)
{
    struct list l = {0};
    while (*text) {
        char *end;
        if (l.n == MAX_LIST) {
            die("a list has at most 16 numbers");
        }
        l.value[l.n++] = (uint32_t)strtoul(text, &end, 10);
        if (end == text || (*end != ',' && *end != 0) || l.value[l.n - 1] == 0) {
            die("a list wants numbers above 0 with commas between them");
        }
        text = *end == ',' ? end + 1 : end;
    }
    return l;
}

static uint32_t parse_number(const char *text)
{
    const struct list l = parse_list(text);
    if (l.n != 1) {
        die("an option that takes a number got a list");
    }
    return l.value[0];
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

/* One row; n 0: the case does not fit. */
static void report(struct bench *b, const char *phase, uint32_t batch, uint32_t context, double *ms,
                   uint32_t n)
{
    const struct options *o = b->o;
    char times[64] = "does not fit,,";

    printf("%s %s tp %u dp %u %s batch %u context %u: ", o->preset, o->formats, o->tp, o->dp, phase,
           batch, context);
    if (n > 0) {
        qsort(ms, n, sizeof(ms[0]), compare_doubles);
        snprintf(times, sizeof(times), "%.4f,%.4f,%.4f", ms[n / 2], ms[n / 10], ms[n * 9 / 10]);
        printf("%.3f ms (%.3f to %.3f, n %u), %.0f tokens/s\n", ms[n / 2], ms[n / 10],
               ms[n * 9 / 10], n,
               (strcmp(phase, "decode") == 0 ? batch : context) / ms[n / 2] * 1e3);
    } else {
        printf("does not fit\n");
    }
    fflush(stdout);
    if (b->csv) {
        fprintf(b->csv, "%s,%s,%s,%s,%s,%s,%s,%u,%u,%u,%u,%u,%s,,,\n", o->date, o->commit,
                o->machine, o->driver, o->preset, o->formats, phase, o->tp, o->tp * o->dp, o->dp,
                batch, context, times);
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

    if ((uint64_t)dmk_kv_pages_for(n_tokens) + 1 > b->n_pages) {
        report(b, "prefill", 1, n_tokens, NULL, 0);
        return;
    }
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

/* Pages that each group needs for its share of the batch, with room for the token of the step. */
static uint64_t decode_pages(const struct options *o, uint32_t batch, uint32_t context)
{
    return (uint64_t)((batch + o->dp - 1) / o->dp) * dmk_kv_pages_for(context + 1);
}

static void bench_decode(struct bench *b, uint32_t batch, uint32_t context)
{
    double ms[MAX_RUNS];
    const uint32_t per_seq = dmk_kv_pages_for(context + 1), dp = b->o->dp;
    const uint32_t most = (batch + dp - 1) / dp; /* sequences of a group */
    struct dmk_step_seq *seqs;
    struct dmk_step_pick *picks;
    struct dmk_step_picked *out;

    if (decode_pages(b->o, batch, context) > b->n_pages) {
        report(b, "decode", batch, context, NULL, 0);
        return;
    }
    seqs = calloc(batch, sizeof(*seqs));
    picks = calloc(batch, sizeof(*picks));
    out = calloc(batch, sizeof(*out));
    if (!seqs || !picks || !out) {
        die("no memory");
    }
    for (uint32_t run = 0; run < b->o->runs + 4; run++) {
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
    report(b, "decode", batch, context, ms, b->o->runs);
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
                        .dense = "bf16",
                        .commit = "unknown",
                        .machine = "H200",
                        .driver = "unknown",
                        .date = "unknown",
                        .runs = 20,
                        .chunk = 8192,
                        .tp = 1,
                        .dp = 1};
    const struct {
        const char *name;
        const char **text; /* one of the three is set */
        struct list *list;
        uint32_t *number;
    } table[] = {
        {"preset", .text = &o.preset},   {"model", .text = &o.model},
        {"experts", .text = &o.experts}, {"commit", .text = &o.commit},
        {"machine", .text = &o.machine}, {"driver", .text = &o.driver},
        {"date", .text = &o.date},       {"csv", .text = &o.csv},
        {"prefill", .list = &o.prefill}, {"batch", .list = &o.batch},
        {"context", .list = &o.context}, {"runs", .number = &o.runs},
        {"chunk", .number = &o.chunk},   {"tp", .number = &o.tp},
        {"dp", .number = &o.dp},         {"dense", .text = &o.dense},
    };
    enum { N = sizeof(table) / sizeof(table[0]) };
    struct option known[N + 2] = {{"help", no_argument, NULL, N}};
    int i;

    for (i = 0; i < N; i++) {
        known[i + 1] = (struct option){table[i].name, required_argument, NULL, i};
    }
    while ((i = getopt_long(argc, argv, "", known, NULL)) != -1) {
        if (i < 0 || i >= N) {
            fputs(usage, i == N ? stdout : stderr);
            exit(i == N ? 0 : 2);
        }
        if (table[i].text) {
            *table[i].text = optarg;
        } else if (table[i].list) {
            *table[i].list = parse_list(optarg);
        } else {
            *table[i].number = parse_number(optarg);
        }
    }
    o.preset = o.model ? "checkpoint" : o.preset;
    if (optind < argc || o.runs > MAX_RUNS ||
        (strcmp(o.experts, "fp8") != 0 && strcmp(o.experts, "mxfp4") != 0) ||
        (strcmp(o.dense, "fp8") != 0 && strcmp(o.dense, "bf16") != 0)) {
        fputs(usage, stderr);
        exit(2);
    }
    snprintf(o.formats, sizeof(o.formats), "%s%s", o.experts,
             strcmp(o.dense, "fp8") == 0 ? "-dense8" : "");
    if (largest(&o.prefill) > N_IDS || largest(&o.batch) * (o.runs + 4) > N_IDS) {
        die("a prompt has at most 300000 tokens, and so have all steps of a batch together");
    }
    return o;
}

/* Pages of the largest case that needs fewer than below; 0: there is none. */
static uint64_t most_pages(const struct options *o, uint64_t below)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < o->context.n * o->batch.n; i++) {
        const uint64_t n =
            decode_pages(o, o->batch.value[i % o->batch.n], o->context.value[i / o->batch.n]);
        most = n < below && n > most ? n : most;
    }
    for (uint32_t i = 0; i < o->prefill.n; i++) {
        const uint64_t n = dmk_kv_pages_for(o->prefill.value[i]) + 1;
        most = n < below && n > most ? n : most;
    }
    return most;
}

/* The engine with pages for as many of the cases as fit; the device says which. */
static void open_engine(struct bench *b)
{
    const struct options *o = b->o;
    struct dmk_engine_conf conf = {
        .model_dir = o->model,
        .random_preset = o->model ? NULL : o->preset,
        .random_seed = 1,
        .fp8_experts = strcmp(o->experts, "fp8") == 0,
        .fp8_dense = strcmp(o->dense, "fp8") == 0,
        .backend = "cuda",
        .layout = {o->tp, o->dp},
        .n_window_pages = 3 * b->max_batch,
        .max_step_tokens = o->prefill.n && o->chunk > b->max_batch ? o->chunk : b->max_batch,
        .max_step_seqs = b->max_batch,
        .max_logit_rows = b->max_batch};
    struct dmk_error error = {0};
    int status = -DMK_ENOMEM;

    for (b->n_pages = most_pages(o, UINT32_MAX); b->n_pages > 0 && status == -DMK_ENOMEM;) {
        conf.n_full_pages = (uint32_t)b->n_pages;
        status = dmk_engine_open(&conf, &b->engine, &error);
        if (status == -DMK_ENOMEM) {
            printf("%s: %s\n", o->preset, error.text);
            b->n_pages = most_pages(o, b->n_pages);
        }
    }
    if (status != 0 && status != -DMK_ENOMEM) {
        die(error.text);
    }
}

int main(int argc, char **argv)
{
    const struct options o = parse(argc, argv);
    struct bench b = {.o = &o, .max_batch = largest(&o.batch) > 1 ? largest(&o.batch) : 1};
    const uint64_t start = dmk_clock_ns();

    if (most_pages(&o, UINT32_MAX) == 0) {
        die("nothing to measure: give --prefill, or --batch and --context");
    }
    open_engine(&b);
    b.csv = o.csv ? fopen(o.csv, "a") : NULL;
    b.ids = calloc(N_IDS, sizeof(uint32_t));
    b.pages = calloc(b.n_pages + 1, sizeof(uint32_t));
    if (!b.ids || !b.pages || (o.csv && !b.csv)) {
        die("no memory, or the file for the rows can not be opened");
    }
    if (b.engine) {
        for (uint32_t i = 0; i < N_IDS; i++) {
            b.ids[i] = (uint32_t)(dmk_rng_u64(1, 2, i) % dmk_engine_shape(b.engine)->vocab);
        }
        for (uint32_t i = 0; i < b.n_pages; i++) {
            b.pages[i] = i;
        }
        fill_pages(&b);
        printf("%s: ready in %.1f s, %u decode graphs in %.2f s\n", o.preset,
               (double)(dmk_clock_ns() - start) * 1e-9, dmk_engine_graphs(b.engine).n_graphs,
               dmk_engine_graphs(b.engine).seconds);
    }
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
