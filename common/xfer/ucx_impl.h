/* What the files of the UCX transport share: ucx.c owns the node and messages, ucx_ep.c endpoints, ucx_mem.c memory, keys,
 * puts and flushes, ucx_conf.c configuration and addresses. The only files that see <ucp/api/ucp.h>. */
#pragma once

#include <netinet/in.h>
#include <ucp/api/ucp.h>
#include "common/base/list.h"
#include "common/xfer/ucx.h"

#define UCX_AM_MESSAGE    1
#define UCX_MESSAGE_SLOTS 128
#define UCX_OPS_PER_SLAB  256
#define UCX_MAX_ACCEPTED  256
#define UCX_MAX_WAITING   32 /* connection requests between two progress calls */

struct ucx_node;
struct ucx_ep;

/* A put or a flush under way. */
struct ucx_op {
    struct ucx_op *next; /* in node->free_ops or node->ended */
    struct ucx_ep *ep;
    int status;
    dmk_xfer_done_fn done;
    void *ud;
};

struct ucx_slab {
    struct ucx_slab *next;
    struct ucx_op ops[UCX_OPS_PER_SLAB];
};

struct ucx_message {
    struct ucx_message *next;
    struct ucx_node *node;
    uint8_t data[DMK_XFER_MESSAGE_MAX];
};

struct ucx_key {
    struct dmk_list link; /* in ep->dead_keys once freed */
    struct ucx_ep *ep;
    ucp_rkey_h rkey; /* unpacked at the first put: the endpoint must be connected by then */
    size_t len;
    uint8_t blob[DMK_XFER_KEY_MAX];
};

struct ucx_ep {
    struct dmk_list link; /* in node->eps */
    struct ucx_node *node;
    ucp_ep_h ep;
    bool accepted; /* the other side connected */
    bool visible;  /* our user has seen it */
    bool broken, told;
    bool device_puts; /* device memory was put on it */
    bool closing, close_started, closed;
    void *close_request;
    int status;
    uint32_t n_ops;
    dmk_xfer_done_fn close_done;
    void *close_ud;
    void *user;
    struct dmk_list dead_keys; /* freed while puts with them may run */
};

struct ucx_mem {
    ucp_mem_h memh;
    uint8_t *base;
    size_t bytes;
    ucs_memory_type_t type;
};

/* What a transport name stands for. */
struct ucx_transport {
    const char *name;
    const char *tls;
    const char *device_tls; /* where pages are in device memory; NULL: it is not for those */
    ucp_err_handling_mode_t err_mode;
    enum dmk_xfer_lane lane;
};

struct ucx_node {
    const struct ucx_transport *transport;
    struct dmk_xfer_events events;
    enum dmk_mem_kind mem_kind;
    int (*device_sync)(void *ud);
    bool stopping;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_listener_h listener;
    struct sockaddr_storage address;
    char device[64];
    struct dmk_list eps;
    uint32_t n_accepted, n_waiting;
    ucp_conn_request_h waiting[UCX_MAX_WAITING];
    struct ucx_op *free_ops, *ended, **ended_tail;
    struct ucx_slab *slabs;
    struct ucx_message *free_messages, *messages;
};

static inline struct ucx_node *ucx_node_of(const struct dmk_xfer *x)
{
    return (struct ucx_node *)x;
}

static inline struct ucx_ep *ucx_ep_of(const struct dmk_xfer_ep *ep)
{
    return (struct ucx_ep *)ep;
}

/* ucx_conf.c */
int ucx_status(ucs_status_t status); /* to ours */
const struct ucx_transport *ucx_transport_find(const char *name);
/* Address to listen on (port 0 = any) and the name of its network interface. */
int ucx_bind_resolve(const char *bind, struct sockaddr_storage *ret_address, char ret_device[64],
                     struct dmk_error *reterr);
size_t ucx_sockaddr_len(const struct sockaddr_storage *address);
int ucx_address_pack(const struct sockaddr_storage *address, uint8_t *ret_blob, size_t *ret_len);
void ucx_info(const struct dmk_xfer *x, struct dmk_xfer_info *ret);
/* What the transport was chosen for is there: UCX itself would go on over what else there is. */
int ucx_check_devices(const struct ucx_node *node, struct dmk_error *reterr);
int ucx_address_unpack(struct dmk_bytes blob, struct sockaddr_storage *ret_address);
/* Puts UCX's log and signal handlers out of our way; once in a process. */
void ucx_quieten(void);

/* ucx_mem.c */
int ucx_mem_register(struct dmk_xfer *x, void *base, size_t bytes, enum dmk_mem_kind kind,
                     struct dmk_xfer_mem **ret, struct dmk_error *reterr);
void ucx_mem_unregister(struct dmk_xfer *x, struct dmk_xfer_mem **mem);
int ucx_mem_pack(struct dmk_xfer *x, struct dmk_xfer_mem *mem, uint8_t *ret_blob, size_t *ret_len);
int ucx_key_unpack(struct dmk_xfer_ep *ep, struct dmk_bytes blob, struct dmk_xfer_key **ret);
void ucx_key_free(struct dmk_xfer_key **key);
void ucx_keys_bury(struct ucx_ep *ep); /* the endpoint has no operations any more */
int ucx_put(struct dmk_xfer_ep *ep, struct dmk_xfer_mem *mem, const void *src, size_t bytes,
            struct dmk_xfer_key *key, uint64_t remote_addr, dmk_xfer_done_fn done, void *ud);
int ucx_flush(struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud);
/* Calls back operations that have ended; returns how many. */
unsigned ucx_ops_drain(struct ucx_node *node);

/* ucx_ep.c */
int ucx_ep_connect(struct dmk_xfer *x, struct dmk_bytes address, struct dmk_xfer_ep **ret,
                   struct dmk_error *reterr);
void ucx_ep_close(struct dmk_xfer *x, struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud);
void ucx_ep_begin_close(struct ucx_ep *ep, dmk_xfer_done_fn done, void *ud);
void ucx_ep_on_connection(ucp_conn_request_h request, void *node);
/* Parts of a node's progress; the counts are of events. Closings start before the worker moves on, so that
 * nothing more comes in on them. */
void ucx_eps_start_closings(struct ucx_node *node);
unsigned ucx_eps_accept(struct ucx_node *node);
unsigned ucx_eps_tell_broken(struct ucx_node *node);
unsigned ucx_eps_finish_closings(struct ucx_node *node);
