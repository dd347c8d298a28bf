/* The UCX transport: a node listens on a socket address; endpoints are connections to such addresses, so
 * that both sides learn of a broken one at once, in every error mode (the connection's own socket tells).
 * Puts are one-sided where the lane is DIRECT. Everything on the owner's thread; callbacks only inside
 * progress. See xfer.h. */
#include "common/xfer/ucx.h"
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/xfer/ucx_impl.h"
#include "common/xfer/watch.h"
#include <stdlib.h>

#define STOP_NS      DMK_NS_PER_S
#define MAX_ADVANCES 64 /* worker progress calls in one of ours */

/* ---- messages --------------------------------------------------------------------------------- */

static void give_message(struct ucx_message *m)
{
    m->next = m->node->free_messages;
    m->node->free_messages = m;
}

static void on_sent(void *request, ucs_status_t status, void *ud)
{
    (void)status; /* a broken endpoint tells by its own event */
    give_message(ud);
    ucp_request_free(request);
}

/* The message goes as payload without a header, which every version of UCX sends rightly. */
static int send_message(struct dmk_xfer_ep *e, struct dmk_bytes message)
{
    struct ucx_ep *ep = ucx_ep_of(e);
    struct ucx_message *m = ep->node->free_messages;
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
    };
    ucs_status_ptr_t request;

    dmk_assert(message.len <= DMK_XFER_MESSAGE_MAX);
    if (ep->broken || ep->closing) {
        return -DMK_EPEER;
    }
    if (!m) {
        return -DMK_EFULL;
    }
    ep->node->free_messages = m->next;
    memcpy(m->data, message.data, message.len);
    param.user_data = m;
    request = ucp_am_send_nbx(ep->ep, UCX_AM_MESSAGE, NULL, 0, m->data, message.len, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        give_message(m);
    }
    return UCS_PTR_IS_ERR(request) ? -DMK_EPEER : 0;
}

static struct ucx_ep *find_ep(struct ucx_node *node, ucp_ep_h handle)
{
    for (struct dmk_list *at = node->eps.next; at != &node->eps; at = at->next) {
        struct ucx_ep *ep = dmk_container_of(at, struct ucx_ep, link);

        if (ep->ep == handle) {
            return ep;
        }
    }
    return NULL;
}

static ucs_status_t on_message(void *ud, const void *header, size_t header_len, void *data,
                               size_t len, const ucp_am_recv_param_t *param)
{
    struct ucx_node *node = ud;
    struct ucx_ep *ep = NULL;

    (void)header;
    (void)header_len;
    if (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) {
        ep = find_ep(node, param->reply_ep);
    }
    if (!ep || ep->closing || ep->broken || node->stopping || len > DMK_XFER_MESSAGE_MAX ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        return UCS_OK; /* refused: not ours, or too long to be */
    }
    ep->visible = true;
    node->events.on_message(node->events.ud, (struct dmk_xfer_ep *)ep,
                            (struct dmk_bytes){data, len});
    return UCS_OK;
}

/* ---- the node --------------------------------------------------------------------------------- */

static void destroy_node(struct ucx_node *node)
{
    if (node->worker) {
        ucp_worker_destroy(node->worker);
    }
    if (node->context) {
        ucp_cleanup(node->context);
    }
    while (node->slabs) {
        struct ucx_slab *slab = node->slabs;

        node->slabs = slab->next;
        free(slab);
    }
    free(node->messages);
    free(node);
}

static ucs_status_t configure(const struct ucx_transport *t, enum dmk_mem_kind mem_kind,
                              const char *device, ucp_config_t **ret)
{
    const char *const pairs[][2] = {
        {"TLS", mem_kind == DMK_MEM_KIND_CUDA ? t->device_tls : t->tls},
        {"NET_DEVICES", device},
        {"TCP_TX_SEG_SIZE", "256k"}, /* the default of 8k costs two thirds of the bandwidth */
        {"TCP_RX_SEG_SIZE", "256k"},
    };
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);

    if (status != UCS_OK) {
        return status;
    }
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]) && status == UCS_OK; i++) {
        status = ucp_config_modify(config, pairs[i][0], pairs[i][1]);
    }
    if (status != UCS_OK) {
        ucp_config_release(config);
        return status;
    }
    *ret = config;
    return UCS_OK;
}

