/* Numbers between bounds; see values.h.
 *
 * A range of whole numbers is cut by the number of digits; numbers of one length are followed digit by digit,
 * with two marks: so far equal to the low end, so far equal to the high end. */
#include "common/schema/values.h"

#include "common/base/assert.h"

#define MAX_DIGITS   DMK_VALUE_MAX_DIGITS
#define MAX_FRACTION 17
#define MAX_NUMBER   999999999999999999 /* 18 digits */

static unsigned count_digits(uint64_t v)
{
    unsigned n = 1;

    while (v >= 10) {
        v /= 10;
        n++;
    }
    return n;
}

static void put_digits(uint64_t v, unsigned n, uint8_t out[MAX_DIGITS])
{
    dmk_assert(n <= MAX_DIGITS);
    while (n-- > 0) {
        out[n] = (uint8_t)(v % 10);
        v /= 10;
    }
}

static void join_digits(struct dmk_build *b, uint32_t from, unsigned first, unsigned last,
                        uint32_t to)
{
    if (first <= last) {
        dmk_build_bytes(b, from, (uint8_t)('0' + first), (uint8_t)('0' + last), to);
    }
}

/* low <= x <= high, both of n digits. at[low][high] is the node where the ends were equal so far. */
static void join_length(struct dmk_build *b, uint64_t low, uint64_t high, unsigned n, uint32_t from,
                        uint32_t to)
{
    uint8_t x[MAX_DIGITS], y[MAX_DIGITS];
    uint32_t at[2][2];

    put_digits(low, n, x);
    put_digits(high, n, y);
    at[0][0] = dmk_build_node(b);
    at[0][1] = dmk_build_node(b);
    at[1][0] = dmk_build_node(b);
    at[1][1] = from;
    for (unsigned i = 0; i < n; i++) {
        uint32_t next[2][2];

        for (unsigned k = 0; k < 4; k++) {
            next[k >> 1][k & 1] = i == n - 1 ? to : dmk_build_node(b);
        }
        join_digits(b, at[0][0], 0, 9, next[0][0]);
        join_digits(b, at[1][0], x[i], x[i], next[1][0]);
        join_digits(b, at[1][0], x[i] + 1u, 9, next[0][0]);
        join_digits(b, at[0][1], y[i], y[i], next[0][1]);
        if (y[i] > 0) {
            join_digits(b, at[0][1], 0, y[i] - 1u, next[0][0]);
        }
        if (x[i] == y[i]) {
            join_digits(b, at[1][1], x[i], x[i], next[1][1]);
        } else {
            join_digits(b, at[1][1], x[i], x[i], next[1][0]);
            join_digits(b, at[1][1], x[i] + 1u, y[i] - 1u, next[0][0]);
            join_digits(b, at[1][1], y[i], y[i], next[0][1]);
        }
        for (unsigned k = 0; k < 4; k++) {
            at[k >> 1][k & 1] = next[k >> 1][k & 1];
        }
    }
}

/* Joins by low <= x <= high, without sign and without leading zeros. */
static void join_range(struct dmk_build *b, uint64_t low, uint64_t high, uint32_t from, uint32_t to)
{
    uint64_t start = 0, ten = 10; /* numbers of n digits: start .. ten - 1 */

    if (low > high) {
        return;
    }
    for (unsigned n = 1; n <= count_digits(high); n++) {
        const uint64_t first = low > start ? low : start;
        const uint64_t last = high < ten - 1 ? high : ten - 1;

        if (first <= last) {
            join_length(b, first, last, n, from, to);
        }
        start = ten;
        ten *= 10;
    }
}

/* The ends as numbers that are allowed themselves. */
static void find_ends(const struct dmk_number_bounds *r, int64_t *ret_min, int64_t *ret_max)
{
    *ret_min = r->has_min ? r->min + r->above_min : -MAX_NUMBER;
    *ret_max = r->has_max ? r->max - r->below_max : MAX_NUMBER;
}

struct dmk_piece dmk_piece_integer(struct dmk_build *b, const struct dmk_number_bounds *bounds)
{
    const uint32_t in = dmk_build_node(b), out = dmk_build_node(b);
    const uint32_t minus = dmk_build_node(b);
    int64_t min, max;

    find_ends(bounds, &min, &max);
    dmk_build_bytes(b, in, '-', '-', minus);
    if (max >= 0 && min <= max) {
        join_range(b, min > 0 ? (uint64_t)min : 0, (uint64_t)max, in, out);
    }
    if (min < 0 && min <= max) {
        join_range(b, max < 0 ? (uint64_t)-max : 1, (uint64_t)-min, minus, out);
    }
    return dmk_piece_nodes(b, in, out, in);
}

enum fraction { FRACTION_ANY, FRACTION_ZERO, FRACTION_MORE };

