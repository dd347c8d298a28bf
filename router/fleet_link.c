/* The stream to one worker: dial, hello, events, end. Loop only; see fleet.h. */
#include "router/fleet_internal.h"

#include <stdio.h>
#include "common/base/assert.h"
#include "common/base/log.h"
#include "common/rpc/msg.h"
#include "common/text/tokenizer.h"

#define PROTOCOL_VERSION 1
#define PAUSE_MAX_MS     2000
#define PAUSE_REFUSED_MS 5000

static void dial(struct dmk_worker *w);

static void note_failure(struct dmk_worker *w, const char *why, bool refused)
{
    /* A worker that is not there yet is dialled for minutes: the same reason is told once. */
    if (!w->why || strcmp(w->why, why) != 0) {
        dmk_log_warn("%s worker %s is not usable: %s", dmk_fleet__role_name(w->role), w->address,
                     why);
    }
    w->why = why;
    w->told = true;
    w->refused = refused;
}

/* Everything that a stream's end means, whoever ended it. */
static void on_closed(void *ud, struct dmk_rpc_stream *stream, enum dmk_rpc_code code,
                      const char *text)
{
    struct dmk_worker *w = ud;
    struct dmk_fleet *fleet = w->fleet;
    const bool was_up = w->up;
    const uint64_t incarnation = w->incarnation;

    dmk_assert(!w->stream || w->stream == stream);
    w->stream = NULL;
    w->up = false;
    w->draining = w->hangs = false;
    w->has_load = w->load.stuck = false;
    w->full_until_ns = 0;
    if (fleet->closing) {
        return;
    }
    dmk_index_clear_worker(fleet->index, w->slot);
    if (was_up) {
        dmk_log_warn("worker=%s (%s, %s): its stream ended (code %d: %s)", w->id,
                     dmk_fleet__role_name(w->role), w->address, (int)code, text ? text : "");
        dmk_counter_add(fleet->conf.stats->worker_downs[w->role], 1);
        fleet->conf.events.on_down(fleet->conf.events.ud, w, "its stream ended");
        /* A hint to the other role: probe it. It ends nothing. */
        for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
            struct dmk_worker *other = fleet->workers[i];
            Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
            Damask__V1__PeerReport report = DAMASK__V1__PEER_REPORT__INIT;

            if (other && other->up && other->role != w->role) {
                report.peer_incarnation = incarnation;
                m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_PEER_REPORT;
                m.peer_report = &report;
                (void)dmk_worker_send(other, &m); /* its own end is told by its own on_closed */
            }
        }
    } else if (!w->told) {
        note_failure(w, "it can not be reached or ended the stream before its hello", false);
    }
    dmk_assert(w->n_requests == 0);
    if (w->removed) {
        dmk_fleet__worker_free(w);
    } else {
        dmk_timer_start(w->timer, w->refused ? PAUSE_REFUSED_MS : w->pause_ms, 0);
        w->pause_ms = w->pause_ms * 2 < PAUSE_MAX_MS ? w->pause_ms * 2 : PAUSE_MAX_MS;
    }
    dmk_fleet__count(fleet);
    if (was_up) {
        fleet->conf.events.on_batch_end(fleet->conf.events.ud);
        fleet->conf.events.on_change(fleet->conf.events.ud);
    }
}

static bool has_model(const struct dmk_worker *w, const Damask__V1__WorkerHello *h)
{
    return w->model_id.hi == h->model_id_hi && w->model_id.lo == h->model_id_lo;
}

/* Why a hello does not fit, or NULL. The first decode worker that is up says which model it is. */
static const char *check_hello(const struct dmk_worker *w, const Damask__V1__WorkerHello *h)
{
    const struct dmk_fleet *fleet = w->fleet;

    if (h->version != PROTOCOL_VERSION) {
        return "it speaks another version of the protocol";
    }
    if (h->role != (w->role == DMK_WORKER_PREFILL ? DAMASK__V1__ROLE__ROLE_PREFILL
                                                  : DAMASK__V1__ROLE__ROLE_DECODE)) {
        return "its role is not the one of the list in which it stands";
    }
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *other = fleet->workers[i];

        if (other && other->up && other->role == DMK_WORKER_DECODE && !has_model(other, h)) {
            return "its model is not the one of the decode workers that are up";
        }
    }
    return NULL;
}

