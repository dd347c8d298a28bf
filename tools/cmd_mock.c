/* damask mock prefill | decode: a worker without a model, for users without accelerators and for measuring
 * routers. It is the real worker, with the real protocol, pages, tickets and transfers; only its engine is
 * one that waits and makes words of hashes (tools/mock/engine.h). */
#include "tools/damask.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "common/base/log.h"
#include "decode/serve.h"
#include "prefill/serve.h"
#include "tools/mock/engine.h"

struct own {
    double step_us, sequence_us, prompt_token_us;
    uint32_t page_bytes, mean_tokens;
    char *step_log;
};

#define AT(f) offsetof(struct own, f)

static const struct dmk_conf_option own_options[] = {
    {"step-us", DMK_CONF_DOUBLE, "5000", 0, 1e9, NULL, "Microseconds that every step takes.",
     AT(step_us)},
    {"sequence-us", DMK_CONF_DOUBLE, "20", 0, 1e9, NULL,
     "Microseconds more for each sequence that gets a token in the step.", AT(sequence_us)},
    {"prompt-token-us", DMK_CONF_DOUBLE, "50", 0, 1e9, NULL,
     "Microseconds more for each prompt token that the step computes.", AT(prompt_token_us)},
    {"page-bytes", DMK_CONF_U32, "512", 512, 1048576, NULL,
     "Bytes of a page, a multiple of 512; all workers of a cluster must have the same.",
     AT(page_bytes)},
    {"mean-tokens", DMK_CONF_U32, "0", 0, 131072, NULL,
     "Answers end by themselves after about this many tokens; 0: only at their limit.",
     AT(mean_tokens)},
    {"step-log", DMK_CONF_STR, "", 0, 0, NULL,
     "File for the times at which steps ended (64-bit words, CLOCK_MONOTONIC in ns); tokens are "
     "then the "
     "last digits of their steps' numbers.",
     AT(step_log)},
};
#define N_OWN (sizeof(own_options) / sizeof(own_options[0]))

struct decode_options {
    struct dmk_decode_options role; /* first: its rows write here */
    struct own own;
};

struct prefill_options {
    struct dmk_prefill_options role;
    struct own own;
};

static const struct dmk_conf_change changes[] = {
    {"model", "mock", "A name; nothing is read."},
    {"full-pages", "65536", NULL},
    {"window-pages", "16384", NULL},
    {"max-sequences", "256", NULL}, /* decode */
};
#define N_CHANGES (sizeof(changes) / sizeof(changes[0]))

struct source {
    struct dmk_mock_conf conf;
    struct dmk_mock_engine *engine;
};

static int open_engine(void *ud, struct dmk_engine_port *ret_port, struct dmk_error *reterr)
{
    struct source *s = ud;
    const int r = dmk_mock_engine_new(&s->conf, &s->engine, reterr);

    if (r == 0) {
        *ret_port = dmk_mock_engine_port(s->engine);
    }
    return r;
}

static void close_engine(void *ud)
{
    struct source *s = ud;

    dmk_mock_engine_free(&s->engine);
}

static int check(const struct dmk_worker_conf *w, bool prefill, const struct own *own,
                 struct dmk_error *reterr)
{
    if (w->tp != 1) {
        return dmk_error_set(reterr, -DMK_EINVAL, "tp is %u: a mock has one rank a group", w->tp);
    }
    if (w->kv_memory.bytes > 0 || w->kv_memory.percent > 0) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "kv-memory: a mock has no model that says how large a page is; give "
                             "full-pages and window-pages");
    }
    if (own->page_bytes % DMK_MOCK_PAGE_BYTES != 0) {
        return dmk_error_set(reterr, -DMK_EINVAL, "page-bytes is %u: a multiple of %u is wanted",
                             own->page_bytes, DMK_MOCK_PAGE_BYTES);
    }
    return dmk_worker_options_check(w, prefill, reterr);
}

/* The words are the same in each of its formats, which only the names tell apart. */
static struct source source_of(const struct dmk_worker_conf *w, const struct own *own,
                               enum dmk_prompt_experts prompts)
{
    static const char *const formats[] = {[DMK_PROMPT_EXPERTS_MXFP4] = "mock",
                                          [DMK_PROMPT_EXPERTS_FP8] = "mock-fp8",
                                          [DMK_PROMPT_EXPERTS_BF16] = "mock-bf16"};
    const char *numerics = formats[w->experts == DMK_WORKER_EXPERTS_FP8 ? DMK_PROMPT_EXPERTS_FP8
                                                                        : DMK_PROMPT_EXPERTS_MXFP4];