/* From the node behind the whole part: nothing or a fraction; only zeros; a fraction that is not zero. */
static void join_fraction(struct dmk_build *b, enum fraction kind, uint32_t from, uint32_t to)
{
    uint32_t zeros = dmk_build_node(b); /* nothing but zeros so far */

    if (kind != FRACTION_MORE) {
        dmk_build_skip(b, from, to);
    }
    dmk_build_bytes(b, from, '.', '.', zeros);
    for (unsigned i = 0; i < MAX_FRACTION; i++) {
        const uint32_t next = dmk_build_node(b);

        dmk_build_bytes(b, zeros, '0', '0', next);
        if (kind != FRACTION_MORE) {
            dmk_build_skip(b, next, to);
        }
        zeros = next;
    }
    if (kind == FRACTION_ZERO) {
        return;
    }
    /* A digit that is not zero, at each place, and then what is left of places. */
    {
        uint32_t at = dmk_build_node(b), some;

        dmk_build_skip(b, from, at);
        zeros = dmk_build_node(b);
        dmk_build_bytes(b, from, '.', '.', zeros);
        some = DMK_BUILD_NO_MAX;
        for (unsigned i = 0; i < MAX_FRACTION; i++) {
            const uint32_t next_some = dmk_build_node(b), next_zeros = dmk_build_node(b);

            dmk_build_bytes(b, zeros, '1', '9', next_some);
            dmk_build_bytes(b, zeros, '0', '0', next_zeros);
            if (some != DMK_BUILD_NO_MAX) {
                dmk_build_bytes(b, some, '0', '9', next_some);
            }
            dmk_build_skip(b, next_some, to);
            some = next_some;
            zeros = next_zeros;
        }
        (void)at;
    }
}

/* Sizes (numbers without sign) from low to high, each end allowed or not; high may have none. */
static void join_size(struct dmk_build *b, uint64_t low, bool low_open, bool has_high,
                      uint64_t high, bool high_open, uint32_t from, uint32_t to)
{
    const uint32_t whole = dmk_build_node(b), edge = dmk_build_node(b), start = dmk_build_node(b);

    if (has_high && (low > high || (low == high && (low_open || high_open)))) {
        return;
    }
    join_fraction(b, FRACTION_ANY, whole, to);
    if (!has_high) {
        join_range(b, low + low_open, MAX_NUMBER, from, whole);
    } else if (low + low_open < high) {
        join_range(b, low + low_open, high - 1, from, whole);
    }
    if (has_high && !high_open) {
        join_fraction(b, FRACTION_ZERO, edge, to);
        if (!(low_open && low == high)) {
            join_range(b, high, high, from, edge);
        }
    }
    if (low_open && (!has_high || low < high)) {
        join_fraction(b, FRACTION_MORE, start, to);
        join_range(b, low, low, from, start);
    }
}

static void join_exponent(struct dmk_build *b, uint32_t from, uint32_t to)
{
    const uint32_t e = dmk_build_node(b), sign = dmk_build_node(b), digit = dmk_build_node(b);

    dmk_build_bytes(b, from, 'E', 'E', e);
    dmk_build_bytes(b, from, 'e', 'e', e);
    dmk_build_bytes(b, e, '+', '+', sign);
    dmk_build_bytes(b, e, '-', '-', sign);
    dmk_build_skip(b, e, sign);
    dmk_build_bytes(b, sign, '0', '9', digit);
    dmk_build_skip(b, digit, to);
    dmk_build_bytes(b, digit, '0', '9', to);
}

struct dmk_piece dmk_piece_number(struct dmk_build *b, const struct dmk_number_bounds *r)
{
    const uint32_t in = dmk_build_node(b), out = dmk_build_node(b);
    const uint32_t minus = dmk_build_node(b), end = dmk_build_node(b);
    const bool free = !r->has_min && !r->has_max;

    dmk_build_bytes(b, in, '-', '-', minus);
    dmk_build_skip(b, end, out);
    if (free) {
        join_exponent(b, end, out);
    }
    if (!r->has_max || r->max >= 0) {
        const bool has_low = r->has_min && r->min >= 0;

        join_size(b, has_low ? (uint64_t)r->min : 0, has_low && r->above_min, r->has_max,
                  r->has_max ? (uint64_t)r->max : 0, r->below_max, in, end);
    }
    if (!r->has_min || r->min < 0) {
        const bool has_low = r->has_max && r->max <= 0;

        join_size(b, has_low ? (uint64_t)-r->max : 0, has_low ? r->below_max : !free, r->has_min,
                  r->has_min ? (uint64_t)-r->min : 0, r->above_min, minus, end);
    }
    return dmk_piece_nodes(b, in, out, in);
}
