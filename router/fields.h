/* Reading of request bodies: typed fields with bounds, and failures that name the field's path.
 *
 * What the JSON dialects share is here too: sampling parameters, limits, stop strings. Pure but for
 * the ask that is filled; runs on pool threads. `prefix` is the path of obj with its dot
 * ("stream_options.") or "". Absent and null fields leave *ret untouched and are no failure. */
#pragma once

#include "common/json/json.h"
#include "router/api.h"

int dmk_field_real(const json_t *obj, const char *prefix, const char *key, double min, double max,
                   float *ret, struct dmk_api_error *reterr);
/* Whole numbers; 4.0 is one. */
int dmk_field_int(const json_t *obj, const char *prefix, const char *key, int64_t min, int64_t max,
                  int64_t *ret, struct dmk_api_error *reterr);
int dmk_field_bool(const json_t *obj, const char *prefix, const char *key, bool *ret,
                   struct dmk_api_error *reterr);
/* A view into obj. */
int dmk_field_str(const json_t *obj, const char *prefix, const char *key, size_t max_bytes,
                  struct dmk_str *ret, struct dmk_api_error *reterr);
/* The value, or NULL when it is absent or null. */
json_t *dmk_field_get(const json_t *obj, const char *key);
struct dmk_str dmk_field_text(const json_t *string);

/* The body as an object; the caller owns *ret_root. */
int dmk_fields_open(struct dmk_bytes body, json_t **ret_root, struct dmk_api_error *reterr);

/* Fields that would change the answer and that this server does not have. */
struct dmk_field_refused {
    const char *key;
    /* Values that mean "as without the field": false, 1, "text", empty list ... NULL: null only. */
    const char *neutral;
};
int dmk_fields_refuse(const json_t *root, const struct dmk_field_refused *refused, size_t n,
                      struct dmk_api_error *reterr);

/* model, stream, stream_options, n, seed, temperature ... stop, logit_bias: as both dialects have
 * them. */
int dmk_fields_common(const json_t *root, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                      struct dmk_api_error *reterr);
