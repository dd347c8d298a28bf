/* Puts of a transfer; see plan.h. Pure functions, no allocation. */
#include "common/xfer/plan.h"
#include "common/base/assert.h"

#define DEFAULT_MAX_PUT ((uint64_t)64 << 20)

static int check_source(const struct dmk_kv_layout *src, const struct dmk_ticket *t,
                        struct dmk_error *reterr)
{
    if (src->n_full_layers != t->n_full_layers || src->n_window_layers != t->n_window_layers) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "decode worker has %u full and %u window layers, this one %u and %u: "
                             "give both pools the same model",
                             t->n_full_layers, t->n_window_layers, src->n_full_layers,
                             src->n_window_layers);
    }
    if (src->n_kv_heads != t->n_kv_heads) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "decode worker has %u KV heads, this one %u: give both pools the same "
                             "model",
                             t->n_kv_heads, src->n_kv_heads);
    }
    if (src->page_bytes != t->page_bytes) {
        return dmk_error_set(
            reterr, -DMK_EMISMATCH,
            "decode worker has pages of %u bytes, this one %u: give both pools the "
            "same KV format",
            t->page_bytes, src->page_bytes);
    }
    return 0;
}

/* Rank of the n layouts that owns the head, or n. */
static uint32_t find_owner(const struct dmk_kv_layout *layouts, uint32_t n, uint32_t head)
{
    for (uint32_t r = 0; r < n; r++) {
        if (head >= layouts[r].kv_head_first &&
            head - layouts[r].kv_head_first < layouts[r].n_local_heads) {
            return r;
        }
    }
    return n;
}

int dmk_plan_init(struct dmk_plan *plan, const struct dmk_kv_layout *src, uint32_t n_src,
                  const struct dmk_ticket *ticket, uint64_t max_put_bytes, struct dmk_error *reterr)
{
    struct dmk_plan p = {.n_heads = ticket->n_kv_heads};
    const uint64_t max_put = max_put_bytes ? max_put_bytes : DEFAULT_MAX_PUT;

    dmk_assert(n_src > 0 && n_src <= DMK_TICKET_MAX_RANKS);
    for (uint32_t r = 0; r < n_src; r++) {
        const int ret = check_source(&src[r], ticket, reterr);

        if (ret < 0) {
            return ret;
        }
        p.src[r] = src[r];
    }
    for (uint32_t r = 0; r < ticket->n_ranks; r++) {
        p.dst[r] = dmk_ticket_layout(ticket, r);
    }
    for (uint32_t h = 0; h < p.n_heads; h++) {
        const uint32_t s = find_owner(p.src, n_src, h);
        const uint32_t d = find_owner(p.dst, ticket->n_ranks, h);

        if (s == n_src || d == ticket->n_ranks) {
            return dmk_error_set(reterr, -DMK_EMISMATCH, "KV head %u has no owner on %s", h,
                                 s == n_src ? "this worker" : "the decode worker");
        }
        p.heads[h] = (struct dmk_plan_head){
            .src_rank = (uint8_t)s,
            .dst_rank = (uint8_t)d,
            .src_local = (uint8_t)(h - p.src[s].kv_head_first),
            .dst_local = (uint8_t)(h - p.dst[d].kv_head_first),
        };
    }
    p.max_run = (uint32_t)(max_put / ticket->page_bytes);
    if (p.max_run == 0) {
        p.max_run = 1;
    }
    *plan = p;
    return 0;
}

/* Blocks from `at` on whose ids rise by one on both sides. */
static uint32_t run_length(const struct dmk_plan_piece *piece, uint32_t at, uint32_t max_run)
{
    const uint32_t *src = piece->src_pages, *dst = piece->dst_pages;
    uint32_t end = at + 1;

    while (end < piece->end && end - at < max_run && src[end] == src[end - 1] + 1 &&
           dst[end] == dst[end - 1] + 1) {
        end++;
    }
    return end - at;
}

bool dmk_plan_next(const struct dmk_plan *plan, const struct dmk_plan_piece *piece,
                   struct dmk_plan_cursor *inout_cursor, struct dmk_plan_put *ret_put)
{
    struct dmk_plan_cursor at = *inout_cursor;
    const struct dmk_plan_head *head;
    const struct dmk_kv_layout *src, *dst;
    uint32_t n, src_page, dst_page;
    bool staged;

    if (piece->first >= piece->end || at.head >= plan->n_heads) {
        return false;
    }
    dmk_assert(at.block >= piece->first && at.block < piece->end);
    head = &plan->heads[at.head];
    staged = (piece->src_pages[at.block] & DMK_PLAN_STAGED) != 0;
    src = staged ? &plan->staged[head->src_rank] : &plan->src[head->src_rank];
    dst = &plan->dst[head->dst_rank];
    n = run_length(piece, at.block, plan->max_run);
    src_page = piece->src_pages[at.block] & ~DMK_PLAN_STAGED;
    dst_page = piece->dst_pages[at.block];
    *ret_put = (struct dmk_plan_put){
        .src_rank = head->src_rank,
        .dst_rank = head->dst_rank,
        .src_offset = piece->window
                          ? dmk_kv_window_offset(src, piece->layer, head->src_local, src_page)
                          : dmk_kv_full_offset(src, piece->layer, head->src_local, src_page),
        .dst_offset = piece->window
                          ? dmk_kv_window_offset(dst, piece->layer, head->dst_local, dst_page)
                          : dmk_kv_full_offset(dst, piece->layer, head->dst_local, dst_page),
        .bytes = (uint64_t)n * src->page_bytes,
        .n_pages = n,
        .staged = staged,
    };
    at.block += n;
    if (at.block == piece->end) {
        at = (struct dmk_plan_cursor){at.head + 1, piece->first};
    }
    *inout_cursor = at;
    return true;
}