/* What constraints are made of. A worker keeps it over the streams of all routers. */
static void send_vocabulary(struct dmk_worker *w, const Damask__V1__WorkerHello *h)
{
    const struct dmk_bytes bytes = w->fleet->conf.vocabulary;
    const struct dmk_id128 hash = dmk_hash128((struct dmk_id128){0}, bytes.data, bytes.len);
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__Vocabulary vocabulary = DAMASK__V1__VOCABULARY__INIT;

    if (w->role != DMK_WORKER_DECODE || w->grammar_version == 0 || bytes.len == 0 ||
        (h->vocabulary_hi == hash.hi && h->vocabulary_lo == hash.lo)) {
        return;
    }
    vocabulary.data = (ProtobufCBinaryData){bytes.len, (uint8_t *)(uintptr_t)bytes.data};
    m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_VOCABULARY;
    m.vocabulary = &vocabulary;
    (void)dmk_worker_send(w, &m);
}

static void take_numerics(struct dmk_worker *w, const Damask__V1__WorkerHello *h)
{
    const bool says_more = w->role == DMK_WORKER_DECODE && h->prompt_numerics[0];

    (void)snprintf(w->numerics, sizeof(w->numerics), "%s", h->numerics);
    (void)snprintf(w->prompt_numerics, sizeof(w->prompt_numerics), "%s",
                   says_more ? h->prompt_numerics : h->numerics);
}

/* Told when a worker comes up that could work with none of the other role: what to set is in the sentence. */
static void warn_of_misfit(const struct dmk_worker *w)
{
    const struct dmk_worker *other = NULL;

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *o = w->fleet->workers[i];

        if (o && o->up && o->role != w->role) {
            if (w->role == DMK_WORKER_PREFILL ? dmk_worker_fits(w, o) : dmk_worker_fits(o, w)) {
                return;
            }
            other = o;
        }
    }
    if (other) {
        const struct dmk_worker *p = w->role == DMK_WORKER_PREFILL ? w : other;
        const struct dmk_worker *d = w->role == DMK_WORKER_PREFILL ? other : w;

        dmk_log_warn("worker=%s fits no %s worker: worker=%s computes pages as \"%s\", worker=%s "
                     "takes them as \"%s\"; start both pools with the same backend and formats, or "
                     "tell the decode worker the formats of its prefill pool (prompt-experts, "
                     "prompt-dense)",
                     w->id, dmk_fleet__role_name(other->role), p->id, p->numerics, d->id,
                     d->prompt_numerics);
    }
}

static void take_hello(struct dmk_worker *w, uint64_t incarnation, const Damask__V1__WorkerHello *h)
{
    struct dmk_fleet *fleet = w->fleet;
    const char *why = check_hello(w, h);

    if (why) {
        note_failure(w, why, true);
        dmk_counter_add(fleet->conf.stats->hello_refused, 1);
        dmk_rpc_cancel(w->stream);
        return;
    }
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS && w->role == DMK_WORKER_DECODE; i++) {
        struct dmk_worker *p = fleet->workers[i];

        if (p && p->up && p->role == DMK_WORKER_PREFILL && !has_model(p, h)) {
            note_failure(p, "its model is not the one of the decode workers that are up", true);
            dmk_rpc_cancel(p->stream);
        }
    }
    dmk_timer_stop(w->timer);
    w->up = true;
    w->why = NULL;
    w->pause_ms = DMK_FLEET__PAUSE_MIN_MS;
    w->incarnation = incarnation;
    w->draining = h->draining;
    w->model_id = (struct dmk_id128){.hi = h->model_id_hi, .lo = h->model_id_lo};
    w->page_tokens = h->page_tokens;
    w->max_context = h->max_context;
    w->max_sequences = h->max_sequences;
    w->local_prefill_threshold = h->local_prefill_threshold;
    w->grammar_version = h->grammar_version;
    w->load_at_least_ms = h->load_at_least_ms;
    (void)snprintf(w->id, sizeof(w->id), "%.63s", h->worker_id[0] ? h->worker_id : w->address);
    (void)snprintf(w->model_name, sizeof(w->model_name), "%s", h->model_name);
    take_numerics(w, h);
    dmk_log_info("worker=%s (%s, %s) is up: model \"%s\", numerics \"%s\"%s%s%s, tp %u, dp %u, "
                 "context %u, %u pages, incarnation %llu%s",
                 w->id, dmk_fleet__role_name(w->role), w->address, w->model_name, w->numerics,
                 dmk_worker_is_mixed(w) ? ", prompts as \"" : "",
                 dmk_worker_is_mixed(w) ? w->prompt_numerics : "",
                 dmk_worker_is_mixed(w) ? "\"" : "", h->tp, h->dp, h->max_context, h->n_full_pages,
                 (unsigned long long)incarnation, w->draining ? ", draining" : "");
    warn_of_misfit(w);
    send_vocabulary(w, h);
    dmk_fleet__count(fleet);
    fleet->conf.events.on_change(fleet->conf.events.ud);
}

