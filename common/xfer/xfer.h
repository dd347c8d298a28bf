/* Page transport: one-sided puts into another worker's page memory, and small messages on the same
 * endpoint. Three lines of promise:
 *
 *   - a put is complete at the source when its callback ran with 0 (the source may be reused);
 *   - after a flush's callback ran with 0, every put posted before it on that endpoint is visible
 * at the target, if the target is alive; a flush alone proves nothing about a dead one;
 *   - a broken endpoint reports on_closed once, and every operation on it fails.
 *
 * A node is owned by one thread (the loop); nothing here is thread-safe and nothing blocks. Two
 * implementations: "loopback" (in one process; can delay, reorder, drop, duplicate and write late
 * on command) and "ucx". */
#pragma once

#include "common/base/error.h"
#include "common/base/hash.h"
#include "common/base/span.h"

#define DMK_XFER_ADDRESS_MAX 512 /* bytes of an address blob */
#define DMK_XFER_KEY_MAX     512 /* bytes of a packed remote key */
#define DMK_XFER_MESSAGE_MAX 2048
#define DMK_XFER_WATCH_MAX   64 /* bytes that say how to watch a process */

struct dmk_xfer;       /* a node: this process's side */
struct dmk_xfer_ep;    /* a connection to another node */
struct dmk_xfer_mem;   /* registered local memory */
struct dmk_xfer_key;   /* another node's memory, unpacked for one endpoint */
struct dmk_xfer_watch; /* an eye on another node's process */
struct dmk_loopback;   /* the fabric of in-process nodes (loopback.h) */

enum dmk_mem_kind { DMK_MEM_KIND_HOST, DMK_MEM_KIND_CUDA };

/* How late writes of a dead or hung peer can land, which decides what proves quiet. */
enum dmk_xfer_lane {
    DMK_LANE_EMULATED, /* tcp: the target's own progress copies; closing the endpoint stops writes
                        */
    DMK_LANE_DIRECT,   /* shared memory, cma, cuda_ipc: only the end of the writer's process does */
};

struct dmk_xfer_events {
    /* A message came on ep, which may be one that the other side opened. Bytes are valid until
     * return. */
    void (*on_message)(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message);
    /* The endpoint is broken or was closed by the peer; every operation on it fails from now on. It
     * still has to be given back with ep_close. Comes once, and not for one that never had a
     * message or a local owner. */
    void (*on_closed)(void *ud, struct dmk_xfer_ep *ep, int status);
    void *ud;
};

struct dmk_xfer_conf {
    const char
        *transport; /* "tcp" (PEER error mode), "shm" (no PEER), "cuda" (cuda_ipc + tcp, PEER) */
    const char
        *bind; /* "address[:port]" to listen on; NULL = 127.0.0.1, any port. loopback: a name */
    struct dmk_loopback *fabric; /* loopback only */
    enum dmk_mem_kind mem_kind;  /* of what will be registered; host memory goes everywhere */
    /* Waits until every copy that this process has started on its devices has ended: 0, or negative
     * where that can not be told. Called when an endpoint that device memory was put on has closed.
     * NULL where all registered memory is host memory; without it such an endpoint never proves its
     * copies. */
    int (*device_sync)(void *ud);
    struct dmk_xfer_events events;
};

/* How this node's pages travel, for logs, health and metrics. */
struct dmk_xfer_info {
    char transport[16]; /* "tcp", "shm", "cuda", "loopback" */
    char device[64];  /* the network interface, the only one that is used; "" when there is none */
    char address[64]; /* that it listens on */
};

/* status: 0 or a negative code. */
typedef void (*dmk_xfer_done_fn)(void *ud, int status);

/* All slots are present in every implementation. Functions may be called inside callbacks;
 * callbacks run inside progress only, never inside another call. */
