/* The team: one epoch number that the leader raises, one count of members still at work.
 *
 * A member waits for the epoch to change, first spinning and then in a futex; the leader makes the
 * wake-up call only when a member has said that it sleeps. Both waits re-check after announcing, so a
 * wake-up can not be lost. Items of a job are taken from one counter; a job ends when every member has
 * left it, so none can take an item of the next one. */
#include "common/backend/team.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "common/base/assert.h"

#define LINE       64
#define SPINS      2000 /* some 40 us of pauses */
#define SPINS_DONE 20000

struct member {
    struct dmk_team *team;
    pthread_t id;
    void *scratch;
    uint32_t thread;
    bool started;
};

struct dmk_team {
    struct dmk_stream stream; /* first: the stream is the team */
    bool spin;
    char name[12];
    struct member *members; /* [n_threads], 0 is the leader */
    void (*fn)(void *ud, uint32_t thread);
    void *ud;
    bool stop;
    dmk_task_fn *task;
    const void *task_args;
    uint32_t n_items;
    _Alignas(LINE) _Atomic uint32_t epoch;
    _Alignas(LINE) _Atomic uint32_t n_sleeping;
    _Alignas(LINE) _Atomic uint32_t n_working;
    _Alignas(LINE) _Atomic uint32_t leader_sleeps;
    _Alignas(LINE) _Atomic uint32_t next_item;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void wait_for_job(struct dmk_team *team, uint32_t seen)
{
    for (int i = 0; i < (team->spin ? SPINS : 0); i++) {
        if (atomic_load_explicit(&team->epoch, memory_order_acquire) != seen) {
            return;
        }
        relax();
    }
    atomic_fetch_add(&team->n_sleeping, 1);
    while (atomic_load(&team->epoch) == seen) {
        futex_wait(&team->epoch, seen);
    }
    atomic_fetch_sub(&team->n_sleeping, 1);
}

static void *run_member(void *arg)
{
    struct member *member = arg;
    struct dmk_team *team = member->team;
    uint32_t seen = 0;
    for (;;) {
        wait_for_job(team, seen);
        seen++;
        if (team->stop) {
            return NULL;
        }
        team->fn(team->ud, member->thread);
        if (atomic_fetch_sub(&team->n_working, 1) == 1 && atomic_load(&team->leader_sleeps)) {
            futex_wake(&team->n_working);
        }
    }
}

static void wait_for_members(struct dmk_team *team)
{
    uint32_t n;
    for (int i = 0; i < (team->spin ? SPINS_DONE : 0); i++) {
        if (atomic_load_explicit(&team->n_working, memory_order_acquire) == 0) {
            return;
        }
        relax();
    }
    atomic_store(&team->leader_sleeps, 1);
    while ((n = atomic_load(&team->n_working)) != 0) {
        futex_wait(&team->n_working, n);
    }
    atomic_store(&team->leader_sleeps, 0);
}

static void post_job(struct dmk_team *team)
{
    atomic_store(&team->n_working, team->stream.n_threads - 1);
    atomic_fetch_add(&team->epoch, 1);
    if (atomic_load(&team->n_sleeping) != 0) {
        futex_wake(&team->epoch);
    }
}

void dmk_team_each(struct dmk_team *team, void (*fn)(void *ud, uint32_t thread), void *ud)
{
    team->fn = fn;
    team->ud = ud;
    if (team->stream.n_threads > 1) {
        post_job(team);
    }
    fn(ud, 0);
    if (team->stream.n_threads > 1) {
        wait_for_members(team);
    }
}

static void take_items(void *ud, uint32_t thread)
{
    struct dmk_team *team = ud;
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&team->next_item, 1, memory_order_relaxed);
        if (item >= team->n_items) {
            return;
        }
        team->task(team->task_args, item, team->members[thread].scratch);
    }
}

static void run_items(struct dmk_stream *stream, dmk_task_fn *fn, const void *args,
                      uint32_t n_items)
{
    struct dmk_team *team = (struct dmk_team *)(void *)stream;
    if (n_items == 1 || stream->n_threads == 1) {
        for (uint32_t item = 0; item < n_items; item++) {
            fn(args, item, team->members[0].scratch);
        }
        return;
    }
    team->task = fn;
    team->task_args = args;
    team->n_items = n_items;
    atomic_store_explicit(&team->next_item, 0, memory_order_relaxed);
    dmk_team_each(team, take_items, team);
}

static int start_members(struct dmk_team *team, size_t scratch_bytes, struct dmk_error *reterr)
{
    size_t bytes = (scratch_bytes + LINE - 1) / LINE * LINE;
    for (uint32_t i = 0; i < team->stream.n_threads; i++) {
        struct member *member = &team->members[i];
        *member = (struct member){.team = team, .thread = i};
        member->scratch = bytes ? aligned_alloc(LINE, bytes) : NULL;
        if (bytes && !member->scratch) {
            return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for %zu bytes of kernel scratch",
                                 bytes);
        }
        if (member->scratch) {
            memset(member->scratch, 0, bytes);
        }
        int rc = i == 0 ? 0 : pthread_create(&member->id, NULL, run_member, member);
        if (rc != 0) {
            return dmk_error_set(reterr, -DMK_ENOMEM, "can not start thread %u of team %s: %s", i,
                                 team->name, strerror(rc));
        }
        member->started = i != 0;
        if (member->started) {
            char name[16];
            snprintf(name, sizeof(name), "%.11s-%u", team->name, i % 1000);
            pthread_setname_np(member->id, name);
        }
    }
    return 0;
}

int dmk_team_new(const char *name, uint32_t n_threads, bool spin, size_t scratch_bytes,
                 struct dmk_team **ret, struct dmk_error *reterr)
{
    dmk_assert(n_threads > 0);
    struct dmk_team *team = aligned_alloc(LINE, sizeof(*team));
    if (!team) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for a team of threads");
    }
    memset(team, 0, sizeof(*team));
    team->stream = (struct dmk_stream){n_threads, scratch_bytes, run_items};
    team->spin = spin;
    snprintf(team->name, sizeof(team->name), "%s", name);
    team->members = calloc(n_threads, sizeof(*team->members));
    int status = team->members ? start_members(team, scratch_bytes, reterr)
                               : dmk_error_set(reterr, -DMK_ENOMEM, "no memory for threads");
    if (status != 0) {
        dmk_team_free(&team);
        return status;
    }
    *ret = team;
    return 0;
}

void dmk_team_free(struct dmk_team **ptr)
{
    struct dmk_team *team = *ptr;
    if (!team) {
        return;
    }
    team->stop = true;
    post_job(team);
    for (uint32_t i = 0; team->members && i < team->stream.n_threads; i++) {
        if (team->members[i].started) {
            pthread_join(team->members[i].id, NULL);
        }
        free(team->members[i].scratch);
    }
    free(team->members);
    free(team);
    *ptr = NULL;
}

struct dmk_stream *dmk_team_stream(struct dmk_team *team)
{
    return &team->stream;
}
