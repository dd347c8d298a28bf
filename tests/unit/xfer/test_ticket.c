/* Tickets and messages on the wire: round trips, and damage of every kind is refused without a crash. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "common/base/rng.h"
#include "common/xfer/message.h"
#include "common/xfer/ticket.h"

static const uint64_t seed = 20;

static uint32_t pick(uint64_t stream, uint64_t i, uint32_t n)
{
    return (uint32_t)(dmk_rng_u64(seed, stream, i) % n);
}

/* A ticket that is right, of random shape. */
static void make_ticket(struct dmk_ticket *t, uint64_t i)
{
    static const uint32_t ranks[] = {1, 2, 4, 8};
    uint32_t first;

    memset(t, 0, sizeof(*t));
    t->d_incarnation = dmk_rng_u64(seed, 1, i);
    t->cookie = (struct dmk_id128){dmk_rng_u64(seed, 2, i), dmk_rng_u64(seed, 3, i)};
    t->generation = i + 1;
    t->expires_unix_ms = 1234567890123;
    t->model_id = (struct dmk_id128){5, 6};
    (void)snprintf(t->numerics, sizeof(t->numerics), "mxfp4-bf16-k%u-cpu", pick(4, i, 9));
    t->n_full_layers = 1 + pick(5, i, 18);
    t->n_window_layers = pick(6, i, 19);
    t->n_kv_heads = 8;
    t->page_tokens = DMK_PAGE_TOKENS;
    t->page_bytes = 16384;
    t->address_len = 1 + pick(7, i, DMK_XFER_ADDRESS_MAX);
    memset(t->address, 0xab, t->address_len);
    t->n_tokens = 1 + pick(8, i, i % 7 == 0 ? 131072 : 9000);
    t->have = pick(9, i, (t->n_tokens - 1) / DMK_PAGE_TOKENS + 1) * DMK_PAGE_TOKENS;
    t->n_pages = dmk_kv_pages_for(t->n_tokens) - t->have / DMK_PAGE_TOKENS;
    for (uint32_t p = 0; p < t->n_pages; p++) {
        t->pages[p] = pick(10, i * 4096 + p, 5000);
    }
    t->n_ring = 3 + pick(11, i, 2);
    for (uint32_t r = 0; r < t->n_ring; r++) {
        t->ring[r] = DMK_PAGE_NONE;
    }
    for (uint32_t b = 0, n = dmk_kv_window_blocks(t->n_tokens, &first); b < n; b++) {
        t->ring[(first + b) % t->n_ring] = pick(12, i * 8 + b, 300);
    }
    t->n_ranks = ranks[pick(13, i, 4)];
    for (uint32_t r = 0; r < t->n_ranks; r++) {
        struct dmk_ticket_rank *k = &t->ranks[r];

        k->n_kv_heads = 8 / t->n_ranks;
        k->kv_head_first = r * k->n_kv_heads;
        k->n_full_pages = 5000;
        k->n_window_pages = 300;
        k->full_base = dmk_rng_u64(seed, 14, i + r);
        k->window_base = dmk_rng_u64(seed, 15, i + r);
        k->full_key_len = 1 + pick(16, i + r, DMK_XFER_KEY_MAX);
        k->window_key_len = 1 + pick(17, i + r, DMK_XFER_KEY_MAX);
        memset(k->full_key, (int)r + 1, k->full_key_len);
        memset(k->window_key, (int)r + 101, k->window_key_len);
    }
    t->bytes_expected = dmk_ticket_bytes(t);
}

static struct dmk_ticket a, b; /* too large for the stack */

static void test_round_trip(void **state)
{
    struct dmk_error err;

    (void)state;
    for (uint64_t i = 0; i < 300; i++) {
        struct dmk_buf blob;

        dmk_buf_init(&blob, DMK_TICKET_MAX_BYTES);
        make_ticket(&a, i);
        dmk_ticket_encode(&a, &blob);
        assert_false(blob.failed);
        assert_int_equal(dmk_ticket_decode(dmk_buf_bytes(&blob), &b, &err), 0);
        assert_memory_equal(&a, &b, sizeof(a));
        dmk_buf_fini(&blob);
    }
}

/* Bytes in a block of their own, so that a sanitizer sees a read past the end. */
static int decode_copy(const void *data, size_t len, struct dmk_error *err)
{
    uint8_t *copy = malloc(len ? len : 1);
    int r;

    assert_non_null(copy);
    if (len > 0) {
        memcpy(copy, data, len);
    }
    r = dmk_ticket_decode((struct dmk_bytes){copy, len}, &b, err);
    free(copy);
    return r;
}

static void test_damage(void **state)
{
    struct dmk_buf blob;
    struct dmk_error err;

    (void)state;
    dmk_buf_init(&blob, DMK_TICKET_MAX_BYTES);
    make_ticket(&a, 3);
    dmk_ticket_encode(&a, &blob);
    memset(&b, 0x77, sizeof(b));
    for (size_t n = 0; n < blob.len; n++) {
        assert_int_equal(decode_copy(blob.data, n, &err), -DMK_EFORMAT);
    }
    for (size_t bit = 0; bit < blob.len * 8; bit++) {
        blob.data[bit / 8] ^= (char)(1 << bit % 8);
        assert_int_equal(decode_copy(blob.data, blob.len, &err), -DMK_EFORMAT);
        assert_true(strlen(err.text) > 20);
        blob.data[bit / 8] ^= (char)(1 << bit % 8);
    }
    dmk_buf_putc(&blob, 0);
    assert_int_equal(decode_copy(blob.data, blob.len, &err), -DMK_EFORMAT);
    for (size_t i = 0; i < sizeof(b); i++) { /* outputs are untouched on failure */
        assert_int_equal(((const uint8_t *)&b)[i], 0x77);
    }
    dmk_buf_fini(&blob);
}

