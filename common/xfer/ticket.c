/* Tickets on the wire; see ticket.h. Pure functions on the caller's memory.
 *
 * Form: magic, version, length of the whole, the fields in the order of the struct, and an XXH3-64
 * of all bytes before it. The checksum guards against damage; that the sender may be trusted with
 * the memory it names is the business of the network policy and the cookie. */
#include "common/xfer/ticket.h"
#include "common/base/assert.h"
#include "common/xfer/wire.h"
#include <stdlib.h>

#define MAGIC          0x544b4d44u /* "DMKT" */
#define VERSION        1
#define CHECKSUM_SEED  0x7469636b6574ull
#define MAX_PAGE_BYTES (1u << 24)
#define MAX_POOL_PAGES (1u << 28)

struct dmk_kv_layout dmk_ticket_layout(const struct dmk_ticket *t, uint32_t rank)
{
    const struct dmk_ticket_rank *r = &t->ranks[rank];

    dmk_assert(rank < t->n_ranks);
    return (struct dmk_kv_layout){
        .n_full_layers = t->n_full_layers,
        .n_window_layers = t->n_window_layers,
        .n_kv_heads = t->n_kv_heads,
        .kv_head_first = r->kv_head_first,
        .n_local_heads = r->n_kv_heads,
        .page_bytes = t->page_bytes,
        .n_full_pages = r->n_full_pages,
        .n_window_pages = r->n_window_pages,
    };
}

static int check_shape(const struct dmk_ticket *t, struct dmk_error *reterr)
{
    const size_t numerics_len = strnlen(t->numerics, sizeof(t->numerics));

    if (t->n_full_layers > DMK_TICKET_MAX_LAYERS || t->n_window_layers > DMK_TICKET_MAX_LAYERS ||
        t->n_full_layers + t->n_window_layers == 0) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket names %u full and %u window layers",
                             t->n_full_layers, t->n_window_layers);
    }
    if (t->n_kv_heads == 0 || t->n_kv_heads > DMK_TICKET_MAX_HEADS) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket names %u KV heads, allowed are 1 to %d",
                             t->n_kv_heads, DMK_TICKET_MAX_HEADS);
    }
    if (t->page_tokens != DMK_PAGE_TOKENS) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket has pages of %u tokens, ours have %d",
                             t->page_tokens, DMK_PAGE_TOKENS);
    }
    if (t->page_bytes == 0 || t->page_bytes > MAX_PAGE_BYTES || t->page_bytes % 64 != 0) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket has pages of %u bytes", t->page_bytes);
    }
    if (numerics_len == 0 || numerics_len == sizeof(t->numerics)) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "ticket has no numerics id, or a longer one "
                             "than %d bytes",
                             DMK_NUMERICS_MAX - 1);
    }
    if (t->address_len == 0 || t->address_len > sizeof(t->address)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket has an address of %zu bytes",
                             t->address_len);
    }
    return 0;
}

/* Heads must be dealt to the ranks without gap or overlap, in ascending order. */
static int check_ranks(const struct dmk_ticket *t, struct dmk_error *reterr)
{
    uint32_t next_head = 0;

    if (t->n_ranks == 0 || t->n_ranks > DMK_TICKET_MAX_RANKS) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket names %u ranks, allowed are 1 to %d",
                             t->n_ranks, DMK_TICKET_MAX_RANKS);
    }
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        const struct dmk_ticket_rank *r = &t->ranks[i];

        if (r->kv_head_first != next_head || r->n_kv_heads == 0 ||
            r->n_kv_heads > t->n_kv_heads - next_head) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "ticket gives rank %u heads %u to %u, expected them from %u on", i,
                                 r->kv_head_first, r->kv_head_first + r->n_kv_heads, next_head);
        }
        next_head += r->n_kv_heads;
        if (r->n_full_pages > MAX_POOL_PAGES || r->n_window_pages > MAX_POOL_PAGES) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "ticket gives rank %u pools of %u and %u pages", i,
                                 r->n_full_pages, r->n_window_pages);
        }
        if (r->full_key_len > sizeof(r->full_key) || r->window_key_len > sizeof(r->window_key) ||
            (t->n_full_layers > 0 && r->full_key_len == 0) ||
            (t->n_window_layers > 0 && r->window_key_len == 0)) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "ticket gives rank %u memory keys of %zu and %zu bytes", i,
                                 r->full_key_len, r->window_key_len);
        }
    }
    if (next_head != t->n_kv_heads) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket's ranks own %u of %u heads", next_head,
                             t->n_kv_heads);
    }
    return 0;
}

static int check_id(const struct dmk_ticket *t, uint32_t id, bool window, struct dmk_error *reterr)
{
    for (uint32_t r = 0; r < t->n_ranks; r++) {
        const uint32_t bound = window ? t->ranks[r].n_window_pages : t->ranks[r].n_full_pages;

        if (id >= bound) {
            return dmk_error_set(reterr, -DMK_EFORMAT, "ticket names %s page %u, rank %u has %u",
                                 window ? "window" : "full", id, r, bound);
        }
    }
    return 0;
}

