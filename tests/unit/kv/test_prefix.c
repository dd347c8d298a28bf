/* Tables and the prefix cache against a slow model: a shadow of page memory that says, for every
 * position of every page, which chain of tokens was written there. A sequence that would read
 * anything else than its own chain (a stale window, a page reused too early, a missing copy) is
 * caught. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/rng.h"
#include "common/base/status.h"
#include "common/kv/prefix.h"

enum {
    N_FULL = 160,
    N_WINDOW = 40,
    N_SEQS = 6,
    MAX_TOKENS = 1200,
    MAX_PAGES = 19,
    P = DMK_PAGE_TOKENS
};

struct seq {
    bool live;
    uint32_t ids[MAX_TOKENS];
    uint64_t chain[MAX_TOKENS]; /* what must stand at each position */
    uint32_t pos;
    uint32_t storage[MAX_PAGES];
    struct dmk_kv_table table;
};

struct world {
    struct dmk_kv_pools pools;
    struct dmk_kv_prefix *prefix;
    uint64_t full[N_FULL][P], window[N_WINDOW][P];
    struct seq seqs[N_SEQS];
    uint64_t seed, counter;
    uint64_t n_hits, n_copies, n_forks, n_evicts;
};

static uint32_t roll(struct world *w, uint32_t n)
{
    return (uint32_t)(dmk_rng_u64(w->seed, 1, w->counter++) % n);
}

static void build(struct world *w, uint64_t seed)
{
    memset(w, 0, sizeof(*w));
    w->seed = seed;
    assert_int_equal(dmk_kv_pool_new(N_FULL, &w->pools.full), 0);
    assert_int_equal(dmk_kv_pool_new(N_WINDOW, &w->pools.window), 0);
    assert_int_equal(dmk_kv_prefix_new(w->pools, 64, &w->prefix), 0);
    for (uint32_t i = 0; i < N_SEQS; i++) {
        dmk_kv_table_init(&w->seqs[i].table, w->seqs[i].storage, MAX_PAGES, DMK_WINDOW_RING);
    }
}

static void tear_down(struct world *w)
{
    for (uint32_t i = 0; i < N_SEQS; i++) {
        dmk_kv_table_release(&w->seqs[i].table, w->pools);
    }
    while (dmk_kv_prefix_evict(w->prefix)) {
    }
    assert_true(dmk_kv_prefix_check(w->prefix));
    assert_int_equal(dmk_kv_pool_counts(w->pools.full).free, N_FULL);
    assert_int_equal(dmk_kv_pool_counts(w->pools.window).free, N_WINDOW);
    dmk_kv_prefix_free(&w->prefix);
    dmk_kv_pool_free(&w->pools.full);
    dmk_kv_pool_free(&w->pools.window);
}

static struct dmk_id128 root_of(uint32_t salt)
{
    return dmk_block_root("n", (struct dmk_bytes){(const uint8_t *)&salt, sizeof(salt)});
}

static void set_ids(struct seq *s, uint32_t salt)
{
    uint64_t chain = salt;

    for (uint32_t i = 0; i < MAX_TOKENS; i++) {
        chain = dmk_rng_mix(chain ^ s->ids[i]);
        s->chain[i] = chain;
    }
}

static void copy_pages(struct world *w, const struct dmk_page_copy *copies, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (copies[i].window) {
            memcpy(w->window[copies[i].dst], w->window[copies[i].src], sizeof(w->window[0]));
        } else {
            memcpy(w->full[copies[i].dst], w->full[copies[i].src], sizeof(w->full[0]));
        }
    }
    w->n_copies += n;
}

/* What a step of n tokens reads, then what it writes. */
static void compute(struct world *w, struct seq *s, uint32_t n)
{
    const uint32_t low = s->pos > 127 ? s->pos - 127 : 0;

    for (uint32_t p = 0; p < s->pos; p++) {
        assert_true(w->full[s->table.full[p / P]][p % P] == s->chain[p]);
    }
    for (uint32_t p = low; p < s->pos; p++) {
        assert_true(w->window[s->table.ring[p / P % s->table.n_ring]][p % P] == s->chain[p]);
    }
    for (uint32_t p = s->pos; p < s->pos + n; p++) {
        w->full[s->table.full[p / P]][p % P] = s->chain[p];
        w->window[s->table.ring[p / P % s->table.n_ring]][p % P] = s->chain[p];
    }
    s->pos += n;
}

static void start(struct world *w, struct seq *s, uint32_t salt)
{
    uint32_t have, found;

    set_ids(s, salt);
    found = dmk_kv_prefix_find(w->prefix, root_of(salt), s->ids, MAX_TOKENS - 1);
    have = dmk_kv_prefix_take(w->prefix, root_of(salt), s->ids, MAX_TOKENS - 1, true, &s->table);
    assert_int_equal(found, have);
    assert_int_equal(have % P, 0);
    w->n_hits += have > 0;
    s->pos = have;
    s->live = true;
}

