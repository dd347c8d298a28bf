/* What the two files of the loopback share: loopback.c owns the fabric (events, chance, faults on
 * command), loopback_node.c the nodes (operations, progress). */
#pragma once

#include "common/base/list.h"
#include "common/xfer/loopback.h"

struct node;
struct conn;

enum half_state { HALF_OPEN, HALF_BROKEN, HALF_CLOSED };

/* One side of a connection: what the interface calls an endpoint. */
struct half {
    struct dmk_list link; /* in node->halves */
    struct node *node;    /* NULL: nobody lives there */
    struct conn *conn;
    struct half *other;
    enum half_state state;
    bool visible; /* its owner has seen it */
    bool closing;
    uint32_t copies; /* DIRECT copies of ours that still run */
    struct dmk_list ops;
    uint64_t last_due; /* of a message to this half: keeps them in order */
    dmk_xfer_done_fn close_done;
    void *close_ud;
    void *user;
};

struct conn {
    struct dmk_list link; /* in fabric->conns */
    bool partitioned;
    struct half half[2];
};

struct event;

/* A put or flush whose end the owner waits for. */
struct op {
    struct dmk_list link; /* in half->ops, in the order of posting */
    bool flush;
    bool local;  /* put: the source was read */
    bool called; /* put: done has run */
    bool landed;
    struct event *event;
    dmk_xfer_done_fn done;
    void *ud;
};

enum event_type {
    EVENT_MESSAGE, /* to half */
    EVENT_READ,    /* EMULATED put: the sending half reads its source */
    EVENT_LAND,    /* EMULATED put: the receiving half writes */
    EVENT_COPY,    /* DIRECT put of half: read and write at once, without its progress */
    EVENT_BREAK,   /* half learns that the connection is gone */
};

struct event {
    struct dmk_list link; /* in fabric->events, by due */
    uint64_t due;
    enum event_type type;
    struct half *half;
    struct op *op; /* NULL when its owner no longer waits */
    struct mem *target;
    uint64_t target_addr;
    const void *src;
    size_t bytes;
    uint8_t data[];
};

struct mem {
    struct dmk_list link; /* in fabric->mems, for the fabric's life */
    struct node *node;
    uint64_t id;
    uint8_t *base; /* NULL when unregistered */
    size_t bytes;
};

struct node {
    struct dmk_list link; /* in fabric->nodes, newest first, for the fabric's life */
    struct dmk_loopback *fabric;
    uint64_t id, name;
    bool killed, closed;
    uint64_t gone_at; /* when killed */
    struct dmk_xfer_events events;
    struct dmk_list halves;
};

/* Another node's memory, as a put names it. */
struct key {
    struct mem *mem;
    uint64_t base;
    size_t bytes;
};

struct dmk_loopback {
    struct dmk_loopback_conf conf;
    uint64_t now, chances, next_id;
    struct dmk_list events, nodes, conns, mems;
};

static inline struct node *node_of(const struct dmk_xfer *x)
{
    return (struct node *)x;
}

static inline struct half *half_of(const struct dmk_xfer_ep *ep)
{
    return (struct half *)ep;
}

/* Uniform in [0, n]; true with permille / 1000. */
uint64_t dmk_loopback_chance(struct dmk_loopback *f, uint64_t n);
bool dmk_loopback_roll(struct dmk_loopback *f, uint32_t permille);

/* A new event with `bytes` of data, queued at due. */
struct event *dmk_loopback_post(struct dmk_loopback *f, enum event_type type, struct half *half,
                                uint64_t due, const void *data, size_t bytes);
void dmk_loopback_event_free(struct event *event);
/* The first due event for which the node must act, or NULL. */
struct event *dmk_loopback_next(struct dmk_loopback *f, const struct node *node);
/* Does the DIRECT copies that are due. */
void dmk_loopback_run_copies(struct dmk_loopback *f);
/* Writes into a target's memory if there is any left; tells the observer before. */
void dmk_loopback_write(struct dmk_loopback *f, const struct event *event, const void *data);
/* True when a connection between the two is partitioned: a new one is then too. */
bool dmk_loopback_is_partitioned(const struct dmk_loopback *f, const struct node *a,
                                 const struct node *b);
bool dmk_loopback_node_gone(const struct node *node);

/* loopback_mem.c: slots of the operations table. */
int dmk_loopback_mem_register(struct dmk_xfer *x, void *base, size_t bytes, enum dmk_mem_kind kind,
                              struct dmk_xfer_mem **ret, struct dmk_error *reterr);
void dmk_loopback_mem_unregister(struct dmk_xfer *x, struct dmk_xfer_mem **mem);
int dmk_loopback_mem_pack(struct dmk_xfer *x, struct dmk_xfer_mem *m, uint8_t *ret_blob,
                          size_t *ret_len);
int dmk_loopback_key_unpack(struct dmk_xfer_ep *ep, struct dmk_bytes blob,
                            struct dmk_xfer_key **ret);
void dmk_loopback_key_free(struct dmk_xfer_key **key);
int dmk_loopback_watch_self(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len);
int dmk_loopback_watch_open(struct dmk_xfer *x, struct dmk_bytes blob, struct dmk_xfer_watch **ret);
bool dmk_loopback_watch_gone(struct dmk_xfer_watch *watch);
void dmk_loopback_watch_close(struct dmk_xfer_watch **watch);
