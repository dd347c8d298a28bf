/* Many seeded schedules of sim.h's world, each checked whole.
 *
 *   sim [--seed N] [--schedules N] [--seconds N]     --seed: that one alone, told turn by turn
 *
 * After each schedule: every answer that was finished is that of a single worker, token for token and bit for
 * bit of its log-probabilities; what was sent before a failure is its beginning; every other request has ended
 * with a sentence; pools add up and everything has come back; nothing waits. The first seed for which that is
 * not so is printed, and the exit is 1. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "tests/sim/sim.h"
#include "tests/support/cell.h"

enum { N_LAYERS = 2, VOCAB = 60, STORM_TURNS = 900, END_TURNS = 20000 };

const struct dmk_sample_params sim_kinds[SIM_N_KINDS] = {
    {.temperature = 0, .top_p = 1, .repetition_penalty = 1, .logprobs = true},
    {.temperature = 1, .top_p = 0.95f, .repetition_penalty = 1, .seed = 5, .logprobs = true},
};

struct totals {
    uint64_t n_ok, n_error, n_left, n_retried, n_faults, n_turns;
};

static struct sim_prompt prompts[SIM_N_PROMPTS];
static struct shadow_engine *engines[SIM_N_WORKERS];

static struct shadow_engine *new_engine(void)
{
    const struct shadow_conf conf = {.n_layers = N_LAYERS,
                                     .n_kv_heads = 1,
                                     .vocab = VOCAB,
                                     .tp = 1,
                                     .dp = 1,
                                     .n_full_pages = 20,
                                     .n_window_pages = 24,
                                     .seed = 9};

    return shadow_engine_new(&conf);
}

/* Prompts, some with a common beginning, and what a worker alone answers to them. */
static void make_prompts(void)
{
    static const uint32_t lengths[SIM_N_PROMPTS] = {1,  2,   40,  64,  65,  66,
                                                    90, 129, 130, 193, 260, SIM_MAX_PROMPT};
    struct shadow_engine *engine = new_engine();
    const struct cell_conf conf = {.decode = shadow_engine_port(engine),
                                   .d_full_pages = 20,
                                   .d_window_pages = 24,
                                   .max_sequences = 2,
                                   .max_context = 512,
                                   .chunk_tokens = 128,
                                   .no_reuse = true};
    struct cell *alone = cell_new(&conf);

    for (uint32_t i = 0; i < SIM_N_PROMPTS; i++) {
        struct sim_prompt *p = &prompts[i];

        p->n = lengths[i];
        for (uint32_t t = 0; t < p->n; t++) {
            p->ids[t] = (uint32_t)(dmk_rng_u64(t < 70 ? i % 3 : i, 4, t) % (VOCAB - 1));
        }
        for (uint32_t k = 0; k < SIM_N_KINDS; k++) {
            const struct dmk_decode_request r = {.prompt = p->ids,
                                                 .n_prompt = p->n,
                                                 .sampling = &sim_kinds[k],
                                                 .max_tokens = SIM_N_NEW,
                                                 .ignore_eos = true};
            const struct cell_answer *a = &alone->answers[cell_ask(alone, &r)];

            dmk_assert(cell_run(alone, 5000) && a->choices[0].n == SIM_N_NEW);
            memcpy(p->want[k].ids, a->choices[0].ids, sizeof(p->want[k].ids));
            memcpy(p->want[k].logprobs, a->choices[0].logprobs, sizeof(p->want[k].logprobs));
            cell_forget(alone);
        }
    }
    cell_free(&alone);
    shadow_engine_free(&engine);
}

/* ---- one schedule ----------------------------------------------------------------------------- */

/* One schedule in six delays only, four in six have one kind of fault besides, one all. */
static struct dmk_loopback_conf choose_fabric(struct sim *sim)
{
    struct dmk_loopback_conf conf = {.seed = sim->seed};
    struct dmk_loopback_faults *f = &conf.faults;
    const uint64_t kind = sim_chance(sim, 6);

    conf.lane = sim_chance(sim, 2) ? DMK_LANE_DIRECT : DMK_LANE_EMULATED;
    f->max_delay = (uint32_t)sim_chance(sim, 30);
    f->drop = kind == 1 || kind == 5 ? (uint32_t)sim_chance(sim, 120) : 0;
    f->duplicate = kind == 2 || kind == 5 ? (uint32_t)sim_chance(sim, 200) : 0;
    f->reorder = kind == 3 || kind == 5 ? (uint32_t)sim_chance(sim, 300) : 0;
    f->late = kind == 4 || kind == 5 ? (uint32_t)sim_chance(sim, 400) : 0;
    f->late_steps = (uint32_t)sim_chance(sim, 600);
    sim->stream_delay = (uint32_t)sim_chance(sim, 12);
    return conf;
}

