/* The shadow engine. One thread; ranks are only where a head's memory lies. */
#include "tests/support/shadow_engine.h"

#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "common/base/status.h"

#define PAGE_BYTES 16384u
#define V_OFFSET   8192u
#define ROW_BYTES  128u
#define WINDOW     128u
#define MAX_CHUNK  4096u

struct shadow_engine {
    struct shadow_conf conf;
    struct dmk_shape shape;
    uint32_t n_ranks;
    struct dmk_kv_mem mem[DMK_PORT_MAX_RANKS], stage[DMK_PORT_MAX_RANKS];
    uint64_t n_staged;
    uint64_t *k, *v; /* [MAX_CHUNK] of one head */
    uint32_t fail_steps;
    int fail_status;
    uint64_t n_tokens;
};

struct shadow_engine *shadow_engine_new(const struct shadow_conf *conf)
{
    struct shadow_engine *e = calloc(1, sizeof(*e));

    dmk_assert(e && conf->tp * conf->dp <= DMK_PORT_MAX_RANKS && conf->n_kv_heads % conf->tp == 0);
    e->conf = *conf;
    e->n_ranks = conf->tp * conf->dp;
    e->shape = (struct dmk_shape){.n_layers = conf->n_layers,
                                  .hidden = 64,
                                  .n_heads = conf->n_kv_heads,
                                  .n_kv_heads = conf->n_kv_heads,
                                  .vocab = conf->vocab,
                                  .window = WINDOW,
                                  .max_positions = 131072,
                                  .eos_ids = {conf->vocab - 1},
                                  .n_eos = 1};
    for (uint32_t r = 0; r < e->n_ranks; r++) {
        struct dmk_kv_layout *l = &e->mem[r].layout;

        l->n_full_layers = dmk_shape_n_full_layers(&e->shape);
        l->n_window_layers = dmk_shape_n_window_layers(&e->shape);
        l->n_kv_heads = conf->n_kv_heads;
        l->n_local_heads = conf->n_kv_heads / conf->tp;
        l->kv_head_first = r % conf->tp * l->n_local_heads;
        l->page_bytes = PAGE_BYTES;
        l->n_full_pages = conf->n_full_pages;
        l->n_window_pages = conf->n_window_pages;
        e->mem[r].full = malloc(dmk_kv_full_bytes(l));
        e->mem[r].window = malloc(dmk_kv_window_bytes(l));
        dmk_assert(e->mem[r].full && e->mem[r].window);
        memset(e->mem[r].full, 0xee, dmk_kv_full_bytes(l));
        memset(e->mem[r].window, 0xee, dmk_kv_window_bytes(l));
        if (conf->n_stage_full_pages > 0) {
            struct dmk_kv_layout *stage = &e->stage[r].layout;

            *stage = *l;
            stage->n_full_pages = conf->n_stage_full_pages;
            stage->n_window_pages = conf->n_stage_window_pages;
            e->stage[r].full = calloc(1, dmk_kv_full_bytes(stage));
            e->stage[r].window = calloc(1, dmk_kv_window_bytes(stage));
            dmk_assert(e->stage[r].full && e->stage[r].window);
        }
    }
    e->k = calloc(MAX_CHUNK, sizeof(*e->k));
    e->v = calloc(MAX_CHUNK, sizeof(*e->v));
    dmk_assert(e->k && e->v);
    return e;
}

void shadow_engine_free(struct shadow_engine **engine)
{
    struct shadow_engine *e = *engine;

    if (e) {
        for (uint32_t r = 0; r < e->n_ranks; r++) {
            free(e->mem[r].full);
            free(e->mem[r].window);
            free(e->stage[r].full);
            free(e->stage[r].window);
        }
        free(e->k);
        free(e->v);
        free(e);
        *engine = NULL;
    }
}

void shadow_engine_fail(struct shadow_engine *e, uint32_t n_steps, int status)
{
    e->fail_steps = n_steps;
    e->fail_status = status;
}

uint64_t shadow_engine_tokens(const struct shadow_engine *e)
{
    return e->n_tokens;
}

uint64_t shadow_engine_staged(const struct shadow_engine *e)
{
    return e->n_staged;
}

static const struct dmk_kv_mem *rank_of(const struct shadow_engine *e, uint32_t dp, uint32_t head,
                                        uint32_t *ret_local)
{
    const uint32_t per_rank = e->conf.n_kv_heads / e->conf.tp;

    *ret_local = head % per_rank;
    return &e->mem[dp * e->conf.tp + head / per_rank];
}

