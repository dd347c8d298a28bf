/* Visits every state of the hand-over's small world, breadth first, and checks what explore.h promises.
 *
 *   explore [name=value ...]     lane=direct|emulated requests routers p d pages puts bound patient once
 *                                crash-p crash-d crash-router cut cut-stream leave hang-p hang-d partition
 *                                lose double (how often each fault may strike)
 *                                others=1 (one attempt beside any number of others, see explore_others.c)
 *                                cover=N (with others: then visits the world of N requests that is so described, and
 *                                checks that each of its states was met, one ticket at a time)
 *                                mutate=NAME (a table made wrong; the run must then find something)
 *                                gb=N (memory; default 4)
 *
 * Exit: 0 all visited and well, 1 a promise is broken (the story is printed), 2 wrong use, 3 out of memory.
 * With mutate it is 0 when the fault was found and 1 when not. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/status.h"
#include "tests/sim/explore_impl.h"

#define NO_STATE UINT32_MAX

struct space {
    struct ex_conf conf;
    struct ex_world world;
    size_t stride;
    uint8_t *states;   /* [cap][stride] */
    uint32_t *parents; /* [cap] */
    uint32_t *first;   /* [cap + 1] index of a state's first edge */
    uint8_t *marks;    /* [cap] 1: requests can end; 2: all can be quiet; 4: jobs can end */
    uint32_t *edges;   /* target << 1 | needs a hung worker; progress only */
    uint32_t *table;   /* [n_table] state + 1 */
    uint32_t n, cap, n_table, current;
    uint64_t n_edges, cap_edges, n_moves;
    bool full;
};

static void *take(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);

    dmk_assert(p != MAP_FAILED);
    return p;
}

static void open_space(struct space *sp, double gb)
{
    struct ex_state s;
    uint8_t bytes[EX_MAX_PACKED];
    double per;

    ex_init(&sp->conf, &s);
    sp->stride = ex_pack(&sp->conf, &s, bytes);
    per = (double)sp->stride + 4 + 4 + 1 + 8 * 4 + 2 * 4;
    sp->cap = (uint32_t)(gb * 1e9 / per < 1e9 ? gb * 1e9 / per : 1e9);
    sp->n_table = 1u << 10;
    while (sp->n_table < 1u << 31 && sp->n_table < sp->cap + sp->cap / 2) {
        sp->n_table *= 2;
    }
    sp->cap_edges = (uint64_t)sp->cap * 8;
    sp->states = take((size_t)sp->cap * sp->stride);
    sp->parents = take((size_t)sp->cap * sizeof(*sp->parents));
    sp->first = take(((size_t)sp->cap + 1) * sizeof(*sp->first));
    sp->marks = take(sp->cap);
    sp->edges = take(sp->cap_edges * sizeof(*sp->edges));
    sp->table = take((size_t)sp->n_table * sizeof(*sp->table));
}

static const uint8_t *bytes_of(const struct space *sp, uint32_t i)
{
    return sp->states + (size_t)i * sp->stride;
}

/* The state's number; a new one is added. NO_STATE when there is no room. */
static uint32_t number_of(struct space *sp, const struct ex_state *state)
{
    uint8_t bytes[EX_MAX_PACKED];
    struct ex_state canonical;
    uint32_t at;

    ex_canonical(&sp->conf, state, &canonical);
    (void)ex_pack(&sp->conf, &canonical, bytes);
    at = (uint32_t)dmk_hash64(bytes, sp->stride, 0) & (sp->n_table - 1);
    for (; sp->table[at]; at = (at + 1) & (sp->n_table - 1)) {
        if (memcmp(bytes_of(sp, sp->table[at] - 1), bytes, sp->stride) == 0) {
            return sp->table[at] - 1;
        }
    }
    if (sp->n == sp->cap) {
        return NO_STATE;
    }
    memcpy(sp->states + (size_t)sp->n * sp->stride, bytes, sp->stride);
    sp->parents[sp->n] = sp->current;
    sp->table[at] = ++sp->n;
    return sp->n - 1;
}

static void keep_next(void *ud, const struct ex_state *next, enum ex_edge edge, const char *text)
{
    struct space *sp = ud;
    uint32_t i;

    (void)text;
    if (sp->full || sp->world.violation) {
        return;
    }
    sp->n_moves++;
    i = number_of(sp, next);
    sp->full = i == NO_STATE || sp->n_edges == sp->cap_edges;
    if (!sp->full && edge != EX_MAYBE && i != sp->current) {
        sp->edges[sp->n_edges++] = i << 1 | (edge == EX_RESUME);
    }
}

