/* What becomes of a ticket after it was given to a prefill worker: the receiver's news of its pages, and which pages may be
 * written from outside at this moment. Owner: the worker's loop. */
#include "decode/core_state.h"

static struct seq *seq_of_key(struct dmk_decode_core *core, uint64_t key)
{
    const uint32_t index = (uint32_t)key;
    struct seq *seq = index < core->n_slots ? &core->seqs[index] : NULL;

    return seq && seq->generation == (uint32_t)(key >> 32) ? seq : NULL;
}

static void on_claimed(void *ud, uint64_t key)
{
    (void)ud;
    (void)key;
}

static void on_ready(void *ud, uint64_t key, uint64_t bytes, uint64_t ns_since_claim)
{
    struct dmk_decode_core *core = ud;
    struct seq *seq = seq_of_key(core, key);
    struct dmk_decode_event event = {.kind = DMK_DECODE_TRANSFERRED};
    struct request *q;

    if (!seq || seq->state != SEQ_KV_WAIT) {
        return;
    }
    q = &core->requests[seq->request];
    seq->state = SEQ_RUNNING;
    seq->n_computed = q->n_prompt - 1;
    q->ready_ns = core->now_ns;
    q->transfer_bytes = bytes;
    q->transfer_us = ns_since_claim / 1000;
    event.transferred.bytes = bytes;
    event.transferred.us = q->transfer_us;
    dmk_decode_prompt_done(core, seq);
    dmk_decode_emit(core, q, &event);
}

static void on_failed(void *ud, uint64_t key, enum dmk_receive_failure why)
{
    static const struct {
        enum dmk_failure code;
        const char *text;
    } words[] = {
        [DMK_RECEIVE_EXPIRED] = {DMK_FAILURE_TIMEOUT,
                                 "no prefill worker claimed the ticket in time"},
        [DMK_RECEIVE_DEADLINE] = {DMK_FAILURE_TIMEOUT, "the page transfer did not end in time"},
        [DMK_RECEIVE_PEER_LOST] = {DMK_FAILURE_PEER,
                                   "the prefill worker was lost during the transfer"},
        [DMK_RECEIVE_PEER_FAIL] = {DMK_FAILURE_PEER,
                                   "the prefill worker reported a failed transfer"},
        [DMK_RECEIVE_SHORT] = {DMK_FAILURE_PEER, "fewer bytes came than the ticket expects"},
    };
    struct dmk_decode_core *core = ud;
    struct seq *seq = seq_of_key(core, key);

    if (seq && seq->state == SEQ_KV_WAIT) {
        seq->has_ticket = false; /* the receiver knows already; its pages come back by on_freed */
        dmk_decode_request_fail(core, &core->requests[seq->request], words[why].code, 0,
                                words[why].text);
    }
}

static void on_freed(void *ud, uint64_t key)
{
    struct dmk_decode_core *core = ud;
    struct seq *seq = seq_of_key(core, key);

    if (seq && seq->state == SEQ_DRAINING) {
        dmk_decode_seq_release(core, seq);
    } else if (seq && seq->state == SEQ_KV_WAIT) {
        seq->quiet = true;
    }
}

static void on_quiet_ask(void *ud, struct dmk_id128 cookie, uint64_t p_incarnation)
{
    struct dmk_decode_event event = {.kind = DMK_DECODE_QUIET_ASK};

    event.quiet_ask.cookie = cookie;
    event.quiet_ask.p_incarnation = p_incarnation;
    dmk_decode_emit(ud, NULL, &event);
}

struct dmk_receiver_events dmk_decode_receiver_events(struct dmk_decode_core *core)
{
    return (struct dmk_receiver_events){
        .on_claimed = on_claimed,
        .on_ready = on_ready,
        .on_failed = on_failed,
        .on_freed = on_freed,
        .on_quiet_ask = on_quiet_ask,
        .ud = core,
    };
}

static bool names_page(const struct seq *seq, bool window, uint32_t page)
{
    for (uint32_t s = 0; window && s < seq->table.n_ring; s++) {
        if (seq->table.ring[s] == page) {
            return true;
        }
    }
    for (uint32_t b = seq->ticket_first; !window && b < seq->ticket_end; b++) {
        if (seq->table.full[b] == page) {
            return true;
        }
    }
    return false;
}

bool dmk_decode_expects_write(const struct dmk_decode_core *core, const void *addr)
{
    const struct dmk_engine_port *e = &core->conf.engine;

    for (uint32_t rank = 0; rank < e->n_ranks; rank++) {
        const struct dmk_kv_layout *l = &e->kv[rank]->layout;
        const uint64_t in_full = (uint64_t)((uintptr_t)addr - (uintptr_t)e->kv[rank]->full);
        const uint64_t in_window = (uint64_t)((uintptr_t)addr - (uintptr_t)e->kv[rank]->window);
        const bool window = in_window < dmk_kv_window_bytes(l);

        if (!window && in_full >= dmk_kv_full_bytes(l)) {
            continue;
        }
        const uint32_t page = window ? (uint32_t)(in_window / l->page_bytes % l->n_window_pages)
                                     : (uint32_t)(in_full / l->page_bytes % l->n_full_pages);

        for (uint32_t i = 0; i < core->n_slots; i++) {
            const struct seq *seq = &core->seqs[i];

            if ((seq->state == SEQ_KV_WAIT || seq->state == SEQ_DRAINING) &&
                seq->group == rank / e->layout.tp && names_page(seq, window, page)) {
                return true;
            }
        }
    }
    return false;
}
