/* Which workers there are: places, counts, and what all of them have in common. Loop only; see fleet.h. */
#include "router/fleet_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/log.h"

#define ARENA_BYTES ((size_t)256 << 10) /* a thousand events of a step */

const char *dmk_fleet__role_name(enum dmk_worker_role role)
{
    return role == DMK_WORKER_PREFILL ? "prefill" : "decode";
}

void dmk_fleet__count(struct dmk_fleet *fleet)
{
    uint32_t known[2] = {0}, up[2] = {0}, draining[2] = {0}, hanging[2] = {0};

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *w = fleet->workers[i];

        if (w) {
            known[w->role]++;
            up[w->role] += w->up;
            draining[w->role] += w->up && w->draining;
            hanging[w->role] += w->up && w->hangs;
        }
    }
    for (int i = 0; i < 2; i++) {
        dmk_gauge_set(fleet->conf.stats->workers_known[i], known[i]);
        dmk_gauge_set(fleet->conf.stats->workers_up[i], up[i]);
        dmk_gauge_set(fleet->conf.stats->workers_draining[i], draining[i]);
        dmk_gauge_set(fleet->conf.stats->workers_hanging[i], hanging[i]);
    }
}

void dmk_fleet__worker_free(struct dmk_worker *w)
{
    struct dmk_fleet *fleet = w->fleet;

    dmk_assert(!w->stream && fleet->workers[w->slot] == w);
    fleet->workers[w->slot] = NULL;
    dmk_index_clear_worker(fleet->index, w->slot);
    dmk_timer_free(&w->timer);
    dmk_rpc_channel_free(&w->channel);
    free(w);
}

int dmk_fleet__worker_add(struct dmk_fleet *fleet, enum dmk_worker_role role, const char *address,
                          const char *host, struct dmk_worker **ret)
{
    struct dmk_worker *w;
    size_t slot = DMK_FLEET_MAX_WORKERS;

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        w = fleet->workers[i];
        if (w && w->role == role && strcmp(w->address, address) == 0) {
            w->removed = false;
            *ret = w;
            return 0;
        }
        if (!w && slot == DMK_FLEET_MAX_WORKERS) {
            slot = i;
        }
    }
    if (slot == DMK_FLEET_MAX_WORKERS) {
        return -DMK_EFULL;
    }
    w = calloc(1, sizeof(*w));
    if (!w) {
        return -DMK_ENOMEM;
    }
    w->fleet = fleet;
    w->slot = (uint32_t)slot;
    w->role = role;
    w->named = host != NULL;
    (void)snprintf(w->host, sizeof(w->host), "%s", host ? host : "");
    w->pause_ms = DMK_FLEET__PAUSE_MIN_MS;
    (void)snprintf(w->address, sizeof(w->address), "%s", address);
    (void)snprintf(w->id, sizeof(w->id), "%.63s", address);
    w->timer = dmk_timer_new(fleet->conf.loop, dmk_fleet__on_timer, w);
    if (!w->timer) {
        free(w);
        return -DMK_ENOMEM;
    }
    fleet->workers[slot] = w;
    dmk_timer_start(w->timer, 0, 0);
    dmk_fleet__count(fleet);
    *ret = w;
    return 0;
}

void dmk_fleet__worker_remove(struct dmk_worker *w)
{
    w->removed = true;
    if (!w->stream) {
        struct dmk_fleet *fleet = w->fleet;

        dmk_log_info("%s worker %s is not among the addresses of its name any more",
                     dmk_fleet__role_name(w->role), w->address);
        dmk_fleet__worker_free(w);
        dmk_fleet__count(fleet);
    }
}

/* Files that can not be used are told at the start; they are read for each dial. */
static int check_tls(const struct dmk_fleet_conf *conf, struct dmk_error *reterr)
{
    struct dmk_rpc_channel *channel;
    const int rc = dmk_rpc_channel_new_tls(conf->rpc, "unix:/nowhere", conf->tls, &channel, reterr);

    if (rc == 0) {
        dmk_rpc_channel_free(&channel);
    }
    return rc;
}

int dmk_fleet_new(const struct dmk_fleet_conf *conf, struct dmk_fleet **ret,
                  struct dmk_error *reterr)
{
    const struct dmk_conf_list *lists[2] = {conf->prefill, conf->decode};
    struct dmk_fleet *fleet = calloc(1, sizeof(*fleet));
    int rc = 0;