static ucs_status_t create_worker(struct ucx_node *node, const char *device)
{
    const ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
    };
    const ucp_worker_params_t worker = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = UCX_AM_MESSAGE,
        .cb = on_message,
        .arg = node,
    };
    ucp_config_t *config;
    ucs_status_t status = configure(node->transport, node->mem_kind, device, &config);

    if (status == UCS_OK) {
        status = ucp_init(&params, config, &node->context);
        ucp_config_release(config);
    }
    if (status == UCS_OK) {
        status = ucp_worker_create(node->context, &worker, &node->worker);
    }
    if (status == UCS_OK) {
        status = ucp_worker_set_am_recv_handler(node->worker, &handler);
    }
    return status;
}

static ucs_status_t start_listening(struct ucx_node *node)
{
    const ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {(const struct sockaddr *)&node->address,
                     (socklen_t)ucx_sockaddr_len(&node->address)},
        .conn_handler = {ucx_ep_on_connection, node},
    };
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    ucs_status_t status = ucp_listener_create(node->worker, &params, &node->listener);

    if (status == UCS_OK) {
        status = ucp_listener_query(node->listener, &attr);
    }
    if (status == UCS_OK) {
        node->address = attr.sockaddr; /* with the port that was given */
    }
    return status;
}

static void close_node(struct dmk_xfer *x);

static int open_node(const struct dmk_xfer_conf *conf, struct dmk_xfer **ret,
                     struct dmk_error *reterr)
{
    const struct ucx_transport *transport = ucx_transport_find(conf->transport);
    struct ucx_node *node;
    ucs_status_t status;
    int r;

    if (!transport) {
        return dmk_error_set(reterr, -DMK_EINVAL, "page transport \"%s\" is none of tcp, shm, cuda",
                             conf->transport ? conf->transport : "");
    }
    if (conf->mem_kind == DMK_MEM_KIND_CUDA && !transport->device_tls) {
        return dmk_error_set(
            reterr, -DMK_ENOTSUP,
            "page transport \"%s\" is for pages in host memory, and these are in a "
            "device's: use \"cuda\" between GPUs of one host, else \"tcp\"",
            transport->name);
    }
    ucx_quieten();
    node = calloc(1, sizeof(*node));
    if (!node) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for the page transport");
    }
    node->transport = transport;
    node->events = conf->events;
    node->mem_kind = conf->mem_kind;
    node->device_sync = conf->device_sync;
    node->ended_tail = &node->ended;
    dmk_list_init(&node->eps);
    node->messages = calloc(UCX_MESSAGE_SLOTS, sizeof(*node->messages));
    if (!node->messages) {
        destroy_node(node);
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for the page transport");
    }
    for (int i = 0; i < UCX_MESSAGE_SLOTS; i++) {
        node->messages[i].node = node;
        give_message(&node->messages[i]);
    }
    r = ucx_bind_resolve(conf->bind, &node->address, node->device, reterr);
    if (r < 0) {
        destroy_node(node);
        return r;
    }
    status = create_worker(node, node->device);
    if (status == UCS_OK) {
        status = start_listening(node);
    }
    if (status != UCS_OK) {
        char name[sizeof(node->device)];

        memcpy(name, node->device, sizeof(name));
        close_node((struct dmk_xfer *)node);
        return dmk_error_set(reterr, ucx_status(status),
                             "page transport \"%s\" cannot start on %s, interface %s (%s)",
                             transport->name, conf->bind ? conf->bind : "127.0.0.1", name,
                             ucs_status_string(status));
    }
    r = ucx_check_devices(node, reterr);
    if (r < 0) {
        close_node((struct dmk_xfer *)node);
        return r;
    }
    *ret = (struct dmk_xfer *)node;
    return 0;
}

static unsigned advance(struct ucx_node *node)
{
    unsigned n = 0;

    ucx_eps_start_closings(node);
    while (n < MAX_ADVANCES && ucp_worker_progress(node->worker)) {
        n++;
    }
    n += ucx_ops_drain(node);
    n += ucx_eps_accept(node);
    n += ucx_eps_tell_broken(node);
    n += ucx_eps_finish_closings(node);
    return n;
}

