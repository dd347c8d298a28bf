/* How requests end: complete, failed, left by their client. On the loop.
 *
 * The failure of one part ends all; an answer is complete when all parts are. What a request used is told
 * here once: to the client, the metrics and the log. */
#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/log.h"
#include "router/request_internal.h"

static void unlink_request(struct dmk_request *r)
{
    struct dmk_requests *all = r->all;
    struct dmk_request **at = &all->table[r->id.lo & (all->n_buckets - 1)];

    while (*at != r) {
        at = &(*at)->next;
    }
    *at = r->next;
    if (!dmk_list_empty(&r->queued)) {
        dmk_list_remove(&r->queued);
        all->n_waiting--;
    }
    dmk_list_remove(&r->dirty);
    dmk_list_remove(&r->node);
    dmk_list_remove(&r->parts);
    all->n_open--;
    dmk_gauge_set(all->conf.stats->open_requests, all->n_open);
}

static void free_request(struct dmk_request *r)
{
    dmk_assert(!r->d && !r->p);
    unlink_request(r);
    dmk_request__output_fini(r);
    if (r->reply) {
        r->dialect->reply_free(r->reply);
    }
    dmk_buf_fini(&r->local);
    dmk_ask_fini(&r->ask);
    free(r);
}

static void free_all(struct dmk_request *lead)
{
    struct dmk_request *part;

    while ((part = dmk_request__next_part(lead))) {
        free_request(part);
    }
    free_request(lead);
}

static void leave_all(struct dmk_request *lead)
{
    for (struct dmk_request *r = lead; r; r = dmk_request__next_part(r)) {
        dmk_request__leave_workers(r, true);
    }
}

static void count_status(struct dmk_request *r, unsigned status)
{
    for (size_t i = 0; dmk_dialects[i] && i < DMK_MAX_DIALECTS; i++) {
        if (dmk_dialects[i] == r->dialect && status / 100 >= 2 && status / 100 < DMK_N_STATUS) {
            dmk_counter_add(r->all->conf.stats->requests[i][status / 100], 1);
        }
    }
}

/* The one line that every request leaves. Workers are those of the first prompt. */
static void log_end(struct dmk_request *lead, const char *result, const struct dmk_buf *timeline)
{
    uint64_t n_prompt = 0, n_cached = 0, n_output = 0;

    for (struct dmk_request *r = lead; r; r = dmk_request__next_part(r)) {
        n_prompt += r->ask.prompt.len;
        n_cached += r->n_cached;
        n_output += r->n_output;
    }
    dmk_log_info(
        "req=%s id=%s api=%s result=%s prompt=%llu cached=%llu output=%llu n=%u d=%s p=%s %s",
        lead->request_id, lead->id_hex, lead->dialect->name, result, (unsigned long long)n_prompt,
        (unsigned long long)n_cached, (unsigned long long)n_output, lead->ask.n,
        lead->d_name[0] ? lead->d_name : "-", lead->p_name[0] ? lead->p_name : "-",
        timeline->data ? timeline->data : "");
}

static void tell_timeline(struct dmk_request *r, struct dmk_buf *text)
{
    dmk_buf_init(text, 4096);
    r->timeline.end_ns = dmk_requests__now_ns(r->all);
    dmk_timeline_text(&r->timeline, text);
}

void dmk_request__fail(struct dmk_request *r, const struct dmk_api_error *error)
{
    struct dmk_request *lead = r->lead;
    const struct dmk_api_error copy = *error; /* it may lie in what is freed here */
    struct dmk_buf timeline;
    char result[32];

    tell_timeline(lead, &timeline);
    (void)snprintf(result, sizeof(result), "%u", copy.status);
    log_end(lead, result, &timeline);
    count_status(lead, copy.status);
    leave_all(lead);
    if (lead->reply && lead->ask.stream && lead->dialect->fail) {
        lead->dialect->fail(lead->reply, &copy);
    }
    lead->front->fail(lead->ud, &copy, dmk_buf_str(&timeline));
    dmk_buf_fini(&timeline);
    free_all(lead);
}

void dmk_request__fail_busy(struct dmk_request *r, unsigned status, const char *code,
                            const char *text)
{
    struct dmk_api_error error;

    (void)dmk_api_fail(&error, status, code, "%s", text);
    error.retry_after_s = dmk_requests__retry_after_s(r->all);
    dmk_request__fail(r, &error);
}

/* What this part used, for the client and the metrics. */
static void count_part(struct dmk_request *r)
{
    struct dmk_stats *stats = r->all->conf.stats;
    struct dmk_usage *sum = &r->lead->usage;
    uint32_t n_output = 0;

    for (uint32_t i = 0; i < r->ask.n; i++) {
        n_output += r->choices[i].n_tokens;
        sum->n_reasoning += r->choices[i].n_reasoning;
    }
    sum->n_prompt += (uint32_t)r->ask.prompt.len;
    sum->n_cached += r->n_cached;
    sum->n_output += n_output;
    dmk_counter_add(stats->prompt_tokens, (double)r->ask.prompt.len);
    dmk_counter_add(stats->cached_tokens, r->n_cached);
    dmk_histogram_observe(stats->request_prompt_tokens, (double)r->ask.prompt.len);
    dmk_histogram_observe(stats->request_generation_tokens, n_output);
}

static void finish(struct dmk_request *lead)
{
    struct dmk_stats *stats = lead->all->conf.stats;
    struct dmk_timeline *t = &lead->timeline;
    struct dmk_buf timeline;

    tell_timeline(lead, &timeline);
    dmk_request__rank(lead);
    lead->dialect->end(lead->reply, &lead->usage);
    log_end(lead, "200", &timeline);
    count_status(lead, 200);
    dmk_histogram_observe(stats->e2e, (double)(t->end_ns - t->received_ns) / 1e9);
    if (t->first_ns) {
        dmk_histogram_observe(stats->decode_time, (double)(t->end_ns - t->first_ns) / 1e9);
    }
    lead->front->done(lead->ud, dmk_buf_str(&timeline));
    dmk_buf_fini(&timeline);
    free_all(lead);
}

void dmk_request__complete(struct dmk_request *r)
{
    struct dmk_request *lead = r->lead;
    bool cut = false;

    for (uint32_t i = 0; i < r->ask.n; i++) {
        cut = cut || r->choices[i].cut;
    }
    count_part(r);
    /* D has ended by itself unless a choice was cut here; a cancel too many does no harm. */
    dmk_request__leave_workers(r, cut);
    r->state = DMK_OVER;
    if (--lead->n_parts_left == 0) {
        finish(lead);
    }
}

void dmk_request__answer_local(struct dmk_request *r)
{
    struct dmk_buf timeline;

    tell_timeline(r, &timeline);
    log_end(r, "200", &timeline);
    count_status(r, 200);
    r->front->begin(r->ud, false);
    r->front->frame(r->ud, NULL, dmk_buf_bytes(&r->local));
    r->front->done(r->ud, dmk_buf_str(&timeline));
    dmk_buf_fini(&timeline);
    free_all(r);
}

void dmk_request__end_abandoned(struct dmk_request *r)
{
    struct dmk_request *lead = r->lead;
    struct dmk_buf timeline;

    tell_timeline(lead, &timeline);
    log_end(lead, "client_gone", &timeline);
    dmk_buf_fini(&timeline);
    dmk_counter_add(lead->all->conf.stats->success[DMK_N_FINISH], 1);
    leave_all(lead);
    lead->front->release(lead->ud);
    free_all(lead);
}
