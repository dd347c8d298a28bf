/* JSON Schema to rules: which values a schema allows, in the one way in which they may be written.
 *
 * Written compactly, with at most one space behind each colon and comma; members in the order of
 * `properties`, further ones behind them; whole numbers without fraction or exponent, all numbers with at most 18
 * digits on each side. docs/API.md lists the keywords. What a schema says and is not enforced is refused by
 * keyword and path; annotations and names that no draft knows are ignored.
 *
 * Subschemas become rules that call each other, so recursion costs nothing here. One thread. */
#pragma once

#include "common/json/json.h"
#include "common/schema/build.h"

struct dmk_schemas;

struct dmk_schemas *dmk_schemas_new(struct dmk_build *build); /* NULL: no memory */
void dmk_schemas_free(struct dmk_schemas **schemas);

/* The rule of a schema, which stays while this lives; path is its place, for sentences. No rule may be under
 * construction. */
int dmk_schemas_add(struct dmk_schemas *schemas, json_t *schema, const char *path,
                    uint32_t *ret_rule, struct dmk_error *reterr);
/* The rule of any JSON object. */
uint32_t dmk_schemas_any_object(struct dmk_schemas *schemas);
