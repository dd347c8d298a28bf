/* Memory, keys, puts and flushes over UCX; see ucx_impl.h. */
#include "common/xfer/ucx_impl.h"
#include "common/base/assert.h"
#include <stdlib.h>

int ucx_mem_register(struct dmk_xfer *x, void *base, size_t bytes, enum dmk_mem_kind kind,
                     struct dmk_xfer_mem **ret, struct dmk_error *reterr)
{
    struct ucx_node *node = ucx_node_of(x);
    struct ucx_mem *mem = calloc(1, sizeof(*mem));
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = base,
        .length = bytes,
        .memory_type = kind == DMK_MEM_KIND_CUDA ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST,
    };
    ucs_status_t status;

    if (!mem) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "out of memory for a registration");
    }
    status = ucp_mem_map(node->context, &params, &mem->memh);
    if (status != UCS_OK) {
        free(mem);
        return dmk_error_set(reterr, ucx_status(status),
                             "page transport \"%s\" cannot register %zu bytes of %s memory (%s)",
                             node->transport->name, bytes,
                             kind == DMK_MEM_KIND_CUDA ? "CUDA" : "host",
                             ucs_status_string(status));
    }
    mem->base = base;
    mem->bytes = bytes;
    mem->type = params.memory_type;
    *ret = (struct dmk_xfer_mem *)mem;
    return 0;
}

void ucx_mem_unregister(struct dmk_xfer *x, struct dmk_xfer_mem **m)
{
    struct ucx_mem *mem = (struct ucx_mem *)*m;

    if (mem) {
        (void)ucp_mem_unmap(ucx_node_of(x)->context, mem->memh);
        free(mem);
        *m = NULL;
    }
}

int ucx_mem_pack(struct dmk_xfer *x, struct dmk_xfer_mem *m, uint8_t *ret_blob, size_t *ret_len)
{
    const struct ucx_mem *mem = (const struct ucx_mem *)m;
    void *packed;
    size_t len;
    const ucs_status_t status = ucp_rkey_pack(ucx_node_of(x)->context, mem->memh, &packed, &len);

    if (status != UCS_OK) {
        return ucx_status(status);
    }
    if (len <= DMK_XFER_KEY_MAX) {
        memcpy(ret_blob, packed, len);
        *ret_len = len;
    }
    ucp_rkey_buffer_release(packed);
    return len <= DMK_XFER_KEY_MAX ? 0 : -DMK_EFULL;
}

int ucx_key_unpack(struct dmk_xfer_ep *e, struct dmk_bytes blob, struct dmk_xfer_key **ret)
{
    struct ucx_key *key;

    if (blob.len == 0 || blob.len > DMK_XFER_KEY_MAX) {
        return -DMK_EFORMAT;
    }
    key = calloc(1, sizeof(*key));
    if (!key) {
        return -DMK_ENOMEM;
    }
    key->ep = ucx_ep_of(e);
    key->len = blob.len;
    memcpy(key->blob, blob.data, blob.len);
    dmk_list_init(&key->link);
    *ret = (struct dmk_xfer_key *)key;
    return 0;
}

static void destroy_key(struct ucx_key *key)
{
    if (key->rkey) {
        ucp_rkey_destroy(key->rkey);
    }
    dmk_list_remove(&key->link);
    free(key);
}

/* Puts under way still use it: then it waits for the end of its endpoint. */
void ucx_key_free(struct dmk_xfer_key **k)
{
    struct ucx_key *key = (struct ucx_key *)*k;

    *k = NULL;
    if (key && key->ep->n_ops > 0) {
        dmk_list_push_back(&key->ep->dead_keys, &key->link);
    } else if (key) {
        destroy_key(key);
    }
}

void ucx_keys_bury(struct ucx_ep *ep)
{
    while (!dmk_list_empty(&ep->dead_keys)) {
        destroy_key(dmk_container_of(dmk_list_pop(&ep->dead_keys), struct ucx_key, link));
    }
}

/* ---- operations ------------------------------------------------------------------------------- */

static struct ucx_op *take_op(struct ucx_ep *ep, dmk_xfer_done_fn done, void *ud)
{
    struct ucx_node *node = ep->node;
    struct ucx_op *op;

