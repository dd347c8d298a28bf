/* What the files of the fleet share: fleet.c (which workers there are), fleet_link.c (the stream to one),
 * fleet_names.c (host names), fleet_silence.c (who hangs). */
#pragma once

#include "common/rpc/arena.h"
#include "router/fleet.h"

#define DMK_FLEET__PAUSE_MIN_MS 100 /* before the second dial */

struct dmk_fleet_name; /* one entry of a list that is a host name */

struct dmk_fleet {
    struct dmk_fleet_conf conf;
    struct dmk_rpc_tls tls; /* when conf.tls is given: that points here */
    struct dmk_worker *workers[DMK_FLEET_MAX_WORKERS];
    struct dmk_index *index;
    struct dmk_rpc_arena arena; /* of the message being read */
    struct dmk_fleet_name *names;
    struct dmk_timer *resolve_timer;
    struct dmk_timer *silence_timer;
    uint64_t looked_ns; /* for silent workers */
    bool closing;
};

/* Finds the address or starts to dial it; -DMK_EFULL when all slots are taken. host: the name that led to it, or
 * NULL when the list has the address itself. */
int dmk_fleet__worker_add(struct dmk_fleet *fleet, enum dmk_worker_role role, const char *address,
                          const char *host, struct dmk_worker **ret);
/* Its address vanished: goes at once, or with its stream when it is up. */
void dmk_fleet__worker_remove(struct dmk_worker *worker);
/* It has no stream. */
void dmk_fleet__worker_free(struct dmk_worker *worker);
void dmk_fleet__count(struct dmk_fleet *fleet); /* sets the gauges */
const char *dmk_fleet__role_name(enum dmk_worker_role role);
/* A worker's timer: its next dial is due, or its hello is late. ud: the worker. */
void dmk_fleet__on_timer(void *ud);

int dmk_fleet__silence_start(struct dmk_fleet *fleet);
/* A message of this worker, which is up, has been taken. */
void dmk_fleet__heard(struct dmk_worker *worker);

/* Adds every address of a list; host names are looked up at once and again every resolve_ms. */
int dmk_fleet__names_add(struct dmk_fleet *fleet, enum dmk_worker_role role, const char *entry,
                         struct dmk_error *reterr);
int dmk_fleet__names_start(struct dmk_fleet *fleet);
void dmk_fleet__names_free(struct dmk_fleet *fleet);