/* Start of a page of one layer and head. */
static uint8_t *page_at(const struct shadow_engine *e, uint32_t dp, uint32_t layer, uint32_t head,
                        uint32_t page)
{
    uint32_t local;
    const struct dmk_kv_mem *m = rank_of(e, dp, head, &local);
    const uint32_t kind = dmk_shape_kind_index(layer);

    if (dmk_shape_layer_is_full(layer)) {
        dmk_assert(page < m->layout.n_full_pages);
        return (uint8_t *)m->full + dmk_kv_full_offset(&m->layout, kind, local, page);
    }
    dmk_assert(page < m->layout.n_window_pages);
    return (uint8_t *)m->window + dmk_kv_window_offset(&m->layout, kind, local, page);
}

static uint64_t load(const uint8_t *page, uint32_t slot, uint32_t part)
{
    uint64_t word;

    memcpy(&word, page + part + (size_t)slot * ROW_BYTES, sizeof(word));
    return word;
}

static void store(uint8_t *page, uint32_t slot, uint32_t part, uint64_t word)
{
    uint8_t *row = page + part + (size_t)slot * ROW_BYTES;

    memset(row, 0x11, ROW_BYTES);
    memcpy(row, &word, sizeof(word));
}

static uint64_t attend(uint64_t k, uint64_t v, uint32_t pos)
{
    return (k ^ (v + pos) * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
}

static uint32_t page_of(const struct dmk_step_seq *s, uint32_t layer, uint32_t pos)
{
    return dmk_shape_layer_is_full(layer) ? s->full_pages[pos / DMK_PAGE_TOKENS]
                                          : s->ring[pos / DMK_PAGE_TOKENS % s->n_ring];
}

/* One layer of one head: reads what came before from pages, what is new from scratch, then writes it. */
static void run_head(struct shadow_engine *e, const struct dmk_step_seq *s, uint32_t layer,
                     uint32_t head, uint64_t *x, uint64_t *sums)
{
    const bool full = dmk_shape_layer_is_full(layer);
    const uint32_t end = s->pos + s->n_tokens;
    uint32_t first_kept;

    for (uint32_t i = 0; i < s->n_tokens; i++) {
        e->k[i] = dmk_rng_mix(x[i] ^ (layer * 64ull + head) ^ e->conf.seed);
        e->v[i] = dmk_rng_mix(e->k[i] + 1);
    }
    for (uint32_t i = 0; i < s->n_tokens; i++) {
        const uint32_t pos = s->pos + i;
        uint32_t p = full || pos < WINDOW - 1 ? 0 : pos - (WINDOW - 1);
        uint64_t sum = 0;

        while (p < s->pos) {
            const uint8_t *page = page_at(e, s->dp, layer, head, page_of(s, layer, p));
            const uint32_t stop = (p / DMK_PAGE_TOKENS + 1) * DMK_PAGE_TOKENS;

            for (; p < stop && p < s->pos; p++) {
                sum += attend(load(page, p % DMK_PAGE_TOKENS, 0),
                              load(page, p % DMK_PAGE_TOKENS, V_OFFSET), p);
            }
        }
        for (; p <= pos; p++) {
            sum += attend(e->k[p - s->pos], e->v[p - s->pos], p);
        }
        sums[i] += dmk_rng_mix(sum ^ head);
    }
    first_kept = full ? s->pos : (end - 1) / DMK_PAGE_TOKENS * DMK_PAGE_TOKENS;
    if (!full) {
        const uint32_t back = (s->n_ring - 1) * DMK_PAGE_TOKENS;

        first_kept = first_kept > back ? first_kept - back : 0;
        first_kept = first_kept > s->pos ? first_kept : s->pos;
    }
    for (uint32_t p = first_kept; p < end; p++) {
        uint8_t *page = page_at(e, s->dp, layer, head, page_of(s, layer, p));

        store(page, p % DMK_PAGE_TOKENS, 0, e->k[p - s->pos]);
        store(page, p % DMK_PAGE_TOKENS, V_OFFSET, e->v[p - s->pos]);
    }
}

static void copy_page(struct shadow_engine *e, const struct dmk_page_copy *c)
{
    for (uint32_t layer = c->window ? 0 : 1; layer < e->conf.n_layers; layer += 2) {
        for (uint32_t h = 0; h < e->conf.n_kv_heads; h++) {
            memcpy(page_at(e, c->dp, layer, h, c->dst), page_at(e, c->dp, layer, h, c->src),
                   PAGE_BYTES);
        }
    }
}

static void stage_layer(struct shadow_engine *e, const struct dmk_step *step, uint32_t layer)
{
    const struct dmk_step_stage *s = step->stage;
    const struct dmk_step_seq *seq = &step->seqs[0];
    const bool full = dmk_shape_layer_is_full(layer);
    const uint32_t first = full ? s->first_block : 0, end = full        ? s->end_block
                                                            : s->window ? seq->n_ring
                                                                        : 0;

    dmk_assert(step->n_seqs == 1);
    for (uint32_t b = first; b < end; b++) {
        for (uint32_t h = 0; h < e->conf.n_kv_heads; h++) {
            uint32_t local;
            const struct dmk_kv_mem *to = &e->stage[rank_of(e, 0, h, &local) - e->mem];
            const uint32_t kind = dmk_shape_kind_index(layer);
            uint8_t *at =
                full ? (uint8_t *)to->full +
                           dmk_kv_full_offset(&to->layout, kind, local, s->full_at + b - first)
                     : (uint8_t *)to->window +
                           dmk_kv_window_offset(&to->layout, kind, local, s->window_at + b);

            dmk_assert(full ? s->full_at + b - first < to->layout.n_full_pages
                            : s->window_at + b < to->layout.n_window_pages);
            memcpy(at, page_at(e, 0, layer, h, full ? seq->full_pages[b] : seq->ring[b]),
                   PAGE_BYTES);
            e->n_staged++;
        }
    }
}

static void write_logits(const struct shadow_engine *e, float *out, uint64_t x)
{
    for (uint32_t v = 0; v < e->conf.vocab; v++) {
        out[v] = (float)(dmk_rng_mix(x ^ (0x51ull << 32 | v)) >> 40) * 0x1.0p-21f;
    }
}

static int step(void *engine, const struct dmk_step *step)
{
    struct shadow_engine *e = engine;
    uint64_t **x = calloc(step->n_seqs, sizeof(*x));
    uint64_t sums[MAX_CHUNK];
    float *logits = step->logits;
    int status = 0;

    if (e->fail_steps > 0) {
        e->fail_steps--;
        free(x);
        return e->fail_status;
    }
    for (uint32_t i = 0; i < step->n_copies; i++) {
        copy_page(e, &step->copies[i]);
    }
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct dmk_step_seq *s = &step->seqs[i];

        dmk_assert(s->n_tokens > 0 && s->n_tokens <= MAX_CHUNK && s->dp < e->conf.dp);
        x[i] = calloc(s->n_tokens, sizeof(**x));
        for (uint32_t t = 0; t < s->n_tokens; t++) {
            dmk_assert(s->ids[t] < e->conf.vocab);
            x[i][t] = dmk_rng_mix(s->ids[t] ^ e->conf.seed);
        }
        e->n_tokens += s->n_tokens;
    }
    for (uint32_t layer = 0; layer < e->conf.n_layers && status == 0; layer++) {
        if (step->cancel && atomic_load(step->cancel)) {
            status = -DMK_ECANCELLED;
            break;
        }
        for (uint32_t i = 0; i < step->n_seqs; i++) {
            const struct dmk_step_seq *s = &step->seqs[i];

            memset(sums, 0, s->n_tokens * sizeof(sums[0]));
            for (uint32_t h = 0; h < e->conf.n_kv_heads; h++) {
                run_head(e, s, layer, h, x[i], sums);
            }
            for (uint32_t t = 0; t < s->n_tokens; t++) {
                x[i][t] = dmk_rng_mix(x[i][t] + sums[t]);
            }
        }
        if (step->stage) {
            stage_layer(e, step, layer);
        }
        if (step->on_layer) {
            step->on_layer(step->ud, layer);
        }
    }
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct dmk_step_seq *s = &step->seqs[i];
        uint32_t t = s->logits == DMK_LOGITS_NONE   ? s->n_tokens
                     : s->logits == DMK_LOGITS_LAST ? s->n_tokens - 1
                                                    : 0;

        for (; t < s->n_tokens; t++, logits += e->conf.vocab) {
            write_logits(e, logits, x[i][t]);
        }
        free(x[i]);
    }
    free(x);
    return status;
}

struct dmk_engine_port shadow_engine_port(struct shadow_engine *e)
{
    struct dmk_engine_port port = {
        .shape = &e->shape,
        .layout = {.tp = e->conf.tp, .dp = e->conf.dp},
        .numerics = "shadow",
        .prompt_numerics = "shadow",
        .model_id = {1, e->conf.seed},
        .n_ranks = e->n_ranks,
        .step = step,
        .engine = e,
    };

    for (uint32_t r = 0; r < e->n_ranks; r++) {
        port.kv[r] = &e->mem[r];
        port.stage[r] = e->stage[r].full ? &e->stage[r] : NULL;
    }
    return port;
}
