/* Which tokens may come next; see walk.h.
 *
 * The tree of tokens is walked down with the ways that each byte leaves; where none is left its subtree is
 * skipped. For a wide state that is done once, as if nothing stood around its rule: tokens that stay in the
 * rule (and what it calls) are in the slot's mask, and for tokens that leave it the node behind the leaving
 * byte is noted. Each use then looks at these nodes with the caller at hand. */
#include "common/grammar/walk_impl.h"

#include <stdlib.h>
#include <string.h>

/* A node of the tree on the way down, with the ways that lead on from it. */
struct level {
    uint32_t end;   /* behind its subtree */
    uint32_t at, n; /* its ways */
    uint32_t n_frames, n_ways;
    bool text; /* the mask has all tokens that are text, and the way here is text */
};

static void set_subtree(const struct dmk_trie *t, uint32_t from, uint32_t end, uint64_t *mask)
{
    for (uint32_t i = from; i < end; i++) {
        const uint32_t id = dmk_node_token(&t->nodes[i]);

        if (id != DMK_NO_TOKEN_ID) {
            dmk_mask_set(mask, id);
        }
    }
}

static void note_exit(struct dmk_walker *w, uint32_t node, uint8_t byte)
{
    if (w->n_exits == MAX_EXITS) {
        w->overflow = true;
        return;
    }
    w->exit_bytes[w->n_exits] = byte;
    w->exits[w->n_exits++] = node;
}

/* A byte that text may hold. */
static bool is_text_byte(uint8_t byte)
{
    return byte >= 0x20 && byte != 0x7f && byte != '"' && byte != '\\';
}

/* A text state of a rule that counts characters: ASCII leads to a state that is marked so. */
static bool counts_chars(const struct dmk_automaton *a, uint32_t state)
{
    const uint32_t next = dmk_state_next(a, &a->states[state], ' ');

    return next != DMK_NO_STATE && a->states[next].flags & DMK_GRAMMAR_TICK;
}

/* One way, by a byte of its own state, where nothing counts: most steps are like this. Returns as
 * dmk_walk__step, or UINT32_MAX when it is not so simple. */
static inline uint32_t step_fast(struct dmk_walker *w, const struct way *from, uint8_t byte)
{
    const struct dmk_state *s = &w->a->states[from->state];
    const struct dmk_state *next;
    uint32_t to;

    if (s->n_calls > 0 || s->flags & DMK_GRAMMAR_ACCEPT || w->n_ways == N_WAYS) {
        return UINT32_MAX;
    }
    to = dmk_state_next(w->a, s, byte);
    if (to == DMK_NO_STATE) {
        return 0;
    }
    next = &w->a->states[to];
    if (next->flags & (DMK_GRAMMAR_TICK | DMK_GRAMMAR_GATE) || next->need != s->need) {
        return UINT32_MAX;
    }
    w->ways[w->n_ways] = *from;
    w->ways[w->n_ways++].state = to;
    return 1;
}

/* Goes down from a node whose byte led to n ways at `at`. text: see struct level. */
static void walk_down(struct dmk_walker *w, uint32_t node, uint32_t at, uint32_t n, bool text,
                      uint64_t *mask)
{
    const struct dmk_trie *t = w->trie;
    struct level levels[DMK_TRIE_MAX_TOKEN + 1];
    uint32_t depth = 0, i = node + 1;

    levels[0] = (struct level){dmk_node_end(&t->nodes[node]), at, n, w->n_frames, w->n_ways, text};
    for (;;) {
        const struct level *l = &levels[depth];
        const struct dmk_node *next = &t->nodes[i];
        uint32_t end, first, n_next;
        uint8_t byte, flags;

        if (i >= l->end) {
            if (depth == 0) {
                break;
            }
            depth--;
            continue;
        }
        w->n_frames = l->n_frames;
        w->n_ways = l->n_ways;
        end = dmk_node_end(next);
        flags = l->n == 1 ? w->a->states[w->ways[l->at].state].flags : 0;
        if (next->end & DMK_NODE_TEXT) {
            if (l->text && flags & (DMK_STATE_TEXT | DMK_STATE_TEXT_INNER)) {
                i = end;
                continue;
            }
            if (flags & DMK_STATE_TEXT && !(flags & DMK_GRAMMAR_TICK) &&
                !counts_chars(w->a, w->ways[l->at].state)) {
                set_subtree(t, i, end, mask);
                i = end;
                continue;
            }
        }
        byte = dmk_node_byte(next);
        first = w->n_ways;
        w->left = false;
        n_next = l->n == 1 ? step_fast(w, &w->ways[l->at], byte) : UINT32_MAX;
        if (n_next == UINT32_MAX) {
            n_next = dmk_walk__step(w, l->at, l->n, byte);
        }
        if (w->left) {
            note_exit(w, i, byte);
        }
        if (n_next == 0) {
            i = end;
            continue;
        }
        if (dmk_node_token(next) != DMK_NO_TOKEN_ID) {
            dmk_mask_set(mask, dmk_node_token(next));
        }
        if (end > i + 1) {
            levels[depth + 1] = (struct level){
                end, first, n_next, w->n_frames, w->n_ways, l->text && is_text_byte(byte)};
            depth++;
        }
        i++;
    }
    w->n_frames = levels[0].n_frames;
    w->n_ways = levels[0].n_ways;
}

