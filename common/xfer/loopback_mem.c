/* Memory, keys and watches of loopback nodes; see loopback_impl.h. */
#include "common/xfer/loopback_impl.h"
#include <stdlib.h>

struct watch {
    const struct node *node;
};

int dmk_loopback_mem_register(struct dmk_xfer *x, void *base, size_t bytes, enum dmk_mem_kind kind,
                              struct dmk_xfer_mem **ret, struct dmk_error *reterr)
{
    struct node *node = node_of(x);
    struct mem *mem;

    if (kind != DMK_MEM_KIND_HOST) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "the loopback moves host memory only");
    }
    mem = calloc(1, sizeof(*mem));
    if (!mem) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for a registration");
    }
    *mem = (struct mem){.node = node, .id = node->fabric->next_id++, .base = base, .bytes = bytes};
    dmk_list_push_back(&node->fabric->mems, &mem->link);
    *ret = (struct dmk_xfer_mem *)mem;
    return 0;
}

void dmk_loopback_mem_unregister(struct dmk_xfer *x, struct dmk_xfer_mem **mem)
{
    (void)x;
    if (*mem) {
        ((struct mem *)*mem)->base = NULL;
        *mem = NULL;
    }
}

int dmk_loopback_mem_pack(struct dmk_xfer *x, struct dmk_xfer_mem *m, uint8_t *ret_blob,
                          size_t *ret_len)
{
    const struct mem *mem = (const struct mem *)m;
    const uint64_t words[3] = {mem->id, (uintptr_t)mem->base, mem->bytes};

    (void)x;
    memcpy(ret_blob, words, sizeof(words));
    *ret_len = sizeof(words);
    return 0;
}

int dmk_loopback_key_unpack(struct dmk_xfer_ep *ep, struct dmk_bytes blob,
                            struct dmk_xfer_key **ret)
{
    struct dmk_loopback *f = half_of(ep)->node->fabric;
    uint64_t words[3];

    if (blob.len != sizeof(words)) {
        return -DMK_EFORMAT;
    }
    memcpy(words, blob.data, sizeof(words));
    for (struct dmk_list *at = f->mems.next; at != &f->mems; at = at->next) {
        struct mem *mem = dmk_container_of(at, struct mem, link);
        struct key *key;

        if (mem->id != words[0]) {
            continue;
        }
        key = calloc(1, sizeof(*key));
        if (!key) {
            return -DMK_ENOMEM;
        }
        *key = (struct key){mem, words[1], words[2]};
        *ret = (struct dmk_xfer_key *)key;
        return 0;
    }
    return -DMK_EFORMAT;
}

void dmk_loopback_key_free(struct dmk_xfer_key **key)
{
    free(*key);
    *key = NULL;
}

int dmk_loopback_watch_self(struct dmk_xfer *x, uint8_t *ret_blob, size_t *ret_len)
{
    memcpy(ret_blob, &node_of(x)->id, sizeof(uint64_t));
    *ret_len = sizeof(uint64_t);
    return 0;
}

int dmk_loopback_watch_open(struct dmk_xfer *x, struct dmk_bytes blob, struct dmk_xfer_watch **ret)
{
    struct dmk_loopback *f = node_of(x)->fabric;
    uint64_t id;

    if (blob.len != sizeof(id)) {
        return -DMK_ENOTSUP;
    }
    memcpy(&id, blob.data, sizeof(id));
    for (struct dmk_list *at = f->nodes.next; at != &f->nodes; at = at->next) {
        const struct node *node = dmk_container_of(at, struct node, link);
        struct watch *watch;

        if (node->id != id) {
            continue;
        }
        if (node->closed || node->killed) {
            return -DMK_EPEER;
        }
        watch = calloc(1, sizeof(*watch));
        if (!watch) {
            return -DMK_ENOMEM;
        }
        watch->node = node;
        *ret = (struct dmk_xfer_watch *)watch;
        return 0;
    }
    return -DMK_ENOTSUP;
}

bool dmk_loopback_watch_gone(struct dmk_xfer_watch *watch)
{
    return dmk_loopback_node_gone(((const struct watch *)watch)->node);
}

void dmk_loopback_watch_close(struct dmk_xfer_watch **watch)
{
    free(*watch);
    *watch = NULL;
}
