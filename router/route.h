/* Which worker takes a request: a pure function over a snapshot.
 *
 * The cost of a worker is the tokens of work that it has already plus the prompt tokens that it
 * would have to compute; the cheapest wins. A worker without room comes after all that have room.
 * */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dmk_route_worker {
    bool usable;
    uint64_t load_tokens;   /* prompt tokens that wait, or context tokens of running sequences */
    uint64_t free_tokens;   /* room in its pages; UINT64_MAX = does not matter */
    uint32_t prefix_tokens; /* of this prompt, held already */
};

struct dmk_route_ask {
    uint32_t prompt_tokens;
    uint64_t room_tokens; /* pages that the request wants */
    uint32_t turn;        /* among equals the pick moves on with it */
};

/* Index of the worker, or -1 when none is usable. */
int dmk_route_pick(const struct dmk_route_worker *workers, size_t n,
                   const struct dmk_route_ask *ask);