    return (struct source){.conf = {.numerics = numerics,
                                    .prompt_numerics = prompts == DMK_PROMPT_EXPERTS_SAME
                                                           ? numerics
                                                           : formats[prompts],
                                    .dp = w->dp,
                                    .n_full_pages = w->full_pages,
                                    .n_window_pages = w->window_pages,
                                    .page_bytes = own->page_bytes,
                                    .step_us = own->step_us,
                                    .sequence_us = own->sequence_us,
                                    .prompt_token_us = own->prompt_token_us,
                                    .mean_tokens = own->mean_tokens,
                                    .step_log = own->step_log}};
}

static int mock_decode(int argc, char **argv)
{
    static const struct dmk_conf_part own_part = {own_options, N_OWN,
                                                  offsetof(struct decode_options, own)};
    static const struct dmk_conf_part *const parts[] = {&dmk_worker_part, &dmk_decode_part,
                                                        &own_part, NULL};
    const struct dmk_conf_program program = {
        .name = "damask mock decode",
        .summary = "A decode worker without a model: the real protocol at a configured speed.",
        .usage = "",
        .env_prefix = "DAMASK_MOCK_",
        .parts = parts,
        .changes = changes,
        .n_changes = N_CHANGES,
    };
    struct decode_options o = {0};
    struct dmk_error err = {0};
    uint32_t below = 0;
    int status = 0;
    int r = dmk_conf_load(&program, argc, argv, &o, NULL, &err);

    if (r == 0) {
        r = check(&o.role.worker, false, &o.own, &err);
    }
    if (r == 0) {
        r = dmk_decode_options_below(o.role.local_prefill_below, &below, &err);
    }
    if (r < 0) {
        (void)fprintf(stderr, "damask mock: %s\n", err.text);
        status = 2;
    } else if (r == 0) {
        struct source s =
            source_of(&o.role.worker, &o.own, (enum dmk_prompt_experts)o.role.prompt_experts);
        const struct dmk_engine_source source = {open_engine, close_engine, &s};

        status = dmk_decode_serve(&o.role, below, &source);
    }
    dmk_conf_free(&program, &o);
    return status;
}

static int mock_prefill(int argc, char **argv)
{
    static const struct dmk_conf_part own_part = {own_options, N_OWN,
                                                  offsetof(struct prefill_options, own)};
    static const struct dmk_conf_part *const parts[] = {&dmk_worker_part, &dmk_prefill_part,
                                                        &own_part, NULL};
    const struct dmk_conf_program program = {
        .name = "damask mock prefill",
        .summary = "A prefill worker without a model: the real protocol at a configured speed.",
        .usage = "",
        .env_prefix = "DAMASK_MOCK_",
        .parts = parts,
        .changes = changes,
        .n_changes = N_CHANGES - 1,
    };
    struct prefill_options o = {0};
    struct dmk_error err = {0};
    int status = 0;
    int r = dmk_conf_load(&program, argc, argv, &o, NULL, &err);

    if (r == 0) {
        r = check(&o.role.worker, true, &o.own, &err);
    }
    if (r < 0) {
        (void)fprintf(stderr, "damask mock: %s\n", err.text);
        status = 2;
    } else if (r == 0) {
        struct source s = source_of(&o.role.worker, &o.own, DMK_PROMPT_EXPERTS_SAME);
        const struct dmk_engine_source source = {open_engine, close_engine, &s};

        status = dmk_prefill_serve(&o.role, &source);
    }
    dmk_conf_free(&program, &o);
    return status;
}

int dmk_cmd_mock(int argc, char **argv)
{
    const char *role = argc > 1 ? argv[1] : "";

    if (strcmp(role, "decode") == 0) {
        return mock_decode(argc - 1, argv + 1);
    }
    if (strcmp(role, "prefill") == 0) {
        return mock_prefill(argc - 1, argv + 1);
    }
    (void)fprintf(strcmp(role, "--help") == 0 ? stdout : stderr,
                  "usage: damask mock prefill|decode [options]\n\n"
                  "A worker without a model: the real protocol at a configured speed.\n"
                  "damask mock decode --help lists the options.\n");
    return strcmp(role, "--help") == 0 ? 0 : 2;
}
