/* The plan against a naive one that copies page by page: same bytes moved, whatever the TP of the two sides,
 * the page ids and the bound of a put; and runs do merge. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "common/base/rng.h"
#include "common/xfer/plan.h"

enum { HEADS = 8, FULL = 3, WINDOW = 2, PAGES = 40, BLOCKS = 12, PAGE_BYTES = 64 };

static const uint64_t seed = 31;
static struct dmk_ticket ticket;

static uint32_t pick(uint64_t stream, uint64_t i, uint32_t n)
{
    return (uint32_t)(dmk_rng_u64(seed, stream, i) % n);
}

static struct dmk_kv_layout layout_of(uint32_t rank, uint32_t tp, uint32_t n_pages)
{
    return (struct dmk_kv_layout){.n_full_layers = FULL,
                                  .n_window_layers = WINDOW,
                                  .n_kv_heads = HEADS,
                                  .kv_head_first = rank * (HEADS / tp),
                                  .n_local_heads = HEADS / tp,
                                  .page_bytes = PAGE_BYTES,
                                  .n_full_pages = n_pages,
                                  .n_window_pages = n_pages + 3};
}

static void fill_ticket(uint32_t tp)
{
    memset(&ticket, 0, sizeof(ticket));
    ticket.n_full_layers = FULL;
    ticket.n_window_layers = WINDOW;
    ticket.n_kv_heads = HEADS;
    ticket.page_bytes = PAGE_BYTES;
    ticket.n_ranks = tp;
    for (uint32_t r = 0; r < tp; r++) {
        ticket.ranks[r] = (struct dmk_ticket_rank){.kv_head_first = r * (HEADS / tp),
                                                   .n_kv_heads = HEADS / tp,
                                                   .n_full_pages = PAGES,
                                                   .n_window_pages = PAGES + 3};
    }
}

/* Distinct ids in random runs. */
static void draw_ids(uint64_t i, uint32_t *ret_ids, uint32_t n, uint32_t n_pages)
{
    bool used[PAGES * 2] = {false};
    uint32_t id = pick(1, i, n_pages);

    for (uint32_t k = 0; k < n; k++) {
        if (k > 0 && pick(2, i * 64 + k, 3) > 0) {
            id = (id + 1) % n_pages;
        } else {
            id = pick(3, i * 64 + k, n_pages);
        }
        while (used[id]) {
            id = (id + 1) % n_pages;
        }
        used[id] = true;
        ret_ids[k] = id;
    }
}

static uint8_t *new_memory(uint32_t tp, uint32_t n_pages, bool window, bool random)
{
    const struct dmk_kv_layout l = layout_of(0, tp, n_pages);
    const size_t bytes = (size_t)(window ? dmk_kv_window_bytes(&l) : dmk_kv_full_bytes(&l)) * tp;
    uint8_t *m = calloc(1, bytes);

    assert_non_null(m);
    for (size_t i = 0; random && i < bytes; i++) {
        m[i] = (uint8_t)(dmk_rng_u64(seed, 9, i) | 1);
    }
    return m;
}

static size_t memory_bytes(uint32_t tp, uint32_t n_pages, bool window)
{
    const struct dmk_kv_layout l = layout_of(0, tp, n_pages);

    return (size_t)(window ? dmk_kv_window_bytes(&l) : dmk_kv_full_bytes(&l)) * tp;
}

static uint8_t *naive_page(uint8_t *memory, uint32_t tp, uint32_t n_pages, bool window,
                           uint32_t layer, uint32_t head, uint32_t page)
{
    const uint32_t rank = head / (HEADS / tp);
    const struct dmk_kv_layout l = layout_of(rank, tp, n_pages);
    const uint64_t size = window ? dmk_kv_window_bytes(&l) : dmk_kv_full_bytes(&l);

    return memory + rank * size +
           (window ? dmk_kv_window_offset(&l, layer, head - l.kv_head_first, page)
                   : dmk_kv_full_offset(&l, layer, head - l.kv_head_first, page));
}