    if (!fleet) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the fleet");
    }
    fleet->conf = *conf;
    if (conf->tls) {
        fleet->tls = *conf->tls;
        fleet->conf.tls = &fleet->tls;
        rc = check_tls(conf, reterr);
    }
    dmk_rpc_arena_init(&fleet->arena, ARENA_BYTES);
    fleet->index = dmk_index_new(conf->index_blocks);
    if (!fleet->index && rc == 0) {
        rc = dmk_error_set(reterr, -DMK_ENOMEM, "no memory for an index of %zu blocks",
                           conf->index_blocks);
    }
    for (int role = 0; role < 2; role++) {
        for (size_t i = 0; rc == 0 && i < lists[role]->n; i++) {
            rc = dmk_fleet__names_add(fleet, (enum dmk_worker_role)role, lists[role]->items[i],
                                      reterr);
        }
    }
    if (rc == 0) {
        rc = dmk_fleet__names_start(fleet);
        rc = rc < 0 ? rc : dmk_fleet__silence_start(fleet);
        if (rc < 0) {
            (void)dmk_error_set(reterr, rc, "no memory for the fleet");
        }
    }
    if (rc < 0) {
        dmk_fleet_free(&fleet);
        return rc;
    }
    *ret = fleet;
    return 0;
}

void dmk_fleet_free(struct dmk_fleet **fleet)
{
    struct dmk_fleet *f = *fleet;

    if (!f) {
        return;
    }
    f->closing = true;
    dmk_fleet__names_free(f);
    dmk_timer_free(&f->silence_timer);
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        struct dmk_worker *w = f->workers[i];

        if (w && w->stream) {
            dmk_rpc_cancel(w->stream);
            w->stream = NULL;
        }
    }
    *fleet = NULL;
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        if (f->workers[i]) {
            dmk_fleet__worker_free(f->workers[i]);
        }
    }
    dmk_index_free(&f->index);
    dmk_rpc_arena_fini(&f->arena);
    free(f);
}

struct dmk_worker *const *dmk_fleet_workers(const struct dmk_fleet *fleet)
{
    return fleet->workers;
}

struct dmk_index *dmk_fleet_index(struct dmk_fleet *fleet)
{
    return fleet->index;
}

uint32_t dmk_fleet_n_usable(const struct dmk_fleet *fleet, enum dmk_worker_role role)
{
    uint32_t n = 0;

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *w = fleet->workers[i];

        n += w && w->role == role && w->up && !w->draining;
    }
    return n;
}

bool dmk_worker_fits(const struct dmk_worker *p, const struct dmk_worker *d)
{
    return strcmp(p->numerics, d->prompt_numerics) == 0;
}

bool dmk_worker_is_mixed(const struct dmk_worker *d)
{
    return strcmp(d->numerics, d->prompt_numerics) != 0;
}

bool dmk_fleet_has_prefill_for(const struct dmk_fleet *fleet, const struct dmk_worker *d)
{
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *p = fleet->workers[i];

        if (p && p->role == DMK_WORKER_PREFILL && p->up && !p->draining && dmk_worker_fits(p, d)) {
            return true;
        }
    }
    return false;
}

bool dmk_fleet_gets_prompts(const struct dmk_fleet *fleet, bool local)
{
    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *d = fleet->workers[i];

        if (d && d->role == DMK_WORKER_DECODE && d->up && !d->draining &&
            ((local && !dmk_worker_is_mixed(d)) || dmk_fleet_has_prefill_for(fleet, d))) {
            return true;
        }
    }
    return false;
}

uint32_t dmk_fleet_max_context(const struct dmk_fleet *fleet)
{
    uint32_t min = 0;

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *w = fleet->workers[i];

        if (w && w->up && w->role == DMK_WORKER_DECODE && (min == 0 || w->max_context < min)) {
            min = w->max_context;
        }
    }
    return min;
}

uint32_t dmk_fleet_max_sequences(const struct dmk_fleet *fleet)
{
    uint32_t min = 0;

    for (size_t i = 0; i < DMK_FLEET_MAX_WORKERS; i++) {
        const struct dmk_worker *w = fleet->workers[i];

        if (w && w->up && w->role == DMK_WORKER_DECODE && (min == 0 || w->max_sequences < min)) {
            min = w->max_sequences;
        }
    }
    return min;
}
