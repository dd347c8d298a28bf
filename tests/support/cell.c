/* The cell. One thread. */
#include "tests/support/cell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/clock.h"

#define MAX_ACTS 1024

enum act_kind { ACT_PREFILL, ACT_CANCEL, ACT_QUIET_ASK, ACT_CLOSED };

struct cell_act {
    enum act_kind kind;
    uint32_t answer;
    struct dmk_id128 cookie;
    uint64_t incarnation;
};

static const struct dmk_sample_params greedy = {
    .top_p = 1, .repetition_penalty = 1, .logprobs = true};

static struct dmk_request_id id_of(uint32_t answer)
{
    return (struct dmk_request_id){7, answer, 1};
}

static void push_act(struct cell *c, struct cell_act act)
{
    dmk_assert(c->n_acts < MAX_ACTS);
    c->acts[c->n_acts++] = act;
}

static struct cell_answer *answer_of(struct cell *c, struct dmk_request_id id)
{
    struct cell_answer *a = &c->answers[id.lo];

    dmk_assert(id.lo < c->n_answers && id.hi == 7 && id.attempt == 1);
    return a;
}

static void fail(struct cell *c, struct dmk_request_id id, enum dmk_failure code, const char *text,
                 uint32_t retry_after_ms)
{
    struct cell_answer *a = answer_of(c, id);

    if (a->over) {
        return;
    }
    a->failed = a->over = true;
    a->code = code;
    a->retry_after_ms = retry_after_ms;
    snprintf(a->text, sizeof(a->text), "%s", text);
    push_act(c, (struct cell_act){.kind = ACT_CANCEL, .answer = (uint32_t)id.lo});
}

static void keep_scores(struct cell_answer *a, const struct dmk_decode_event *e)
{
    dmk_assert(e->prompt_logprobs.first == a->n_scores + 1);
    a->scores = realloc(a->scores, (a->n_scores + e->prompt_logprobs.n) * sizeof(float));
    for (uint32_t i = 0; i < e->prompt_logprobs.n; i++) {
        dmk_assert(e->prompt_logprobs.rows[i].id == a->prompt[a->n_scores + 1]);
        a->scores[a->n_scores++] = e->prompt_logprobs.rows[i].logprob;
    }
}

static void keep_token(struct cell_answer *a, const struct dmk_decode_event *e)
{
    struct cell_choice *choice = &a->choices[e->token.choice];

    dmk_assert(choice->n < CELL_MAX_TOKENS && e->token.index == choice->n && !choice->finished);
    choice->ids[choice->n] = e->token.result->id;
    choice->logprobs[choice->n++] = e->token.result->logprob;
}

static void keep_end(struct cell_answer *a, const struct dmk_decode_event *e)
{
    struct cell_choice *choice = &a->choices[e->finished.choice];

    dmk_assert(!choice->finished && choice->n == e->finished.n_tokens);
    choice->finished = true;
    choice->stopped = e->finished.stopped;
    choice->n_cached = e->finished.n_cached;
    choice->n_preemptions = e->finished.n_preemptions;
    a->over = ++a->n_finished == a->n_choices;
}

static void on_decode_event(void *ud, const struct dmk_decode_event *e)
{
    struct cell *c = ud;
    struct cell_answer *a;

    if (e->kind == DMK_DECODE_QUIET_ASK) {
        push_act(c, (struct cell_act){.kind = ACT_QUIET_ASK,
                                      .cookie = e->quiet_ask.cookie,
                                      .incarnation = e->quiet_ask.p_incarnation});
        return;
    }
    a = answer_of(c, e->id);
    dmk_assert(!a->cancelled);
    switch (e->kind) {
    case DMK_DECODE_RESERVED:
        a->reserved = true;
        a->have = e->reserved.have;
        a->needs_prefill = e->reserved.needs_prefill;
        if (a->needs_prefill) {
            memcpy(a->ticket, e->reserved.ticket.data, e->reserved.ticket.len);
            a->ticket_len = e->reserved.ticket.len;
            push_act(c, (struct cell_act){.kind = ACT_PREFILL, .answer = (uint32_t)e->id.lo});
        }
        break;
    case DMK_DECODE_TRANSFERRED:
        a->transferred = true;
        a->transfer_bytes = e->transferred.bytes;
        break;
    case DMK_DECODE_PROMPT_LOGPROBS:
        keep_scores(a, e);
        break;
    case DMK_DECODE_TOKEN:
        keep_token(a, e);
        break;
    case DMK_DECODE_FINISHED:
        keep_end(a, e);
        break;
    default:
        fail(c, e->id, e->failed.code, e->failed.text, e->failed.retry_after_ms);
    }
}

