/* What the files of the schema compiler share. Private to common/schema. */
#pragma once

#include "common/schema/schema.h"
#include "common/schema/values.h"

#define MAX_JOBS         2048u
#define MAX_OWNED        4096u
#define MAX_PROPERTIES   512u
#define MAX_ALTERNATIVES 64u
#define MAX_ENUM         1024u
#define MAX_FLATTEN      64u /* parts of one schema: references and members of allOf */
#define PATH_BYTES       256u

/* A schema that is to become a rule. */
struct dmk_job {
    json_t *schema;
    json_t *root; /* what "#" means in it */
    uint32_t rule;
    uint32_t parent; /* job; its own index for a schema that was asked for */
    char *key;       /* its place in the parent, or for a root its name */
};

struct dmk_memo {
    const json_t *schema;
    uint32_t rule;
};

struct dmk_schemas {
    struct dmk_build *build;
    struct dmk_values values;
    struct dmk_job *jobs;
    uint32_t n_jobs, n_done, cap_jobs;
    json_t **owned; /* schemas that were made here */
    uint32_t n_owned, cap_owned;
    struct dmk_memo *memo; /* hash table by address */
    uint32_t n_memo, cap_memo;
    struct dmk_error *err; /* of the call that is under way */
};

/* A failure at job's place: "path: sentence". */
int dmk_schema__bad(struct dmk_schemas *s, const struct dmk_job *job, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Keeps a new schema until the end. False: no memory, or too many. Takes the reference. */
bool dmk_schema__own(struct dmk_schemas *s, json_t *schema);
/* The rule of a schema that stands at key in job's; declared, and compiled later. Negative: failed. */
int dmk_schema__rule(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                     const char *key, uint32_t *ret);

/* merge.c */
/* A keyword that would change the meaning and is not enforced; NULL = none. */
const char *dmk_schema__refused(const json_t *schema);
/* True when only annotations stand in it: it allows everything. */
bool dmk_schema__is_free(const json_t *schema);
/* The same schema without $ref and allOf (with a single one of them and nothing else, as it is). Borrowed. */
int dmk_schema__flatten(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                        json_t **ret);
/* The values that two lists of an enum share, or NULL: no memory. The caller's. */
json_t *dmk_schema__common_values(const json_t *x, const json_t *y);
/* What a local reference points to, or NULL. Borrowed. */
json_t *dmk_schema__resolve(json_t *root, const char *ref);
/* exclude.c */
/* Types as bits. */
enum {
    DMK_TYPE_OBJECT = 1,
    DMK_TYPE_ARRAY = 2,
    DMK_TYPE_STRING = 4,
    DMK_TYPE_INTEGER = 8,
    DMK_TYPE_FRACTION = 16, /* numbers that are not whole */
    DMK_TYPE_NUMBER = 24,
    DMK_TYPE_BOOLEAN = 32,
    DMK_TYPE_NULL = 64,
    DMK_TYPE_ALL = 127,
};
/* What types a flat schema allows: as it says, or by the keywords that it has. -DMK_EINVAL for other words. */
int dmk_schema__types(const json_t *schema, unsigned *ret);
unsigned dmk_schema__type_of(const json_t *value);
/* Whether no value can satisfy both. */
bool dmk_schema__disjoint(struct dmk_schemas *s, const struct dmk_job *job, json_t *x, json_t *y);

/* bounds.c: of whole numbers, or of any. */
int dmk_schema__bounds(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema,
                       bool whole, struct dmk_number_bounds *ret);

/* object.c: the body of a rule. Its schemas' rules are found before it is begun. */
int dmk_schema__object(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                       uint32_t *ret_rule);
int dmk_schema__array(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                      uint32_t *ret_rule);
/* string.c */
int dmk_schema__string(struct dmk_schemas *s, const struct dmk_job *job, json_t *schema,
                       uint32_t *ret_rule);
/* A bound such as minItems: 0 when absent. */
int dmk_schema__count(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema,
                      const char *key, uint32_t absent, uint32_t *ret);
/* format.c: the expression of a known format, NULL for others. */
const char *dmk_schema__format(const char *name);
