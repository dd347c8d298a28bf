/* The short way of dmk_json_parse. Internal to common/json. */
#pragma once

#include <jansson.h>
#include "common/base/span.h"

/* The value of a text that is plain JSON of at most max_depth levels, as jansson reads it; else NULL: the text
 * has a fault, or something rare (half characters, NUL, long keys), and takes the careful way. */
json_t *dmk_json__parse_fast(struct dmk_str text, uint32_t max_depth);