/* ---- telling a story -------------------------------------------------------------------------- */

struct story {
    struct space *sp;
    uint32_t want; /* the state to go to; NO_STATE: what breaks the promise */
    bool found;
    struct ex_state state;
};

static void tell_next(void *ud, const struct ex_state *next, enum ex_edge edge, const char *text)
{
    struct story *story = ud;
    struct space *sp = story->sp;
    struct ex_state canonical;
    uint8_t bytes[EX_MAX_PACKED];

    (void)edge;
    if (story->found) {
        return;
    }
    if (story->want == NO_STATE) {
        story->found = sp->world.violation != NULL;
    } else {
        ex_canonical(&sp->conf, next, &canonical);
        (void)ex_pack(&sp->conf, &canonical, bytes);
        story->found = memcmp(bytes, bytes_of(sp, story->want), sp->stride) == 0;
    }
    if (story->found) {
        story->state = *next;
        printf("  %s\n", text);
    }
}

/* From the beginning to state i, then the move that breaks a promise if one does. Workers keep their
 * names through the story, although states are stored under the least renaming. */
static void tell(struct space *sp, uint32_t i, const char *broken)
{
    struct story story = {.sp = sp};
    uint32_t path[4096], n = 0;

    for (uint32_t at = i; at != 0; at = sp->parents[at]) {
        dmk_assert(n < sizeof(path) / sizeof(path[0]));
        path[n++] = at;
    }
    ex_init(&sp->conf, &story.state);
    sp->world.on_next = tell_next;
    sp->world.ud = &story;
    sp->world.telling = true;
    while (n > 0) {
        const struct ex_state from = story.state;

        story.want = path[--n];
        story.found = false;
        ex_successors(&sp->world, &from);
        dmk_assert(story.found);
    }
    if (broken) {
        const struct ex_state from = story.state;

        story.want = NO_STATE;
        story.found = false;
        sp->world.violation = NULL;
        ex_successors(&sp->world, &from);
    }
    ex_print(&sp->conf, &story.state);
}

/* ---- the search ------------------------------------------------------------------------------- */

/* The first state without the mark from which no progress leads on; else the first without it. */
static uint32_t find_stuck(const struct space *sp, uint8_t mark, bool with_resume)
{
    uint32_t first = NO_STATE;

    for (uint32_t i = 0; i < sp->n; i++) {
        bool leads_on = false;

        if (sp->marks[i] & mark) {
            continue;
        }
        first = first == NO_STATE ? i : first;
        for (uint32_t e = sp->first[i]; e < sp->first[i + 1]; e++) {
            leads_on |= with_resume || !(sp->edges[e] & 1);
        }
        if (!leads_on) {
            return i;
        }
    }
    return first;
}

/* Which states can reach their good end by progress alone, from the last to the first until no mark is
 * added: progress mostly leads to later states. */
static uint32_t mark_all(struct space *sp, uint8_t mark, bool with_resume,
                         bool (*is_good)(const struct ex_conf *, const struct ex_state *))
{
    bool changed = true;

    for (uint32_t i = 0; i < sp->n; i++) {
        struct ex_state s;

        ex_unpack(&sp->conf, bytes_of(sp, i), &s);
        sp->marks[i] |= is_good(&sp->conf, &s) ? mark : 0;
    }
    while (changed) {
        changed = false;
        for (uint32_t i = sp->n; i-- > 0;) {
            for (uint32_t e = sp->first[i]; !(sp->marks[i] & mark) && e < sp->first[i + 1]; e++) {
                if ((with_resume || !(sp->edges[e] & 1)) && sp->marks[sp->edges[e] >> 1] & mark) {
                    sp->marks[i] |= mark;
                    changed = true;
                }
            }
        }
    }
    return find_stuck(sp, mark, with_resume);
}

