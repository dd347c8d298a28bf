/* Token ids of a request to events of its answer: parser, stop strings, log-probabilities.
 *
 * On the loop. A choice ends when its worker says so, or when this file cuts it: at a stop string
 * in the visible content, or after its first tool call where only one is wanted. What comes for it
 * later is dropped; when all choices have ended the request is complete. */
#include <stdlib.h>
#include "common/text/utf8.h"
#include "router/request_internal.h"

static struct dmk_lp_record *list_add(struct dmk_lp_list *list)
{
    if (list->n == list->cap) {
        const size_t cap = list->cap ? 2 * list->cap : 8;
        struct dmk_lp_record *items = realloc(list->items, cap * sizeof(*items));

        if (!items) {
            return NULL;
        }
        list->items = items;
        list->cap = cap;
    }
    list->items[list->n] = (struct dmk_lp_record){0};
    return &list->items[list->n++];
}

static void list_drop(struct dmk_lp_list *list, size_t n)
{
    list->n -= n;
    if (n > 0 && list->n > 0) {
        memmove(list->items, list->items + n, list->n * sizeof(list->items[0]));
    }
}

/* Records as dialects see them, in the scratch that all requests share. NULL: no memory. */
static const struct dmk_lp *show(struct dmk_requests *all, const struct dmk_lp_record *records,
                                 size_t n)
{
    if (n > all->cap_lps) {
        struct dmk_lp *lps = realloc(all->lps, n * sizeof(*lps));

        if (!lps) {
            return NULL;
        }
        all->lps = lps;
        all->cap_lps = n;
    }
    for (size_t i = 0; i < n; i++) {
        struct dmk_lp *to = &all->lps[i];

        to->id = records[i].id;
        to->bytes = dmk_token_bytes(all->conf.vocab, records[i].id);
        to->logprob = records[i].logprob;
        to->has_logprob = records[i].has_logprob;
        to->n_top = records[i].n_top;
        for (uint32_t k = 0; k < to->n_top; k++) {
            to->top[k].id = records[i].top[k].id;
            to->top[k].bytes = dmk_token_bytes(all->conf.vocab, records[i].top[k].id);
            to->top[k].logprob = records[i].top[k].logprob;
        }
    }
    return all->lps;
}

/* The prompt in front of the answer, once for each choice. */
static void send_echo(struct dmk_choice *c)
{
    struct dmk_request *r = c->request;
    struct dmk_requests *all = r->all;
    const struct dmk_lp *lps = NULL;
    struct dmk_buf text;

    if (c->echoed || !r->ask.echo || !r->dialect->prompt) {
        return;
    }
    c->echoed = true;
    dmk_buf_init(&text, 0);
    if (r->ask.text.len > 0) {
        dmk_buf_append_str(&text, dmk_buf_str(&r->ask.text));
    } else {
        struct dmk_buf bytes;

        dmk_buf_init(&bytes, 0);
        for (size_t i = 0; i < r->ask.prompt.len; i++) {
            const struct dmk_bytes b = dmk_token_bytes(all->conf.vocab, r->ask.prompt.data[i]);

            dmk_buf_append(&bytes, b.data, b.len);
        }
        dmk_utf8_append_lossy(&text, dmk_buf_bytes(&bytes));
        dmk_buf_fini(&bytes);
    }
    if (r->prompt_lps.n > 0) {
        lps = show(all, r->prompt_lps.items, r->prompt_lps.n);
    }
    r->dialect->prompt(r->lead->reply, r->first_choice + c->index, dmk_buf_str(&text), lps,
                       lps ? r->prompt_lps.n : 0);
    dmk_buf_fini(&text);
}

static void emit(struct dmk_choice *c, const struct dmk_event *event, const struct dmk_lp *lps,
                 size_t n_lps)
{
    struct dmk_request *r = c->request;

    r->dialect->event(r->lead->reply, r->first_choice + c->index, event, lps, n_lps);
}