static void choose_requests(struct sim *sim)
{
    for (uint32_t q = 0; q < SIM_N_REQUESTS; q++) {
        sim->requests[q] = (struct sim_request){
            .prompt = (uint32_t)sim_chance(sim, SIM_N_PROMPTS),
            .kind = (uint32_t)sim_chance(sim, SIM_N_KINDS),
            .router = q % SIM_N_ROUTERS,
            .arrives = 1 + sim_chance(sim, 200),
            .d = -1,
            .p = -1,
        };
        if (sim_chance(sim, 6) == 0) {
            sim->requests[q].leaves = sim->requests[q].arrives + 1 + sim_chance(sim, 150);
        }
    }
}

static void strike(struct sim *sim)
{
    const uint32_t worker = (uint32_t)sim_chance(sim, SIM_N_WORKERS);
    const uint32_t p = (uint32_t)sim_chance(sim, SIM_N_P);
    const uint32_t d = SIM_N_P + (uint32_t)sim_chance(sim, SIM_N_D);
    struct sim_worker *w = &sim->workers[worker];
    const uint64_t turns = 1 + sim_chance(sim, 1500);

    sim->n_faults++;
    switch (sim_chance(sim, 7)) {
    case 0:
        sim_say(sim, "FAULT worker %u is killed", worker);
        sim_kill(sim, worker, sim_chance(sim, 4) ? 1 + sim_chance(sim, 400) : 0);
        break;
    case 1:
        sim_say(sim, "FAULT worker %u hangs for %llu turns", worker, (unsigned long long)turns);
        w->hung_until = w->dead ? 0 : sim->turn + turns;
        break;
    case 2:
        if (!sim->workers[p].dead && !sim->workers[d].dead) {
            sim_say(sim, "FAULT connections of %u and %u are cut", p, d);
            dmk_loopback_cut(sim->fabric, sim->workers[p].node, sim->workers[d].node);
        }
        break;
    case 3:
    case 4:
        if (!sim->workers[p].dead && !sim->workers[d].dead) {
            const bool on = sim_chance(sim, 3) > 0;

            sim_say(sim, "FAULT partition of %u and %u: %d", p, d, on);
            dmk_loopback_partition(sim->fabric, sim->workers[p].node, sim->workers[d].node, on);
        }
        break;
    case 5: {
        const uint32_t router = (uint32_t)sim_chance(sim, SIM_N_ROUTERS);

        sim_say(sim, "FAULT stream of router %u and worker %u breaks", router, worker);
        sim_cut_stream(sim, router, worker);
        break;
    }
    default: { /* as after a stop of the machine: all timers at once */
        const uint64_t leap_ms = sim_chance(sim, 2000);

        sim_say(sim, "FAULT time leaps by %llu ms", (unsigned long long)leap_ms);
        sim->now_ns += leap_ms * DMK_NS_PER_MS;
    }
    }
}

/* What lasts is mended, so that what is left to wait for comes. Dead workers may stay dead. */
static void mend(struct sim *sim)
{
    const struct dmk_loopback_faults none = {0};

    dmk_loopback_set_faults(sim->fabric, &none);
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        sim->workers[i].hung_until = 0;
    }
    for (uint32_t p = 0; p < SIM_N_P; p++) {
        for (uint32_t d = SIM_N_P; d < SIM_N_WORKERS; d++) {
            if (sim->workers[p].node && sim->workers[d].node) {
                dmk_loopback_partition(sim->fabric, sim->workers[p].node, sim->workers[d].node,
                                       false);
            }
        }
    }
}

static bool all_ended(const struct sim *sim)
{
    for (uint32_t q = 0; q < SIM_N_REQUESTS; q++) {
        if (sim->requests[q].state < SIM_OK) {
            return false;
        }
    }
    return true;
}

