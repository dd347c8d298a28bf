/* Stands in for UCX where it was not found at build time: opening says so. */
#include "common/xfer/ucx.h"

static int open_stub(const struct dmk_xfer_conf *conf, struct dmk_xfer **ret,
                     struct dmk_error *reterr)
{
    (void)ret;
    return dmk_error_set(reterr, -DMK_ENOTSUP,
                         "page transport \"%s\" needs UCX, which this build was made without: "
                         "configure with -Ddeps_dir=... or install the system's UCX",
                         conf->transport ? conf->transport : "");
}

const struct dmk_xfer_ops dmk_xfer_ucx_ops = {.name = "ucx", .open = open_stub};