/* Prompts that share prefixes of random length with a few families. */
static void start_random(struct world *w, struct seq *s)
{
    const uint32_t family = roll(w, 3), cut = roll(w, MAX_TOKENS), own = roll(w, 4);

    for (uint32_t i = 0; i < MAX_TOKENS; i++) {
        s->ids[i] = i < cut ? family * 1000 + i % 7 : 50 + own;
    }
    start(w, s, roll(w, 8) == 0);
}

static void advance(struct world *w, struct seq *s, uint32_t n)
{
    struct dmk_page_copy copies[DMK_KV_ADVANCE_COPIES];
    uint32_t n_copies = 0;

    if (s->pos + n > MAX_TOKENS) {
        return;
    }
    /* Room changes what is needed: evicting may make a shared page the sequence's own. */
    if (!dmk_kv_prefix_make_room(w->prefix,
                                 dmk_kv_table_advance_need(&s->table, w->pools, s->pos, n))) {
        return;
    }
    assert_int_equal(dmk_kv_table_advance(&s->table, w->pools, s->pos, n, copies, &n_copies), 0);
    assert_true(n_copies <= DMK_KV_ADVANCE_COPIES);
    copy_pages(w, copies, n_copies);
    compute(w, s, n);
}

static void fork_one(struct world *w, struct seq *parent, struct seq *child)
{
    struct dmk_page_copy copies[DMK_KV_FORK_COPIES];
    uint32_t n_copies = 0;
    uint32_t max = parent->pos + roll(w, 100);

    max = max < MAX_TOKENS ? max : MAX_TOKENS;
    if (!dmk_kv_prefix_make_room(w->prefix,
                                 dmk_kv_table_fork_need(&parent->table, parent->pos, max))) {
        return;
    }
    assert_int_equal(dmk_kv_table_fork(&parent->table, &child->table, w->pools, parent->pos, max,
                                       copies, &n_copies),
                     0);
    copy_pages(w, copies, n_copies);
    memcpy(child->ids, parent->ids, sizeof(child->ids));
    child->pos = parent->pos;
    for (uint32_t i = child->pos; i < MAX_TOKENS; i++) {
        child->ids[i] = 90 + roll(w, 3);
    }
    set_ids(child, 0);
    child->live = true;
    w->n_forks++;
}

static void check(struct world *w)
{
    assert_true(dmk_kv_pool_check(w->pools.full));
    assert_true(dmk_kv_pool_check(w->pools.window));
    assert_true(dmk_kv_prefix_check(w->prefix));
}

static void random_against_shadow(void **state)
{
    struct world *w = malloc(sizeof(*w));

    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        print_message("seed %llu\n", (unsigned long long)seed);
        build(w, seed);
        for (int step = 0; step < 2500; step++) {
            struct seq *s = &w->seqs[roll(w, N_SEQS)], *other = &w->seqs[roll(w, N_SEQS)];
            const uint32_t what = roll(w, 16);

            if (!s->live) {
                if (what < 8) {
                    start_random(w, s);
                }
            } else if (what < 6) {
                advance(w, s, 1 + roll(w, 400));
            } else if (what < 10) {
                advance(w, s, 1);
            } else if (what < 13) {
                /* Only salt 0 forks, so that set_ids of the child stays simple. */
                dmk_kv_prefix_insert(w->prefix, root_of(s->chain[0] == dmk_rng_mix(1 ^ s->ids[0])),
                                     s->ids, s->pos, &s->table);
            } else if (what == 13) {
                dmk_kv_table_release(&s->table, w->pools);
                s->live = false;
            } else if (what == 14 && !other->live && s->pos > 0 &&
                       s->chain[0] == dmk_rng_mix(0 ^ s->ids[0])) {
                fork_one(w, s, other);
            } else if (roll(w, 4) == 0) {
                w->n_evicts += dmk_kv_prefix_evict(w->prefix);
            }
            check(w);
        }
        tear_down(w);
        print_message("hits %llu copies %llu forks %llu\n", (unsigned long long)w->n_hits,
                      (unsigned long long)w->n_copies, (unsigned long long)w->n_forks);
        assert_true(w->n_hits > 0 && w->n_copies > 0 && w->n_forks > 0 && w->n_evicts > 0);
    }
    free(w);
}

