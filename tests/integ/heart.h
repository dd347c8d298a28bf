/* The promise, in one process: what a prefill core computes and a decode core goes on with is, token for
 * token and bit for bit of its log-probabilities, what a decode core alone gives. Every answer equals that
 * or ends in a clear failure, and pages balance after each. The tests here run on any engine. */
#pragma once

#include "tests/support/cell.h"

struct heart_ports {
    struct dmk_engine_port alone, decode, prefill;
    uint32_t n_pages, n_window_pages; /* of each */
    uint32_t max_context, chunk_tokens;
    bool light; /* a slow engine: fewer prompts */
};

/* A prompt of n ids below the vocabulary's size; seeds that share `shared` leading ids differ above it. */
void heart_prompt(const struct heart_ports *ports, uint32_t *ids, uint32_t n, uint64_t seed,
                  uint32_t shared);

/* Each length greedy and seeded, first with empty caches and then again with what they hold. */
void heart_lengths(const struct heart_ports *ports, const uint32_t *lengths, uint32_t n,
                   uint32_t n_new);
/* Prompts with common beginnings, some computed by the decode worker itself below a threshold. */
void heart_shared_beginnings(const struct heart_ports *ports, uint32_t n_new);
/* Prompts of every length between two pages' ends are transferred, each followed by one that shares its whole
 * pages: the window that came for the first must not pass for the window at their end. */
void heart_every_remainder(const struct heart_ports *ports);
/* Many rounds under a fabric's faults; returns how many answers were right, *ret_failed how many failed. */
uint32_t heart_faults(const struct heart_ports *ports, enum dmk_xfer_lane lane,
                      struct dmk_loopback_faults faults, uint32_t rounds, uint64_t seed,
                      uint32_t *ret_failed);
/* Several at a time, on both sides, with cancels in the midst. */
void heart_crowd(const struct heart_ports *ports, uint64_t seed, uint32_t n_new);

/* Requests that are under way together, some computed by the prefill worker, some in chunks between the
 * others' decode steps: heart_alone gives what each gets alone, and heart_together must give the same,
 * whichever group each lands in, with a cancel in the midst, then again with what the caches hold, and at
 * last with one sequence in the worker, so that all groups but one are idle. */
enum { HEART_TOGETHER = 7 };
void heart_alone(const struct heart_ports *ports, struct cell_choice want[HEART_TOGETHER]);
void heart_together(const struct heart_ports *ports, const struct cell_choice want[HEART_TOGETHER]);
/* Three long answers over two groups whose pools hold less than two of them: the youngest gives its pages up
 * and comes back; the other group, which has pages, is not asked. */
void heart_preemption(const struct heart_ports *ports);

enum heart_loss { HEART_CUT, HEART_PARTITION, HEART_KILL, N_HEART_LOSSES };
/* The prefill worker is lost in the midst of transfers, again and again: requests fail clearly or are right,
 * pages come back, and what follows is right. Returns how many failed. */
uint32_t heart_losses(const struct heart_ports *ports, enum dmk_xfer_lane lane,
                      enum heart_loss loss, uint32_t rounds, uint64_t seed);