static int check_ring(const struct dmk_ticket *t, struct dmk_error *reterr)
{
    uint32_t first;
    const uint32_t n = dmk_kv_window_blocks(t->n_tokens, &first);
    int r = 0;

    if (t->n_ring > DMK_WINDOW_RING_MAX ||
        (t->n_window_layers > 0 && t->n_ring < DMK_WINDOW_RING)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket has a ring of %u window pages",
                             t->n_ring);
    }
    for (uint32_t b = first; t->n_window_layers > 0 && b < first + n && r == 0; b++) {
        r = check_id(t, t->ring[b % t->n_ring], true, reterr); /* a slot that is needed */
    }
    for (uint32_t i = 0; i < t->n_ring && r == 0; i++) {
        r = t->ring[i] == DMK_PAGE_NONE ? 0 : check_id(t, t->ring[i], true, reterr);
    }
    return r;
}

static int check_pages(const struct dmk_ticket *t, struct dmk_error *reterr)
{
    int r = 0;

    if (t->n_tokens == 0 || t->n_tokens > DMK_TICKET_MAX_PAGES * DMK_PAGE_TOKENS ||
        t->have % DMK_PAGE_TOKENS != 0 || t->have >= t->n_tokens) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket asks for positions %u to %u", t->have,
                             t->n_tokens);
    }
    if (t->n_pages != dmk_kv_pages_for(t->n_tokens) - t->have / DMK_PAGE_TOKENS) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket names %u pages for positions %u to %u",
                             t->n_pages, t->have, t->n_tokens);
    }
    for (uint32_t i = 0; i < t->n_pages && r == 0; i++) {
        r = check_id(t, t->pages[i], false, reterr);
    }
    if (r == 0) {
        r = check_ring(t, reterr);
    }
    if (r < 0) {
        return r;
    }
    if (t->bytes_expected != dmk_ticket_bytes(t)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket expects %llu bytes, its pages hold %llu",
                             (unsigned long long)t->bytes_expected,
                             (unsigned long long)dmk_ticket_bytes(t));
    }
    return 0;
}

int dmk_ticket_check(const struct dmk_ticket *t, struct dmk_error *reterr)
{
    int r = check_shape(t, reterr);

    if (r == 0) {
        r = check_ranks(t, reterr);
    }
    if (r == 0) {
        r = check_pages(t, reterr);
    }
    return r;
}

void dmk_ticket_encode(const struct dmk_ticket *t, struct dmk_buf *out)
{
    const size_t start = out->len;

    dmk_assert(dmk_ticket_check(t, NULL) == 0);
    dmk_wire_put_u32(out, MAGIC);
    dmk_wire_put_u16(out, VERSION);
    dmk_wire_put_u64(out, t->d_incarnation);
    dmk_wire_put_id128(out, t->cookie);
    dmk_wire_put_u64(out, t->generation);
    dmk_wire_put_u64(out, t->expires_unix_ms);
    dmk_wire_put_id128(out, t->model_id);
    dmk_wire_put_blob(out, t->numerics, strlen(t->numerics));
    dmk_wire_put_u32(out, t->n_full_layers);
    dmk_wire_put_u32(out, t->n_window_layers);
    dmk_wire_put_u32(out, t->n_kv_heads);
    dmk_wire_put_u32(out, t->page_tokens);
    dmk_wire_put_u32(out, t->page_bytes);
    dmk_wire_put_blob(out, t->address, t->address_len);
    dmk_wire_put_u32(out, t->have);
    dmk_wire_put_u32(out, t->n_tokens);
    dmk_wire_put_u32(out, t->n_pages);
    for (uint32_t i = 0; i < t->n_pages; i++) {
        dmk_wire_put_u32(out, t->pages[i]);
    }
    dmk_wire_put_u32(out, t->n_ring);
    for (uint32_t i = 0; i < t->n_ring; i++) {
        dmk_wire_put_u32(out, t->ring[i]);
    }
    dmk_wire_put_u64(out, t->bytes_expected);
    dmk_wire_put_u32(out, t->n_ranks);
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        const struct dmk_ticket_rank *r = &t->ranks[i];

        dmk_wire_put_u32(out, r->kv_head_first);
        dmk_wire_put_u32(out, r->n_kv_heads);
        dmk_wire_put_u32(out, r->n_full_pages);
        dmk_wire_put_u32(out, r->n_window_pages);
        dmk_wire_put_u64(out, r->full_base);
        dmk_wire_put_u64(out, r->window_base);
        dmk_wire_put_blob(out, r->full_key, r->full_key_len);
        dmk_wire_put_blob(out, r->window_key, r->window_key_len);
    }
    if (!out->failed) {
        dmk_wire_put_u64(out, dmk_hash64(out->data + start, out->len - start, CHECKSUM_SEED));
    }
}

