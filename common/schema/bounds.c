/* minimum, maximum and their like of a schema, as the bounds of a number. */
#include "common/schema/schema_impl.h"

#include <math.h>

#define MAX_BOUND 999999999999999999 /* 18 digits; as a double it would be 10^18 */

/* A bound that no number of 18 digits passes is the end of those: nothing beyond is written anyway. */
static int read_bound(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema,
                      const char *key, bool low, bool whole, bool up, bool *ret_has, int64_t *ret)
{
    const json_t *v = json_object_get(schema, key);
    double x = json_number_value(v);
    int64_t bound;

    *ret_has = false;
    if (!v || json_is_boolean(v)) {
        return 0;
    }
    if (!json_is_number(v)) {
        return dmk_schema__bad(s, job, "\"%s\" must be a number", key);
    }
    if (x != floor(x)) {
        if (!whole) {
            return dmk_schema__bad(s, job, "\"%s\" must be a whole number here", key);
        }
        x = up ? ceil(x) : floor(x);
    }
    if (json_is_integer(v)) {
        bound = json_integer_value(v);
    } else {
        bound = fabs(x) < 1e18 ? (int64_t)x : x < 0 ? INT64_MIN : INT64_MAX;
    }
    if (low ? bound > MAX_BOUND : bound < -MAX_BOUND) {
        return dmk_schema__bad(s, job, "\"%s\" must have at most 18 digits", key);
    }
    *ret_has = true;
    *ret = bound < -MAX_BOUND ? -MAX_BOUND : bound > MAX_BOUND ? MAX_BOUND : bound;
    return 0;
}

/* One end: an inclusive bound and an exclusive one, of which the narrower counts; the oldest drafts mark the
 * first as exclusive by true. */
static int read_end(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema,
                    bool low, bool whole, bool *ret_has, bool *ret_open, int64_t *ret)
{
    const char *closed_key = low ? "minimum" : "maximum";
    const char *open_key = low ? "exclusiveMinimum" : "exclusiveMaximum";
    const json_t *open_value = json_object_get(schema, open_key);
    bool has_closed = false, has_open = false;
    int64_t closed = 0, open = 0;
    int r;

    if ((r = read_bound(s, job, schema, closed_key, low, whole, low, &has_closed, &closed)) < 0 ||
        /* Above 1.5 means from 2 on: the bound below, left out. */
        (r = read_bound(s, job, schema, open_key, low, whole, !low, &has_open, &open)) < 0) {
        return r;
    }
    *ret_has = has_closed || has_open;
    *ret_open = has_open && (!has_closed || (low ? open >= closed : open <= closed));
    *ret = *ret_open ? open : closed;
    if (json_is_true(open_value) && has_closed) {
        *ret_open = true;
    }
    return 0;
}

int dmk_schema__bounds(struct dmk_schemas *s, const struct dmk_job *job, const json_t *schema,
                       bool whole, struct dmk_number_bounds *ret)
{
    int r = read_end(s, job, schema, true, whole, &ret->has_min, &ret->above_min, &ret->min);

    r = r < 0 ? r
              : read_end(s, job, schema, false, whole, &ret->has_max, &ret->below_max, &ret->max);
    if (r == 0 && ret->has_min && ret->has_max) {
        const int64_t low = ret->min + (whole && ret->above_min);
        const int64_t high = ret->max - (whole && ret->below_max);

        if (low > high || (!whole && low == high && (ret->above_min || ret->below_max))) {
            return dmk_schema__bad(s, job, "no number lies between its bounds");
        }
    }
    return r;
}