static void on_prefill_event(void *ud, const struct dmk_prefill_event *e)
{
    struct cell *c = ud;

    switch (e->kind) {
    case DMK_PREFILL_CLOSED_WORD:
        push_act(c, (struct cell_act){.kind = ACT_CLOSED, .cookie = e->closed_word.cookie});
        break;
    case DMK_PREFILL_DONE:
        answer_of(c, e->id)->prefill_done = true;
        answer_of(c, e->id)->p_computed = e->done.n_computed;
        answer_of(c, e->id)->p_cached = e->done.n_cached;
        break;
    default:
        fail(c, e->id, e->failed.code, e->failed.text, e->failed.retry_after_ms);
    }
}

static void d_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct cell *c = ud;

    (void)dmk_decode_xfer_message(c->decode, ep, message, c->now_ns);
}

static void d_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct cell *c = ud;

    (void)status;
    dmk_decode_xfer_closed(c->decode, ep, c->now_ns);
}

static void p_message(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct cell *c = ud;

    (void)dmk_prefill_xfer_message(c->prefill, ep, message, c->now_ns);
}

static void p_closed(void *ud, struct dmk_xfer_ep *ep, int status)
{
    struct cell *c = ud;

    (void)status;
    dmk_prefill_xfer_closed(c->prefill, ep, c->now_ns);
}

static void p_layer(void *ud)
{
    struct cell *c = ud;

    if (c->conf.on_layer) {
        c->conf.on_layer(c->conf.ud, c);
    }
    dmk_prefill_layers(c->prefill);
}

static void new_decode(struct cell *c, struct dmk_error *err)
{
    const struct cell_conf *k = &c->conf;
    struct dmk_decode_conf conf = {
        .engine = k->decode,
        .incarnation = 11,
        .n_full_pages = k->d_full_pages,
        .n_window_pages = k->d_window_pages,
        .max_sequences = k->max_sequences,
        .max_context = k->max_context,
        .max_step_tokens = k->step_tokens ? k->step_tokens : k->max_sequences + k->chunk_tokens,
        .max_chunk_tokens = k->chunk_tokens,
        .max_logit_rows = k->max_sequences + 32,
        .local_prefill_below = c->p_node ? k->local_prefill_below : DMK_DECODE_LOCAL_ALWAYS,
        .reuse = !k->no_reuse,
        .ops = c->d_node ? &dmk_xfer_loopback_ops : NULL,
        .xfer = c->d_node,
        .ticket_expiry_ns = (k->ticket_expiry_ms ? k->ticket_expiry_ms : 500) * DMK_NS_PER_MS,
        .transfer_budget_ns =
            (k->transfer_budget_ms ? k->transfer_budget_ms : 2000) * DMK_NS_PER_MS,
        .quiet_ask_every_ns = 50 * DMK_NS_PER_MS,
        .max_draining_pages = k->max_draining_pages ? k->max_draining_pages : 1u << 20,
        .on_event = on_decode_event,
        .ud = c,
    };

    if (dmk_decode_core_new(&conf, &c->decode, err) != 0) {
        fprintf(stderr, "%s\n", err->text);
        dmk_unreachable("no decode core");
    }
}

static void new_prefill(struct cell *c, struct dmk_error *err)
{
    const struct cell_conf *k = &c->conf;
    struct dmk_prefill_conf conf = {
        .engine = k->prefill,
        .incarnation = 22 + c->n_restarts,
        .n_full_pages = k->p_full_pages,
        .n_window_pages = k->p_window_pages,
        .max_jobs = 16,
        .max_context = k->max_context,
        .chunk_tokens = k->chunk_tokens,
        .reuse = !k->no_reuse,
        .ops = &dmk_xfer_loopback_ops,
        .xfer = c->p_node,
        .queue_budget_ns = (k->queue_budget_ms ? k->queue_budget_ms : 5000) * DMK_NS_PER_MS,
        .transfer_budget_ns =
            (k->transfer_budget_ms ? k->transfer_budget_ms : 2000) * DMK_NS_PER_MS,
        .resend_every_ns = 20 * DMK_NS_PER_MS,
        .give_up_ns = 3000 * DMK_NS_PER_MS,
        .max_puts_in_flight = 32,
        .on_layer = p_layer,
        .on_event = on_prefill_event,
        .ud = c,
    };

    if (dmk_prefill_core_new(&conf, &c->prefill, err) != 0) {
        fprintf(stderr, "%s\n", err->text);
        dmk_unreachable("no prefill core");
    }
}