static void read_ranks(struct dmk_wire_in *in, struct dmk_ticket *t)
{
    t->n_ranks = dmk_wire_get_u32(in);
    if (t->n_ranks > DMK_TICKET_MAX_RANKS) {
        in->failed = true;
        return;
    }
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        struct dmk_ticket_rank *r = &t->ranks[i];

        r->kv_head_first = dmk_wire_get_u32(in);
        r->n_kv_heads = dmk_wire_get_u32(in);
        r->n_full_pages = dmk_wire_get_u32(in);
        r->n_window_pages = dmk_wire_get_u32(in);
        r->full_base = dmk_wire_get_u64(in);
        r->window_base = dmk_wire_get_u64(in);
        r->full_key_len = dmk_wire_get_blob(in, r->full_key, sizeof(r->full_key));
        r->window_key_len = dmk_wire_get_blob(in, r->window_key, sizeof(r->window_key));
    }
}

static void read_fields(struct dmk_wire_in *in, struct dmk_ticket *t)
{
    t->d_incarnation = dmk_wire_get_u64(in);
    t->cookie = dmk_wire_get_id128(in);
    t->generation = dmk_wire_get_u64(in);
    t->expires_unix_ms = dmk_wire_get_u64(in);
    t->model_id = dmk_wire_get_id128(in);
    if (dmk_wire_get_blob(in, t->numerics, sizeof(t->numerics) - 1) != strlen(t->numerics)) {
        in->failed = true; /* a NUL inside */
        return;
    }
    t->n_full_layers = dmk_wire_get_u32(in);
    t->n_window_layers = dmk_wire_get_u32(in);
    t->n_kv_heads = dmk_wire_get_u32(in);
    t->page_tokens = dmk_wire_get_u32(in);
    t->page_bytes = dmk_wire_get_u32(in);
    t->address_len = dmk_wire_get_blob(in, t->address, sizeof(t->address));
    t->have = dmk_wire_get_u32(in);
    t->n_tokens = dmk_wire_get_u32(in);
    t->n_pages = dmk_wire_get_u32(in);
    if (t->n_pages > DMK_TICKET_MAX_PAGES) {
        in->failed = true;
        return;
    }
    for (uint32_t i = 0; i < t->n_pages; i++) {
        t->pages[i] = dmk_wire_get_u32(in);
    }
    t->n_ring = dmk_wire_get_u32(in);
    if (t->n_ring > DMK_WINDOW_RING_MAX) {
        in->failed = true;
        return;
    }
    for (uint32_t i = 0; i < t->n_ring; i++) {
        t->ring[i] = dmk_wire_get_u32(in);
    }
    t->bytes_expected = dmk_wire_get_u64(in);
    read_ranks(in, t);
}

/* Looks at what encloses the fields; on success *ret_in stands on the first field. */
static int open_envelope(struct dmk_bytes blob, struct dmk_wire_in *ret_in,
                         struct dmk_error *reterr)
{
    struct dmk_wire_in in = {.rest = blob}, tail;
    uint16_t version;

    if (blob.len < 14 || blob.len > DMK_TICKET_MAX_BYTES) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket of %zu bytes is no whole ticket",
                             blob.len);
    }
    if (dmk_wire_get_u32(&in) != MAGIC) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "bytes given as a ticket are none");
    }
    version = dmk_wire_get_u16(&in);
    if (version != VERSION) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "ticket has version %u, this worker reads version %d: run the same "
                             "release in both pools",
                             version, VERSION);
    }
    tail = (struct dmk_wire_in){.rest = {blob.data + blob.len - 8, 8}};
    if (dmk_wire_get_u64(&tail) != dmk_hash64(blob.data, blob.len - 8, CHECKSUM_SEED)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "ticket of %zu bytes is damaged (checksum)",
                             blob.len);
    }
    in.rest.len -= 8;
    *ret_in = in;
    return 0;
}

int dmk_ticket_decode(struct dmk_bytes blob, struct dmk_ticket *ret_ticket,
                      struct dmk_error *reterr)
{
    struct dmk_wire_in in = {0};
    struct dmk_ticket *t;
    int r = open_envelope(blob, &in, reterr);

    if (r < 0) {
        return r;
    }
    t = calloc(1, sizeof(*t)); /* some 20 kB: not for the stack */
    if (!t) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory while reading a ticket");
    }
    read_fields(&in, t);
    if (in.failed || in.rest.len != 0) {
        r = dmk_error_set(reterr, -DMK_EFORMAT, "ticket of %zu bytes does not hold its fields",
                          blob.len);
    } else {
        r = dmk_ticket_check(t, reterr);
    }
    if (r == 0) {
        *ret_ticket = *t;
    }
    free(t);
    return r;
}
