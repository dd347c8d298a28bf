/* Stands in where damask was built without CUDA: opening says so. */
#include "common/backend/backend.h"

static int open_stub(const struct dmk_backend_conf *conf, struct dmk_backend **ret,
                     struct dmk_error *reterr)
{
    (void)conf;
    (void)ret;
    return dmk_error_set(
        reterr, -DMK_ENOTSUP,
        "backend 'cuda' is not part of this build; use backend 'cpu', or build with "
        "-Dcuda=enabled where nvcc is installed");
}

const struct dmk_backend_ops dmk_backend_cuda = {.name = "cuda", .open = open_stub};
