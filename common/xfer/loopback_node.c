/* Nodes of the loopback: the operations of xfer.h over the fabric's events; see loopback.h. */
#include "common/base/assert.h"
#include "common/xfer/loopback.h"
#include "common/xfer/loopback_impl.h"
#include <stdio.h>
#include <stdlib.h>

#define ADDRESS_MAGIC       0x6c6f6f7061646472ull
#define MAX_EVENTS_PER_CALL 64

static int open_node(const struct dmk_xfer_conf *conf, struct dmk_xfer **ret,
                     struct dmk_error *reterr)
{
    struct node *node;

    if (!conf->fabric) {
        return dmk_error_set(reterr, -DMK_EINVAL, "a loopback node needs a fabric");
    }
    node = calloc(1, sizeof(*node));
    if (!node) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for a loopback node");
    }
    node->fabric = conf->fabric;
    node->id = node->fabric->next_id++;
    node->name = conf->bind ? dmk_hash64(conf->bind, strlen(conf->bind), 0) : node->id;
    node->events = conf->events;
    dmk_list_init(&node->halves);
    dmk_list_push_back(node->fabric->nodes.next, &node->link); /* in front: newest first */
    *ret = (struct dmk_xfer *)node;
    return 0;
}

/* Takes an operation off its half without a word. */
static void drop_op(struct op *op)
{
    if (op->event) {
        op->event->op = NULL;
    }
    dmk_list_remove(&op->link);
    free(op);
}

static void break_other(struct half *half)
{
    struct dmk_loopback *f = half->node->fabric;

    if (half->other->node && half->other->state == HALF_OPEN) {
        (void)dmk_loopback_post(f, EVENT_BREAK, half->other,
                                f->now + dmk_loopback_chance(f, f->conf.faults.max_delay), NULL, 0);
    }
}

static void close_node(struct dmk_xfer *x)
{
    struct node *node = node_of(x);
    struct dmk_loopback *f = node->fabric;
    struct dmk_list *at = f->events.next;

    node->closed = true;
    for (struct dmk_list *h = node->halves.next; h != &node->halves; h = h->next) {
        struct half *half = dmk_container_of(h, struct half, link);

        while (!dmk_list_empty(&half->ops)) {
            drop_op(dmk_container_of(dmk_list_pop(&half->ops), struct op, link));
        }
        if (half->state != HALF_CLOSED) {
            half->state = HALF_CLOSED;
            break_other(half);
        }
    }
    while (at != &f->events) {
        struct event *event = dmk_container_of(at, struct event, link);

        at = at->next;
        if (event->half->node == node) {
            dmk_loopback_event_free(event);
        }
    }
    for (struct dmk_list *m = f->mems.next; m != &f->mems; m = m->next) {
        struct mem *mem = dmk_container_of(m, struct mem, link);

        if (mem->node == node) {
            mem->base = NULL;
        }
    }
}

static int get_address(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len)
{
    const uint64_t words[2] = {ADDRESS_MAGIC, node_of(x)->name};

    memcpy(ret_blob, words, sizeof(words));
    *ret_len = sizeof(words);
    return 0;
}

static enum dmk_xfer_lane get_lane(const struct dmk_xfer *x)
{
    return node_of(x)->fabric->conf.lane;
}

static void get_info(const struct dmk_xfer *x, struct dmk_xfer_info *ret)
{
    *ret = (struct dmk_xfer_info){.transport = "loopback"};
    (void)snprintf(ret->address, sizeof(ret->address), "%016llx",
                   (unsigned long long)node_of(x)->name);
}

static struct node *find_node(struct dmk_loopback *f, uint64_t name)
{
    for (struct dmk_list *at = f->nodes.next; at != &f->nodes; at = at->next) {
        struct node *node = dmk_container_of(at, struct node, link);

        if (node->name == name && !node->closed && !node->killed) {
            return node;
        }
    }
    return NULL;
}

