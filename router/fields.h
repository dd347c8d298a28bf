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
/* True for a whole number that is a token id. */
bool dmk_field_token(const json_t *v, int64_t *ret_id);

/* The body as an object; the caller owns *ret_root. */
int dmk_fields_open(struct dmk_bytes body, json_t **ret_root, struct dmk_api_error *reterr);

/* Fields that would change the answer and that this server does not have. */
struct dmk_field_refused {
    const char *key;
    /* Values that mean "as without the field": false, 1, "text", empty list ... NULL: null only. */
    const char *neutral;
};

/* Scalar fields as tables: the same rows read bodies and stand in the served description of the API
 * (openapi.h), so that the two can not differ. */
enum dmk_field_kind {
    DMK_KIND_REAL,    /* float */
    DMK_KIND_INT,     /* 4 or 8 bytes */
    DMK_KIND_BOOL,    /* bool */
    DMK_KIND_TEXT,    /* char[size], at most size - 1 bytes; nothing kept when size is 0 */
    DMK_KIND_STRINGS, /* an object whose values are strings; nothing kept */
};
struct dmk_field {
    const char *key;
    enum dmk_field_kind kind;
    double min, max;   /* of text: max is the bound in bytes when nothing is kept */
    size_t at, size;   /* of the value in the ask; size 0 = it is checked and no more */
    size_t has_at;     /* of a bool that is set when the field is given; 0 = none */
    bool above;        /* above min, not from min */
    const char *about; /* one sentence for the description */
};
/* The place of a member for a row. */
#define DMK_ASK_AT(member) offsetof(struct dmk_ask, member), sizeof(((struct dmk_ask *)0)->member)

/* All tables of one dialect's body. */
struct dmk_field_tables {
    const char *schema; /* name of the body's schema in openapi.json */
    const struct dmk_field *fields;
    size_t n_fields;
    const struct dmk_field_refused *refused;
    size_t n_refused;
    bool
        samples; /* the rows of dmk_fields_sampling are read too, those of dmk_fields_refused refused */
};

/* Refuses and reads what the tables hold, but for reading the sampling rows. */
int dmk_fields_read(const json_t *root, const struct dmk_field_tables *tables, struct dmk_ask *ask,
                    struct dmk_api_error *reterr);
/* The rows that all dialects of prompts share. */
const struct dmk_field *dmk_fields_sampling(size_t *ret_n);
/* What those dialects all refuse. */
const struct dmk_field_refused *dmk_fields_refused(size_t *ret_n);
/* The model's name, as every body has it. */
int dmk_fields_model(const json_t *root, struct dmk_ask *ask, struct dmk_api_error *reterr);

/* model, stream, stream_options, the sampling table, stop, stop_token_ids, logit_bias: as Chat Completions and
 * Completions have them. */
int dmk_fields_common(const json_t *root, const struct dmk_api_limits *limits, struct dmk_ask *ask,
                      struct dmk_api_error *reterr);
/* best_of, which is in the ask already: checks it, and makes it the number that is sampled. */
int dmk_fields_best_of(const struct dmk_api_limits *limits, struct dmk_ask *ask,
                       struct dmk_api_error *reterr);
