/* Page transport: one-sided puts into another worker's page memory, and small messages on the same
 * endpoint. Three lines of promise:
 *
 *   - a put is complete at the source when its callback ran with 0 (the source may be reused);
 *   - after a flush's callback ran with 0, every put posted before it on that endpoint is visible at the
 *     target, if the target is alive; a flush alone proves nothing about a dead one;
 *   - a broken endpoint reports on_closed once, and every operation on it fails.
 *
 * A node is owned by one thread (the loop); nothing here is thread-safe and nothing blocks. Two
 * implementations: "loopback" (in one process; can delay, reorder, drop, duplicate and write late on
 * command) and "ucx". */
#pragma once

#include "common/base/error.h"
#include "common/base/hash.h"
#include "common/base/span.h"

#define DMK_XFER_ADDRESS_MAX 512 /* bytes of an address blob */
#define DMK_XFER_KEY_MAX     256 /* bytes of a packed remote key */
#define DMK_XFER_MESSAGE_MAX 2048

struct dmk_xfer;     /* a node: this process's side */
struct dmk_xfer_ep;  /* a connection to another node */
struct dmk_xfer_mem; /* registered local memory */
struct dmk_xfer_key; /* another node's memory, unpacked for one endpoint */

enum dmk_mem_kind { DMK_MEM_HOST, DMK_MEM_CUDA };

/* How late writes of a dead or hung peer can land, which decides what proves quiet. */
enum dmk_xfer_lane {
    DMK_LANE_EMULATED, /* tcp: the target's own progress copies; closing the endpoint stops writes */
    DMK_LANE_DIRECT,   /* shared memory, cma, cuda_ipc: only the end of the writer's process does */
};

struct dmk_xfer_events {
    /* A message came on ep. The bytes are valid until return. */
    void (*on_message)(void *ud, struct dmk_xfer_ep *ep, struct dmk_bytes message);
    /* The endpoint is broken or was closed by the peer; free it with ep_close. */
    void (*on_closed)(void *ud, struct dmk_xfer_ep *ep, int status);
    void *ud;
};

struct dmk_xfer_conf {
    const char *transport; /* "tcp" (PEER error mode), "shm" (no PEER), "cuda" (cuda_ipc + tcp, PEER) */
    const char *bind;      /* address or interface for tcp; NULL = loopback */
    struct dmk_xfer_events events;
};

typedef void (*dmk_xfer_done_fn)(void *ud, int status);

/* All slots are present in every implementation; wrappers dmk_xfer_* call them. */
struct dmk_xfer_ops {
    const char *name;
    int (*open)(const struct dmk_xfer_conf *conf, struct dmk_xfer **ret, struct dmk_error *reterr);
    void (*close)(struct dmk_xfer *x);
    int (*address)(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len);
    enum dmk_xfer_lane (*lane)(const struct dmk_xfer *x);

    int (*mem_register)(struct dmk_xfer *x, void *base, size_t bytes, enum dmk_mem_kind kind,
                        struct dmk_xfer_mem **ret, struct dmk_error *reterr);
    void (*mem_unregister)(struct dmk_xfer *x, struct dmk_xfer_mem **mem);
    int (*mem_pack)(struct dmk_xfer *x, struct dmk_xfer_mem *mem, uint8_t *ret_blob, size_t *ret_len);

    int (*ep_connect)(struct dmk_xfer *x, struct dmk_bytes address, struct dmk_xfer_ep **ret,
                      struct dmk_error *reterr);
    /* No callback of this endpoint runs after done; pending operations fail first. done may be NULL. */
    void (*ep_close)(struct dmk_xfer *x, struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud);
    int (*key_unpack)(struct dmk_xfer_ep *ep, struct dmk_bytes blob, struct dmk_xfer_key **ret);
    void (*key_free)(struct dmk_xfer_key **key);

    /* remote_base is the address the target registered; offset counts from it. */
    int (*put)(struct dmk_xfer_ep *ep, struct dmk_xfer_mem *mem, const void *src, size_t bytes,
               struct dmk_xfer_key *key, uint64_t remote_addr, dmk_xfer_done_fn done, void *ud);
    int (*flush)(struct dmk_xfer_ep *ep, dmk_xfer_done_fn done, void *ud);
    int (*send)(struct dmk_xfer_ep *ep, struct dmk_bytes message);

    /* Moves things on; returns how many events happened. */
    unsigned (*progress)(struct dmk_xfer *x);
    /* A descriptor to poll for reading, or -1; arm returns false when progress must be called again
     * before waiting. */
    int (*fd)(struct dmk_xfer *x);
    bool (*arm)(struct dmk_xfer *x);
    /* The user's pointer on an endpoint (both sides). */
    void (*ep_set_user)(struct dmk_xfer_ep *ep, void *user);
    void *(*ep_user)(const struct dmk_xfer_ep *ep);
};

/* "loopback" or "ucx"; NULL when unknown or not built (the stub's open says so in a sentence). */
const struct dmk_xfer_ops *dmk_xfer_find(const char *name);