/* The quiet rule: nothing lands outside of the pages of tickets that are out. */
static void on_write(void *ud, const struct dmk_xfer *writer, void *addr, size_t bytes)
{
    const struct cell *c = ud;

    (void)writer;
    dmk_assert(dmk_decode_expects_write(c->decode, addr));
    dmk_assert(dmk_decode_expects_write(c->decode, (const uint8_t *)addr + bytes - 1));
}

static void open_node(struct cell *c, const char *name, struct dmk_xfer_events events,
                      struct dmk_xfer **ret)
{
    struct dmk_xfer_conf conf = {.bind = name, .fabric = c->fabric, .events = events};
    struct dmk_error err;
    const int r = dmk_xfer_loopback_ops.open(&conf, ret, &err);

    dmk_assert(r == 0);
}

struct cell *cell_new(const struct cell_conf *conf)
{
    struct cell *c = calloc(1, sizeof(*c));
    struct dmk_error err = {0};

    dmk_assert(c);
    c->conf = *conf;
    c->now_ns = DMK_NS_PER_S;
    c->answers = calloc(CELL_MAX_ANSWERS, sizeof(*c->answers));
    c->acts = calloc(MAX_ACTS, sizeof(*c->acts));
    dmk_assert(c->answers && c->acts);
    if (conf->prefill.step) {
        struct dmk_loopback_conf fabric = conf->fabric;
        int r;

        fabric.on_write = on_write;
        fabric.ud = c;
        r = dmk_loopback_new(&fabric, &c->fabric);

        dmk_assert(r == 0);
        open_node(c, "decode", (struct dmk_xfer_events){d_message, d_closed, c}, &c->d_node);
        open_node(c, "prefill", (struct dmk_xfer_events){p_message, p_closed, c}, &c->p_node);
        new_prefill(c, &err);
    }
    new_decode(c, &err);
    return c;
}

void cell_free(struct cell **cellp)
{
    struct cell *c = *cellp;

    dmk_assert(dmk_decode_check(c->decode));
    dmk_assert(!c->prefill || dmk_prefill_check(c->prefill));
    dmk_decode_core_free(&c->decode);
    dmk_prefill_core_free(&c->prefill);
    if (c->fabric) {
        dmk_xfer_loopback_ops.close(c->d_node);
        dmk_xfer_loopback_ops.close(c->p_node);
        dmk_loopback_free(&c->fabric);
    }
    for (uint32_t i = 0; i < c->n_answers; i++) {
        free(c->answers[i].prompt);
        free(c->answers[i].scores);
    }
    free(c->answers);
    free(c->acts);
    free(c);
    *cellp = NULL;
}

uint32_t cell_ask(struct cell *c, const struct dmk_decode_request *request)
{
    struct dmk_decode_request r = *request;
    struct cell_answer *a = &c->answers[c->n_answers];

    dmk_assert(c->n_answers < CELL_MAX_ANSWERS);
    r.id = id_of(c->n_answers);
    r.n = r.n ? r.n : 1;
    r.max_tokens = r.max_tokens ? r.max_tokens : 8;
    r.sampling = r.sampling ? r.sampling : &greedy;
    *a = (struct cell_answer){
        .used = true, .n_choices = r.n, .n_prompt = r.n_prompt, .salt = r.salt};
    a->prompt = malloc((r.n_prompt + 1) * sizeof(uint32_t));
    dmk_assert(a->prompt);
    memcpy(a->prompt, r.prompt, r.n_prompt * sizeof(uint32_t));
    c->n_answers++;
    dmk_decode_generate(c->decode, &r, c->now_ns);
    return (uint32_t)r.id.lo;
}

void cell_cancel(struct cell *c, uint32_t answer)
{
    struct cell_answer *a = &c->answers[answer];

    if (!a->over) {
        a->over = a->cancelled = true;
        dmk_decode_cancel(c->decode, 0, id_of(answer), c->now_ns);
        if (c->prefill && !c->p_dead) {
            dmk_prefill_cancel(c->prefill, 0, id_of(answer));
        }
    }
}