static bool is_well(struct space *sp)
{
    uint32_t i = mark_all(sp, 1, false, ex_requests_ended);

    if (i != NO_STATE) {
        printf("L1: from here a request can not end without help:\n");
        tell(sp, i, NULL);
        return false;
    }
    i = mark_all(sp, 2, true, ex_all_quiet);
    if (i != NO_STATE) {
        printf("L2, L3: from here a page, a ticket or a job stays for good:\n");
        tell(sp, i, NULL);
        return false;
    }
    i = mark_all(sp, 4, false, ex_jobs_ended);
    if (i != NO_STATE) {
        printf("L4: from here a job of a P that runs can not end without D's help:\n");
        tell(sp, i, NULL);
        return false;
    }
    return true;
}

/* The number of a state that is there; NO_STATE: it is not. */
static uint32_t look_up(const struct space *sp, const struct ex_state *state)
{
    uint8_t bytes[EX_MAX_PACKED];
    struct ex_state canonical;
    uint32_t at;

    ex_canonical(&sp->conf, state, &canonical);
    (void)ex_pack(&sp->conf, &canonical, bytes);
    at = (uint32_t)dmk_hash64(bytes, sp->stride, 0) & (sp->n_table - 1);
    for (; sp->table[at]; at = (at + 1) & (sp->n_table - 1)) {
        if (memcmp(bytes_of(sp, sp->table[at] - 1), bytes, sp->stride) == 0) {
            return sp->table[at] - 1;
        }
    }
    return NO_STATE;
}

/* 0 well, 1 broken, 3 no room. */
static int search(struct space *sp)
{
    const uint64_t begun_ns = dmk_clock_ns();
    struct ex_state s;
    uint32_t depth = 0, level_end = 1;
    int rc = 0;

    ex_init(&sp->conf, &s);
    (void)number_of(sp, &s);
    sp->world = (struct ex_world){.conf = &sp->conf, .on_next = keep_next, .ud = sp};
    for (; sp->current < sp->n && rc == 0; sp->current++) {
        if (sp->current == level_end) {
            depth++;
            level_end = sp->n;
        }
        sp->first[sp->current] = (uint32_t)sp->n_edges;
        ex_unpack(&sp->conf, bytes_of(sp, sp->current), &s);
        ex_successors(&sp->world, &s);
        if (sp->world.violation) {
            printf("%s:\n", sp->world.violation);
            rc = 1;
            tell(sp, sp->current, sp->world.violation);
        } else if (sp->full) {
            rc = 3;
        }
    }
    sp->first[sp->n] = (uint32_t)sp->n_edges;
    if (rc == 0 && !is_well(sp)) {
        rc = 1;
    }
    printf("%s: %u states of %zu bytes, %llu moves, depth %u, %.1f s\n",
           rc == 0   ? "all visited, nothing wrong"
           : rc == 1 ? "a promise is broken"
                     : "out of memory, not all visited",
           sp->n, sp->stride, (unsigned long long)sp->n_moves, depth,
           (double)(dmk_clock_ns() - begun_ns) / 1e9);
    return rc;
}

/* A ticket that may be followed: it is not blank, or its attempt goes on. */
static bool is_followed(const struct ex_state *s, int t)
{
    static const struct ex_ticket blank;
    const struct ex_request *q = &s->requests[t / EX_ATTEMPTS];

    return memcmp(&s->tickets[t], &blank, sizeof(blank)) != 0 ||
           (q->attempt == t % EX_ATTEMPTS && (t % EX_ATTEMPTS == 0 || ex_is_active(q)));
}

/* Visits n requests in full, and looks each state up, one ticket at a time, among those beside others. */
static int cover(const struct space *sp, double gb, uint8_t n)
{
    struct space all = {.conf = sp->conf};
    struct ex_state s, one;
    int rc;

    all.conf.others = false;
    all.conf.n_requests = n;
    open_space(&all, gb);
    rc = search(&all);
    for (uint32_t i = 0; rc != 1 && i < all.n; i++) {
        ex_unpack(&all.conf, bytes_of(&all, i), &s);
        for (int t = 0; t < ex_n_tickets(&all.conf) && rc != 1; t++) {
            if (!is_followed(&s, t)) {
                continue;
            }
            ex_project(&sp->conf, &s, t, &one);
            if (look_up(sp, &one) == NO_STATE) {
                printf("a state whose t%d alone was not met:\n", t);
                tell(&all, i, NULL);
                ex_print(&sp->conf, &one);
                rc = 1;
            }
        }
    }
    printf("%s\n", rc == 0   ? "each state was met, one ticket at a time"
                   : rc == 3 ? "each state that was visited was met, one ticket at a time"
                             : "not covered");
    return rc;
}

