/* Ways and steps; see walk_impl.h. */
#include "common/grammar/walk_impl.h"

#include "common/base/assert.h"

#define WAY_WORDS 3u /* state, count, depth; then state and count of each open call */

/* Room for one more way; NULL and overflow when there is none. */
static struct way *add_way(struct dmk_walker *w)
{
    if (w->n_ways == N_WAYS) {
        w->overflow = true;
        return NULL;
    }
    return &w->ways[w->n_ways++];
}

static bool equal_ways(const struct way *x, const struct way *y)
{
    return x->state == y->state && x->count == y->count && x->frame == y->frame &&
           x->depth == y->depth;
}

/* Adds a way to the list that begins at `from` unless it is there, or the list is full. */
static bool add_new_way(struct dmk_walker *w, uint32_t from, uint32_t max, const struct way *way)
{
    struct way *to;

    for (uint32_t i = from; i < w->n_ways; i++) {
        if (equal_ways(&w->ways[i], way)) {
            return false;
        }
    }
    if (w->n_ways - from >= max) {
        w->overflow = true;
        return false;
    }
    to = add_way(w);
    if (to) {
        *to = *way;
    }
    return to != NULL;
}

/* A frame with this content; the youngest ones are looked through so that equal ways stay equal. */
static uint32_t make_frame(struct dmk_walker *w, uint32_t state, uint32_t count, uint32_t parent)
{
    const uint32_t oldest = w->n_frames > 18 ? w->n_frames - 16 : 2;

    for (uint32_t i = w->n_frames; i-- > oldest;) {
        const struct frame *f = &w->frames[i];

        if (f->state == state && f->count == count && f->parent == parent) {
            return i;
        }
    }
    if (w->n_frames == N_FRAMES) {
        w->overflow = true;
        return FRAME_NONE;
    }
    w->frames[w->n_frames] = (struct frame){state, count, parent};
    return w->n_frames++;
}

static bool fits(struct dmk_walker *w, uint32_t state, uint32_t depth)
{
    const uint32_t reach = depth + w->a->states[state].need;

    if (reach > DMK_GRAMMAR_MAX_DEPTH) {
        return false;
    }
    if (reach > w->max_reach) {
        w->max_reach = reach;
    }
    return true;
}

bool dmk_walk__enter(struct dmk_walker *w, const struct way *from, uint32_t to, struct way *ret)
{
    const struct dmk_state *s = &w->a->states[to];
    const struct dmk_rule *rule = &w->a->rules[s->rule];
    uint32_t count = from->count;

    if (s->flags & DMK_GRAMMAR_TICK) {
        if (count >= rule->max) {
            return false;
        }
        /* Beyond the bounds numbers mean the same: ways stay few. */
        count += rule->max != DMK_GRAMMAR_NO_MAX || count < rule->min;
    }
    if (s->flags & DMK_GRAMMAR_GATE && count < rule->min) {
        return false;
    }
    if (!fits(w, to, from->depth)) {
        return false;
    }
    *ret = (struct way){to, count, from->frame, from->depth};
    return true;
}

/* The way into a called rule. */
static bool call(struct dmk_walker *w, const struct way *from, const struct dmk_call *c,
                 struct way *ret)
{
    const uint32_t start = w->a->rules[c->rule].start;

    if (w->a->states[c->ret].flags & DMK_STATE_TAIL) {
        *ret = (struct way){start, 0, from->frame, from->depth};
        return fits(w, start, from->depth);
    }
    if (!fits(w, start, from->depth + 1) || !fits(w, c->ret, from->depth)) {
        return false;
    }
    ret->frame = make_frame(w, c->ret, from->count, from->frame);
    ret->state = start;
    ret->count = 0;
    ret->depth = from->depth + 1;
    return ret->frame != FRAME_NONE;
}

/* The way back to the caller; false when there is none to go back to. */
static bool leave(struct dmk_walker *w, const struct way *from, struct way *ret)
{
    const struct frame *f = &w->frames[from->frame];

    if (from->frame == FRAME_OUTER) {
        w->left = true;
        return false;
    }
    if (from->frame == FRAME_NONE) {
        return false;
    }
    *ret = (struct way){f->state, f->count, f->parent, from->depth - 1};
    return true;
}

