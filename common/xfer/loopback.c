/* The fabric of in-process nodes: events in time, chance, faults on command; see loopback.h. */
#include "common/xfer/loopback.h"
#include "common/base/assert.h"
#include "common/base/rng.h"
#include "common/xfer/loopback_impl.h"
#include <stdlib.h>

int dmk_loopback_new(const struct dmk_loopback_conf *conf, struct dmk_loopback **ret)
{
    struct dmk_loopback *f = calloc(1, sizeof(*f));

    if (!f) {
        return -DMK_ENOMEM;
    }
    f->conf = *conf;
    f->next_id = 1;
    dmk_list_init(&f->events);
    dmk_list_init(&f->nodes);
    dmk_list_init(&f->conns);
    dmk_list_init(&f->mems);
    *ret = f;
    return 0;
}

static void free_ops(struct half *half)
{
    while (!dmk_list_empty(&half->ops)) {
        free(dmk_container_of(dmk_list_pop(&half->ops), struct op, link));
    }
}

void dmk_loopback_free(struct dmk_loopback **fabric)
{
    struct dmk_loopback *f = *fabric;

    if (!f) {
        return;
    }
    while (!dmk_list_empty(&f->events)) {
        dmk_loopback_event_free(dmk_container_of(dmk_list_pop(&f->events), struct event, link));
    }
    while (!dmk_list_empty(&f->conns)) {
        struct conn *conn = dmk_container_of(dmk_list_pop(&f->conns), struct conn, link);

        free_ops(&conn->half[0]);
        free_ops(&conn->half[1]);
        free(conn);
    }
    while (!dmk_list_empty(&f->mems)) {
        struct mem *mem = dmk_container_of(dmk_list_pop(&f->mems), struct mem, link);

        free(mem);
    }
    while (!dmk_list_empty(&f->nodes)) {
        struct node *node = dmk_container_of(dmk_list_pop(&f->nodes), struct node, link);

        dmk_assert(node->closed);
        free(node);
    }
    free(f);
    *fabric = NULL;
}

void dmk_loopback_set_faults(struct dmk_loopback *f, const struct dmk_loopback_faults *faults)
{
    f->conf.faults = *faults;
}

uint64_t dmk_loopback_step_count(const struct dmk_loopback *f)
{
    return f->now;
}

uint64_t dmk_loopback_chance(struct dmk_loopback *f, uint64_t n)
{
    return n ? dmk_rng_u64(f->conf.seed, 0x6c6f6f70, f->chances++) % (n + 1) : 0;
}

bool dmk_loopback_roll(struct dmk_loopback *f, uint32_t permille)
{
    return permille > 0 && dmk_loopback_chance(f, 999) < permille;
}

struct event *dmk_loopback_post(struct dmk_loopback *f, enum event_type type, struct half *half,
                                uint64_t due, const void *data, size_t bytes)
{
    struct event *event = calloc(1, sizeof(*event) + bytes);
    struct dmk_list *at = f->events.prev;

    dmk_assert(event); /* a test's fabric: out of memory ends the test */
    event->due = due;
    event->type = type;
    event->half = half;
    event->bytes = bytes;
    if (bytes > 0) {
        memcpy(event->data, data, bytes);
    }
    while (at != &f->events && dmk_container_of(at, struct event, link)->due > due) {
        at = at->prev;
    }
    dmk_list_push_back(at->next, &event->link); /* in front of at->next, so after `at` */
    return event;
}

void dmk_loopback_event_free(struct event *event)
{
    if (event->op) {
        event->op->event = NULL;
    }
    dmk_list_remove(&event->link);
    free(event);
}

struct event *dmk_loopback_next(struct dmk_loopback *f, const struct node *node)
{
    for (struct dmk_list *at = f->events.next; at != &f->events; at = at->next) {
        struct event *event = dmk_container_of(at, struct event, link);

        if (event->due > f->now) {
            break;
        }
        if (event->type == EVENT_COPY || event->half->node != node) {
            continue;
        }
        if (event->half->conn->partitioned &&
            (event->type == EVENT_MESSAGE || event->type == EVENT_LAND)) {
            continue;
        }
        return event;
    }
    return NULL;
}

