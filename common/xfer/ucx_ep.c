/* Endpoints over UCX: connecting, accepting, breaking, closing; see ucx_impl.h. */
#include "common/base/assert.h"
#include "common/xfer/ucx_impl.h"
#include <stdlib.h>

static void on_ep_error(void *ud, ucp_ep_h handle, ucs_status_t status)
{
    struct ucx_ep *ep = ud;

    (void)handle;
    ep->broken = true; /* told in progress */
    ep->status = ucx_status(status);
}

static struct ucx_ep *new_ep(struct ucx_node *node)
{
    struct ucx_ep *ep = calloc(1, sizeof(*ep));

    if (ep) {
        ep->node = node;
        dmk_list_init(&ep->dead_keys);
        dmk_list_push_back(&node->eps, &ep->link);
    }
    return ep;
}

static void free_ep(struct ucx_ep *ep)
{
    ucx_keys_bury(ep);
    ep->node->n_accepted -= ep->accepted;
    dmk_list_remove(&ep->link);
    free(ep);
}

static int create_ep(struct ucx_ep *ep, ucp_ep_params_t *params)
{
    ucs_status_t status;

    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params->err_mode = ep->node->transport->err_mode;
    params->err_handler = (ucp_err_handler_t){on_ep_error, ep};
    status = ucp_ep_create(ep->node->worker, params, &ep->ep);
    return ucx_status(status);
}

int ucx_ep_connect(struct dmk_xfer *x, struct dmk_bytes address, struct dmk_xfer_ep **ret,
                   struct dmk_error *reterr)
{
    struct ucx_node *node = ucx_node_of(x);
    struct sockaddr_storage to;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
    };
    struct ucx_ep *ep;
    int r = ucx_address_unpack(address, &to);

    if (r < 0) {
        return dmk_error_set(reterr, r,
                             "peer's page transport address of %zu bytes is not one of "
                             "UCX: both pools must use the same transport",
                             address.len);
    }
    ep = new_ep(node);
    if (!ep) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for an endpoint");
    }
    params.sockaddr.addr = (const struct sockaddr *)&to;
    params.sockaddr.addrlen = (socklen_t)ucx_sockaddr_len(&to);
    r = create_ep(ep, &params);
    if (r < 0) {
        free_ep(ep);
        return dmk_error_set(reterr, r, "page transport \"%s\" cannot open an endpoint (%s)",
                             node->transport->name, dmk_status_message(r));
    }
    ep->visible = true;
    *ret = (struct dmk_xfer_ep *)ep;
    return 0;
}

void ucx_ep_on_connection(ucp_conn_request_h request, void *ud)
{
    struct ucx_node *node = ud;

    if (node->n_waiting < UCX_MAX_WAITING && !node->stopping) {
        node->waiting[node->n_waiting++] = request; /* accepted in progress */
    } else {
        (void)ucp_listener_reject(node->listener, request);
    }
}

void ucx_ep_begin_close(struct ucx_ep *ep, dmk_xfer_done_fn done, void *ud)
{
    ep->closing = true;
    ep->close_done = done;
    ep->close_ud = ud;
}

/* Whoever connects and says nothing gives way to newer ones. */
static void make_room(struct ucx_node *node)
{
    for (struct dmk_list *at = node->eps.next; at != &node->eps; at = at->next) {
        struct ucx_ep *ep = dmk_container_of(at, struct ucx_ep, link);

        if (ep->accepted && !ep->visible && !ep->closing) {
            ucx_ep_begin_close(ep, NULL, NULL);
            return;
        }
    }
}