static void count(const struct sim *sim, struct totals *totals)
{
    for (uint32_t q = 0; q < SIM_N_REQUESTS; q++) {
        const struct sim_request *r = &sim->requests[q];

        totals->n_ok += r->state == SIM_OK;
        totals->n_error += r->state == SIM_ERROR;
        totals->n_left += r->state == SIM_LEFT;
        totals->n_retried += r->n_retries;
    }
    totals->n_faults += sim->n_faults;
    totals->n_turns += sim->turn;
}

static void run_to_the_end(struct sim *sim)
{
    const uint64_t storm_end = STORM_TURNS;
    const uint64_t rate = 40 + sim_chance(sim, 400); /* turns between faults, in the mean */

    while (!sim->broken[0] && sim->turn < storm_end) {
        if (sim_chance(sim, rate) == 0) {
            strike(sim);
        }
        sim_turn(sim);
        if (sim->turn % 50 == 0) {
            sim_check_workers(sim);
        }
    }
    /* Half of the time requests have to end while faults last. */
    if (sim_chance(sim, 2)) {
        mend(sim);
    }
    while (!sim->broken[0] && !all_ended(sim) && sim->turn < END_TURNS) {
        sim_turn(sim);
    }
    if (!sim->broken[0] && !all_ended(sim)) {
        sim_break(sim, "a request waits for ever");
    }
    mend(sim);
    while (!sim->broken[0] && !sim_is_settled(sim) && sim->turn < 2 * END_TURNS) {
        sim_turn(sim);
    }
    if (!sim->broken[0] && !sim_is_settled(sim)) {
        sim_tell_rest(sim);
        sim_break(sim, "pages, tickets or jobs stay behind");
    }
    sim_check_workers(sim);
}

static bool run(uint64_t seed, bool verbose, struct totals *totals)
{
    struct sim *sim = calloc(1, sizeof(*sim));
    bool ok;

    dmk_assert(sim);
    sim->seed = seed;
    sim->verbose = verbose;
    sim->now_ns = DMK_NS_PER_S;
    sim->prompts = prompts;
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        sim->workers[i].engine = engines[i];
        sim->workers[i].port = shadow_engine_port(engines[i]);
    }
    choose_requests(sim);
    sim_open(sim, choose_fabric(sim));
    run_to_the_end(sim);
    ok = !sim->broken[0];
    if (!ok) {
        printf("seed %llu: %s (turn %llu)\n", (unsigned long long)seed, sim->broken,
               (unsigned long long)sim->turn);
    }
    count(sim, totals);
    sim_close(sim);
    free(sim);
    return ok;
}

int main(int argc, char **argv)
{
    uint64_t first = 1, n = 1000, seconds = 0, done = 0;
    const uint64_t begun_ns = dmk_clock_ns();
    struct totals t = {0};
    bool one = false, ok = true;

    for (int i = 1; i + 1 < argc; i += 2) {
        const uint64_t value = strtoull(argv[i + 1], NULL, 10);

        if (strcmp(argv[i], "--seed") == 0) {
            first = value;
            one = true;
        } else if (strcmp(argv[i], "--schedules") == 0) {
            n = value;
        } else if (strcmp(argv[i], "--seconds") == 0) {
            seconds = value;
        } else {
            fprintf(stderr, "sim: what is \"%s\"? --seed N, --schedules N, --seconds N\n", argv[i]);
            return 2;
        }
    }
    make_prompts();
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        engines[i] = new_engine();
    }
    for (; ok && done < (one ? 1 : n); done++) {
        if (seconds && dmk_clock_ns() - begun_ns > seconds * DMK_NS_PER_S) {
            break;
        }
        ok = run(first + done, one, &t);
    }
    printf("%llu schedules from seed %llu: %llu answered, %llu failed clearly, %llu left, %llu "
           "retries, "
           "%llu faults, %llu turns, %.1f s\n",
           (unsigned long long)done, (unsigned long long)first, (unsigned long long)t.n_ok,
           (unsigned long long)t.n_error, (unsigned long long)t.n_left,
           (unsigned long long)t.n_retried, (unsigned long long)t.n_faults,
           (unsigned long long)t.n_turns, (double)(dmk_clock_ns() - begun_ns) / 1e9);
    if (ok && !one && n >= 100 && (t.n_ok == 0 || t.n_error == 0 || t.n_retried == 0)) {
        printf("these schedules show nothing: some answers, failures and retries are due\n");
        ok = false;
    }
    for (uint32_t i = 0; i < SIM_N_WORKERS; i++) {
        shadow_engine_free(&engines[i]);
    }
    return ok ? 0 : 1;
}