bool dmk_loopback_node_gone(const struct node *node)
{
    return node->closed || (node->killed && node->fabric->now >= node->gone_at);
}

void dmk_loopback_write(struct dmk_loopback *f, const struct event *event, const void *data)
{
    const struct mem *mem = event->target;
    uint8_t *addr = (uint8_t *)(uintptr_t)event->target_addr;

    if (!mem->base || mem->node->killed) {
        return;
    }
    if (f->conf.on_write) {
        const struct half *writer = event->type == EVENT_LAND ? event->half->other : event->half;

        f->conf.on_write(f->conf.ud, (const struct dmk_xfer *)writer->node, addr, event->bytes);
    }
    memcpy(addr, data, event->bytes);
}

void dmk_loopback_run_copies(struct dmk_loopback *f)
{
    struct dmk_list *at = f->events.next;

    while (at != &f->events) {
        struct event *event = dmk_container_of(at, struct event, link);
        const bool gone = event->half->node && dmk_loopback_node_gone(event->half->node);

        at = at->next;
        if (event->type != EVENT_COPY || (event->due > f->now && !gone)) {
            continue;
        }
        if (!gone) {
            dmk_loopback_write(f, event, event->src);
        }
        if (event->op) {
            event->op->local = event->op->landed = true;
        }
        event->half->copies--;
        dmk_loopback_event_free(event);
    }
}

uint32_t dmk_loopback_n_pending_writes(const struct dmk_loopback *f)
{
    uint32_t n = 0;

    for (struct dmk_list *at = f->events.next; at != &f->events; at = at->next) {
        const struct event *event = dmk_container_of(at, struct event, link);

        n += event->type == EVENT_COPY || event->type == EVENT_LAND ||
             (event->type == EVENT_READ && event->op);
    }
    return n;
}

static void break_half(struct dmk_loopback *f, struct half *half)
{
    if (half->node && half->state == HALF_OPEN) {
        (void)dmk_loopback_post(f, EVENT_BREAK, half,
                                f->now + dmk_loopback_chance(f, f->conf.faults.max_delay), NULL, 0);
    }
}

static bool joins(const struct conn *conn, const struct node *a, const struct node *b)
{
    return (conn->half[0].node == a && conn->half[1].node == b) ||
           (conn->half[0].node == b && conn->half[1].node == a);
}

bool dmk_loopback_is_partitioned(const struct dmk_loopback *f, const struct node *a,
                                 const struct node *b)
{
    for (struct dmk_list *at = f->conns.next; at != &f->conns; at = at->next) {
        const struct conn *conn = dmk_container_of(at, struct conn, link);

        if (conn->partitioned && joins(conn, a, b)) {
            return true;
        }
    }
    return false;
}

void dmk_loopback_cut(struct dmk_loopback *f, struct dmk_xfer *a, struct dmk_xfer *b)
{
    for (struct dmk_list *at = f->conns.next; at != &f->conns; at = at->next) {
        struct conn *conn = dmk_container_of(at, struct conn, link);

        if (joins(conn, node_of(a), node_of(b))) {
            break_half(f, &conn->half[0]);
            break_half(f, &conn->half[1]);
        }
    }
}

void dmk_loopback_partition(struct dmk_loopback *f, struct dmk_xfer *a, struct dmk_xfer *b, bool on)
{
    for (struct dmk_list *at = f->conns.next; at != &f->conns; at = at->next) {
        struct conn *conn = dmk_container_of(at, struct conn, link);

        if (joins(conn, node_of(a), node_of(b))) {
            conn->partitioned = on;
        }
    }
}

void dmk_loopback_kill(struct dmk_loopback *f, struct dmk_xfer *x, uint32_t linger_steps)
{
    struct node *node = node_of(x);

    if (node->killed || node->closed) {
        return;
    }
    node->killed = true;
    node->gone_at = f->now + linger_steps;
    if (f->conf.faults.silent_death) {
        return;
    }
    for (struct dmk_list *at = node->halves.next; at != &node->halves; at = at->next) {
        break_half(f, dmk_container_of(at, struct half, link)->other);
    }
}