uint32_t dmk_walk__close(struct dmk_walker *w, struct way from)
{
    const uint32_t first = w->n_ways;

    if (!add_new_way(w, first, MAX_CLOSED, &from)) {
        return 0;
    }
    for (uint32_t i = first; i < w->n_ways; i++) {
        const struct way at = w->ways[i];
        const struct dmk_state *s = &w->a->states[at.state];
        struct way next;

        for (uint32_t k = 0; k < s->n_calls; k++) {
            if (call(w, &at, &w->a->calls[s->calls + k], &next)) {
                (void)add_new_way(w, first, MAX_CLOSED, &next);
            }
        }
        if (s->flags & DMK_GRAMMAR_ACCEPT && leave(w, &at, &next)) {
            (void)add_new_way(w, first, MAX_CLOSED, &next);
        }
    }
    return w->n_ways - first;
}

uint32_t dmk_walk__step_edge(struct dmk_walker *w, const struct way *from, uint8_t byte)
{
    const uint32_t to = dmk_state_next(w->a, &w->a->states[from->state], byte);
    struct way way;
    struct way *at;

    if (to == DMK_NO_STATE || !dmk_walk__enter(w, from, to, &way)) {
        return 0;
    }
    at = add_way(w);
    if (!at) {
        return 0;
    }
    *at = way;
    return 1;
}

/* One way that may call and return: those that wait are a list on the stack. */
static void step_way(struct dmk_walker *w, const struct way *from, uint8_t byte, uint32_t first)
{
    struct way list[MAX_WAYS];
    uint32_t n = 1;

    list[0] = *from;
    while (n > 0) {
        const struct way at = list[--n];
        const struct dmk_state *s = &w->a->states[at.state];
        const uint32_t to = dmk_state_next(w->a, s, byte);
        struct way next;

        if (to != DMK_NO_STATE && dmk_walk__enter(w, &at, to, &next)) {
            (void)add_new_way(w, first, MAX_WAYS, &next);
        }
        for (uint32_t k = 0; k < s->n_calls; k++) {
            const struct dmk_call *c = &w->a->calls[s->calls + k];

            if (!(w->a->rules[c->rule].first[byte / 64] >> (byte % 64) & 1) ||
                !call(w, &at, c, &next)) {
                continue;
            }
            if (n == MAX_WAYS) {
                w->overflow = true;
                break;
            }
            list[n++] = next;
        }
        if (s->flags & DMK_GRAMMAR_ACCEPT && leave(w, &at, &next)) {
            if (n == MAX_WAYS) {
                w->overflow = true;
            } else {
                list[n++] = next;
            }
        }
    }
}

uint32_t dmk_walk__step(struct dmk_walker *w, uint32_t at, uint32_t n, uint8_t byte)
{
    const uint32_t first = w->n_ways;

    for (uint32_t i = 0; i < n; i++) {
        const struct way from = w->ways[at + i];
        const struct dmk_state *s = &w->a->states[from.state];

        if (n == 1 && s->n_calls == 0 && !(s->flags & DMK_GRAMMAR_ACCEPT)) {
            return dmk_walk__step_edge(w, &from, byte);
        }
        step_way(w, &from, byte, first);
    }
    return w->n_ways - first;
}

/* ---------------------------------------------------------------- walks */

void dmk_walk_begin(struct dmk_walk *walk, const struct dmk_automaton *automaton)
{
    walk->automaton = automaton;
    walk->n = 1;
    walk->n_words = WAY_WORDS;
    walk->words[0] = walk->words[1] = walk->words[2] = 0;
}

