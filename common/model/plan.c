/* The plan of a step: which row is which token, and where its keys go. On hosts the groups share one set of
 * arrays, one after the other; on devices, where a plan is sent and padded, each has its own. Any group may have all
 * rows of a step. Pure apart from the arrays that it fills; on the engine thread, before the ranks start. */
#include "common/model/engine_internal.h"

#include <string.h>
#include "common/base/assert.h"
#include "kernels/attn_cut.h"

static int alloc_room(struct dmk_engine *engine, uint32_t group, struct dmk_error *reterr)
{
    const struct dmk_engine_conf *c = &engine->conf;
    struct dmk_rank *rank = &engine->ranks[0];
    struct dmk_step_plan *p = &engine->rooms[group];
    const size_t u32 = sizeof(uint32_t), T = c->max_step_tokens;
    size_t n_pages = (size_t)c->max_step_seqs * dmk_kv_pages_for(engine->n_positions);
    /* A device's tiles are longer, but those of a sequence may break at a position once more, or twice in a long one. */
    size_t n_tiles = T / DMK_ATTN_TILE + 2 * (size_t)c->max_step_seqs;
    /* In this order in one block: a device gets it with few copies, the two long arrays last. */
    struct {
        void *ret;
        size_t bytes;
    } parts[] = {
        {&p->counts, sizeof(*p->counts)},
        {&p->seqs, c->max_step_seqs * sizeof(*p->seqs)},
        {&p->tiles, n_tiles * sizeof(*p->tiles)},
        {&p->logit_rows, (c->max_logit_rows + 1) * u32},
        {&p->picks, (c->max_logit_rows + 1) * sizeof(*p->picks)},
        {&p->ids, T * u32},
        {&p->positions, T * u32},
        {&p->slot, T * u32},
        {&p->full_page, T * u32},
        {&p->window_page, T * u32},
        {&p->page_ids, n_pages * u32},
        {&p->splits, rank->backend->ops->async
                         ? (size_t)c->max_step_seqs * engine->max_row_splits * sizeof(*p->splits)
                         : 0},
    };
    const size_t n_parts = sizeof(parts) / sizeof(parts[0]);
    engine->plan_bytes = 0;
    for (size_t i = 0; i < n_parts; i++) {
        engine->plan_bytes += (parts[i].bytes + 63) / 64 * 64;
    }
    int status = dmk_engine_alloc_mem(rank, DMK_MEM_HOST, engine->plan_bytes,
                                      &engine->plan_blocks[group], "the step plan", reterr);
    uint8_t *at = engine->plan_blocks[group];
    for (size_t i = 0; i < n_parts && status == 0; i++) {
        memcpy(parts[i].ret, &at, sizeof(at));
        at += (parts[i].bytes + 63) / 64 * 64;
    }
    return status;
}

int dmk_engine_plan_alloc(struct dmk_engine *engine, struct dmk_error *reterr)
{
    const uint32_t n_rooms = engine->ranks[0].backend->ops->async ? engine->conf.layout.dp : 1;
    int status = 0;

    engine->max_row_splits = engine->n_positions / DMK_ATTN_SPLIT + 1;
    for (uint32_t group = 0; group < n_rooms && status == 0; group++) {
        status = alloc_room(engine, group, reterr);
    }
    return status;
}

static uint32_t n_logits_of(const struct dmk_step_seq *seq)
{
    return seq->logits == DMK_LOGITS_ALL ? seq->n_tokens : seq->logits == DMK_LOGITS_LAST;
}

static void plan_rows(struct dmk_step_plan *p, const struct dmk_step_seq *seq, uint32_t row)
{
    uint32_t last_block = (seq->pos + seq->n_tokens - 1) / DMK_PAGE_TOKENS;
    for (uint32_t i = 0; i < seq->n_tokens; i++) {
        uint32_t position = seq->pos + i, block = position / DMK_PAGE_TOKENS;
        p->ids[row + i] = seq->ids[i];
        p->positions[row + i] = position;
        p->slot[row + i] = position % DMK_PAGE_TOKENS;
        p->full_page[row + i] = seq->full_pages[block];
        p->window_page[row + i] =
            block + seq->n_ring > last_block ? seq->ring[block % seq->n_ring] : DMK_NONE;
    }
}

static void plan_tiles(struct dmk_step_plan *p, uint32_t seq_index, uint32_t pos, uint32_t n_tokens)
{
    for (uint32_t first = 0, tile; first < n_tokens; first += tile) {
        uint32_t left = n_tokens - first;
        if (p->splits) {
            tile = dmk_attn_tile_tokens(pos + first, left);
        } else {
            tile = left < DMK_ATTN_TILE ? left : DMK_ATTN_TILE;
        }
        p->tiles[p->n_tiles++] = (struct dmk_attn_tile){
            .seq = seq_index,
            .first = first,
            .n_tokens = tile,
        };
    }
}

/* A single token on a device: its keys in pieces. */
static void plan_splits(struct dmk_step_plan *p, uint32_t seq_index, uint32_t pos)
{
    for (uint32_t i = 0; i <= pos / dmk_attn_split_keys(pos); i++) {
        p->splits[p->counts->n_splits++] = (struct dmk_attn_split){seq_index, i};
    }
    p->n_singles++;
}