static void boundaries_and_salt(void **state)
{
    struct world *w = malloc(sizeof(*w));
    struct seq *a, *b;

    (void)state;
    build(w, 7);
    a = &w->seqs[0];
    b = &w->seqs[1];
    for (uint32_t i = 0; i < MAX_TOKENS; i++) {
        a->ids[i] = i;
    }
    start(w, a, 0);
    advance(w, a, 200);
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(0), a->ids, MAX_TOKENS), 0);
    dmk_kv_prefix_insert(w->prefix, root_of(0), a->ids, a->pos, &a->table);
    advance(w, a, 300);
    dmk_kv_prefix_insert(w->prefix, root_of(0), a->ids, a->pos, &a->table);
    /* 448 is the last full page of 500, 192 that of 200; pages between have no window. */
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(0), a->ids, MAX_TOKENS), 448);
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(0), a->ids, 448), 448);
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(0), a->ids, 447), 192);
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(0), a->ids, 191), 0);
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(1), a->ids, MAX_TOKENS), 0);
    memcpy(b->ids, a->ids, sizeof(b->ids));
    b->ids[300] = 9999;
    start(w, b, 0);
    assert_int_equal(b->pos, 192);
    advance(w, b, 600);
    /* The oldest boundary goes first, and it is the leaf. */
    assert_true(dmk_kv_prefix_evict(w->prefix));
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(0), a->ids, MAX_TOKENS), 192);
    check(w);
    tear_down(w);
    free(w);
}

/* Two texts whose second block is the same behind another first one. */
static void a_block_belongs_to_what_stands_before_it(void **state)
{
    struct world *w = malloc(sizeof(*w));

    (void)state;
    build(w, 9);
    for (uint32_t i = 0; i < 2; i++) {
        struct seq *s = &w->seqs[i];

        for (uint32_t k = 0; k < MAX_TOKENS; k++) {
            s->ids[k] = k < P && i == 1 ? 5000 + k : k;
        }
        start(w, s, 0);
        assert_int_equal(s->pos, 0);
        advance(w, s, i == 0 ? 130 : 70);
        dmk_kv_prefix_insert(w->prefix, root_of(0), s->ids, s->pos, &s->table);
    }
    assert_int_equal(dmk_kv_prefix_find(w->prefix, root_of(0), w->seqs[0].ids, MAX_TOKENS), 128);
    /* None where hashes collide: the second text is not kept then. */
    assert_in_range(dmk_kv_prefix_find(w->prefix, root_of(0), w->seqs[1].ids, MAX_TOKENS), 0, 64);
    check(w);
    tear_down(w);
    free(w);
}

static void events_and_listing(void **state)
{
    struct world *w = malloc(sizeof(*w));
    struct dmk_kv_prefix_event ev[64];
    struct dmk_id128 hash;
    uint32_t n, at = 0;
    bool lost;
    struct seq *a;

    (void)state;
    build(w, 8);
    a = &w->seqs[0];
    start(w, a, 0);
    advance(w, a, 130);
    dmk_kv_prefix_insert(w->prefix, root_of(0), a->ids, a->pos, &a->table);
    dmk_kv_prefix_insert(w->prefix, root_of(0), a->ids, a->pos, &a->table);
    n = dmk_kv_prefix_events(w->prefix, ev, 64, &lost);
    hash = dmk_block_next(dmk_block_next(root_of(0), a->ids), a->ids + 64);
    assert_int_equal(n, 1);
    assert_false(lost);
    assert_true(ev[0].added && ev[0].n_tokens == 128 && dmk_id128_equal(ev[0].hash, hash));
    assert_int_equal(dmk_kv_prefix_list(w->prefix, &at, ev, 64), 1);
    assert_int_equal(dmk_kv_prefix_list(w->prefix, &at, ev, 64), 0);
    assert_true(dmk_kv_prefix_evict(w->prefix));
    assert_int_equal(dmk_kv_prefix_events(w->prefix, ev, 64, &lost), 1);
    assert_false(ev[0].added);
    for (int i = 0; i < 65; i++) { /* more than the list holds */
        dmk_kv_prefix_insert(w->prefix, root_of(0), a->ids, a->pos, &a->table);
        dmk_kv_prefix_evict(w->prefix);
    }
    assert_int_equal(dmk_kv_prefix_events(w->prefix, ev, 64, &lost), 0);
    assert_true(lost);
    dmk_kv_prefix_insert(w->prefix, root_of(0), a->ids, a->pos, &a->table);
    assert_int_equal(dmk_kv_prefix_events(w->prefix, ev, 64, &lost), 1);
    assert_false(lost);
    tear_down(w);
    free(w);
}

static void drained_pages_come_back_at_release(void **state)
{
    struct world *w = malloc(sizeof(*w));
    struct dmk_kv_table *t;

    (void)state;
    build(w, 9);
    t = &w->seqs[0].table;
    assert_int_equal(dmk_kv_table_reserve(t, w->pools, 600), 0);
    dmk_kv_table_drain(t, w->pools, 2, 5);
    assert_int_equal(dmk_kv_pool_counts(w->pools.full).draining, 3);
    assert_int_equal(dmk_kv_pool_counts(w->pools.full).free, N_FULL - 3);
    assert_int_equal(dmk_kv_pool_counts(w->pools.window).draining, 3);
    check(w);
    dmk_kv_table_release(t, w->pools);
    assert_int_equal(dmk_kv_pool_counts(w->pools.full).free, N_FULL);
    tear_down(w);
    free(w);
}

