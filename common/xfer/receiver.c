/* The receiver's doors: making and ending it, what its owner calls, what it says about itself; see receiver.h.
 * What follows from an event is in receiver_drive.c. On the loop; nothing allocates after new but watches. */
#include "common/xfer/receiver_impl.h"

#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"

#define DEFAULT_ENDPOINTS 256
#define STOP_NS           DMK_NS_PER_S

int dmk_receiver_new(const struct dmk_receiver_conf *conf, struct dmk_receiver **ret)
{
    struct dmk_receiver *rx;

    dmk_assert(conf->max_tickets > 0 && conf->incarnation > 0);
    rx = calloc(1, sizeof(*rx));
    if (!rx) {
        return -DMK_ENOMEM;
    }
    rx->conf = *conf;
    if (rx->conf.max_endpoints == 0) {
        rx->conf.max_endpoints = DEFAULT_ENDPOINTS;
    }
    rx->direct = conf->ops->lane(conf->xfer) == DMK_LANE_DIRECT;
    rx->next_generation = 1;
    rx->tickets = calloc(conf->max_tickets, sizeof(*rx->tickets));
    rx->claimants = calloc(conf->max_tickets, sizeof(*rx->claimants));
    rx->endpoints = calloc(rx->conf.max_endpoints, sizeof(*rx->endpoints));
    if (!rx->tickets || !rx->claimants || !rx->endpoints) {
        free(rx->tickets);
        free(rx->claimants);
        free(rx->endpoints);
        free(rx);
        return -DMK_ENOMEM;
    }
    *ret = rx;
    return 0;
}

void dmk_receiver_free(struct dmk_receiver **rx_ref)
{
    struct dmk_receiver *rx = *rx_ref;
    const uint64_t give_up_ns = dmk_clock_ns() + STOP_NS;
    bool open = true;

    if (!rx) {
        return;
    }
    rx->stopping = true;
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        dmk_rx_endpoint_close(rx, rx->endpoints[i].ep ? &rx->endpoints[i] : NULL);
    }
    while (open) {
        open = false;
        for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
            open |= rx->endpoints[i].ep != NULL;
        }
        if (open && dmk_clock_ns() > give_up_ns) {
            dmk_log_warn("transfer endpoints did not close in time; their memory is left behind");
            *rx_ref = NULL;
            return;
        }
        if (open) {
            (void)rx->conf.ops->progress(rx->conf.xfer);
        }
    }
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        if (rx->claimants[i].watch) {
            rx->conf.ops->watch_close(&rx->claimants[i].watch);
        }
    }
    free(rx->tickets);
    free(rx->claimants);
    free(rx->endpoints);
    free(rx);
    *rx_ref = NULL;
}

static struct dmk_rx_ticket *find_key(struct dmk_receiver *rx, uint64_t key)
{
    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        struct dmk_rx_ticket *t = &rx->tickets[i];

        if (t->state != DMK_RECEIVE_FORGOTTEN && t->key == key) {
            return t;
        }
    }
    return NULL;
}

int dmk_receiver_reserve(struct dmk_receiver *rx, uint64_t key, uint32_t n_pages_counted,
                         uint64_t now_ns, struct dmk_ticket *inout_ticket, struct dmk_error *reterr)
{
    struct dmk_ticket *ticket = inout_ticket;
    struct dmk_rx_ticket *t = NULL;
    int r;

    rx->now_ns = now_ns;
    for (uint32_t i = 0; i < rx->conf.max_tickets && !t; i++) {
        if (rx->tickets[i].state == DMK_RECEIVE_FORGOTTEN) {
            t = &rx->tickets[i];
        }
    }
    if (!t) {
        return dmk_error_set(reterr, -DMK_EFULL, "all %u transfer tickets are in use",
                             rx->conf.max_tickets);
    }
    dmk_assert(!find_key(rx, key));
    ticket->d_incarnation = rx->conf.incarnation;
    ticket->cookie = dmk_id128_random();
    ticket->generation = rx->next_generation;
    ticket->expires_unix_ms =
        (uint64_t)dmk_clock_unix_s() * 1000 + rx->conf.expiry_ns / DMK_NS_PER_MS;
    ticket->page_tokens = DMK_PAGE_TOKENS;
    ticket->bytes_expected = dmk_ticket_bytes(ticket);
    r = rx->conf.ops->address(rx->conf.xfer, ticket->address, &ticket->address_len);
    if (r < 0) {
        return dmk_error_set(reterr, r, "the page transport has no address");
    }
    r = dmk_ticket_check(ticket, reterr);
    if (r < 0) {
        return -DMK_EINVAL;
    }
    rx->next_generation++;
    *t = (struct dmk_rx_ticket){
        .state =
            dmk_receive_step(DMK_RECEIVE_FORGOTTEN, DMK_RECEIVE_EV_RESERVE, DMK_RECEIVE_IF_ROOM)
                .next,
        .key = key,
        .cookie = ticket->cookie,
        .generation = ticket->generation,
        .bytes_expected = ticket->bytes_expected,
        .n_pages = n_pages_counted,
        .due_ns = now_ns + rx->conf.expiry_ns,
    };
    return 0;
}

void dmk_receiver_cancel(struct dmk_receiver *rx, uint64_t key, uint64_t now_ns)
{
    struct dmk_rx_ticket *t = find_key(rx, key);
    const struct dmk_rx_cause cause = {0};

    rx->now_ns = now_ns;
    if (t) {
        dmk_rx_feed(rx, t, DMK_RECEIVE_EV_CANCEL, 0, &cause);
    }
}

void dmk_receiver_finish(struct dmk_receiver *rx, uint64_t key)
{
    struct dmk_rx_ticket *t = find_key(rx, key);
    const struct dmk_rx_cause cause = {0};

    if (t) {
        dmk_rx_feed(rx, t, DMK_RECEIVE_EV_FINISH, 0, &cause);
    }
}

void dmk_receiver_closed_word(struct dmk_receiver *rx, struct dmk_id128 cookie, uint64_t now_ns)
{
    struct dmk_rx_ticket *t = dmk_rx_find_cookie(rx, cookie);
    const struct dmk_rx_cause cause = {.why = DMK_RECEIVE_PEER_FAIL};

    rx->now_ns = now_ns;
    if (t) {
        dmk_rx_feed(rx, t, DMK_RECEIVE_EV_CLOSED_WORD, 0, &cause);
    }
}

struct dmk_receiver_stats dmk_receiver_stats(const struct dmk_receiver *rx)
{
    struct dmk_receiver_stats s = rx->stats;

    for (uint32_t i = 0; i < rx->conf.max_tickets; i++) {
        const struct dmk_rx_ticket *t = &rx->tickets[i];

        s.n_unclaimed += t->state == DMK_RECEIVE_UNCLAIMED;
        s.n_claimed += t->state == DMK_RECEIVE_CLAIMED;
        s.n_draining += t->state == DMK_RECEIVE_DRAINING;
        s.n_ready += t->state == DMK_RECEIVE_READY;
        s.draining_pages += t->state == DMK_RECEIVE_DRAINING ? t->n_pages : 0;
        s.refusing |= rx->claimants[i].draining_pages >= rx->conf.max_draining_pages;
    }
    for (uint32_t i = 0; i < rx->conf.max_endpoints; i++) {
        s.n_endpoints += rx->endpoints[i].ep != NULL;
    }
    return s;
}
