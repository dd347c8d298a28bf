/* For socket plumbing that lives beside the loop (common/http): the libuv loop underneath. */
#pragma once

#include <uv.h>
#include "common/loop/loop.h"

uv_loop_t *dmk_loop__uv(struct dmk_loop *loop);
