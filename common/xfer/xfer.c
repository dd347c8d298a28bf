/* The list of transports. */
#include "common/xfer/xfer.h"
#include "common/xfer/loopback.h"
#include "common/xfer/ucx.h"

const struct dmk_xfer_ops *dmk_xfer_find(const char *name)
{
    static const struct dmk_xfer_ops *const all[] = {&dmk_xfer_loopback_ops, &dmk_xfer_ucx_ops};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (strcmp(all[i]->name, name) == 0) {
            return all[i];
        }
    }
    return NULL;
}
