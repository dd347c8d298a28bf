/* What travels around a step on devices: plans and draws to the ranks, copies of pages among their own, tokens and logits
 * back. Only queues, but for the end. On the engine's thread; see device.h. */
#include "common/model/device.h"

#include <string.h>

int dmk_device_sync(struct dmk_engine *engine)
{
    int status = 0;
    for (uint32_t r = 0; r < engine->n_ranks; r++) {
        struct dmk_rank *rank = &engine->ranks[r];
        int one = rank->backend->ops->sync(rank->backend, rank->stream);
        status = status == 0 ? one : status;
    }
    return status;
}

void dmk_device_copy_pages(struct dmk_rank *rank, const struct dmk_step *step)
{
    const struct dmk_kv_layout *l = &rank->kv.layout;
    for (uint32_t i = 0; i < step->n_copies; i++) {
        const struct dmk_page_copy *copy = &step->copies[i];
        if (copy->dp != rank->group) {
            continue;
        }
        rank->kernels.page_copy(
            &(struct dmk_page_copy_args){
                .pool = copy->window ? rank->kv.window : rank->kv.full,
                .pairs = {{copy->src, copy->dst}},
                .n_pairs = 1,
                .n_arrays =
                    (copy->window ? l->n_window_layers : l->n_full_layers) * l->n_local_heads,
                .n_pages = copy->window ? l->n_window_pages : l->n_full_pages,
                .page_bytes = l->page_bytes,
            },
            rank->stream);
    }
}

static void send_range(struct dmk_rank *rank, const void *first, const void *end)
{
    const size_t bytes = (size_t)((const uint8_t *)end - (const uint8_t *)first);
    if (bytes > 0) {
        rank->backend->ops->copy(rank->backend, rank->stream, dmk_device_at(rank, first), first,
                                 bytes);
    }
}

/* The arrays lie one after the other; the two long ones last, of which only what is used travels. */
void dmk_device_send_plan(struct dmk_rank *rank)
{
    const struct dmk_step_plan *p = &rank->engine->plans[rank->group];
    send_range(rank, p->counts, p->page_ids + p->n_page_ids);
    send_range(rank, p->splits, p->splits + p->counts->n_splits);
}

void dmk_device_plan_picks(struct dmk_step_plan *p, const struct dmk_step_pick *picks, uint32_t n)
{
    for (uint32_t i = 0; i < p->n_logit_rows; i++) {
        const struct dmk_step_pick *pick = picks && i < n ? &picks[i] : NULL;
        p->picks[i] = pick && pick->pick
                          ? (struct dmk_sample_row){pick->scale, pick->min_p, pick->unit}
                          : (struct dmk_sample_row){0};
    }
}

static struct dmk_step_picked picked_of(const struct dmk_sample_out *out)
{
    return (struct dmk_step_picked){
        .id = out->id,
        .status = out->status == 0   ? 0
                  : out->status == 1 ? -DMK_EFORMAT
                                     : -DMK_ENOENT,
        .logit = out->logit,
        .max = out->max,
        .sum = out->sum,
    };
}

/* Of a group's first rank: tokens, and the logits of rows without a pick, one row at a time through pinned memory.
 * at: the group's first of the step's n rows with logits. */
static int fetch_rows(struct dmk_rank *rank, const struct dmk_step *step, uint32_t at, uint32_t n)
{
    const struct dmk_device_rank *dev = dmk_device_of(rank);
    struct dmk_backend *be = rank->backend;
    const size_t vocab = rank->engine->shape.vocab;
    float *row = rank->engine->device->logits_host;
    int status = 0;
    for (uint32_t i = 0; i < n && status == 0; i++) {
        if (step->picks && step->picks[at + i].pick) {
            step->picked[at + i] = picked_of(&dev->picked_host[i]);
            continue;
        }
        be->ops->copy(be, rank->stream, row, dev->logits + i * vocab, vocab * sizeof(float));
        status = be->ops->sync(be, rank->stream);
        memcpy(step->logits + (at + i) * vocab, row, vocab * sizeof(float));
    }
    return status;
}

int dmk_device_fetch(struct dmk_engine *engine, const struct dmk_step *step,
                     const uint32_t *n_logits)
{
    const struct dmk_layout layout = engine->conf.layout;
    for (uint32_t g = 0; g < layout.dp; g++) {
        struct dmk_rank *first = &engine->ranks[g * layout.tp];
        const struct dmk_device_rank *dev = dmk_device_of(first);
        if (step->picks && n_logits[g] > 0) {
            first->backend->ops->copy(first->backend, first->stream, dev->picked_host, dev->picked,
                                      n_logits[g] * sizeof(*dev->picked));
        }
    }
    int status = dmk_device_sync(engine);
    uint32_t at = 0;
    for (uint32_t g = 0; g < layout.dp && status == 0; g++) {
        status = fetch_rows(&engine->ranks[g * layout.tp], step, at, n_logits[g]);
        at += n_logits[g];
    }
    return status;
}