static void nothing_is_evicted_in_vain(void **state)
{
    struct world *w = malloc(sizeof(*w));
    struct seq *a;

    (void)state;
    build(w, 10);
    a = &w->seqs[0];
    start(w, a, 0);
    advance(w, a, 640);
    dmk_kv_prefix_insert(w->prefix, root_of(0), a->ids, a->pos, &a->table);
    assert_false(dmk_kv_prefix_make_room(w->prefix, (struct dmk_kv_need){N_FULL, 0}));
    assert_int_equal(dmk_kv_prefix_stats(w->prefix).n_boundaries, 1);
    dmk_kv_table_release(&a->table, w->pools);
    assert_true(dmk_kv_prefix_make_room(w->prefix, (struct dmk_kv_need){N_FULL, 0}));
    assert_int_equal(dmk_kv_prefix_stats(w->prefix).n_nodes, 0);
    tear_down(w);
    free(w);
}

/* Prompts of a page to 128, answers that end somewhere in what was reserved for them, all of it cached: after a while
 * nothing is free but what is evicted. What a ticket then names must still lie in long runs. */
static void runs_stay_long(void **state)
{
    enum { PAGES = 4096, LIVE = 24, LONGEST = 144, ANSWER = 1024, REQUESTS = 6000 };
    static struct {
        bool live;
        uint32_t n, request, storage[LONGEST];
        struct dmk_kv_table table;
    } seqs[LIVE];
    static uint32_t ids[LONGEST * P];
    struct world w = {.seed = 11};
    uint64_t n_pages = 0, n_runs = 0;

    (void)state;
    assert_int_equal(dmk_kv_pool_new(PAGES, &w.pools.full), 0);
    assert_int_equal(dmk_kv_pool_new(PAGES, &w.pools.window), 0);
    assert_int_equal(dmk_kv_prefix_new(w.pools, 64, &w.prefix), 0);
    for (uint32_t i = 0; i < LIVE; i++) {
        dmk_kv_table_init(&seqs[i].table, seqs[i].storage, LONGEST, DMK_WINDOW_RING);
    }
    for (uint32_t r = 0; r < REQUESTS; r++) {
        const uint32_t i = roll(&w, LIVE), n_prompt = (1 + roll(&w, 1 << roll(&w, 8))) * P;

        if (seqs[i].live) {
            for (uint32_t t = 0; t < seqs[i].n; t++) {
                ids[t] = seqs[i].request + t;
            }
            dmk_kv_prefix_insert(w.prefix, root_of(seqs[i].request), ids, seqs[i].n,
                                 &seqs[i].table);
            dmk_kv_table_release(&seqs[i].table, w.pools);
        }
        seqs[i].live = true;
        seqs[i].request = r;
        seqs[i].n = n_prompt + roll(&w, ANSWER);
        assert_true(dmk_kv_prefix_make_room(
            w.prefix, dmk_kv_table_reserve_need(&seqs[i].table, n_prompt + ANSWER)));
        assert_int_equal(dmk_kv_table_reserve(&seqs[i].table, w.pools, n_prompt + ANSWER), 0);
        for (uint32_t p = 0; r > REQUESTS / 2 && p < n_prompt / P; p++) {
            n_runs += p == 0 || seqs[i].storage[p] != seqs[i].storage[p - 1] + 1;
            n_pages++;
        }
    }
    print_message("%.1f pages in %.1f runs\n", 2.0 * (double)n_pages / REQUESTS,
                  2.0 * (double)n_runs / REQUESTS);
    assert_true(n_runs <= 3 * (REQUESTS / 2)); /* seven for each without slack */
    for (uint32_t i = 0; i < LIVE; i++) {
        dmk_kv_table_release(&seqs[i].table, w.pools);
    }
    assert_true(dmk_kv_prefix_check(w.prefix));
    dmk_kv_prefix_free(&w.prefix);
    dmk_kv_pool_free(&w.pools.full);
    dmk_kv_pool_free(&w.pools.window);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_against_shadow),
        cmocka_unit_test(boundaries_and_salt),
        cmocka_unit_test(a_block_belongs_to_what_stands_before_it),
        cmocka_unit_test(events_and_listing),
        cmocka_unit_test(drained_pages_come_back_at_release),
        cmocka_unit_test(nothing_is_evicted_in_vain),
        cmocka_unit_test(runs_stay_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
