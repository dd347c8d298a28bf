/* Scheduling of prompts as pure functions: batch 1, first come first served, in chunks.
 *
 * The engine runs one job at a time. While it does, the next jobs may already be claiming at their decode
 * workers, so that the engine does not wait for an answer; but not long before their turn, since from the
 * claim on the transfer's deadline counts. A decode worker that does not answer holds up nobody: its job is
 * passed by those behind it. */
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
};

/* Index of the earliest RUNNING job with something left to plan; UINT32_MAX when there is none. */
uint32_t dmk_prefill_pick_run(const struct dmk_prefill_turn *turns, uint32_t n);

/* Index of the QUEUED job that should claim now: the earliest, when the jobs before it leave the engine
 * nothing to plan. UINT32_MAX when nobody should. */
uint32_t dmk_prefill_pick_claim(const struct dmk_prefill_turn *turns, uint32_t n);

/* Tokens of the next chunk at pos of a prompt of n tokens: ends at multiples of boundary (where a prefix can
 * be cached) and has at most chunk_tokens. 0 < result. */
uint32_t dmk_prefill_chunk(uint32_t pos, uint32_t n, uint32_t chunk_tokens, uint32_t boundary);