unsigned ucx_eps_accept(struct ucx_node *node)
{
    const unsigned n = node->n_waiting;

    for (unsigned i = 0; i < n; i++) {
        ucp_ep_params_t params = {
            .field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
            .conn_request = node->waiting[i],
        };
        struct ucx_ep *ep = NULL;

        if (node->n_accepted < UCX_MAX_ACCEPTED) {
            ep = new_ep(node);
        } else {
            make_room(node);
        }
        if (!ep) {
            (void)ucp_listener_reject(node->listener, node->waiting[i]);
            continue;
        }
        ep->accepted = true;
        node->n_accepted++;
        if (create_ep(ep, &params) < 0) {
            free_ep(ep);
        }
    }
    node->n_waiting = 0;
    return n;
}

void ucx_ep_close(struct dmk_xfer *x, struct dmk_xfer_ep *e, dmk_xfer_done_fn done, void *ud)
{
    (void)x;
    dmk_assert(!ucx_ep_of(e)->closing);
    ucx_ep_begin_close(ucx_ep_of(e), done,
                       ud); /* done in progress: we may be inside one of its callbacks */
}

/* Force cancels what is pending; UCX has it in the PEER mode only. Without it the other side must take
 * part, or end. */
static void start_close(struct ucx_ep *ep)
{
    const bool force = ep->node->transport->err_mode == UCP_ERR_HANDLING_MODE_PEER;
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0,
    };
    const ucs_status_ptr_t request = ucp_ep_close_nbx(ep->ep, &param);

    ep->close_started = true;
    if (UCS_PTR_IS_PTR(request)) {
        ep->close_request = request;
    } else {
        ep->closed = true;
    }
}

/* Before the worker moves on, so that nothing more comes in on them. */
void ucx_eps_start_closings(struct ucx_node *node)
{
    for (struct dmk_list *at = node->eps.next; at != &node->eps; at = at->next) {
        struct ucx_ep *ep = dmk_container_of(at, struct ucx_ep, link);

        if (ep->closing && !ep->close_started) {
            start_close(ep);
        }
    }
}

/* True when a closing endpoint is closed and none of its operations is left. */
static bool is_closed(struct ucx_ep *ep)
{
    if (ep->close_request && ucp_request_check_status(ep->close_request) != UCS_INPROGRESS) {
        ucp_request_free(ep->close_request);
        ep->close_request = NULL;
        ep->closed = true;
    }
    return ep->closed && ep->n_ops == 0;
}

/* Copies of CUDA memory may outlive the operations that began them. */
static int prove_copies(const struct ucx_node *node, bool device_puts)
{
    if (!device_puts) {
        return 0;
    }
    return node->device_sync ? node->device_sync(node->events.ud) : -DMK_ENOTSUP;
}

unsigned ucx_eps_finish_closings(struct ucx_node *node)
{
    unsigned n = 0;

    for (struct dmk_list *at = node->eps.next, *next; at != &node->eps; at = next) {
        struct ucx_ep *ep = dmk_container_of(at, struct ucx_ep, link);
        const dmk_xfer_done_fn done = ep->close_done;
        void *ud = ep->close_ud;
        const bool device_puts = ep->device_puts;

        next = at->next;
        if (!ep->closing || !is_closed(ep)) {
            continue;
        }
        (void)ucx_ops_drain(node);
        free_ep(ep);
        n++;
        if (done && !node->stopping) {
            done(ud, prove_copies(node, device_puts));
            next = node->eps.next; /* the callback may have changed the list */
        }
    }
    return n;
}

unsigned ucx_eps_tell_broken(struct ucx_node *node)
{
    unsigned n = 0;

    for (struct dmk_list *at = node->eps.next, *next; at != &node->eps; at = next) {
        struct ucx_ep *ep = dmk_container_of(at, struct ucx_ep, link);

        next = at->next;
        if (!ep->broken || ep->told || ep->closing) {
            continue;
        }
        ep->told = true;
        n++;
        if (!ep->visible) {
            ucx_ep_begin_close(ep, NULL, NULL);
        } else if (!node->stopping) {
            node->events.on_closed(node->events.ud, (struct dmk_xfer_ep *)ep, ep->status);
            next = node->eps.next;
        }
    }
    return n;
}
