/* A fixed team of threads that do the leader's work together.
 *
 * The leader (whoever calls run or each, one thread at a time) takes part itself, so a team of one has
 * no threads at all. Between jobs the members spin for some microseconds, since the next operation of a
 * step follows at once, and then sleep in the kernel until the leader wakes them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "common/base/error.h"
#include "kernels/kernels.h"

struct dmk_team;

/* name is for the list of threads (16 bytes). scratch_bytes: working memory of each thread. */
int dmk_team_new(const char *name, uint32_t n_threads, bool spin, size_t scratch_bytes,
                 struct dmk_team **ret, struct dmk_error *reterr);
void dmk_team_free(struct dmk_team **team);

/* fn once in every thread, at the same time; thread 0 is the caller. Returns when all have. */
void dmk_team_each(struct dmk_team *team, void (*fn)(void *ud, uint32_t thread), void *ud);

/* The team as the stream that kernels take: items are handed out one by one. */
struct dmk_stream *dmk_team_stream(struct dmk_team *team);
