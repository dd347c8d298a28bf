/* Scheduling of prompts as pure functions: batch 1, in chunks.
 *
 * A step computes a chunk of one job. Every second chunk is the earliest job's, the others go to the job
 * with the least left: so a short prompt waits for no long one, and a long one goes on at half speed at
 * least, however many short ones come. While the engine runs, the jobs whose turn is next may already be
 * claiming at their decode workers, so that the engine does not wait for an answer; but not long before
 * their turn, since from the claim on the transfer's deadline counts. A decode worker that does not answer
 * holds up nobody: its job is passed by those behind it.
 *
 * The earliest is the one that is due first: its arrival, moved by its priority for a bounded time, so that
 * nobody is overtaken for ever. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Claims that may wait for their answers at a time. */
#define DMK_PREFILL_MAX_CLAIMING 8

enum dmk_prefill_state {
    DMK_PREFILL_FREE,     /* no job in this slot */
    DMK_PREFILL_QUEUED,   /* no pages yet */
    DMK_PREFILL_CLAIMING, /* has pages; D has not answered */
    DMK_PREFILL_RUNNING,  /* claimed; being computed, or next in line */
    DMK_PREFILL_PUSHED,   /* everything handed to the sender; waits for D's answer */
    DMK_PREFILL_FAILING,  /* lost or cancelled; waits until its puts have retired */
};

struct dmk_prefill_turn {
    enum dmk_prefill_state state;
    uint64_t order;    /* arrival: smaller is earlier */
    uint32_t n_left;   /* tokens not computed yet, those of a chunk in flight included */
    uint32_t n_flight; /* tokens of a chunk in flight */
    int64_t due_ns;    /* arrival, moved by the request's priority: comes before order */
};

/* Of the RUNNING jobs with something left to plan, the index of the one that has the least left, or of the
 * earliest; UINT32_MAX when there is none. Steps alternate between the two. */
uint32_t dmk_prefill_pick_run(const struct dmk_prefill_turn *turns, uint32_t n, bool shortest);

/* Index of the QUEUED job that should claim now, UINT32_MAX when nobody should. It is the earliest, when
 * nothing is left to plan or what runs came later; else the one with the least left, when that is less than
 * any other that claims or runs has. */
uint32_t dmk_prefill_pick_claim(const struct dmk_prefill_turn *turns, uint32_t n);

/* Tokens of the next chunk at pos of a prompt of n tokens: ends at multiples of boundary (where a prefix can
 * be cached) and has at most chunk_tokens. 0 < result. */
uint32_t dmk_prefill_chunk(uint32_t pos, uint32_t n, uint32_t chunk_tokens, uint32_t boundary);