    if (!node->free_ops) {
        struct ucx_slab *slab = calloc(1, sizeof(*slab));

        if (!slab) {
            return NULL;
        }
        slab->next = node->slabs;
        node->slabs = slab;
        for (int i = 0; i < UCX_OPS_PER_SLAB; i++) {
            slab->ops[i].next = node->free_ops;
            node->free_ops = &slab->ops[i];
        }
    }
    op = node->free_ops;
    node->free_ops = op->next;
    *op = (struct ucx_op){.ep = ep, .done = done, .ud = ud};
    ep->n_ops++;
    return op;
}

static void give_op(struct ucx_op *op)
{
    struct ucx_node *node = op->ep->node;

    op->ep->n_ops--;
    op->next = node->free_ops;
    node->free_ops = op;
}

static void end_op(struct ucx_op *op, ucs_status_t status)
{
    struct ucx_node *node = op->ep->node;

    op->status = ucx_status(status);
    op->next = NULL;
    *node->ended_tail = op;
    node->ended_tail = &op->next;
}

static void on_op(void *request, ucs_status_t status, void *ud)
{
    end_op(ud, status);
    ucp_request_free(request);
}

/* What a UCX call gave back: callbacks wait for progress also where the operation has ended at once. */
static int accept_request(struct ucx_op *op, ucs_status_ptr_t request)
{
    if (UCS_PTR_IS_ERR(request)) {
        give_op(op);
        return UCS_PTR_STATUS(request) == UCS_ERR_NO_MEMORY ? -DMK_ENOMEM : -DMK_EPEER;
    }
    if (!request) {
        end_op(op, UCS_OK);
    }
    return 0;
}

int ucx_put(struct dmk_xfer_ep *e, struct dmk_xfer_mem *m, const void *src, size_t bytes,
            struct dmk_xfer_key *k, uint64_t remote_addr, dmk_xfer_done_fn done, void *ud)
{
    struct ucx_ep *ep = ucx_ep_of(e);
    struct ucx_key *key = (struct ucx_key *)k;
    const struct ucx_mem *mem = (const struct ucx_mem *)m;
    const size_t offset = (size_t)((const uint8_t *)src - mem->base);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send = on_op,
        .memh = mem->memh,
        .memory_type = mem->type,
    };
    struct ucx_op *op;

    dmk_assert(offset <= mem->bytes && bytes <= mem->bytes - offset);
    ep->device_puts |= mem->type != UCS_MEMORY_TYPE_HOST;
    if (ep->broken || ep->closing) {
        return -DMK_EPEER;
    }
    if (!key->rkey) {
        const ucs_status_t status = ucp_ep_rkey_unpack(ep->ep, key->blob, &key->rkey);

        if (status != UCS_OK) {
            key->rkey = NULL;
            return -DMK_EFORMAT;
        }
    }
    op = take_op(ep, done, ud);
    if (!op) {
        return -DMK_ENOMEM;
    }
    param.user_data = op;
    return accept_request(op, ucp_put_nbx(ep->ep, src, bytes, remote_addr, key->rkey, &param));
}

int ucx_flush(struct dmk_xfer_ep *e, dmk_xfer_done_fn done, void *ud)
{
    struct ucx_ep *ep = ucx_ep_of(e);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_op,
    };
    struct ucx_op *op;

    if (ep->broken || ep->closing) {
        return -DMK_EPEER;
    }
    op = take_op(ep, done, ud);
    if (!op) {
        return -DMK_ENOMEM;
    }
    param.user_data = op;
    return accept_request(op, ucp_ep_flush_nbx(ep->ep, &param));
}

unsigned ucx_ops_drain(struct ucx_node *node)
{
    unsigned n = 0;

    while (node->ended) {
        struct ucx_op *op = node->ended;
        const dmk_xfer_done_fn done = op->done;
        void *ud = op->ud;
        const int status = op->status;

        node->ended = op->next;
        if (!node->ended) {
            node->ended_tail = &node->ended;
        }
        give_op(op);
        if (done && !node->stopping) {
            done(ud, status);
        }
        n++;
    }
    return n;
}