static struct dmk_worker *find_incarnation(struct dmk_fleet *fleet, enum dmk_worker_role role,
                                           uint64_t incarnation)
{
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        struct dmk_worker *w = fleet->workers[i];

        if (w && w->up && w->role == role && w->incarnation == incarnation) {
            return w;
        }
    }
    return NULL;
}

/* A word to a worker that is not connected is dropped: who asked asks again. */
static void relay(struct dmk_worker *from, const Damask__V1__WorkerEvent *e)
{
    struct dmk_fleet *fleet = from->fleet;
    const bool asks = e->body_case == DAMASK__V1__WORKER_EVENT__BODY_QUIET_ASK;
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    struct dmk_worker *to;

    if (asks) {
        to = find_incarnation(fleet, DMK_WORKER_PREFILL, e->quiet_ask->p_incarnation);
        m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_QUIET_ASK;
        m.quiet_ask = e->quiet_ask;
    } else {
        to = find_incarnation(fleet, DMK_WORKER_DECODE, e->closed->d_incarnation);
        m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_CLOSED;
        m.closed = e->closed;
    }
    if (to && dmk_worker_send(to, &m) == 0) {
        dmk_counter_add(asks ? fleet->conf.stats->relayed_quiet : fleet->conf.stats->relayed_closed,
                        1);
    }
}

static void take_load(struct dmk_worker *w, const Damask__V1__Load *l)
{
    w->has_load = true;
    w->load.n_running = l->n_running;
    w->load.n_waiting = l->n_waiting;
    w->load.tokens_waiting = l->tokens_waiting;
    w->load.full_pages_free = l->full_pages_free;
    w->load.full_pages_total = l->full_pages_total;
    w->load.full_pages_most_free =
        l->full_pages_most_free > 0 ? l->full_pages_most_free : l->full_pages_free;
    w->load.window_pages_free = l->window_pages_free;
    w->load.window_pages_total = l->window_pages_total;
    w->load.pages_draining = l->pages_draining;
    w->load.step_ms = l->step_ms;
    w->load.stuck = l->stuck;
}

static void take_blocks(struct dmk_worker *w, const Damask__V1__Blocks *b)
{
    struct dmk_fleet *fleet = w->fleet;

    if (b->snapshot) {
        dmk_index_clear_worker(fleet->index, w->slot);
    }
    for (size_t i = 0; i < b->n_removed; i++) {
        dmk_index_remove(fleet->index, w->slot,
                         (struct dmk_id128){.hi = b->removed[i]->hi, .lo = b->removed[i]->lo});
    }
    for (size_t i = 0; i < b->n_added; i++) {
        dmk_index_add(fleet->index, w->slot,
                      (struct dmk_id128){.hi = b->added[i]->hi, .lo = b->added[i]->lo});
    }
    dmk_gauge_set(fleet->conf.stats->index_blocks, (double)dmk_index_n_blocks(fleet->index));
}

static void take_event(struct dmk_worker *w, const Damask__V1__WorkerEvent *e)
{
    struct dmk_fleet *fleet = w->fleet;

    switch (e->body_case) {
    case DAMASK__V1__WORKER_EVENT__BODY_HELLO:
        break; /* a second one says nothing */
    case DAMASK__V1__WORKER_EVENT__BODY_LOAD:
        take_load(w, e->load);
        break;
    case DAMASK__V1__WORKER_EVENT__BODY_BLOCKS:
        take_blocks(w, e->blocks);
        break;
    case DAMASK__V1__WORKER_EVENT__BODY_QUIET_ASK:
    case DAMASK__V1__WORKER_EVENT__BODY_CLOSED:
        relay(w, e);
        break;
    case DAMASK__V1__WORKER_EVENT__BODY_DRAIN:
        if (!w->draining) {
            dmk_log_info("worker=%s (%s) drains within %u ms", w->id, dmk_fleet__role_name(w->role),
                         e->drain->limit_ms);
        }
        w->draining = true;
        dmk_fleet__count(fleet);
        fleet->conf.events.on_change(fleet->conf.events.ud);
        break;
    default:
        fleet->conf.events.on_event(fleet->conf.events.ud, w, e);
        break;
    }
}