static void act(struct cell *c, const struct cell_act *act)
{
    const struct cell_answer *a = &c->answers[act->answer];

    switch (act->kind) {
    case ACT_PREFILL:
        if (!a->over && c->p_dead) {
            fail(c, id_of(act->answer), DMK_FAILURE_PEER, "no prefill worker", 0);
        } else if (!a->over) {
            const struct dmk_prefill_request r = {.id = id_of(act->answer),
                                                  .prompt = a->prompt,
                                                  .n_prompt = a->n_prompt,
                                                  .salt = a->salt,
                                                  .ticket = {a->ticket, a->ticket_len}};

            dmk_prefill_submit(c->prefill, &r, c->now_ns);
        }
        break;
    case ACT_CANCEL:
        dmk_decode_cancel(c->decode, 0, id_of(act->answer), c->now_ns);
        if (c->prefill && !c->p_dead) {
            dmk_prefill_cancel(c->prefill, 0, id_of(act->answer));
        }
        break;
    case ACT_QUIET_ASK:
        if (c->prefill && !c->p_dead) {
            dmk_prefill_quiet_ask(c->prefill, act->cookie, act->incarnation, 11);
        }
        break;
    default:
        dmk_decode_closed_word(c->decode, act->cookie, c->now_ns);
    }
}

void cell_turn(struct cell *c)
{
    struct cell_act acts[MAX_ACTS];
    const uint32_t n_acts = c->n_acts;
    struct dmk_prefill_step *p;
    struct dmk_decode_step *d;

    c->n_turns++;
    c->now_ns += DMK_NS_PER_MS;
    memcpy(acts, c->acts, n_acts * sizeof(acts[0]));
    c->n_acts = 0;
    for (uint32_t i = 0; i < n_acts; i++) {
        act(c, &acts[i]);
    }
    if (c->fabric) {
        dmk_xfer_loopback_ops.progress(c->d_node);
        dmk_xfer_loopback_ops.progress(c->p_node); /* of a killed node: only time */
    }
    if (c->n_turns % 10 == 0) {
        dmk_decode_tick(c->decode, c->now_ns);
        if (c->prefill && !c->p_dead) {
            dmk_prefill_tick(c->prefill, c->now_ns);
        }
    }
    if (c->prefill && !c->p_dead && (p = dmk_prefill_plan(c->prefill, c->now_ns)) != NULL) {
        dmk_prefill_run(p);
        dmk_prefill_done(c->prefill, p, c->now_ns);
    }
    if ((d = dmk_decode_plan(c->decode, c->now_ns)) != NULL) {
        dmk_decode_run(d);
        dmk_decode_done(c->decode, d, c->now_ns);
    }
}

bool cell_run(struct cell *c, uint32_t max_turns)
{
    for (uint32_t t = 0; t < max_turns; t++) {
        bool over = true;

        for (uint32_t i = 0; i < c->n_answers; i++) {
            over = over && c->answers[i].over;
        }
        if (over) {
            return true;
        }
        cell_turn(c);
    }
    return false;
}

static bool settled(const struct cell *c)
{
    const struct dmk_decode_load d = dmk_decode_load(c->decode);

    if (c->n_acts > 0 || !dmk_decode_idle(c->decode) || d.full.leased + d.full.draining > 0 ||
        d.window.leased + d.window.draining > 0) {
        return false;
    }
    if (c->prefill && !c->p_dead) {
        const struct dmk_prefill_load p = dmk_prefill_load(c->prefill);

        return dmk_prefill_idle(c->prefill) && p.full.leased == 0 && p.window.leased == 0;
    }
    return true;
}

bool cell_settle(struct cell *c, uint32_t max_turns)
{
    for (uint32_t t = 0; t < max_turns; t++) {
        if (settled(c)) {
            return true;
        }
        cell_turn(c);
    }
    return false;
}

void cell_kill_prefill(struct cell *c, uint32_t linger_steps)
{
    dmk_loopback_kill(c->fabric, c->p_node, linger_steps);
    c->p_dead = true;
}

void cell_restart_prefill(struct cell *c)
{
    struct dmk_error err = {0};

    dmk_assert(c->p_dead);
    dmk_prefill_core_free(&c->prefill);
    dmk_xfer_loopback_ops.close(c->p_node);
    c->n_restarts++;
    open_node(c, "prefill", (struct dmk_xfer_events){p_message, p_closed, c}, &c->p_node);
    new_prefill(c, &err);
    c->p_dead = false;
}

void cell_forget(struct cell *c)
{
    for (uint32_t i = 0; i < c->n_answers; i++) {
        dmk_assert(c->answers[i].over);
        free(c->answers[i].prompt);
        free(c->answers[i].scores);
    }
    c->n_answers = 0;
}

bool cell_check(struct cell *c, bool idle)
{
    return dmk_decode_check(c->decode) && (!c->prefill || dmk_prefill_check(c->prefill)) &&
           (!idle || settled(c));
}