static unsigned progress(struct dmk_xfer *x)
{
    return advance(ucx_node_of(x));
}

static void close_node(struct dmk_xfer *x)
{
    struct ucx_node *node = ucx_node_of(x);
    const uint64_t give_up_ns = dmk_clock_ns() + STOP_NS;

    node->stopping = true;
    if (node->listener) {
        ucp_listener_destroy(node->listener);
    }
    for (struct dmk_list *at = node->eps.next; at != &node->eps; at = at->next) {
        struct ucx_ep *ep = dmk_container_of(at, struct ucx_ep, link);

        if (!ep->closing) {
            ucx_ep_begin_close(ep, NULL, NULL);
        }
    }
    while (!dmk_list_empty(&node->eps) && dmk_clock_ns() < give_up_ns) {
        (void)advance(node);
    }
    if (!dmk_list_empty(&node->eps)) {
        dmk_log_debug("page transport endpoints did not close in time");
        return; /* what they still use stays with the process */
    }
    destroy_node(node);
}

static int get_address(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len)
{
    return ucx_address_pack(&ucx_node_of(x)->address, ret_blob, ret_len);
}

static enum dmk_xfer_lane get_lane(const struct dmk_xfer *x)
{
    return ucx_node_of(x)->transport->lane;
}

static int get_fd(struct dmk_xfer *x)
{
    int fd;

    return ucp_worker_get_efd(ucx_node_of(x)->worker, &fd) == UCS_OK ? fd : -1;
}

static bool arm(struct dmk_xfer *x)
{
    const struct ucx_node *node = ucx_node_of(x);

    if (node->ended || node->n_waiting > 0) {
        return false;
    }
    for (const struct dmk_list *at = node->eps.next; at != &node->eps; at = at->next) {
        const struct ucx_ep *ep = dmk_container_of(at, struct ucx_ep, link);

        if ((ep->closing && !ep->close_started) || (ep->broken && !ep->told && !ep->closing)) {
            return false;
        }
    }
    return ucp_worker_arm(node->worker) == UCS_OK;
}

static void set_user(struct dmk_xfer_ep *ep, void *user)
{
    ucx_ep_of(ep)->user = user;
}

static void *get_user(const struct dmk_xfer_ep *ep)
{
    return ucx_ep_of(ep)->user;
}

/* ---- watches ---------------------------------------------------------------------------------- */

static int watch_self(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len)
{
    (void)x;
    return dmk_watch_describe(ret_blob, ret_len);
}

static int open_watch(struct dmk_xfer *x, struct dmk_bytes blob, struct dmk_xfer_watch **ret)
{
    struct dmk_watch *watch = calloc(1, sizeof(*watch));
    int r;

    (void)x;
    if (!watch) {
        return -DMK_ENOMEM;
    }
    r = dmk_watch_open(blob, watch);
    if (r < 0) {
        free(watch);
        return r;
    }
    *ret = (struct dmk_xfer_watch *)watch;
    return 0;
}

static bool is_watch_gone(struct dmk_xfer_watch *watch)
{
    return dmk_watch_is_gone((const struct dmk_watch *)watch);
}

static void close_watch(struct dmk_xfer_watch **watch)
{
    dmk_watch_close((struct dmk_watch *)*watch);
    free(*watch);
    *watch = NULL;
}

const struct dmk_xfer_ops dmk_xfer_ucx_ops = {
    .name = "ucx",
    .open = open_node,
    .close = close_node,
    .address = get_address,
    .lane = get_lane,
    .info = ucx_info,
    .mem_register = ucx_mem_register,
    .mem_unregister = ucx_mem_unregister,
    .mem_pack = ucx_mem_pack,
    .ep_connect = ucx_ep_connect,
    .ep_close = ucx_ep_close,
    .key_unpack = ucx_key_unpack,
    .key_free = ucx_key_free,
    .put = ucx_put,
    .flush = ucx_flush,
    .send = send_message,
    .progress = progress,
    .fd = get_fd,
    .arm = arm,
    .ep_set_user = set_user,
    .ep_user = get_user,
    .watch_self = watch_self,
    .watch_open = open_watch,
    .watch_gone = is_watch_gone,
    .watch_close = close_watch,
};