struct dmk_xfer_ops {
    const char *name;
    int (*open)(const struct dmk_xfer_conf *conf, struct dmk_xfer **ret, struct dmk_error *reterr);
    /* Frees the node and every endpoint left. No callback runs during or after it, so whoever waits
     * for one (sender, receiver) is freed first. Memory must have been unregistered. */
    void (*close)(struct dmk_xfer *x);
    /* ret_blob holds DMK_XFER_ADDRESS_MAX bytes. */
    int (*address)(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len);
    enum dmk_xfer_lane (*lane)(const struct dmk_xfer *x);
    void (*info)(const struct dmk_xfer *x, struct dmk_xfer_info *ret);

    int (*mem_register)(struct dmk_xfer *x, void *base, size_t bytes, enum dmk_mem_kind kind,
                        struct dmk_xfer_mem **ret, struct dmk_error *reterr);
    /* Stops nothing: writes of others may still land. */
    void (*mem_unregister)(struct dmk_xfer *x, struct dmk_xfer_mem **mem);
    /* ret_blob holds DMK_XFER_KEY_MAX bytes. */
    int (*mem_pack)(struct dmk_xfer *x, struct dmk_xfer_mem *mem, uint8_t *ret_blob,
                    size_t *ret_len);

    /* Returns before the other side has answered; a peer that is not there shows by on_closed. */
    int (*ep_connect)(struct dmk_xfer *x, struct dmk_bytes address, struct dmk_xfer_ep **ret,
                      struct dmk_error *reterr);
    /* Callbacks of pending operations run with a failure, then done (may be NULL) and nothing after
     * it. When done runs, no write that came in on this endpoint can land any more (EMULATED). Its
     * status is about our own puts: 0 = no copy of theirs still runs; otherwise one may (both
     * lanes). */
    void (*ep_close)(struct dmk_xfer *x, struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud);
    int (*key_unpack)(struct dmk_xfer_ep *ep, struct dmk_bytes blob, struct dmk_xfer_key **ret);
    /* Before its endpoint is closed. */
    void (*key_free)(struct dmk_xfer_key **key);

    /* remote_addr lies inside the memory that the key names, as an address of the target.
     * -DMK_EPEER when the endpoint is broken; done is then not called, nor for any other negative
     * result. */
    int (*put)(struct dmk_xfer_ep *ep, struct dmk_xfer_mem *mem, const void *src, size_t bytes,
               struct dmk_xfer_key *key, uint64_t remote_addr, dmk_xfer_done_fn done, void *ud);
    int (*flush)(struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud);
    /* The message is copied. Messages of one endpoint arrive in order. -DMK_EFULL: too many wait.
     */
    int (*send)(struct dmk_xfer_ep *ep, struct dmk_bytes message);

    /* Moves things on; returns how many events happened. */
    unsigned (*progress)(struct dmk_xfer *x);
    /* A descriptor to poll for reading, or -1 (call progress by timer); arm returns false when
     * progress must be called again before waiting. */
    int (*fd)(struct dmk_xfer *x);
    bool (*arm)(struct dmk_xfer *x);
    /* The user's pointer on an endpoint, NULL at first (both sides). */
    void (*ep_set_user)(struct dmk_xfer_ep *ep, void *user);
    void *(*ep_user)(const struct dmk_xfer_ep *ep);

    /* How another process on this host can watch ours; ret_blob holds DMK_XFER_WATCH_MAX bytes. */
    int (*watch_self)(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len);
    /* -DMK_ENOTSUP: not on this host or not visible from here; -DMK_EPEER: gone already. */
    int (*watch_open)(struct dmk_xfer *x, struct dmk_bytes blob, struct dmk_xfer_watch **ret);
    /* True once the process, with every thread and device context of it, has ended. */
    bool (*watch_gone)(struct dmk_xfer_watch *watch);
    void (*watch_close)(struct dmk_xfer_watch **watch);
};

/* "loopback" or "ucx"; NULL when unknown. Where UCX is not built, open of "ucx" says so in a
 * sentence. */
const struct dmk_xfer_ops *dmk_xfer_find(const char *name);