/* Content that surely goes out, with the tokens that begin in it. */
static void emit_content(struct dmk_choice *c, const struct dmk_event *event, struct dmk_str text,
                         bool last)
{
    struct dmk_event e = *event;
    const struct dmk_lp *lps = NULL;
    size_t n = 0;

    if (text.len == 0) {
        return;
    }
    c->n_sent += text.len;
    while (n < c->out.n && (last || c->out.items[n].start < c->n_sent)) {
        n++;
    }
    if (n > 0) {
        lps = show(c->request->all, c->out.items, n);
    }
    e.kind = DMK_EVENT_CONTENT;
    e.text = text;
    emit(c, &e, lps, lps ? n : 0);
    list_drop(&c->out, n);
}

/* Text that the stop strings held back is no beginning of one after all. */
static void flush_held(struct dmk_choice *c)
{
    const struct dmk_event e = {.kind = DMK_EVENT_CONTENT};
    struct dmk_buf *text = &c->request->all->text;

    if (c->stop.n > 0 && !c->request->dialect->tokens) {
        dmk_buf_reset(text);
        dmk_stop_flush(&c->stop, text);
        emit_content(c, &e, dmk_buf_str(text), false);
    }
}

/* The tokens that came since the last event or control token made this content. */
static void take_pending(struct dmk_choice *c, size_t n_bytes)
{
    size_t start = c->n_content;

    for (size_t i = 0; i < c->pending.n; i++) {
        struct dmk_lp_record *to = list_add(&c->out);

        if (!to) {
            break; /* entries are lost, the answer is not */
        }
        *to = c->pending.items[i];
        to->start = start;
        start += dmk_token_bytes(c->request->all->conf.vocab, to->id).len;
    }
    c->pending.n = 0;
    c->n_content += n_bytes;
}

static void cut(struct dmk_choice *c, enum dmk_finish finish)
{
    c->ended = true;
    c->cut = true;
    c->cut_finish = finish;
}

static void on_event(void *ud, const struct dmk_event *event)
{
    struct dmk_choice *c = ud;
    struct dmk_request *r = c->request;

    if (c->ended) {
        return;
    }
    if (event->kind == DMK_EVENT_CONTENT) {
        struct dmk_buf *text = &r->all->text;
        bool stopped;

        take_pending(c, event->text.len);
        if (c->stop.n == 0) {
            emit_content(c, event, event->text, false);
            return;
        }
        dmk_buf_reset(text);
        stopped = dmk_stop_push(&c->stop, event->text, text);
        emit_content(c, event, dmk_buf_str(text), false);
        if (stopped) {
            cut(c, DMK_FINISH_STOP);
        }
        return;
    }
    c->pending.n = 0;
    flush_held(c);
    emit(c, event, NULL, 0);
    if (event->kind == DMK_EVENT_CALL_END && !r->ask.parallel_calls) {
        cut(c, DMK_FINISH_TOOL_CALLS);
    }
}

int dmk_request__output_init(struct dmk_request *r)
{
    const struct dmk_conv_view *view = r->ask.conv ? dmk_conv_view(r->ask.conv) : NULL;
    const size_t n_tools = view ? view->n_tools : 0;
    struct dmk_str *names = calloc(n_tools + 1, sizeof(*names));
    int rc = names ? 0 : -DMK_ENOMEM;

    for (size_t i = 0; names && i < n_tools; i++) {
        names[i] = view->tools[i].name;
    }
    r->choices = calloc(r->ask.n, sizeof(r->choices[0]));
    rc = r->choices ? rc : -DMK_ENOMEM;
    for (uint32_t i = 0; rc == 0 && i < r->ask.n; i++) {
        struct dmk_choice *c = &r->choices[i];
        const struct dmk_parser_conf conf = {
            .vocab = r->all->conf.vocab,
            .tool_names = names,
            .n_tool_names = n_tools,
            .tools_allowed = n_tools > 0 && view->tool_choice != DMK_TOOLS_NONE,
            .runs_on = r->ask.ignore_eos,
            .call_id_seed = r->id.lo ^ (0x9e3779b97f4a7c15ull * (i + 1)),
            .on_event = on_event,
            .ud = c,
        };

        c->request = r;
        c->index = i;
        c->stopped = dmk_ask_is_prompt_only(&r->ask);
        c->parser = r->format->parser_new(&conf);
        rc = c->parser ? dmk_stop_init(&c->stop, r->ask.stops, r->ask.n_stops) : -DMK_ENOMEM;
    }
    free(names);
    return rc;
}

