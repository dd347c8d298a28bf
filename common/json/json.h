/* Strict JSON on top of jansson, with sentences.
 *
 * Text is RFC 8259: UTF-8 only, no duplicate keys, nothing after the value, bounded size and depth.
 * Three things that it may hold have no place in a json_t and come as the nearest that has: an escape that
 * is half a character (a lone surrogate) and one that is NUL are U+FFFD, a whole number beyond 64 bits is a
 * real. Values are jansson's json_t; whoever parses owns the root (json_decref)
 * and may use jansson's own accessors on it. The getters below add bounds and errors that name the
 * place.
 *
 * `where` is the place of `obj` for the sentence, e.g. "/m/config.json: rope_scaling" or
 * "messages[2]"; a bad key then reads: /m/config.json: rope_scaling: "factor" must be ..., not "x".
 * No state; any thread, but a value belongs to one thread at a time. */
#pragma once

#include <jansson.h>
#include "common/base/error.h"
#include "common/base/span.h"

/* Parses one value of any type. name is what the text is called in sentences (a path, "the body").
 */
int dmk_json_parse(struct dmk_str text, const char *name, uint32_t max_depth, json_t **ret_root,
                   struct dmk_error *reterr);

/* Reads and parses a file; the root must be an object. -DMK_ENOENT when there is no such file. */
int dmk_json_load(const char *path, size_t max_bytes, uint32_t max_depth, json_t **ret_root,
                  struct dmk_error *reterr);

enum dmk_json_need { DMK_JSON_OPTIONAL, DMK_JSON_REQUIRED };

/* All getters: 1 = found and stored; 0 = absent or null, *ret untouched (so it may hold a default);
 * negative = of another type or out of bounds, or absent though required. */
int dmk_json_get_u64(const json_t *obj, const char *where, const char *key, enum dmk_json_need need,
                     uint64_t min, uint64_t max, uint64_t *ret, struct dmk_error *reterr);
int dmk_json_get_u32(const json_t *obj, const char *where, const char *key, enum dmk_json_need need,
                     uint32_t min, uint32_t max, uint32_t *ret, struct dmk_error *reterr);
/* Takes integers too. */
int dmk_json_get_real(const json_t *obj, const char *where, const char *key,
                      enum dmk_json_need need, double min, double max, double *ret,
                      struct dmk_error *reterr);
int dmk_json_get_bool(const json_t *obj, const char *where, const char *key,
                      enum dmk_json_need need, bool *ret, struct dmk_error *reterr);
/* The view lives as long as obj does. It never holds a NUL. */
int dmk_json_get_str(const json_t *obj, const char *where, const char *key, enum dmk_json_need need,
                     struct dmk_str *ret, struct dmk_error *reterr);
/* Borrowed references. */
int dmk_json_get_object(const json_t *obj, const char *where, const char *key,
                        enum dmk_json_need need, json_t **ret, struct dmk_error *reterr);
int dmk_json_get_array(const json_t *obj, const char *where, const char *key,
                       enum dmk_json_need need, json_t **ret, struct dmk_error *reterr);

#define DMK_JSON_SHOW_BYTES 64

/* A value as it may stand in a sentence: compact, cut at the bound. Returns ret_text. */
const char *dmk_json_show(const json_t *value, char ret_text[DMK_JSON_SHOW_BYTES]);