static void run_case(uint64_t i)
{
    const uint32_t src_tp = 1u << pick(10, i, 4), dst_tp = 1u << pick(11, i, 4);
    const uint32_t src_pages = 20 + pick(12, i, 20);
    const bool window = pick(13, i, 2);
    const uint32_t layer = pick(14, i, window ? WINDOW : FULL);
    const uint32_t first = pick(15, i, BLOCKS), end = first + pick(16, i, BLOCKS - first + 1);
    const uint32_t max_run = 1 + pick(17, i, 6);
    uint32_t src_ids[BLOCKS], dst_ids[BLOCKS], n_puts = 0, n_pages = 0;
    struct dmk_kv_layout src_layouts[8];
    struct dmk_plan plan;
    struct dmk_error err;
    struct dmk_plan_put put;
    uint8_t *src, *got, *want;
    struct dmk_plan_piece piece = {window, layer, src_ids, dst_ids, first, end};
    struct dmk_plan_cursor cursor = {0, first};

    for (uint32_t r = 0; r < src_tp; r++) {
        src_layouts[r] = layout_of(r, src_tp, src_pages);
    }
    fill_ticket(dst_tp);
    draw_ids(2 * i, src_ids, BLOCKS, src_pages);
    draw_ids(2 * i + 1, dst_ids, BLOCKS, PAGES);
    src = new_memory(src_tp, src_pages, window, true);
    got = new_memory(dst_tp, PAGES, window, false);
    want = new_memory(dst_tp, PAGES, window, false);
    assert_int_equal(
        dmk_plan_init(&plan, src_layouts, src_tp, &ticket, (uint64_t)max_run * PAGE_BYTES, &err),
        0);
    while (dmk_plan_next(&plan, &piece, &cursor, &put)) {
        const uint64_t src_size = memory_bytes(src_tp, src_pages, window) / src_tp;
        const uint64_t dst_size = memory_bytes(dst_tp, PAGES, window) / dst_tp;

        assert_true(put.n_pages > 0 && put.n_pages <= max_run);
        assert_int_equal(put.bytes, put.n_pages * PAGE_BYTES);
        assert_true(put.src_offset + put.bytes <= src_size);
        assert_true(put.dst_offset + put.bytes <= dst_size);
        memcpy(got + put.dst_rank * dst_size + put.dst_offset,
               src + put.src_rank * src_size + put.src_offset, put.bytes);
        n_puts++;
        n_pages += put.n_pages;
    }
    for (uint32_t h = 0; h < HEADS; h++) {
        for (uint32_t k = first; k < end; k++) {
            memcpy(naive_page(want, dst_tp, PAGES, window, layer, h, dst_ids[k]),
                   naive_page(src, src_tp, src_pages, window, layer, h, src_ids[k]), PAGE_BYTES);
        }
    }
    assert_memory_equal(got, want, memory_bytes(dst_tp, PAGES, window));
    assert_int_equal(n_pages, HEADS * (end - first));
    /* As few puts as the runs allow. */
    for (uint32_t k = first, run = 0, runs = 0; k < end; k++) {
        run = k > first && run < max_run && src_ids[k] == src_ids[k - 1] + 1 &&
                      dst_ids[k] == dst_ids[k - 1] + 1
                  ? run + 1
                  : 1;
        runs += run == 1;
        if (k + 1 == end) {
            assert_int_equal(n_puts, runs * HEADS);
        }
    }
    free(src);
    free(got);
    free(want);
}

static void test_against_naive(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 1500; i++) {
        run_case(i);
    }
}