void dmk_request__output_reset(struct dmk_request *r)
{
    for (uint32_t i = 0; i < r->ask.n; i++) {
        r->choices[i].n_received = 0; /* else what was sampled for a prompt alone */
    }
    r->prompt_lps.n = 0;
}

void dmk_request__output_fini(struct dmk_request *r)
{
    for (uint32_t i = 0; r->choices && i < r->ask.n; i++) {
        struct dmk_choice *c = &r->choices[i];

        if (c->parser) {
            r->format->parser_free(&c->parser);
        }
        dmk_stop_fini(&c->stop);
        free(c->pending.items);
        free(c->out.items);
    }
    free(r->choices);
    r->choices = NULL;
    free(r->prompt_lps.items);
    r->prompt_lps = (struct dmk_lp_list){0};
}

/* Flushes the parser and tells the dialect how the choice ended. */
static void end_choice(struct dmk_choice *c, bool by_length)
{
    struct dmk_request *r = c->request;
    struct dmk_parse_result result = {0};
    enum dmk_finish finish = c->cut_finish;

    r->format->parser_end(c->parser, by_length || c->cut, &result);
    if (!c->cut) {
        flush_held(c);
        finish = by_length                            ? DMK_FINISH_LENGTH
                 : result.end == DMK_PARSE_TOOL_CALLS ? DMK_FINISH_TOOL_CALLS
                                                      : DMK_FINISH_STOP;
    }
    c->ended = true;
    c->n_reasoning =
        result.n_reasoning_tokens < c->n_tokens ? result.n_reasoning_tokens : c->n_tokens;
    send_echo(c);
    r->dialect->choice_end(r->lead->reply, r->first_choice + c->index, finish);
    r->n_ended++;
    dmk_counter_add(r->all->conf.stats->success[finish], 1);
    for (int i = 0; i < DMK_N_REPAIRS; i++) {
        if (result.repairs[i] > 0) {
            dmk_counter_add(r->all->conf.stats->recovered[i], result.repairs[i]);
        }
    }
}

static void take_top(const struct dmk_request *r, struct dmk_lp_record *record,
                     const Damask__V1__TopLogprobs *top)
{
    for (size_t k = 0; top && k < top->n_entries && k < r->ask.top_logprobs; k++) {
        record->top[k].id = top->entries[k]->token;
        record->top[k].logprob = top->entries[k]->logprob;
        record->n_top++;
    }
}

static void note_logprobs(struct dmk_choice *c, const Damask__V1__Tokens *t, size_t i)
{
    struct dmk_lp_record *record;

    if (dmk_token_is_special(t->ids[i])) {
        if (c->request->ask.conv) {
            c->pending.n = 0; /* what stood before a control token was a header, not text */
        }
        return;
    }
    record = list_add(&c->pending);
    if (!record) {
        return;
    }
    record->id = t->ids[i];
    record->has_logprob = i < t->n_logprobs;
    record->logprob = record->has_logprob ? t->logprobs[i] : 0;
    take_top(c->request, record, i < t->n_top ? t->top[i] : NULL);
}

/* A token of an answer that is no text: kept until the end of the message. */
static void push_raw(struct dmk_choice *c, const Damask__V1__Tokens *t, size_t i)
{
    struct dmk_request *r = c->request;
    const struct dmk_bytes bytes = dmk_token_bytes(r->all->conf.vocab, t->ids[i]);
    struct dmk_lp_record *record = list_add(&c->out);

    if (record) {
        record->id = t->ids[i];
        record->has_logprob = i < t->n_logprobs;
        record->logprob = record->has_logprob ? t->logprobs[i] : 0;
        take_top(r, record, i < t->n_top ? t->top[i] : NULL);
    }
    if (c->stop.n > 0 && !dmk_token_is_special(t->ids[i])) {
        dmk_buf_reset(&r->all->text);
        if (dmk_stop_push(&c->stop, (struct dmk_str){(const char *)bytes.data, bytes.len},
                          &r->all->text)) {
            cut(c, DMK_FINISH_STOP);
        }
    }
}