uint32_t dmk_walk__load(struct dmk_walker *w, const struct dmk_walk *walk)
{
    uint32_t at = 0;

    w->a = walk->automaton;
    w->n_frames = 2;
    w->n_ways = 0;
    w->overflow = w->left = false;
    for (uint32_t i = 0; i < walk->n; i++) {
        struct way *way = add_way(w);
        const uint32_t depth = walk->words[at + 2];

        *way = (struct way){walk->words[at], walk->words[at + 1], FRAME_NONE, depth};
        at += WAY_WORDS;
        for (uint32_t d = 0; d < depth; d++, at += 2) {
            way->frame = make_frame(w, walk->words[at], walk->words[at + 1], way->frame);
        }
    }
    return walk->n;
}

/* Writes the ways at `at`, outermost call first, as many as there is room for. */
static void store(const struct dmk_walker *w, uint32_t at, uint32_t n, struct dmk_walk *walk)
{
    walk->n = 0;
    walk->n_words = 0;
    for (uint32_t i = 0; i < n && i < MAX_WAYS; i++) {
        const struct way *way = &w->ways[at + i];
        uint32_t end = walk->n_words + WAY_WORDS + 2 * way->depth;

        if (end > DMK_WALK_WORDS) {
            continue;
        }
        walk->words[walk->n_words] = way->state;
        walk->words[walk->n_words + 1] = way->count;
        walk->words[walk->n_words + 2] = way->depth;
        walk->n_words = end;
        for (uint32_t f = way->frame; f != FRAME_NONE; f = w->frames[f].parent) {
            end -= 2;
            walk->words[end] = w->frames[f].state;
            walk->words[end + 1] = w->frames[f].count;
        }
        walk->n++;
    }
}

/* Where the bytes of a token lead one way whose calls and returns are made: the list is appended at the end of
 * ways, without what led to it. Each way is stepped for itself, as for masks, so that a bound that is met
 * drops the same. */
static void take_bytes(struct dmk_walker *w, const struct way *from, struct dmk_bytes bytes)
{
    const uint32_t mark = w->n_ways;
    uint32_t at = mark, n = dmk_walk__step_edge(w, from, bytes.data[0]);

    for (size_t i = 1; i < bytes.len && n > 0; i++) {
        const uint32_t next = w->n_ways;

        n = dmk_walk__step(w, at, n, bytes.data[i]);
        at = next;
    }
    memmove(&w->ways[mark], &w->ways[at], n * sizeof(w->ways[0]));
    w->n_ways = mark + n;
}

static void take_id(struct dmk_walker *w, const struct way *from, uint32_t id)
{
    const struct dmk_state *s = &w->a->states[from->state];

    for (uint32_t k = 0; k < s->n_ids; k++) {
        const struct dmk_id_edge *e = &w->a->ids[s->ids + k];
        struct way next;
        struct way *to;

        if (e->id == id && dmk_walk__enter(w, from, e->target, &next) && (to = add_way(w))) {
            *to = next;
        }
    }
}

int dmk_walk_advance(struct dmk_walker *w, struct dmk_walk *walk, uint32_t id)
{
    const struct dmk_bytes bytes = dmk_trie_token(w->trie, id);
    const uint32_t n = dmk_walk__load(w, walk);
    uint32_t n_closed = 0, first, kept;

    for (uint32_t i = 0; i < n; i++) {
        n_closed += dmk_walk__close(w, w->ways[i]);
    }
    first = kept = w->n_ways;
    for (uint32_t i = n; i < n + n_closed; i++) {
        const struct way from = w->ways[i];

        if (bytes.len > 0) {
            take_bytes(w, &from, bytes);
        } else {
            take_id(w, &from, id);
        }
        /* What is new moves down to what was kept. */
        for (uint32_t k = kept; k < w->n_ways; k++) {
            bool is_new = true;

            for (uint32_t j = first; j < kept && is_new; j++) {
                is_new = !equal_ways(&w->ways[j], &w->ways[k]);
            }
            if (is_new) {
                w->ways[kept++] = w->ways[k];
            }
        }
        w->n_ways = kept;
    }
    if (kept == first) {
        return -DMK_EINVAL;
    }
    store(w, first, kept - first, walk);
    return walk->n > 0 ? 0 : -DMK_EINVAL;
}
