/* The decode core's own structures, shared by its files and nobody else: core.c (doors), admit.c (from a
 * request to its pages), tickets.c (the receiver's news of them), sequence.c (a sequence's states), origin.c (what
 * mixed pools keep of a prompt), step.c (steps). */
#pragma once

#include <stdatomic.h>
#include "decode/core.h"
#include "decode/sched.h"

enum seq_state {
    SEQ_FREE,
    SEQ_KV_WAIT, /* has a ticket out */
    SEQ_FORK_WAIT, /* a further choice, until the first one's prompt is computed; its pages are spare */
    SEQ_RUNNING,
    SEQ_PREEMPTED, /* has no pages */
    SEQ_LEAVING,   /* its request is over, the step in flight still uses its pages */
    SEQ_DRAINING,  /* its request is over, its ticket's pages wait for quiet */
};

struct seq {
    enum seq_state state;
    uint32_t index;   /* its own, in core->seqs */
    uint32_t request; /* index */
    uint32_t choice;
    uint32_t group;
    uint32_t generation; /* of the slot, so that a ticket's key names one use of it */
    uint64_t order;      /* age */
    uint32_t *ids;       /* [max_context] prompt and answer */
    uint32_t n_ids;
    uint32_t n_computed; /* positions whose KV is in the pages */
    struct dmk_kv_table table;
    struct dmk_constraint
        *constraint;        /* held until the slot is released; NULL: the answer is free */
    uint32_t n_constrained; /* ids of the answer that its walk has seen */
    bool in_step;
    uint64_t
        copied_in; /* the step, by number, that copies into its pages; it may have no other part in it */
    bool has_ticket;                   /* the receiver knows it */
    bool quiet;                        /* on_freed came before on_failed */
    uint32_t ticket_first, ticket_end; /* blocks that the ticket names */
    uint32_t n_preemptions;
    uint64_t decode_start_ns; /* first decode step */
};

struct request {
    bool used;
    uint32_t n_leaving; /* sequences of it in SEQ_LEAVING: the step in flight reads what follows */
    uint32_t router;
    struct dmk_request_id id;
    struct dmk_sample_params sampling; /* bias points into the two arrays */
    uint32_t bias_ids[DMK_SAMPLE_MAX_BIAS];
    float bias_values[DMK_SAMPLE_MAX_BIAS];
    uint32_t stop_ids[DMK_DECODE_MAX_STOP_IDS + DMK_MAX_EOS]; /* all that end an answer */
    uint32_t n_stop_ids;
    uint32_t n_prompt, max_tokens, min_tokens;
    struct dmk_id128 root; /* of the chain hash */
    uint32_t have;         /* prompt tokens that were cached here */
    bool echo;
    uint32_t echo_done; /* prompt tokens scored */
    uint32_t n_choices, n_live;
    uint32_t seqs[DMK_DECODE_MAX_CHOICES]; /* slots; NO_SEQ once ended */
    uint64_t arrived_ns, ready_ns, started_ns, prompt_done_ns;
    uint64_t transfer_bytes, transfer_us;
    bool remote;
    uint32_t group;
    /* In mixed pools: pages for a copy of the prompt's, and once kept the prompt's; see origin.c. */
    struct dmk_kv_table origin;
    bool origin_kept, origin_leaving;
};

#define NO_SEQ UINT32_MAX

/* Status of a row whose answer is complete under its constraint: nothing may follow. */
#define ROW_ENDED 1

/* A data-parallel group: ranks that hold the same sequences. */
struct group {
    struct dmk_kv_pools pools;
    struct dmk_kv_prefix *prefix;
};

struct row {
    uint32_t seq;
    uint32_t pos; /* of the token whose logits these are */
    bool score;   /* prompt token: score what follows, do not sample */
    int status;   /* of sampling or scoring it */
};

struct dmk_decode_step {
    struct dmk_decode_core *core;
    bool in_flight;
    int status;
    struct dmk_step step;
    struct dmk_step_seq *seqs;    /* [max_seqs] */
    uint32_t *slots;              /* [max_seqs] */
    struct dmk_page_copy *copies; /* [max_copies] */
    struct row *rows;             /* [max_rows] */
    struct dmk_sample_result *results;
    struct dmk_step_pick *draws; /* [max_rows]; NULL where the engine picks no tokens */
    struct dmk_step_picked *drawn;
    uint32_t n_seqs, n_copies, n_rows, n_tokens;
    uint64_t start_ns;
};