static void on_message(void *ud, struct dmk_rpc_stream *stream, struct dmk_bytes bytes)
{
    struct dmk_worker *w = ud;
    struct dmk_fleet *fleet = w->fleet;
    Damask__V1__WorkerMessage *m;
    struct dmk_error error;

    dmk_assert(stream == w->stream);
    if (dmk_msg_worker_unpack(bytes, DMK_VOCAB_SIZE, &fleet->arena.allocator, &m, &error) < 0) {
        dmk_log_error("worker=%s (%s) broke the protocol: %s", w->id, w->address, error.text);
        note_failure(w, "it sent a message that can not be read", true);
        dmk_rpc_cancel(stream);
        return;
    }
    for (size_t i = 0; i < m->n_events; i++) {
        const Damask__V1__WorkerEvent *e = m->events[i];

        if (!w->up && e->body_case == DAMASK__V1__WORKER_EVENT__BODY_HELLO) {
            take_hello(w, m->incarnation, e->hello);
        } else if (w->up && m->incarnation == w->incarnation) {
            take_event(w, e);
        } else if (w->up) {
            dmk_counter_add(fleet->conf.stats->stale_events, 1);
        }
    }
    damask__v1__worker_message__free_unpacked(m, &fleet->arena.allocator);
    dmk_fleet__heard(w);
    fleet->conf.events.on_batch_end(fleet->conf.events.ud);
}

void dmk_fleet__on_timer(void *ud)
{
    struct dmk_worker *w = ud;

    if (w->stream) {
        note_failure(w, "it sent no hello in time", false);
        dmk_rpc_cancel(w->stream);
        return;
    }
    dial(w);
}

/* Each dial takes a channel of its own, so that gRPC's own growing pauses do not add to ours. */
static void dial(struct dmk_worker *w)
{
    struct dmk_fleet *fleet = w->fleet;
    const struct dmk_rpc_stream_events events = {
        .on_message = on_message, .on_closed = on_closed, .ud = w};
    Damask__V1__RouterMessage m = DAMASK__V1__ROUTER_MESSAGE__INIT;
    Damask__V1__RouterHello hello = DAMASK__V1__ROUTER_HELLO__INIT;

    dmk_rpc_channel_free(&w->channel);
    w->incarnation = 0;
    w->told = w->refused = false;
    w->channel = NULL;
    if (fleet->conf.tls) {
        struct dmk_rpc_tls tls = fleet->tls;
        struct dmk_error error;

        if (!tls.name || !tls.name[0]) {
            tls.name = w->host; /* "": the address */
        }
        if (dmk_rpc_channel_new_tls(fleet->conf.rpc, w->address, &tls, &w->channel, &error) < 0) {
            dmk_log_error("TLS to worker %s: %s", w->address, error.text);
        }
    } else {
        w->channel = dmk_rpc_channel_new(fleet->conf.rpc, w->address);
    }
    w->stream =
        w->channel ? dmk_rpc_call(w->channel, "/damask.v1.Worker/Connect", 0, &events) : NULL;
    if (!w->stream) {
        note_failure(w, "no call could be started", false);
        dmk_timer_start(w->timer, PAUSE_MAX_MS, 0);
        return;
    }
    hello.version = PROTOCOL_VERSION;
    hello.router_id = (char *)fleet->conf.router_id;
    hello.incarnation = fleet->conf.incarnation;
    m.body_case = DAMASK__V1__ROUTER_MESSAGE__BODY_HELLO;
    m.hello = &hello;
    (void)dmk_worker_send(w, &m); /* a failure comes as on_closed */
    dmk_timer_start(w->timer, fleet->conf.hello_timeout_ms, 0);
}

int dmk_worker_send(struct dmk_worker *worker, Damask__V1__RouterMessage *message)
{
    if (!worker->stream) {
        return -DMK_EPEER;
    }
    message->worker_incarnation = worker->incarnation;
    return dmk_rpc_send_message(worker->stream, &message->base);
}
