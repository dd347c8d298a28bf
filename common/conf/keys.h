/* Bearer keys: who may call. They come from an option and from a file with one key a line, which is read
 * again when it has changed (looked at once a second, when somebody calls).
 *
 * In the file empty lines and lines that begin with # are left out. A file that can not be read, or that
 * holds no key, stops a start; later it is told to the log and the keys from before stay. Owner: one thread. */
#pragma once

#include "common/base/span.h"
#include "common/conf/conf.h"

#define DMK_KEYS_MAX      1024
#define DMK_KEY_MAX_BYTES 512

struct dmk_keys;

/* path "" or NULL: no file. Keys are of 1 to DMK_KEY_MAX_BYTES printable characters without white space. */
int dmk_keys_new(const struct dmk_conf_list *list, const char *path, struct dmk_keys **ret,
                 struct dmk_error *reterr);
void dmk_keys_free(struct dmk_keys **keys);
/* False: none are set, so that everybody may call. */
bool dmk_keys_needed(const struct dmk_keys *keys);
/* Whether the value of an Authorization header ("Bearer KEY"; data NULL: none was sent) holds one of the keys, in
 * their very spelling. How long it takes depends on what was sent and on how many keys there are, not on
 * what they are. */
bool dmk_keys_allow(struct dmk_keys *keys, struct dmk_str authorization);