static void init_half(struct conn *conn, int side, struct node *node)
{
    struct half *half = &conn->half[side];

    half->conn = conn;
    half->other = &conn->half[1 - side];
    half->node = node;
    half->visible = side == 0;
    dmk_list_init(&half->ops);
    dmk_list_init(&half->link);
    if (node) {
        dmk_list_push_back(&node->halves, &half->link);
    } else {
        half->state = HALF_CLOSED;
    }
}

static int connect_ep(struct dmk_xfer *x, struct dmk_bytes address, struct dmk_xfer_ep **ret,
                      struct dmk_error *reterr)
{
    struct node *node = node_of(x);
    struct dmk_loopback *f = node->fabric;
    struct conn *conn;
    struct node *peer;
    uint64_t words[2];

    if (address.len != sizeof(words)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "a loopback address has %zu bytes, not %zu",
                             sizeof(words), address.len);
    }
    memcpy(words, address.data, sizeof(words));
    if (words[0] != ADDRESS_MAGIC || node->closed || node->killed) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "bytes given as a loopback address are none");
    }
    conn = calloc(1, sizeof(*conn));
    if (!conn) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for a loopback connection");
    }
    peer = find_node(f, words[1]);
    conn->partitioned = peer && dmk_loopback_is_partitioned(f, node, peer);
    init_half(conn, 0, node);
    init_half(conn, 1, peer);
    dmk_list_push_back(&f->conns, &conn->link);
    if (!peer) {
        break_other(&(struct half){.node = node, .other = &conn->half[0]});
    }
    *ret = (struct dmk_xfer_ep *)&conn->half[0];
    return 0;
}

static void close_ep(struct dmk_xfer *x, struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud)
{
    struct half *half = half_of(ep);

    (void)x;
    dmk_assert(!half->closing && half->state != HALF_CLOSED);
    half->closing = true;
    half->close_done = done;
    half->close_ud = ud;
}

static bool is_usable(const struct half *half)
{
    return half->state == HALF_OPEN && !half->closing && !half->node->killed;
}

static struct op *add_op(struct half *half, bool flush, dmk_xfer_done_fn done, void *ud)
{
    struct op *op = calloc(1, sizeof(*op));

    if (op) {
        *op = (struct op){.flush = flush, .done = done, .ud = ud};
        dmk_list_push_back(&half->ops, &op->link);
    }
    return op;
}

static int put(struct dmk_xfer_ep *ep, struct dmk_xfer_mem *m, const void *src, size_t bytes,
               struct dmk_xfer_key *k, uint64_t remote_addr, dmk_xfer_done_fn done, void *ud)
{
    struct half *half = half_of(ep);
    const struct key *key = (const struct key *)k;
    const struct mem *mem = (const struct mem *)m;
    struct dmk_loopback *f = half->node->fabric;
    const bool direct = f->conf.lane == DMK_LANE_DIRECT;
    uint64_t due;
    struct event *event;
    struct op *op;

    if (!is_usable(half)) {
        return -DMK_EPEER;
    }
    dmk_assert((const uint8_t *)src >= mem->base &&
               bytes <= mem->bytes - (size_t)((const uint8_t *)src - mem->base));
    if (remote_addr < key->base || remote_addr - key->base > key->bytes ||
        bytes > key->bytes - (remote_addr - key->base)) {
        return -DMK_EINVAL;
    }
    op = add_op(half, false, done, ud);
    if (!op) {
        return -DMK_ENOMEM;
    }
    due = f->now + dmk_loopback_chance(f, f->conf.faults.max_delay);
    if (direct && dmk_loopback_roll(f, f->conf.faults.late)) {
        due += dmk_loopback_chance(f, f->conf.faults.late_steps);
    }
    event = dmk_loopback_post(f, direct ? EVENT_COPY : EVENT_READ, half, due, NULL, 0);
    event->op = op;
    event->target = key->mem;
    event->target_addr = remote_addr;
    event->src = src;
    event->bytes = bytes;
    op->event = event;
    half->copies += direct;
    return 0;
}