void dmk_engine_plan_empty(struct dmk_engine *engine, uint32_t group)
{
    struct dmk_step_plan *p = &engine->plans[group];

    *p = engine->rooms[group];
    p->counts->n_splits = 0;
    if (!engine->device) {
        p->splits = NULL; /* hosts walk tiles only */
    }
}

/* The next group's plan begins where this one ends; all of its rows are its own. */
static struct dmk_step_plan after(const struct dmk_step_plan *p, uint32_t n_pages,
                                  const struct dmk_engine *engine)
{
    return (struct dmk_step_plan){
        .ids = p->ids + p->n_rows,
        .positions = p->positions + p->n_rows,
        .slot = p->slot + p->n_rows,
        .full_page = p->full_page + p->n_rows,
        .window_page = p->window_page + p->n_rows,
        .page_ids = p->page_ids + n_pages,
        .logit_rows = p->logit_rows + p->n_logit_rows,
        .logits = p->logits ? p->logits + (size_t)p->n_logit_rows * engine->shape.vocab : NULL,
        .seqs = p->seqs + p->n_seqs,
        .tiles = p->tiles + p->n_tiles,
    };
}

/* Adds a sequence to its group's plan; returns how many page ids the group has now. */
static uint32_t plan_seq(struct dmk_step_plan *p, const struct dmk_step_seq *seq, uint32_t n_pages)
{
    struct dmk_attn_seq *s = &p->seqs[p->n_seqs];

    plan_rows(p, seq, p->n_rows);
    if (p->splits && seq->n_tokens == 1) {
        plan_splits(p, p->n_seqs++, seq->pos);
    } else {
        plan_tiles(p, p->n_seqs++, seq->pos, seq->n_tokens);
    }
    *s = (struct dmk_attn_seq){
        .row = p->n_rows,
        .n_tokens = seq->n_tokens,
        .pos = seq->pos,
        .first_page = n_pages,
        .n_ring = seq->n_ring,
    };
    for (uint32_t slot = 0; slot < seq->n_ring; slot++) {
        s->ring[slot] = seq->ring[slot];
    }
    uint32_t seq_pages = dmk_kv_pages_for((uint64_t)seq->pos + seq->n_tokens);
    for (uint32_t page = 0; page < seq_pages; page++) {
        p->page_ids[n_pages++] = seq->full_pages[page];
    }
    uint32_t n_logits = n_logits_of(seq);
    for (uint32_t r = seq->n_tokens - n_logits; r < seq->n_tokens; r++) {
        p->logit_rows[p->n_logit_rows++] = p->n_rows + r;
    }
    p->n_rows += seq->n_tokens;
    p->n_page_ids = n_pages;
    return n_pages;
}

/* What the caller promises of the step as a whole, before any array is written. */
static void check_step(const struct dmk_engine *engine, const struct dmk_step *step)
{
    const struct dmk_engine_conf *c = &engine->conf;
    uint32_t n_rows = 0, n_logits = 0, group = 0;

    dmk_assert(step->n_seqs <= c->max_step_seqs);
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct dmk_step_seq *seq = &step->seqs[i];
        dmk_assert(seq->dp >= group && seq->dp < c->layout.dp);
        dmk_assert(seq->n_tokens > 0 && seq->n_tokens <= c->max_step_tokens - n_rows);
        dmk_assert((uint64_t)seq->pos + seq->n_tokens <= engine->n_positions);
        dmk_assert(seq->n_ring >= DMK_WINDOW_RING && seq->n_ring <= DMK_WINDOW_RING_MAX);
        dmk_assert(n_logits_of(seq) <= c->max_logit_rows - n_logits);
        group = seq->dp;
        n_rows += seq->n_tokens;
        n_logits += n_logits_of(seq);
    }
    dmk_assert(n_logits == 0 || ((step->logits || step->picks) && !c->prefill));
    dmk_assert(!step->picks || dmk_engine_samples(engine));
    for (uint32_t i = 0; i < step->n_copies; i++) {
        dmk_assert(step->copies[i].dp < c->layout.dp);
    }
}

void dmk_engine_plan(struct dmk_engine *engine, const struct dmk_step *step)
{
    struct dmk_step_plan *p = engine->plans;
    uint32_t at = 0, n_pages = 0;

    check_step(engine, step);
    for (uint32_t group = 0; group < engine->conf.layout.dp; group++) {
        if (group == 0 || engine->device) {
            dmk_engine_plan_empty(engine, group);
            p[group].logits = group == 0 ? step->logits : NULL; /* a device fetches them itself */
        } else {
            p[group] = after(&p[group - 1], n_pages, engine);
        }
        n_pages = 0;
        for (; at < step->n_seqs && step->seqs[at].dp == group; at++) {
            n_pages = plan_seq(&p[group], &step->seqs[at], n_pages);
        }
        if (engine->device) {
            p[group].max_splits = p[group].counts->n_splits;
        }
    }
}