/* Blocks of a piece that lie in the staging memory are put from there, by its own strides. */
static void test_staged_pages(void **state)
{
    const struct dmk_kv_layout src = layout_of(0, 1, PAGES), staged = layout_of(0, 1, 17);
    const uint32_t src_ids[] = {5,
                                6,
                                7,
                                DMK_PLAN_STAGED | 2,
                                DMK_PLAN_STAGED | 3,
                                DMK_PLAN_STAGED | 4,
                                DMK_PLAN_STAGED | 5},
                   dst_ids[] = {20, 21, 22, 23, 24, 25, 26};
    struct dmk_plan plan;
    struct dmk_plan_put put;

    (void)state;
    fill_ticket(2);
    assert_int_equal(dmk_plan_init(&plan, &src, 1, &ticket, 0, NULL), 0);
    plan.staged[0] = staged;
    for (int window = 0; window < 2; window++) {
        const struct dmk_plan_piece piece = {window, 1, src_ids, dst_ids, 0, 7};
        struct dmk_plan_cursor cursor = {0, 0};

        for (uint32_t n = 0; n < 2 * HEADS; n++) {
            const bool second = n % 2;
            const struct dmk_kv_layout *from = second ? &staged : &src;
            const uint32_t page = second ? 2 : 5;

            assert_true(dmk_plan_next(&plan, &piece, &cursor, &put));
            assert_int_equal(put.staged, second);
            assert_int_equal(put.n_pages, second ? 4 : 3);
            assert_int_equal(put.src_offset, window ? dmk_kv_window_offset(from, 1, n / 2, page)
                                                    : dmk_kv_full_offset(from, 1, n / 2, page));
        }
        assert_false(dmk_plan_next(&plan, &piece, &cursor, &put));
    }
}

static void test_one_run_is_one_put(void **state)
{
    const struct dmk_kv_layout src = layout_of(0, 1, PAGES);
    uint32_t src_ids[BLOCKS], dst_ids[BLOCKS], n = 0;
    struct dmk_plan plan;
    struct dmk_plan_put put;
    const struct dmk_plan_piece piece = {false, 1, src_ids, dst_ids, 0, BLOCKS};
    struct dmk_plan_cursor cursor = {0, 0};

    (void)state;
    fill_ticket(2);
    for (uint32_t k = 0; k < BLOCKS; k++) {
        src_ids[k] = 5 + k;
        dst_ids[k] = 20 + k;
    }
    assert_int_equal(dmk_plan_init(&plan, &src, 1, &ticket, 0, NULL), 0);
    while (dmk_plan_next(&plan, &piece, &cursor, &put)) {
        assert_int_equal(put.n_pages, BLOCKS);
        assert_int_equal(put.dst_rank, n / 4);
        n++;
    }
    assert_int_equal(n, HEADS);
}

static void test_mismatch(void **state)
{
    struct dmk_kv_layout src = layout_of(0, 1, PAGES);
    struct dmk_plan plan;
    struct dmk_error err;

    (void)state;
    fill_ticket(1);
    src.n_full_layers++;
    assert_int_equal(dmk_plan_init(&plan, &src, 1, &ticket, 0, &err), -DMK_EMISMATCH);
    assert_non_null(strstr(err.text, "layers"));
    src = layout_of(0, 1, PAGES);
    src.n_window_layers++;
    assert_int_equal(dmk_plan_init(&plan, &src, 1, &ticket, 0, &err), -DMK_EMISMATCH);
    assert_non_null(strstr(err.text, "window layers"));
    src = layout_of(0, 1, PAGES);
    src.n_kv_heads = 4;
    assert_int_equal(dmk_plan_init(&plan, &src, 1, &ticket, 0, &err), -DMK_EMISMATCH);
    assert_non_null(strstr(err.text, "KV heads"));
    src = layout_of(0, 1, PAGES);
    src.page_bytes = 8192; /* another format of keys and values */
    assert_int_equal(dmk_plan_init(&plan, &src, 1, &ticket, 0, &err), -DMK_EMISMATCH);
    assert_non_null(strstr(err.text, "pages of"));
    assert_non_null(strstr(err.text, "8192"));
    src = layout_of(0, 2, PAGES); /* the second rank is missing */
    assert_int_equal(dmk_plan_init(&plan, &src, 1, &ticket, 0, &err), -DMK_EMISMATCH);
    assert_non_null(strstr(err.text, "no owner"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_naive),
        cmocka_unit_test(test_one_run_is_one_put),
        cmocka_unit_test(test_staged_pages),
        cmocka_unit_test(test_mismatch),
    };

    print_message("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