static int flush(struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud)
{
    struct half *half = half_of(ep);

    if (!is_usable(half)) {
        return -DMK_EPEER;
    }
    return add_op(half, true, done, ud) ? 0 : -DMK_ENOMEM;
}

static void post_message(struct dmk_loopback *f, struct half *to, struct dmk_bytes message)
{
    uint64_t due = f->now + dmk_loopback_chance(f, f->conf.faults.max_delay);

    if (!dmk_loopback_roll(f, f->conf.faults.reorder)) {
        due = due > to->last_due ? due : to->last_due;
        to->last_due = due;
    }
    (void)dmk_loopback_post(f, EVENT_MESSAGE, to, due, message.data, message.len);
}

static int send_message(struct dmk_xfer_ep *ep, struct dmk_bytes message)
{
    struct half *half = half_of(ep);
    struct dmk_loopback *f = half->node->fabric;

    if (!is_usable(half)) {
        return -DMK_EPEER;
    }
    dmk_assert(message.len <= DMK_XFER_MESSAGE_MAX);
    if (!half->other->node || dmk_loopback_roll(f, f->conf.faults.drop)) {
        return 0;
    }
    post_message(f, half->other, message);
    if (dmk_loopback_roll(f, f->conf.faults.duplicate)) {
        post_message(f, half->other, message);
    }
    return 0;
}

static void fail_ops(struct half *half, int status)
{
    while (!dmk_list_empty(&half->ops)) {
        struct op *op = dmk_container_of(dmk_list_pop(&half->ops), struct op, link);
        const dmk_xfer_done_fn done = op->called ? NULL : op->done;
        void *ud = op->ud;

        drop_op(op);
        if (done) {
            done(ud, status);
        }
    }
}

/* Sees off an operation that has ended; false when there is none. Operations leave at the head of the list
 * only, so a flush that stands there has nothing before it that has not landed. */
static bool complete_one(struct half *half)
{
    for (struct dmk_list *at = half->ops.next; at != &half->ops; at = at->next) {
        struct op *op = dmk_container_of(at, struct op, link);

        if (op->local && !op->called) {
            op->called = true;
            op->done(op->ud, 0);
            return true;
        }
        if (at == half->ops.next && (op->flush || (op->called && op->landed))) {
            const dmk_xfer_done_fn done = op->flush ? op->done : NULL;
            void *ud = op->ud;

            drop_op(dmk_container_of(dmk_list_pop(&half->ops), struct op, link));
            if (done) {
                done(ud, 0);
            }
            return true;
        }
    }
    return false;
}

static bool close_half(struct half *half)
{
    const dmk_xfer_done_fn done = half->close_done;

    fail_ops(half, -DMK_ECANCELLED);
    if (half->copies > 0 && !half->node->killed) {
        return false;
    }
    half->state = HALF_CLOSED;
    half->closing = false;
    if (!half->node->killed) {
        break_other(half);
    }
    if (done) {
        done(half->close_ud, 0);
    }
    return true;
}

static void handle_break(struct half *half)
{
    const struct dmk_xfer_events *events = &half->node->events;

    if (half->state != HALF_OPEN || half->closing) {
        return;
    }
    if (!half->visible) {
        half->state = HALF_CLOSED;
        return;
    }
    half->state = HALF_BROKEN;
    fail_ops(half, -DMK_EPEER);
    if (!half->closing && half->state == HALF_BROKEN) {
        events->on_closed(events->ud, (struct dmk_xfer_ep *)half, -DMK_EPEER);
    }
}