/* Damage behind a right checksum: what a foreign or malicious writer could send. */
static void test_damage_with_checksum(void **state)
{
    struct dmk_error err;

    (void)state;
    for (uint64_t i = 0; i < 20000; i++) {
        struct dmk_buf blob;
        uint64_t sum;
        size_t at;

        if (i % 2000 == 0) {
            make_ticket(&a, i);
        }
        dmk_buf_init(&blob, DMK_TICKET_MAX_BYTES);
        dmk_ticket_encode(&a, &blob);
        at = 6 + pick(20, i, i % 2 ? 400 : (uint32_t)blob.len - 14);
        at = at < blob.len - 8 ? at : 6;
        blob.data[at] = (char)dmk_rng_u64(seed, 21, i);
        blob.len -= i % 5 == 0 ? pick(22, i, 40) : 0;
        sum = dmk_hash64(blob.data, blob.len - 8, 0x7469636b6574ull);
        memcpy(blob.data + blob.len - 8, &sum, 8);
        if (decode_copy(blob.data, blob.len, &err) == 0) {
            assert_int_equal(dmk_ticket_check(&b, &err), 0);
        }
        dmk_buf_fini(&blob);
    }
}

static void test_bounds(void **state)
{
    struct dmk_error err;

    (void)state;
#define refuse(change)                                                                             \
    do {                                                                                           \
        make_ticket(&a, 8);                                                                        \
        assert_int_equal(dmk_ticket_check(&a, &err), 0);                                           \
        change;                                                                                    \
        assert_int_equal(dmk_ticket_check(&a, &err), -DMK_EFORMAT);                                \
        assert_true(strlen(err.text) > 20);                                                        \
    } while (0)
    refuse(a.n_full_layers = DMK_TICKET_MAX_LAYERS + 1);
    refuse(a.n_kv_heads = 0);
    refuse(a.n_kv_heads = 9);
    refuse(a.page_tokens = 32);
    refuse(a.page_bytes = 0);
    refuse(a.numerics[0] = 0);
    refuse(memset(a.numerics, 'x', sizeof(a.numerics)));
    refuse(a.address_len = 0);
    refuse(a.address_len = DMK_XFER_ADDRESS_MAX + 1);
    refuse(a.have += 1);
    refuse(a.have = a.n_tokens / 64 * 64 + 64);
    refuse(a.n_tokens = 0);
    refuse(a.n_pages += 1);
    refuse(a.pages[0] = 5000);
    refuse(a.ring[dmk_kv_pages_for(a.n_tokens) - 1 == 0
                      ? 0
                      : (dmk_kv_pages_for(a.n_tokens) - 1) % a.n_ring] = 300);
    refuse(a.n_ring = 2);
    refuse(a.n_ring = 5);
    refuse(a.bytes_expected -= 1);
    refuse(a.n_ranks = 0);
    refuse(a.n_ranks = 9);
    refuse(a.ranks[0].kv_head_first = 1);
    refuse(a.ranks[0].n_kv_heads += 1);
    refuse(a.ranks[a.n_ranks - 1].n_full_pages = 1u << 30);
    refuse(a.ranks[0].full_key_len = 0);
    refuse(a.ranks[0].full_key_len = DMK_XFER_KEY_MAX + 1);
#undef refuse
}

static struct dmk_message make_message(enum dmk_message_type type)
{
    struct dmk_message m = {.type = type,
                            .from_incarnation = 7,
                            .to_incarnation = 8,
                            .worker = 9,
                            .cookie = {10, 11},
                            .generation = 12};

    switch (type) {
    case DMK_MESSAGE_CLAIM:
        m.watch_len = 32;
        memset(m.watch, 3, 32);
        break;
    case DMK_MESSAGE_REPLY:
        m.reply = DMK_REPLY_WATCH;
        break;
    case DMK_MESSAGE_TERMINAL:
        m.ok = true;
        m.bytes = 1ull << 40;
        break;
    case DMK_MESSAGE_ANSWER:
        m.answer = DMK_ANSWER_STALE;
        break;
    }
    return m;
}

static void test_messages(void **state)
{
    (void)state;
    for (int type = DMK_MESSAGE_CLAIM; type <= DMK_MESSAGE_ANSWER; type++) {
        const struct dmk_message m = make_message((enum dmk_message_type)type);
        uint8_t raw[DMK_MESSAGE_MAX_BYTES];
        const size_t len = dmk_message_encode(&m, raw);
        struct dmk_message back;

        assert_true(len <= sizeof(raw));
        assert_int_equal(dmk_message_decode((struct dmk_bytes){raw, len}, &back), 0);
        assert_int_equal(back.type, m.type);
        assert_true(back.from_incarnation == 7 && back.to_incarnation == 8 && back.worker == 9);
        assert_true(back.cookie.lo == 10 && back.cookie.hi == 11 && back.generation == 12);
        assert_true(back.watch_len == m.watch_len && back.reply == m.reply && back.ok == m.ok &&
                    back.bytes == m.bytes && back.answer == m.answer);
        for (size_t n = 0; n < len; n++) {
            assert_int_equal(dmk_message_decode((struct dmk_bytes){raw, n}, &back), -DMK_EFORMAT);
        }
        for (size_t bit = 0; bit < len * 8; bit++) {
            raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
            assert_int_equal(dmk_message_decode((struct dmk_bytes){raw, len}, &back), -DMK_EFORMAT);
            raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
    }
    for (int reply = DMK_REPLY_YES; reply <= DMK_REPLY_DRAINING + 1; reply++) {
        assert_true(strlen(dmk_message_reply_text((enum dmk_message_reply)reply)) > 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_damage_with_checksum),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_messages),
    };

    print_message("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