/* ---- what to visit ---------------------------------------------------------------------------- */

static const char *const fault_names[EX_N_FAULTS] = {
    "crash-p", "crash-d", "crash-router", "cut",  "cut-stream", "leave",
    "hang-p",  "hang-d",  "partition",    "lose", "double"};

static const char *const mutation_names[EX_N_MUTATIONS] = {
    "nothing",       "deadline-frees", "break-frees",    "word-frees", "no-expiry",
    "deaf-to-quiet", "any-endpoint",   "deadline-ready", "needs-break"};

static bool set_number(struct ex_conf *conf, const char *name, unsigned value)
{
    const struct {
        const char *name;
        uint8_t *field;
        unsigned min, max;
    } fields[] = {
        {"requests", &conf->n_requests, 1, EX_MAX_REQUESTS},
        {"routers", &conf->n_routers, 1, EX_MAX_ROUTERS},
        {"p", &conf->n_p, 1, EX_MAX_WORKERS},
        {"d", &conf->n_d, 1, EX_MAX_WORKERS},
        {"pages", &conf->n_pages, 1, EX_MAX_PAGES},
        {"puts", &conf->n_puts, 1, 3},
    };
    const struct {
        const char *name;
        bool *field;
    } switches[] = {{"bound", &conf->bound},
                    {"patient", &conf->patient},
                    {"once", &conf->once},
                    {"others", &conf->others}};

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (strcmp(name, fields[i].name) == 0) {
            *fields[i].field = (uint8_t)value;
            return value >= fields[i].min && value <= fields[i].max;
        }
    }
    for (int i = 0; i < EX_N_FAULTS; i++) {
        if (strcmp(name, fault_names[i]) == 0) {
            conf->budget[i] = (uint8_t)value;
            return value <= 3;
        }
    }
    for (size_t i = 0; i < sizeof(switches) / sizeof(switches[0]); i++) {
        if (strcmp(name, switches[i].name) == 0) {
            *switches[i].field = value != 0;
            return value <= 1;
        }
    }
    return false;
}

static bool set(struct ex_conf *conf, double *gb, uint8_t *covers, const char *arg)
{
    const char *value = strchr(arg, '=');
    char name[32];

    if (!value || value - arg >= (ptrdiff_t)sizeof(name)) {
        return false;
    }
    memcpy(name, arg, (size_t)(value - arg));
    name[value++ - arg] = '\0';
    if (strcmp(name, "lane") == 0) {
        conf->direct = strcmp(value, "direct") == 0;
        return conf->direct || strcmp(value, "emulated") == 0;
    }
    if (strcmp(name, "gb") == 0) {
        *gb = strtod(value, NULL);
        return *gb > 0;
    }
    if (strcmp(name, "cover") == 0) {
        *covers = (uint8_t)strtoul(value, NULL, 10);
        return *covers >= 1 && *covers <= EX_MAX_REQUESTS;
    }
    if (strcmp(name, "mutate") == 0) {
        for (int i = 0; i < EX_N_MUTATIONS; i++) {
            if (strcmp(value, mutation_names[i]) == 0) {
                conf->mutation = (enum ex_mutation)i;
                return true;
            }
        }
        return false;
    }
    return set_number(conf, name, (unsigned)strtoul(value, NULL, 10));
}

int main(int argc, char **argv)
{
    struct space sp = {
        .conf = {.n_requests = 1, .n_routers = 1, .n_p = 1, .n_d = 1, .n_pages = 1, .n_puts = 1}};
    double gb = 4;
    uint8_t covers = 0;
    int rc;

    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc; i++) {
        if (!set(&sp.conf, &gb, &covers, argv[i])) {
            fprintf(stderr, "explore: what is \"%s\"? See the head of explore.c.\n", argv[i]);
            return 2;
        }
        printf("%s%s", argv[i], i + 1 < argc ? " " : "\n");
    }
    if (sp.conf.others && sp.conf.n_requests > 1) {
        fprintf(stderr, "explore: with others one request is followed\n");
        return 2;
    }
    open_space(&sp, gb);
    rc = search(&sp);
    if (rc == 0 && covers > 0) {
        rc = cover(&sp, gb, covers);
    }
    return sp.conf.mutation ? rc != 1 : rc;
}