static void send_raw(struct dmk_choice *c)
{
    struct dmk_request *r = c->request;
    const struct dmk_lp *lps = show(r->all, c->out.items, c->out.n);
    const struct dmk_str none = {0};

    if (lps && c->out.n > 0) {
        r->dialect->tokens(r->lead->reply, r->first_choice + c->index, lps, c->out.n, r->n_cached,
                           c->cut ? c->stop.words[c->stop.matched].text : none);
    }
    c->out.n = 0;
}

/* An engine's client that takes raw tokens has stop ids of its own, which the worker keeps to. */
static bool ends_turn(const struct dmk_request *r, uint32_t id)
{
    if (r->dialect->tokens) {
        return false;
    }
    for (size_t i = 0; i < r->format->n_stop_ids; i++) {
        if (r->format->stop_ids[i] == id) {
            return !r->ask.ignore_eos;
        }
    }
    return false;
}

bool dmk_request__tokens(struct dmk_request *r, const Damask__V1__Tokens *t)
{
    struct dmk_stats *stats = r->all->conf.stats;
    struct dmk_choice *c;
    const uint64_t now = dmk_requests__now_ns(r->all);

    if (t->choice >= r->ask.n) {
        return false;
    }
    c = &r->choices[t->choice];
    if (c->ended) {
        return true;
    }
    if (t->first_index != c->n_received) {
        return false;
    }
    send_echo(c);
    c->n_received += (uint32_t)t->n_ids;
    for (size_t i = 0; i < t->n_ids && !c->ended && !c->stopped; i++) {
        c->stopped = ends_turn(r, t->ids[i]);
        c->n_tokens++;
        r->n_output++;
        c->sum_logprobs += i < t->n_logprobs ? (double)t->logprobs[i] : 0;
        if (r->ask.logprobs && !r->dialect->tokens) {
            note_logprobs(c, t, i);
        }
        if (r->dialect->tokens) {
            push_raw(c, t, i);
        } else {
            r->format->parser_push(c->parser, t->ids[i]);
        }
    }
    if (r->dialect->tokens) {
        send_raw(c);
    }
    if (c->last_token_ns != 0 && t->n_ids > 0) {
        dmk_histogram_observe(stats->itl,
                              (double)(now - c->last_token_ns) / 1e9 / (double)t->n_ids);
    }
    c->last_token_ns = now;
    dmk_counter_add(stats->generation_tokens, (double)t->n_ids);
    if (c->cut) {
        end_choice(c, false);
    }
    return true;
}

/* The record of prompt token i; its log-probability follows from those before it, so the first has none. */
static struct dmk_lp_record *add_prompt_record(struct dmk_request *r)
{
    const size_t i = r->prompt_lps.n;
    struct dmk_lp_record *record = i < r->ask.prompt.len ? list_add(&r->prompt_lps) : NULL;

    if (record) {
        record->id = r->ask.prompt.data[i];
        record->has_logprob = i > 0;
    }
    return record;
}

bool dmk_request__prompt_logprobs(struct dmk_request *r, const Damask__V1__PromptLogprobs *m)
{
    if (r->prompt_lps.n == 0 && !add_prompt_record(r)) {
        return false;
    }
    for (size_t i = 0; i < m->n_logprobs; i++) {
        struct dmk_lp_record *record = add_prompt_record(r);

        if (!record) {
            return false;
        }
        record->logprob = m->logprobs[i];
        take_top(r, record, i < m->n_top ? m->top[i] : NULL);
    }
    return true;
}

bool dmk_request__has_prompt_logprobs(struct dmk_request *r)
{
    if (!dmk_ask_scores_prompt(&r->ask)) {
        return true;
    }
    return (r->prompt_lps.n > 0 || add_prompt_record(r)) && r->prompt_lps.n == r->ask.prompt.len;
}

bool dmk_request__finished(struct dmk_request *r, const Damask__V1__Finished *f)
{
    struct dmk_choice *c;

    if (f->choice >= r->ask.n) {
        return false;
    }
    c = &r->choices[f->choice];
    if (!c->ended) {
        if (f->n_tokens != c->n_received) {
            return false;
        }
        end_choice(c, f->reason == DAMASK__V1__FINISH_REASON__FINISH_LENGTH ||
                          dmk_ask_is_prompt_only(&r->ask));
    }
    return true;
}
