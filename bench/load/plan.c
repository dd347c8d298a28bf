/* Plans of requests; see plan.h. */
#include "bench/load/plan.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"
#include "common/json/json.h"

/* Each is one token with a blank in front. */
static const char *const words[] = {
    "the",   "of",      "and",     "to",    "in",   "is",    "that",  "for",    "it",     "as",
    "was",   "with",    "be",      "by",    "on",   "not",   "he",    "this",   "are",    "or",
    "his",   "from",    "at",      "which", "but",  "have",  "an",    "had",    "they",   "you",
    "were",  "their",   "one",     "all",   "we",   "can",   "her",   "has",    "there",  "been",
    "if",    "more",    "when",    "will",  "who",  "so",    "no",    "time",   "people", "way",
    "day",   "man",     "thing",   "woman", "life", "child", "world", "school", "state",  "family",
    "group", "country", "problem", "hand"};
#define N_WORDS (sizeof(words) / sizeof(words[0]))

void plan_prompt(const struct plan_request *r, struct dmk_buf *out)
{
    for (uint32_t i = 0; i < r->n_in; i++) {
        const uint32_t block = i / PLAN_BLOCK;
        const uint64_t h = block < r->n_hash ? r->hash[block] : dmk_rng_mix(r->seed + block);

        dmk_buf_putc(out, ' ');
        dmk_buf_puts(out, words[dmk_rng_u64(h, 1, i % PLAN_BLOCK) % N_WORDS]);
    }
}

static int add_line(struct plan *plan, const struct plan_conf *conf, struct dmk_str line,
                    const char *where, struct dmk_error *reterr)
{
    struct plan_request *r = &plan->requests[plan->n];
    json_t *root, *ids = NULL;
    double at = 0;
    int rc = dmk_json_parse(line, where, 4, &root, reterr);

    if (rc < 0) {
        return rc;
    }
    *r = (struct plan_request){.seed = dmk_rng_u64(conf->seed, 2, plan->n) | 1ull << 63};
    if ((rc = dmk_json_get_real(root, where, "timestamp", DMK_JSON_REQUIRED, 0, 1e12, &at,
                                reterr)) >= 0 &&
        (rc = dmk_json_get_u32(root, where, "input_length", DMK_JSON_REQUIRED, 1, 1u << 20,
                               &r->n_in, reterr)) >= 0 &&
        (rc = dmk_json_get_u32(root, where, "output_length", DMK_JSON_REQUIRED, 0, 1u << 20,
                               &r->n_out, reterr)) >= 0) {
        rc = dmk_json_get_array(root, where, "hash_ids", DMK_JSON_OPTIONAL, &ids, reterr);
    }
    if (rc >= 0) {
        r->n_out = r->n_out > 0 ? r->n_out : 1;
        r->at_ns = (uint64_t)(at * 1e6 / conf->speedup);
        r->n_hash = ids ? (uint32_t)json_array_size(ids) : 0;
        r->hash = calloc(r->n_hash + 1, sizeof(*r->hash));
        for (uint32_t i = 0; r->hash && i < r->n_hash; i++) {
            r->hash[i] = (uint64_t)json_integer_value(json_array_get(ids, i));
        }
        plan->n += r->hash != NULL;
        rc = r->hash ? 0 : dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the trace");
    }
    json_decref(root);
    return rc;
}

static int read_trace(const struct plan_conf *conf, struct plan *plan, struct dmk_error *reterr)
{
    FILE *file = fopen(conf->trace, "r");
    char *line = NULL;
    size_t cap = 0, n_cap = 0, number = 0;
    ssize_t len;
    int rc = 0;

    if (!file) {
        return dmk_error_set(reterr, -DMK_ENOENT, "the trace \"%s\" can not be read: %s",
                             conf->trace, strerror(errno));
    }
    while (rc >= 0 && (len = getline(&line, &cap, file)) > 0 &&
           (conf->n_requests == 0 || plan->n < conf->n_requests)) {
        char where[300];

        number++;
        while (len > 0 && (line[len - 1] == '\n' || line[len - 1] == '\r')) {
            len--;
        }
        if (len == 0) {
            continue;
        }
        if (plan->n == n_cap) {
            struct plan_request *more;

            n_cap = n_cap ? 2 * n_cap : 1024;
            more = realloc(plan->requests, n_cap * sizeof(*more));
            if (!more) {
                rc = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the trace");
                break;
            }
            plan->requests = more;
        }
        (void)snprintf(where, sizeof(where), "%.200s line %zu", conf->trace, number);
        rc = add_line(plan, conf, (struct dmk_str){line, (size_t)len}, where, reterr);
    }
    free(line);
    (void)fclose(file);
    if (rc >= 0 && plan->n == 0) {
        rc = dmk_error_set(reterr, -DMK_EFORMAT, "the trace \"%s\" has no requests", conf->trace);
    }
    return rc < 0 ? rc : 0;
}

static int make_own(const struct plan_conf *conf, struct plan *plan, struct dmk_error *reterr)
{
    double at = 0;

    plan->n = conf->n_requests;
    plan->requests = calloc(plan->n, sizeof(*plan->requests));
    for (size_t i = 0; plan->requests && i < plan->n; i++) {
        struct plan_request *r = &plan->requests[i];
        const uint32_t n_hash = conf->n_shared / PLAN_BLOCK;

        r->n_in = conf->n_in;
        r->n_out = conf->n_out;
        r->seed = dmk_rng_u64(conf->seed, 2, i) | 1ull << 63;
        r->hash = calloc(n_hash + 1, sizeof(*r->hash));
        r->n_hash = r->hash ? n_hash : 0;
        for (uint32_t b = 0; b < r->n_hash; b++) {
            r->hash[b] = dmk_rng_mix(conf->seed + b);
        }
        if (conf->concurrency == 0) {
            r->at_ns = (uint64_t)(at * 1e9);
            at +=
                conf->even ? 1 / conf->rate : -log(1 - dmk_rng_unit(conf->seed, 3, i)) / conf->rate;
        }
    }
    return plan->requests ? 0 : dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the requests");
}

int plan_make(const struct plan_conf *conf, struct plan *ret, struct dmk_error *reterr)
{
    struct plan plan = {.closed = conf->concurrency};
    const int rc = conf->trace[0] ? read_trace(conf, &plan, reterr) : make_own(conf, &plan, reterr);

    if (rc < 0) {
        plan_free(&plan);
        return rc;
    }
    *ret = plan;
    return 0;
}

void plan_free(struct plan *plan)
{
    for (size_t i = 0; plan->requests && i < plan->n; i++) {
        free(plan->requests[i].hash);
    }
    free(plan->requests);
    *plan = (struct plan){0};
}
