/* An eye on another process of this host: pidfd plus the process's start time, so that a number that was
 * given away again is not mistaken for it. The blob travels in a claim. */
#pragma once

#include "common/base/span.h"

struct dmk_watch {
    int pidfd;
};

/* Of this process; ret_blob holds DMK_XFER_WATCH_MAX bytes. -DMK_EIO when /proc is not to be read. */
int dmk_watch_describe(uint8_t *ret_blob, size_t *ret_len);
/* -DMK_EFORMAT, -DMK_ENOTSUP (another host, boot or process namespace), -DMK_EPEER (has ended). */
int dmk_watch_open(struct dmk_bytes blob, struct dmk_watch *ret_watch);
bool dmk_watch_is_gone(const struct dmk_watch *watch);
void dmk_watch_close(struct dmk_watch *watch);
