/* The list of backends, and the rules that each of their tables has to keep. */
#include "common/backend/backend.h"

#include <string.h>
#include "common/base/assert.h"

static const struct dmk_backend_ops *const backends[] = {
    &dmk_backend_cpu,
    &dmk_backend_ref,
    &dmk_backend_cuda,
};

static void check_ops(const struct dmk_backend_ops *ops)
{
    dmk_assert(ops->open && ops->close && ops->memory && ops->alloc && ops->free && ops->stream &&
               ops->copy && ops->sync && ops->event_new && ops->event_free && ops->record &&
               ops->wait && ops->wait_host && ops->kernels);
    dmk_assert(!ops->async || (ops->fill && ops->describe && ops->reach));
    bool graphs = ops->graph_begin != NULL;
    dmk_assert(graphs == (ops->graph_end != NULL) && graphs == (ops->graph_run != NULL) &&
               graphs == (ops->graph_free != NULL));
}

int dmk_backend_open(const char *name, const struct dmk_backend_conf *conf,
                     struct dmk_backend **ret, struct dmk_error *reterr)
{
    for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++) {
        if (strcmp(backends[i]->name, name) == 0) {
            int status = backends[i]->open(conf, ret, reterr);
            if (status == 0) {
                check_ops(backends[i]);
            }
            return status;
        }
    }
    return dmk_error_set(reterr, -DMK_ENOENT, "backend '%s' is none of cpu, ref, cuda", name);
}

void dmk_backend_close(struct dmk_backend **backend)
{
    if (*backend) {
        (*backend)->ops->close(*backend);
        *backend = NULL;
    }
}
