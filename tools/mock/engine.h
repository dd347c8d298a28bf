/* An engine without a model: steps take a configured time, tokens are words picked by hashes.
 *
 * Pages are real but small. Each position stores the hash of all ids up to it, and the next token depends on
 * that hash and on two older ones, read back from the full and the window pages: so a page that was not
 * transferred, was reused too early or belongs to another sequence changes the answer, and an answer depends
 * on the request's ids only, whichever workers made it.
 *
 * The engine's thread calls everything but new and free. */
#pragma once

#include "common/worker/engine_port.h"

struct dmk_mock_engine;

#define DMK_MOCK_PAGE_BYTES 512u /* the least: 64 hashes */

struct dmk_mock_conf {
    const char *numerics, *prompt_numerics; /* as the port tells them; they stay the caller's */
    uint32_t dp;
    uint32_t n_full_pages, n_window_pages; /* of each group */
    uint32_t page_bytes;                   /* a multiple of DMK_MOCK_PAGE_BYTES */
    double step_us;                        /* of every step */
    double sequence_us;                    /* for each sequence of it that gets a token */
    double prompt_token_us;                /* for each other token of it */
    uint32_t mean_tokens; /* answers end by themselves after about so many; 0: never */
    /* Empty: none. Else a file of 64-bit words, little-endian: word i is when step i (from 1) ended, by
     * CLOCK_MONOTONIC in ns; steps without tokens are not counted. Every token is then one digit, the last
     * one of its step's number. */
    const char *step_log;
};

int dmk_mock_engine_new(const struct dmk_mock_conf *conf, struct dmk_mock_engine **ret,
                        struct dmk_error *reterr);
void dmk_mock_engine_free(struct dmk_mock_engine **engine);
struct dmk_engine_port dmk_mock_engine_port(struct dmk_mock_engine *engine);