/* All tokens that begin with an edge of the way's own state. text: the mask has those that are text. */
static void walk_state(struct dmk_walker *w, const struct way *from, bool text, uint64_t *mask)
{
    const struct dmk_trie *t = w->trie;
    const struct dmk_state *s = &w->a->states[from->state];
    const uint32_t n_frames = w->n_frames, n_ways = w->n_ways;

    for (uint32_t k = 0; k < s->n_edges; k++) {
        const struct dmk_edge *e = &w->a->edges[s->edges + k];

        for (unsigned b = e->first; b <= e->last; b++) {
            const uint32_t node = t->child[b];

            if (dmk_walk__step_edge(w, from, (uint8_t)b) > 0) {
                dmk_mask_set(mask, dmk_node_token(&t->nodes[node]));
                walk_down(w, node, n_ways, 1, text && is_text_byte((uint8_t)b), mask);
            }
            w->n_frames = n_frames;
            w->n_ways = n_ways;
        }
    }
}

/* ---------------------------------------------------------------- slots */

/* What is left to a bound, as far as a single token can use it up. */
static uint32_t clip(uint32_t left)
{
    return left < DMK_TRIE_MAX_TOKEN ? left : DMK_TRIE_MAX_TOKEN;
}

/* Sorts the exits by their byte. */
static void take_exits(struct dmk_walker *w, struct slot *slot)
{
    uint16_t at[257];

    memset(slot->exit_from, 0, sizeof(slot->exit_from));
    for (uint32_t i = 0; i < w->n_exits; i++) {
        slot->exit_from[w->exit_bytes[i] + 1]++;
    }
    for (unsigned b = 0; b < 256; b++) {
        slot->exit_from[b + 1] = (uint16_t)(slot->exit_from[b + 1] + slot->exit_from[b]);
    }
    memcpy(at, slot->exit_from, sizeof(at));
    for (uint32_t i = 0; i < w->n_exits; i++) {
        slot->exits[at[w->exit_bytes[i]]++] = w->exits[i];
    }
    slot->n_exits = w->n_exits;
}

/* Tokens that are text, as many characters as there is room for. */
static void put_text(const struct dmk_trie *t, uint32_t room, uint64_t *mask)
{
    if (room >= DMK_TRIE_MAX_TOKEN) {
        memcpy(mask, t->text, t->n_words * sizeof(*mask));
        return;
    }
    for (uint32_t id = 0; id < t->n_ids; id++) {
        if (t->chars[id] > 0 && t->chars[id] <= room) {
            dmk_mask_set(mask, id);
        }
    }
}

static void fill_slot(struct dmk_walker *w, struct slot *slot, const struct way *at)
{
    const struct way inner = {at->state, at->count, FRAME_OUTER, 0};
    const bool text = w->a->states[at->state].flags & DMK_STATE_TEXT;
    const bool overflow = w->overflow;

    w->n_exits = 0;
    w->max_reach = w->a->states[at->state].need;
    w->overflow = false;
    memset(slot->mask, 0, w->trie->n_words * sizeof(*slot->mask));
    if (text) {
        put_text(w->trie, counts_chars(w->a, at->state) ? slot->room : UINT32_MAX, slot->mask);
    }
    walk_state(w, &inner, text, slot->mask);
    take_exits(w, slot);
    slot->reach = w->overflow ? UINT32_MAX : w->max_reach;
    w->overflow = overflow;
    w->stats.n_computed++;
}

static struct slot *find_slot(struct dmk_walker *w, const struct way *at)
{
    const struct dmk_state *s = &w->a->states[at->state];
    const struct dmk_rule *rule = &w->a->rules[s->rule];
    const uint32_t room =
        rule->max == DMK_GRAMMAR_NO_MAX ? UINT32_MAX : clip(rule->max - at->count);
    const uint32_t lack = rule->min > at->count ? clip(rule->min - at->count) : 0;
    struct slot *oldest = &w->slots[0];

    for (uint32_t i = 0; i < w->n_slots; i++) {
        struct slot *slot = &w->slots[i];

        if (slot->used && slot->state == at->state - rule->start && slot->room == room &&
            slot->lack == lack && dmk_id128_equal(slot->key, rule->key)) {
            slot->stamp = ++w->stamp;
            return slot;
        }
        if (slot->stamp < oldest->stamp) {
            oldest = slot;
        }
    }
    oldest->used = true;
    oldest->key = rule->key;
    oldest->state = at->state - rule->start;
    oldest->room = room;
    oldest->lack = lack;
    oldest->stamp = ++w->stamp;
    fill_slot(w, oldest, at);
    return oldest;
}

