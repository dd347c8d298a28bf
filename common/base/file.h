/* Small files that may change while the program runs: keys, certificates.
 *
 * A stamp says which state of a file was read, so that the next look costs one system call. A Secret of
 * Kubernetes is replaced by turning a link, which changes the inode: that counts as a change too. Any thread;
 * a stamp belongs to one. */
#pragma once

#include "common/base/buf.h"
#include "common/base/error.h"

struct dmk_file_stamp {
    uint64_t device, inode, size, changed_ns;
};

/* Appends the whole file to out, at most max_bytes of it. name is what the file is called in sentences
 * ("certificate"). When ret_stamp is given it gets the state that was read. */
int dmk_file_read(const char *path, const char *name, size_t max_bytes, struct dmk_buf *out,
                  struct dmk_file_stamp *ret_stamp, struct dmk_error *reterr);
/* True when the file is there and is not the one of the stamp. */
bool dmk_file_changed(const char *path, const struct dmk_file_stamp *stamp);