struct dmk_decode_core {
    struct dmk_decode_conf conf;
    uint32_t n_groups, n_slots, max_pages; /* of a sequence */
    bool mixed; /* prompts are of another numerics id than the engine's */
    struct group *groups;
    struct seq *seqs;              /* [n_slots] */
    uint32_t *ids_storage;         /* [n_slots][max_context] */
    uint32_t *pages_storage;       /* [n_slots][max_pages] */
    uint32_t *origin_storage;      /* the same; NULL where pools are not mixed */
    struct request *requests;      /* [n_slots]: those that leave are beyond max_sequences */
    struct dmk_receiver *receiver; /* NULL without transport */
    struct dmk_xfer_mem *full_mem[DMK_PORT_MAX_RANKS], *window_mem[DMK_PORT_MAX_RANKS];
    struct dmk_ticket *ticket; /* scratch, with all that is the same in every ticket filled in */
    struct dmk_ticket_rank ranks[DMK_PORT_MAX_RANKS];
    struct dmk_buf ticket_blob;
    struct dmk_sampler *sampler;
    struct dmk_constraints *constraints;
    float *logits; /* [max_logit_rows][vocab] */
    struct dmk_decode_step step;
    uint32_t *by_age;             /* [n_slots] scratch of plan */
    struct dmk_sched_seq *sched;  /* [n_slots] */
    struct dmk_sched_pick *picks; /* [n_slots] */
    uint64_t next_order;
    uint32_t n_active; /* sequences with a request */
    bool draining, broken;
    uint64_t now_ns; /* of the call that is under way, for the receiver's callbacks */
    double step_ms;
    uint64_t n_steps, n_tokens, n_preemptions, n_prompt_tokens;
    uint64_t n_local, n_remote, n_query_tokens, n_hit_tokens;
};

/* sequence.c */
struct seq *dmk_decode_seq_new(struct dmk_decode_core *core, uint32_t request, uint32_t choice,
                               uint32_t group);
/* The first choice's prompt pages are complete up to its last token. */
void dmk_decode_prompt_done(struct dmk_decode_core *core, struct seq *seq);
/* Remembers the boundary at the last full page of what is computed. */
void dmk_decode_seq_cache(struct dmk_decode_core *core, struct seq *seq);
/* Ends one choice, and with the last one the request. */
void dmk_decode_seq_end(struct dmk_decode_core *core, struct seq *seq);
/* Gives the slot back; its pages too. */
void dmk_decode_seq_release(struct dmk_decode_core *core, struct seq *seq);
void dmk_decode_request_end(struct dmk_decode_core *core, struct request *request);
void dmk_decode_request_fail(struct dmk_decode_core *core, struct request *request,
                             enum dmk_failure code, uint32_t retry_after_ms, const char *text);
void dmk_decode_seq_preempt(struct dmk_decode_core *core, struct seq *seq);
void dmk_decode_resume(struct dmk_decode_core *core);
void dmk_decode_fork_ready(struct dmk_decode_core *core);
/* The youngest sequence of a group that can give its pages up; NULL when there is none. */
struct seq *dmk_decode_victim(struct dmk_decode_core *core, uint32_t group);

/* origin.c */
/* Whether the request can be admitted beside those that are there; true where pools are not mixed. */
bool dmk_decode_origin_fits(const struct dmk_decode_core *core, uint32_t group,
                            const struct dmk_decode_request *r);
/* Spare pages for the copies that an origin needs: 0 or -DMK_EFULL. */
int dmk_decode_origin_reserve(struct dmk_decode_core *core, struct request *q);
/* Before the first step of a request's first choice. */
void dmk_decode_origin_keep(struct dmk_decode_core *core, const struct seq *seq);
/* Gives the sequence's pages back; those that no step has written yet become the origin. */
void dmk_decode_origin_give_up(struct dmk_decode_core *core, struct seq *seq);
/* Pages for n_tokens of a preempted sequence, with the prompt in them; false when they are not free. */
bool dmk_decode_origin_resume(struct dmk_decode_core *core, struct seq *seq, uint32_t n_tokens);
/* The request is over. Pages that a step in flight may copy go back after it. */
void dmk_decode_origin_release(struct dmk_decode_core *core, struct request *q);

/* admit.c */
void dmk_decode_ticket_prepare(struct dmk_decode_core *core);

/* tickets.c */
struct dmk_receiver_events dmk_decode_receiver_events(struct dmk_decode_core *core);

/* Whether the pages of a prompt come from elsewhere and can not be computed here. Scored prompts are. */
static inline bool dmk_decode_needs_origin(const struct dmk_decode_core *core, uint32_t n_prompt,
                                           bool scored)
{
    return core->mixed && !scored && n_prompt > 1;
}

static inline bool dmk_decode_has_origin(const struct dmk_decode_core *core,
                                         const struct request *q)
{
    return dmk_decode_needs_origin(core, q->n_prompt, q->echo);
}

/* Copies of the step that is planned, from the first on, are of one group. */
static inline void dmk_decode_copies_of(struct dmk_decode_step *step, uint32_t first,
                                        uint32_t group)
{
    for (uint32_t c = first; c < step->n_copies; c++) {
        step->copies[c].dp = group;
    }
}

static inline void dmk_decode_emit(struct dmk_decode_core *core, const struct request *request,
                                   struct dmk_decode_event *event)
{
    if (request) {
        event->router = request->router;
        event->id = request->id;
    }
    core->conf.on_event(core->conf.ud, event);
}

static inline uint64_t dmk_decode_key(const struct seq *seq)
{
    return (uint64_t)seq->generation << 32 | seq->index;
}