/* Tokens that leave the rule of a kept mask, with the caller that it has here. */
static void add_exits(struct dmk_walker *w, const struct slot *slot, const struct way *at,
                      uint64_t *mask)
{
    const struct frame *f = &w->frames[at->frame];
    const uint32_t n_frames = w->n_frames, n_ways = w->n_ways;

    if (at->frame == FRAME_NONE || slot->n_exits == 0 || n_ways == N_WAYS) {
        return;
    }
    w->ways[w->n_ways++] = (struct way){f->state, f->count, f->parent, at->depth - 1};
    for (unsigned b = 0; b < 256; b++) {
        const uint32_t from = slot->exit_from[b], end = slot->exit_from[b + 1];
        uint32_t n;

        if (from == end) {
            continue;
        }
        w->n_frames = n_frames;
        w->n_ways = n_ways + 1;
        n = dmk_walk__step(w, n_ways, 1, (uint8_t)b);
        for (uint32_t i = from; i < end && n > 0; i++) {
            const uint32_t node = slot->exits[i];

            if (dmk_node_token(&w->trie->nodes[node]) != DMK_NO_TOKEN_ID) {
                dmk_mask_set(mask, dmk_node_token(&w->trie->nodes[node]));
            }
            walk_down(w, node, n_ways + 1, n, false, mask);
        }
    }
    w->n_frames = n_frames;
    w->n_ways = n_ways;
}

static void add_state(struct dmk_walker *w, const struct way *at, uint64_t *mask)
{
    const struct dmk_state *s = &w->a->states[at->state];
    const struct slot *slot;

    if (s->flags & DMK_STATE_ALL) {
        for (uint32_t i = 0; i < w->trie->n_words; i++) {
            mask[i] |= w->trie->all[i];
        }
        return;
    }
    if (!(s->flags & DMK_STATE_WIDE)) {
        walk_state(w, at, false, mask);
        return;
    }
    slot = find_slot(w, at);
    if (slot->reach > DMK_GRAMMAR_MAX_DEPTH - at->depth) {
        w->stats.n_uncached++;
        walk_state(w, at, false, mask);
        return;
    }
    for (uint32_t i = 0; i < w->trie->n_words; i++) {
        mask[i] |= slot->mask[i];
    }
    add_exits(w, slot, at, mask);
}

/* ---------------------------------------------------------------- the walker */

enum dmk_walk_end dmk_walk_mask(struct dmk_walker *w, const struct dmk_walk *walk, uint64_t *mask)
{
    const uint32_t n = dmk_walk__load(w, walk);
    uint32_t n_closed = 0;
    bool complete = false;

    w->stats.n_masks++;
    memset(mask, 0, w->trie->n_words * sizeof(*mask));
    for (uint32_t i = 0; i < n; i++) {
        n_closed += dmk_walk__close(w, w->ways[i]);
    }
    for (uint32_t i = n; i < n + n_closed; i++) {
        const struct way at = w->ways[i];
        const struct dmk_state *s = &w->a->states[at.state];
        struct way next;

        complete = complete || (s->flags & DMK_GRAMMAR_ACCEPT && at.frame == FRAME_NONE);
        for (uint32_t k = 0; k < s->n_ids; k++) {
            const struct dmk_id_edge *e = &w->a->ids[s->ids + k];

            if (e->id < w->trie->n_ids && dmk_trie_token(w->trie, e->id).len == 0 &&
                dmk_walk__enter(w, &at, e->target, &next)) {
                dmk_mask_set(mask, e->id);
            }
        }
        if (s->n_edges > 0) {
            add_state(w, &at, mask);
        }
    }
    if (!complete) {
        return DMK_WALK_OPEN;
    }
    for (uint32_t i = 0; i < w->trie->n_words; i++) {
        if (mask[i] != 0) {
            return DMK_WALK_MAY_END;
        }
    }
    return DMK_WALK_ENDED;
}

int dmk_walker_new(const struct dmk_trie *trie, uint32_t n_slots, struct dmk_walker **ret)
{
    struct dmk_walker *w = calloc(1, sizeof(*w));

    if (!w) {
        return -DMK_ENOMEM;
    }
    w->trie = trie;
    w->n_slots = n_slots > 0 ? n_slots : 1;
    w->slots = calloc(w->n_slots, sizeof(*w->slots));
    w->masks = calloc((size_t)w->n_slots * trie->n_words, sizeof(*w->masks));
    if (!w->slots || !w->masks) {
        dmk_walker_free(&w);
        return -DMK_ENOMEM;
    }
    for (uint32_t i = 0; i < w->n_slots; i++) {
        w->slots[i].mask = w->masks + (size_t)i * trie->n_words;
    }
    *ret = w;
    return 0;
}

void dmk_walker_free(struct dmk_walker **walker)
{
    struct dmk_walker *w = *walker;

    if (w) {
        free(w->slots);
        free(w->masks);
        free(w);
        *walker = NULL;
    }
}

struct dmk_walker_stats dmk_walker_stats(const struct dmk_walker *walker)
{
    return walker->stats;
}
