/* See metrics.h. */
#include "decode/metrics.h"

#include <stdio.h>

static struct dmk_gauge *ticket_gauge(struct dmk_worker *worker, const char *state)
{
    char labels[600];

    snprintf(labels, sizeof(labels), "%s,state=\"%s\"", dmk_worker_labels(worker), state);
    return dmk_gauge_new(dmk_worker_metrics(worker), "damask_tickets", labels,
                         "Tickets for page transfers by state.");
}

static void make_constraint_metrics(struct dmk_worker *worker, struct dmk_decode_metrics *ret)
{
    struct dmk_metrics *m = dmk_worker_metrics(worker);
    const char *labels = dmk_worker_labels(worker);

    ret->masks = dmk_counter_new(m, "damask_constraint_masks_total", labels,
                                 "Tokens that were sampled under a constraint.");
    ret->masks_computed =
        dmk_counter_new(m, "damask_constraint_masks_computed_total", labels,
                        "Masks of wide states that were computed because none was kept.");
    ret->masks_uncached =
        dmk_counter_new(m, "damask_constraint_masks_uncached_total", labels,
                        "Masks of wide states that were computed and could not be kept.");
    ret->mask_seconds =
        dmk_counter_new(m, "damask_constraint_mask_seconds_total", labels, "Time spent on masks.");
    ret->mask_max_seconds = dmk_gauge_new(m, "damask_constraint_mask_max_seconds", labels,
                                          "The longest time that a mask took so far.");
    ret->automata = dmk_gauge_new(m, "damask_constraints", labels, "Automata that are loaded.");
    ret->automata_bytes = dmk_gauge_new(m, "damask_constraint_bytes", labels, "Their memory.");
}

void dmk_decode_metrics_make(struct dmk_worker *worker, struct dmk_decode_metrics *ret)
{
    struct dmk_metrics *m = dmk_worker_metrics(worker);
    const char *labels = dmk_worker_labels(worker);

    ret->unclaimed = ticket_gauge(worker, "unclaimed");
    ret->claimed = ticket_gauge(worker, "claimed");
    ret->draining_tickets = ticket_gauge(worker, "draining");
    ret->draining_pages =
        dmk_gauge_new(m, "damask_draining_pages", labels,
                      "Pages of dead tickets that wait for the last word of a prefill worker.");
    ret->refusing = dmk_gauge_new(
        m, "damask_refusing_claims", labels,
        "1 while a prefill worker has left so many pages draining that its claims are refused.");
    ret->local = dmk_counter_new(m, "damask_local_prefills_total", labels,
                                 "Prompts that this decode worker computed itself.");
    ret->remote = dmk_counter_new(m, "damask_remote_prefills_total", labels,
                                  "Prompts for which a ticket was handed out.");
    ret->refused =
        dmk_counter_new(m, "damask_refused_claims_total", labels, "Claims that were answered no.");
    ret->expired = dmk_counter_new(m, "damask_expired_tickets_total", labels,
                                   "Tickets that nobody claimed in time.");
    ret->failed =
        dmk_counter_new(m, "damask_failed_transfers_total", labels, "Claimed tickets that failed.");
    make_constraint_metrics(worker, ret);
}

void dmk_decode_metrics_set(const struct dmk_decode_metrics *m, const struct dmk_decode_load *load)
{
    dmk_gauge_set(m->unclaimed, load->receiver.n_unclaimed);
    dmk_gauge_set(m->claimed, load->receiver.n_claimed);
    dmk_gauge_set(m->draining_tickets, load->receiver.n_draining);
    dmk_gauge_set(m->draining_pages, load->receiver.draining_pages);
    dmk_gauge_set(m->refusing, load->receiver.refusing);
    dmk_counter_raise(m->local, (double)load->n_local_prefills);
    dmk_counter_raise(m->remote, (double)load->n_remote_prefills);
    dmk_counter_raise(m->refused, (double)load->receiver.n_refused_claims);
    dmk_counter_raise(m->expired, (double)load->receiver.n_expired);
    dmk_counter_raise(m->failed, (double)load->receiver.n_failed);
    dmk_counter_raise(m->masks, (double)load->constraints.walker.n_masks);
    dmk_counter_raise(m->masks_computed, (double)load->constraints.walker.n_computed);
    dmk_counter_raise(m->masks_uncached, (double)load->constraints.walker.n_uncached);
    dmk_counter_raise(m->mask_seconds, (double)load->constraints.mask_ns / 1e9);
    dmk_gauge_set(m->mask_max_seconds, (double)load->constraints.max_mask_ns / 1e9);
    dmk_gauge_set(m->automata, load->constraints.n_automata);
    dmk_gauge_set(m->automata_bytes, (double)load->constraints.bytes);
}
