/* Who speaks to D: the endpoints that P's opened, the claimants with the watch on their process, and the
 * newest incarnation of each worker. Bounded tables; see receiver_impl.h. */
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/xfer/receiver_impl.h"

#define MAX_WORKERS DMK_RECEIVER_MAX_WORKERS
#define UNPROVEN_NS (5 * DMK_NS_PER_S)   /* an endpoint without any valid cookie */
#define IDLE_NS     (120 * DMK_NS_PER_S) /* one that no ticket needs */
#define NEWEST_NS                                                                                  \
    (60 * DMK_NS_PER_S) /* silence of a worker's newest start after which an older one counts */

struct dmk_rx_endpoint *dmk_rx_endpoint_take(struct dmk_receiver *rx, struct dmk_xfer_ep *ep)
{
    struct dmk_rx_endpoint *known = rx->conf.ops->ep_user(ep);

    if (known) {
        return known;
    }
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        struct dmk_rx_endpoint *e = &rx->endpoints[i];

        if (!e->ep) {
            *e = (struct dmk_rx_endpoint){.ep = ep, .rx = rx, .heard_ns = rx->now_ns};
            rx->conf.ops->ep_set_user(ep, e);
            return e;
        }
    }
    return NULL;
}

bool dmk_rx_is_current(struct dmk_receiver *rx, uint64_t id, uint64_t incarnation)
{
    struct dmk_rx_worker *slot = &rx->workers[0];

    if (id == 0) {
        return true; /* unnamed: nothing to compare with */
    }
    for (uint32_t i = 0; i < MAX_WORKERS; i++) {
        struct dmk_rx_worker *w = &rx->workers[i];

        if (w->id == id) {
            slot = w;
            break;
        }
        if (w->id == 0 || (slot->id != 0 && w->heard_ns < slot->heard_ns)) {
            slot = w; /* a free slot, or the one not heard of for longest */
        }
    }
    if (slot->id == id && incarnation < slot->incarnation &&
        rx->now_ns - slot->heard_ns < NEWEST_NS) {
        return false;
    }
    *slot = (struct dmk_rx_worker){id, incarnation, rx->now_ns};
    return true;
}

static void on_endpoint_closed(void *ud, int status)
{
    struct dmk_rx_endpoint *e = ud;

    (void)status; /* about our own puts: we have none */
    e->ep = NULL;
    dmk_rx_endpoint_gone(e->rx, e);
}

void dmk_rx_endpoint_close(struct dmk_receiver *rx, struct dmk_rx_endpoint *e)
{
    if (e && !e->closing) {
        e->closing = true;
        rx->conf.ops->ep_close(rx->conf.xfer, e->ep, on_endpoint_closed, e);
    }
}

static bool is_endpoint_needed(const struct dmk_receiver *rx, const struct dmk_rx_endpoint *e)
{
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        if (rx->tickets[i].state != DMK_RECEIVE_FORGOTTEN && rx->tickets[i].endpoint == e) {
            return true;
        }
    }
    return false;
}

void dmk_rx_endpoints_tidy(struct dmk_receiver *rx)
{
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        struct dmk_rx_endpoint *e = &rx->endpoints[i];
        const uint64_t bound = e->proven ? IDLE_NS : UNPROVEN_NS;

        if (e->ep && !e->closing && rx->now_ns > e->heard_ns && rx->now_ns - e->heard_ns > bound &&
            !is_endpoint_needed(rx, e)) {
            dmk_rx_endpoint_close(rx, e);
        }
    }
}

void dmk_rx_claimant_drop(struct dmk_receiver *rx, struct dmk_rx_claimant *c)
{
    if (c && c->n_tickets == 0) {
        if (c->watch) {
            rx->conf.ops->watch_close(&c->watch);
        }
        *c = (struct dmk_rx_claimant){0};
    }
}

struct dmk_rx_claimant *dmk_rx_claimant_take(struct dmk_receiver *rx, const struct dmk_message *m)
{
    struct dmk_rx_claimant *slot = NULL;

    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct dmk_rx_claimant *c = &rx->claimants[i];

        if (c->incarnation == m->from_incarnation) {
            return c->watch && rx->conf.ops->watch_gone(c->watch) ? NULL : c;
        }
        if (c->incarnation == 0 && !slot) {
            slot = c;
        }
    }
    dmk_assert(slot); /* one for each ticket */
    if (rx->direct) {
        const struct dmk_bytes blob = {m->watch, m->watch_len};

        if (rx->conf.ops->watch_open(rx->conf.xfer, blob, &slot->watch) < 0) {
            return NULL;
        }
        if (rx->conf.ops->watch_gone(slot->watch)) {
            rx->conf.ops->watch_close(&slot->watch);
            return NULL;
        }
    }
    slot->incarnation = m->from_incarnation;
    return slot;
}

bool dmk_rx_claimant_gone(const struct dmk_receiver *rx, const struct dmk_rx_claimant *c)
{
    return c && c->watch && rx->conf.ops->watch_gone(c->watch);
}
