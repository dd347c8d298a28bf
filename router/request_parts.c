/* Requests with several prompts, and the choice of the best answers. On the loop. */
#include <stdlib.h>
#include "router/request_internal.h"

struct dmk_request *dmk_request__next_part(const struct dmk_request *r)
{
    const struct dmk_list *next = r->parts.next;

    return next == &r->lead->parts
               ? NULL
               : dmk_container_of((struct dmk_list *)next, struct dmk_request, parts);
}

static struct dmk_request *add_part(struct dmk_request *lead, size_t i)
{
    struct dmk_request *r = calloc(1, sizeof(*r));

    if (!r) {
        return NULL;
    }
    r->all = lead->all;
    r->lead = lead;
    r->dialect = lead->dialect;
    r->format = lead->format;
    r->front = lead->front;
    r->first_choice = (uint32_t)(i + 1) * lead->ask.n;
    r->id = dmk_id128_random();
    dmk_id128_format(r->id, r->id_hex);
    memcpy(r->request_id, lead->request_id, sizeof(r->request_id));
    memcpy(r->traceparent, lead->traceparent, sizeof(r->traceparent));
    r->timeline = lead->timeline;
    r->deadline_ns = lead->deadline_ns;
    dmk_list_init(&r->queued);
    dmk_list_init(&r->dirty);
    dmk_ask_split(&lead->ask, i, &r->ask);
    dmk_list_push_back(&lead->parts, &r->parts);
    lead->n_parts_left++;
    dmk_request__link(r);
    return r;
}

bool dmk_request__split(struct dmk_request *lead)
{
    if (dmk_request__output_init(lead) < 0) {
        return false;
    }
    for (size_t i = 0; i < lead->ask.n_more; i++) {
        struct dmk_request *r = add_part(lead, i);

        if (!r || dmk_request__output_init(r) < 0) {
            return false;
        }
    }
    return true;
}

static double score(const struct dmk_choice *c)
{
    return c->n_tokens > 0 ? c->sum_logprobs / c->n_tokens : 0;
}

/* Puts the n_best best choices of a part into order, best first; among equals the earlier one. */
static void pick_best(const struct dmk_request *r, uint32_t n_best, uint32_t *order)
{
    bool taken[DMK_ASK_MAX_CHOICES] = {false};

    for (uint32_t k = 0; k < n_best; k++) {
        uint32_t best = r->ask.n;

        for (uint32_t i = 0; i < r->ask.n; i++) {
            if (!taken[i] &&
                (best == r->ask.n || score(&r->choices[i]) > score(&r->choices[best]))) {
                best = i;
            }
        }
        taken[best] = true;
        order[k] = r->first_choice + best;
    }
}

void dmk_request__rank(struct dmk_request *lead)
{
    uint32_t order[DMK_ASK_MAX_CHOICES];
    const uint32_t n_best = lead->ask.n_shown;
    uint32_t n = 0;

    if (n_best == 0 || !lead->dialect->rank) {
        return;
    }
    for (struct dmk_request *r = lead; r; r = dmk_request__next_part(r)) {
        pick_best(r, n_best, order + n);
        n += n_best;
    }
    lead->dialect->rank(lead->reply, order, n);
}
