/* Fuzz target of the ticket: what a prefill worker reads from a router.
 *
 * Input: one byte, then a ticket. With the byte's lowest bit the envelope (magic, version, checksum) is made
 * right first, so that the fields are reached. Checked: it is refused with a sentence, or it encodes to the
 * same bytes, and every put that a plan makes of it lies inside the regions of both sides. */
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/xfer/plan.h"
#include "common/xfer/wire.h"
#include "tests/fuzz/fuzz.h"

#define CHECKSUM_SEED 0x7469636b6574ull
#define MAX_PUTS      20000

static uint8_t blob[DMK_TICKET_MAX_BYTES + 1];

static void repair(uint8_t *data, size_t len)
{
    static const uint8_t head[6] = {'D', 'M', 'K', 'T', 1, 0};
    uint64_t sum;

    if (len < 14) {
        return;
    }
    memcpy(data, head, sizeof(head));
    sum = dmk_hash64(data, len - 8, CHECKSUM_SEED);
    for (size_t i = 0; i < 8; i++) {
        data[len - 8 + i] = (uint8_t)(sum >> (8 * i));
    }
}

static void check_same(const struct dmk_ticket *t, struct dmk_bytes want)
{
    struct dmk_buf out;

    dmk_buf_init(&out, DMK_TICKET_MAX_BYTES);
    dmk_ticket_encode(t, &out);
    dmk_assert(!out.failed && out.len == want.len && memcmp(out.data, want.data, want.len) == 0);
    dmk_buf_fini(&out);
}

/* Puts of one piece over all heads, from one rank that owns them all. */
static void check_piece(const struct dmk_plan *plan, const struct dmk_plan_piece *piece)
{
    struct dmk_plan_cursor cursor = {0, piece->first};
    struct dmk_plan_put put;
    uint64_t bytes = 0;

    for (uint32_t n = 0; n < MAX_PUTS; n++) {
        if (!dmk_plan_next(plan, piece, &cursor, &put)) {
            dmk_assert(bytes == (uint64_t)plan->n_heads * (piece->end - piece->first) *
                                    plan->src[0].page_bytes);
            return;
        }
        const struct dmk_kv_layout *src = &plan->src[put.src_rank];
        const struct dmk_kv_layout *dst = &plan->dst[put.dst_rank];
        const uint64_t src_size = piece->window ? dmk_kv_window_bytes(src) : dmk_kv_full_bytes(src);
        const uint64_t dst_size = piece->window ? dmk_kv_window_bytes(dst) : dmk_kv_full_bytes(dst);

        dmk_assert(put.bytes > 0 && put.bytes == (uint64_t)put.n_pages * src->page_bytes);
        dmk_assert(put.src_offset <= src_size && put.bytes <= src_size - put.src_offset);
        dmk_assert(put.dst_offset <= dst_size && put.bytes <= dst_size - put.dst_offset);
        bytes += put.bytes;
    }
}

static void check_plan(const struct dmk_ticket *t)
{
    static uint32_t src_pages[DMK_TICKET_MAX_PAGES], dst_pages[DMK_TICKET_MAX_PAGES];
    static struct dmk_plan plan;
    const struct dmk_kv_layout src = {.n_full_layers = t->n_full_layers,
                                      .n_window_layers = t->n_window_layers,
                                      .n_kv_heads = t->n_kv_heads,
                                      .n_local_heads = t->n_kv_heads,
                                      .page_bytes = t->page_bytes,
                                      .n_full_pages = DMK_TICKET_MAX_PAGES,
                                      .n_window_pages = DMK_TICKET_MAX_PAGES};
    const uint32_t have = t->have / DMK_PAGE_TOKENS, end = dmk_kv_pages_for(t->n_tokens);
    struct dmk_plan_piece piece = {
        .src_pages = src_pages, .dst_pages = dst_pages, .first = have, .end = end};

    if (dmk_plan_init(&plan, &src, 1, t, 0, NULL) < 0) {
        return;
    }
    for (uint32_t i = 0; i < DMK_TICKET_MAX_PAGES; i++) {
        src_pages[i] = i;
        dst_pages[i] = i >= have && i < end ? t->pages[i - have] : 0;
    }
    if (t->n_full_layers > 0) {
        piece.layer = t->n_full_layers - 1;
        check_piece(&plan, &piece);
    }
    if (t->n_window_layers > 0) {
        piece.window = true;
        piece.layer = t->n_window_layers - 1;
        piece.end = dmk_kv_window_blocks(t->n_tokens, &piece.first);
        piece.end += piece.first;
        for (uint32_t b = piece.first; b < piece.end; b++) {
            dst_pages[b] = t->ring[b % t->n_ring];
        }
        check_piece(&plan, &piece);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct dmk_ticket ticket;
    struct dmk_error err = {0};
    struct dmk_bytes bytes;

    if (size < 1 || size > sizeof(blob)) {
        return 0;
    }
    memcpy(blob, data + 1, size - 1);
    if (data[0] & 1) {
        repair(blob, size - 1);
    }
    bytes = (struct dmk_bytes){blob, size - 1};
    if (dmk_ticket_decode(bytes, &ticket, &err) < 0) {
        dmk_assert(err.text[0]);
        return 0;
    }
    check_same(&ticket, bytes);
    check_plan(&ticket);
    return 0;
}
