/* Pieces and rules of JSON values, free of schemas. Rules that every schema uses are made once per build. */
#pragma once

#include "common/json/json.h"
#include "common/schema/chars.h"

#define DMK_VALUE_MAX_DIGITS 18 /* of a whole number, and of the parts of a fraction */

/* Rules that are shared: DMK_BUILD_NO_MAX while they were not asked for. */
struct dmk_values {
    struct dmk_build *build;
    uint32_t string, string_tail, number, any, any_object, any_array;
};

void dmk_values_init(struct dmk_values *values, struct dmk_build *build);

/* These may not be called while a rule is under construction, unless it was asked for before. */
uint32_t dmk_values_string(struct dmk_values *values);
uint32_t dmk_values_string_tail(struct dmk_values *values); /* what stands behind the first quote */
uint32_t dmk_values_number(struct dmk_values *values);
uint32_t dmk_values_any(struct dmk_values *values);
uint32_t dmk_values_any_object(struct dmk_values *values);
uint32_t dmk_values_any_array(struct dmk_values *values);

/* At most one space behind a colon or a comma. */
struct dmk_piece dmk_piece_mark(struct dmk_build *build, char mark);

/* A value as it stands in an enum or const: compact. -DMK_EINVAL when it is too large. */
int dmk_piece_literal(struct dmk_build *build, const json_t *value, struct dmk_piece *ret);

/* Bounds of a number; whole numbers only. */
struct dmk_number_bounds {
    bool has_min, has_max, above_min, below_max; /* above, below: the bound itself is left out */
    int64_t min, max;                            /* within 18 digits */
};
/* A piece that allows nothing when no number lies between. */
struct dmk_piece dmk_piece_integer(struct dmk_build *build, const struct dmk_number_bounds *bounds);
struct dmk_piece dmk_piece_number(struct dmk_build *build, const struct dmk_number_bounds *bounds);
