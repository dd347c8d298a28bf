/* The UCX transport as seen by the list of transports; ucx_stub.c stands in where UCX is not built.
 */
#pragma once

#include "common/xfer/xfer.h"

extern const struct dmk_xfer_ops dmk_xfer_ucx_ops;