/* The source is read now, not when the put was posted: reusing it early would show. */
static void handle_read(struct dmk_loopback *f, const struct event *event)
{
    uint64_t due = f->now + dmk_loopback_chance(f, f->conf.faults.max_delay);
    struct event *land;

    if (!event->op || event->half->state != HALF_OPEN || !event->half->other->node) {
        return;
    }
    if (dmk_loopback_roll(f, f->conf.faults.late)) {
        due += dmk_loopback_chance(f, f->conf.faults.late_steps);
    }
    land = dmk_loopback_post(f, EVENT_LAND, event->half->other, due, event->src, event->bytes);
    land->op = event->op;
    land->op->event = land;
    land->op->local = true;
    land->target = event->target;
    land->target_addr = event->target_addr;
}

static void handle_event(struct dmk_loopback *f, struct event *event)
{
    struct half *half = event->half;
    const struct dmk_xfer_events *events = &half->node->events;

    /* Off the list first: callbacks post and free events. */
    dmk_list_remove(&event->link);
    switch (event->type) {
    case EVENT_MESSAGE:
        if (half->state == HALF_OPEN && !half->closing) {
            half->visible = true;
            events->on_message(events->ud, (struct dmk_xfer_ep *)half,
                               (struct dmk_bytes){event->data, event->bytes});
        }
        break;
    case EVENT_READ:
        handle_read(f, event);
        if (event->op && event->op->event == event) {
            event->op->event = NULL; /* nobody is there: the break will tell its owner */
        }
        event->op = NULL;
        break;
    case EVENT_LAND:
        if (half->state != HALF_CLOSED) {
            dmk_loopback_write(f, event, event->data);
            if (event->op) {
                event->op->landed = true;
            }
        }
        break;
    case EVENT_BREAK:
        handle_break(half);
        break;
    case EVENT_COPY:
        dmk_unreachable("copies run without progress");
    }
    dmk_loopback_event_free(event);
}

static unsigned progress(struct dmk_xfer *x)
{
    struct node *node = node_of(x);
    struct dmk_loopback *f = node->fabric;
    unsigned n = 0;

    f->now++;
    dmk_loopback_run_copies(f);
    while (!node->killed && n < MAX_EVENTS_PER_CALL) {
        struct event *event = dmk_loopback_next(f, node);

        if (!event) {
            break;
        }
        handle_event(f, event);
        n++;
    }
    for (struct dmk_list *at = node->halves.next; at != &node->halves; at = at->next) {
        struct half *half = dmk_container_of(at, struct half, link);

        while (!node->killed && half->state == HALF_OPEN && !half->closing && complete_one(half)) {
            n++;
        }
        n += half->closing && close_half(half);
    }
    return n;
}

static int get_fd(struct dmk_xfer *x)
{
    (void)x;
    return -1;
}

static bool arm(struct dmk_xfer *x)
{
    return dmk_list_empty(&node_of(x)->fabric->events);
}

static void set_user(struct dmk_xfer_ep *ep, void *user)
{
    half_of(ep)->user = user;
}

static void *get_user(const struct dmk_xfer_ep *ep)
{
    return half_of(ep)->user;
}

const struct dmk_xfer_ops dmk_xfer_loopback_ops = {
    .name = "loopback",
    .open = open_node,
    .close = close_node,
    .address = get_address,
    .lane = get_lane,
    .info = get_info,
    .mem_register = dmk_loopback_mem_register,
    .mem_unregister = dmk_loopback_mem_unregister,
    .mem_pack = dmk_loopback_mem_pack,
    .ep_connect = connect_ep,
    .ep_close = close_ep,
    .key_unpack = dmk_loopback_key_unpack,
    .key_free = dmk_loopback_key_free,
    .put = put,
    .flush = flush,
    .send = send_message,
    .progress = progress,
    .fd = get_fd,
    .arm = arm,
    .ep_set_user = set_user,
    .ep_user = get_user,
    .watch_self = dmk_loopback_watch_self,
    .watch_open = dmk_loopback_watch_open,
    .watch_gone = dmk_loopback_watch_gone,
    .watch_close = dmk_loopback_watch_close,
};
