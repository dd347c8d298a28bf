/* The reader of regular expressions; see regex.h. Groups that are open are a list, not calls. */
#include "common/schema/regex.h"

#include <string.h>
#include "common/base/spell.h"

/* A group under way: alternatives that are complete, and the parts of the one at hand. */
struct group {
    struct dmk_piece alternatives, branch, atom;
    bool has_alternatives, has_branch, has_atom;
    bool from_start, to_end; /* of the branch: it has ^, $ */
};

struct reader {
    struct dmk_build *b;
    struct dmk_str text;
    size_t at;
    enum dmk_regex_match match;
    enum dmk_spelling spelling;
    bool tick;
    struct group groups[DMK_REGEX_MAX_GROUPS];
    unsigned depth;
    struct dmk_chars chars; /* of the atom at hand */
    struct dmk_error *err;
};

static int bad(struct reader *r, const char *what)
{
    return dmk_error_set(r->err, -DMK_EINVAL, "%s at byte %zu of the expression", what, r->at);
}

static bool at_end(const struct reader *r)
{
    return r->at >= r->text.len;
}

static char peek(const struct reader *r)
{
    return at_end(r) ? 0 : r->text.data[r->at];
}

static bool take(struct reader *r, const char *word)
{
    const size_t n = strlen(word);

    if (r->text.len - r->at < n || memcmp(r->text.data + r->at, word, n) != 0) {
        return false;
    }
    r->at += n;
    return true;
}

/* ---------------------------------------------------------------- branches */

static struct group *top(struct reader *r)
{
    return &r->groups[r->depth];
}

/* The atom at hand will not be repeated any more: it becomes part of the branch. */
static void close_atom(struct reader *r)
{
    struct group *g = top(r);

    if (g->has_atom) {
        g->branch = g->has_branch ? dmk_piece_then(r->b, g->branch, g->atom) : g->atom;
        g->has_branch = true;
        g->has_atom = false;
    }
}

static void set_atom(struct reader *r, struct dmk_piece atom)
{
    close_atom(r);
    top(r)->atom = atom;
    top(r)->has_atom = true;
}

static struct dmk_piece any_text(struct reader *r)
{
    const uint32_t in = dmk_build_node(r->b), loop = dmk_build_node(r->b);
    const uint32_t out = dmk_build_node(r->b);

    dmk_build_skip(r->b, in, loop);
    dmk_build_skip(r->b, loop, out);
    if (r->spelling == DMK_SPELL_JSON) {
        dmk_chars_join_any(r->b, r->tick, loop, loop);
    } else {
        dmk_chars_clear(&r->chars);
        (void)dmk_chars_invert(&r->chars);
        dmk_chars_join(r->b, &r->chars, r->spelling, r->tick, loop, loop);
    }
    return dmk_piece_nodes(r->b, in, out, in);
}

/* The branch is complete: it joins the alternatives. */
static void close_branch(struct reader *r)
{
    struct group *g = top(r);
    struct dmk_piece branch;

    close_atom(r);
    branch = g->has_branch ? g->branch : dmk_piece_empty(r->b);
    if (r->depth == 0 && r->match == DMK_REGEX_SEARCH) {
        if (!g->from_start) {
            /* Made behind the branch, joined in front of it. */
            const struct dmk_piece before = any_text(r);

            dmk_build_skip(r->b, before.out, branch.in);
            branch = (struct dmk_piece){before.in, branch.out, branch.first, before.end};
        }
        if (!g->to_end) {
            branch = dmk_piece_then(r->b, branch, any_text(r));
        }
    }
    g->alternatives = g->has_alternatives ? dmk_piece_or(r->b, g->alternatives, branch) : branch;
    g->has_alternatives = true;
    g->has_branch = g->from_start = g->to_end = false;
}

/* ---------------------------------------------------------------- characters */

static int too_many(struct reader *r)
{
    return bad(r, "a class has too many parts");
}

static int read_hex(struct reader *r, unsigned n, uint32_t *ret)
{
    uint32_t v = 0;

    for (unsigned i = 0; i < n; i++, r->at++) {
        const int digit = dmk_hex_digit(peek(r));

        if (digit < 0) {
            return bad(r, "a hexadecimal digit is missing");
        }
        v = v * 16 + (uint32_t)digit;
    }
    *ret = v;
    return 0;
}

static int read_unicode(struct reader *r, uint32_t *ret)
{
    uint32_t low = 0;
    int rc;

    if (take(r, "{")) {
        unsigned n = 0;

        *ret = 0;
        while (!at_end(r) && peek(r) != '}' && n++ < 6) {
            rc = read_hex(r, 1, &low);
            if (rc < 0) {
                return rc;
            }
            *ret = *ret * 16 + low;
        }
        if (n == 0 || !take(r, "}") || *ret > DMK_CHARS_MAX) {
            return bad(r, "\\u{ is not followed by a code point and }");
        }
    } else {
        rc = read_hex(r, 4, ret);
        if (rc < 0) {
            return rc;
        }
        if (*ret >= 0xd800 && *ret <= 0xdbff && take(r, "\\u")) {
            rc = read_hex(r, 4, &low);
            if (rc < 0) {
                return rc;
            }
            if (low >= 0xdc00 && low <= 0xdfff) {
                *ret = 0x10000 + ((*ret - 0xd800) << 10) + (low - 0xdc00);
            }
        }
    }
    return *ret >= 0xd800 && *ret <= 0xdfff ? bad(r, "a surrogate stands alone") : 0;
}

static bool add_class(struct dmk_chars *c, char letter)
{
    bool ok = true;

    switch (letter) {
    case 'd':
        return dmk_chars_add(c, '0', '9');
    case 'w':
        ok = dmk_chars_add(c, '0', '9') && dmk_chars_add(c, 'A', 'Z');
        return ok && dmk_chars_add(c, 'a', 'z') && dmk_chars_add(c, '_', '_');
    default: /* white space and line ends */
        ok = dmk_chars_add(c, '\t', '\r') && dmk_chars_add(c, ' ', ' ');
        ok = ok && dmk_chars_add(c, 0xa0, 0xa0) && dmk_chars_add(c, 0x1680, 0x1680);
        ok = ok && dmk_chars_add(c, 0x2000, 0x200a) && dmk_chars_add(c, 0x2028, 0x2029);
        ok = ok && dmk_chars_add(c, 0x202f, 0x202f) && dmk_chars_add(c, 0x205f, 0x205f);
        return ok && dmk_chars_add(c, 0x3000, 0x3000) && dmk_chars_add(c, 0xfeff, 0xfeff);
    }
}

/* Behind a backslash. A class is added to chars and *ret_single is false; else the code point goes to *ret. */
static int read_escape(struct reader *r, struct dmk_chars *chars, bool *ret_single, uint32_t *ret)
{
    static const char letters[] = "tnrfv0", codes[] = "\t\n\r\f\v";
    const char c = peek(r);
    const char *at = c ? strchr(letters, c) : NULL;

    *ret_single = true;
    r->at++;
    if (c && strchr("dDwWsS", c)) {
        struct dmk_chars inner = {0};
        bool ok = add_class(&inner, (char)(c | 0x20));

        if (ok && c < 'a') {
            ok = dmk_chars_invert(&inner);
        }
        *ret_single = false;
        return ok && dmk_chars_add_all(chars, &inner) ? 0 : too_many(r);
    }
    if (at) {
        *ret = (uint32_t)(unsigned char)codes[at - letters];
        return c == '0' && peek(r) >= '0' && peek(r) <= '9' ? bad(r, "an octal escape is not known")
                                                            : 0;
    }
    switch (c) {
    case 'x':
        return read_hex(r, 2, ret);
    case 'u':
        return read_unicode(r, ret);
    case 'c':
        if ((peek(r) | 0x20) < 'a' || (peek(r) | 0x20) > 'z') {
            return bad(r, "\\c is not followed by a letter");
        }
        *ret = (uint32_t)r->text.data[r->at++] & 31;
        return 0;
    default:
        break;
    }
    if (c == 0 || (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') ||
        (unsigned char)c >= 0x80) {
        return bad(r, c == 'b' || c == 'B'   ? "word borders are not supported: \\b"
                      : c >= '1' && c <= '9' ? "back references are not supported"
                      : c == 'p' || c == 'P' ? "Unicode properties are not supported: \\p"
                                             : "an escape is not known");
    }
    *ret = (uint32_t)c;
    return 0;
}

/* One member of a class: a single character, or several that were added to the set. */
static int read_member(struct reader *r, bool *ret_single, uint32_t *ret)
{
    *ret_single = true;
    if (take(r, "\\")) {
        if (peek(r) == 'b') {
            r->at++;
            *ret = '\b';
            return 0;
        }
        if (peek(r) == '-') {
            r->at++;
            *ret = '-';
            return 0;
        }
        return read_escape(r, &r->chars, ret_single, ret);
    }
    *ret = dmk_chars_next(r->text, &r->at);
    return 0;
}

static int read_class(struct reader *r)
{
    const bool inverted = take(r, "^");

    dmk_chars_clear(&r->chars);
    while (!at_end(r) && peek(r) != ']') {
        uint32_t first = 0, last = 0;
        bool single = true, last_single = true;
        int rc = read_member(r, &single, &first);

        last = first;
        if (rc == 0 && peek(r) == '-' && r->at + 1 < r->text.len &&
            r->text.data[r->at + 1] != ']') {
            r->at++;
            rc = read_member(r, &last_single, &last);
            if (rc == 0 && (!single || !last_single || last < first)) {
                return bad(r, "a range in a class is out of order");
            }
        }
        if (rc < 0) {
            return rc;
        }
        if (single && !dmk_chars_add(&r->chars, first, last)) {
            return too_many(r);
        }
    }
    if (!take(r, "]")) {
        return bad(r, "a class is not closed");
    }
    return !inverted || dmk_chars_invert(&r->chars) ? 0 : too_many(r);
}

static void set_chars(struct reader *r)
{
    set_atom(r, dmk_piece_chars(r->b, &r->chars, r->spelling, r->tick));
}

/* ---------------------------------------------------------------- atoms and quantifiers */

static int read_number(struct reader *r, uint32_t *ret)
{
    uint32_t v = 0;

    if (peek(r) < '0' || peek(r) > '9') {
        return -DMK_EINVAL;
    }
    while (peek(r) >= '0' && peek(r) <= '9') {
        v = v * 10 + (uint32_t)(peek(r) - '0');
        r->at++;
        if (v > DMK_REGEX_MAX_REPEAT) {
            return bad(r, "a count is above 1000");
        }
    }
    *ret = v;
    return 0;
}

static int repeat(struct reader *r, uint32_t min, uint32_t max)
{
    struct group *g = top(r);

    if (!g->has_atom) {
        return bad(r, "nothing stands before a quantifier");
    }
    (void)take(r, "?"); /* what matches is the same */
    if (min == 0 && max == 1) {
        g->atom = dmk_piece_maybe(r->b, g->atom);
    } else if (min == 0 && max == DMK_BUILD_NO_MAX) {
        g->atom = dmk_piece_many(r->b, g->atom);
    } else {
        g->atom = dmk_piece_repeat(r->b, g->atom, min, max);
    }
    /* A quantifier behind a quantifier has nothing to repeat. */
    close_atom(r);
    return 0;
}

static int read_count(struct reader *r)
{
    uint32_t min = 0, max;

    if (read_number(r, &min) < 0) {
        return bad(r, "{ is not followed by a count up to 1000");
    }
    max = min;
    if (take(r, ",")) {
        max = DMK_BUILD_NO_MAX;
        if (peek(r) != '}' && read_number(r, &max) < 0) {
            return bad(r, "{ is not followed by a count up to 1000");
        }
    }
    if (!take(r, "}") || max < min) {
        return bad(r, "a count is not closed, or ends before it begins");
    }
    return repeat(r, min, max);
}

static int open_group(struct reader *r)
{
    if (take(r, "?:")) {
        /* as any group */
    } else if (peek(r) == '?') {
        if (!(r->text.len - r->at > 2 && r->text.data[r->at + 1] == '<' &&
              r->text.data[r->at + 2] != '=' && r->text.data[r->at + 2] != '!')) {
            return bad(r, "look-around and flags are not supported: (?");
        }
        while (!at_end(r) && peek(r) != '>') {
            r->at++;
        }
        if (!take(r, ">")) {
            return bad(r, "a group's name is not closed");
        }
    }
    if (r->depth + 1 == DMK_REGEX_MAX_GROUPS) {
        return bad(r, "groups are nested too deep");
    }
    close_atom(r);
    r->groups[++r->depth] = (struct group){0};
    return 0;
}

static int close_group(struct reader *r)
{
    struct dmk_piece piece;

    if (r->depth == 0) {
        return bad(r, "a group is closed that was not opened");
    }
    close_branch(r);
    piece = top(r)->alternatives;
    r->depth--;
    set_atom(r, piece);
    return 0;
}

static int read_anchor(struct reader *r, bool start)
{
    struct group *g = top(r);

    close_atom(r);
    if (r->depth > 0 || (start && g->has_branch) || (start && g->from_start)) {
        return bad(r, "^ and $ may only stand at the ends of the whole expression");
    }
    if (start) {
        g->from_start = true;
    } else {
        if (!at_end(r) && peek(r) != '|') {
            return bad(r, "^ and $ may only stand at the ends of the whole expression");
        }
        g->to_end = true;
    }
    return 0;
}

static int read_atom(struct reader *r)
{
    bool single = true;
    uint32_t code = 0;
    int rc = 0;

    if (take(r, ".")) {
        dmk_chars_clear(&r->chars);
        (void)(dmk_chars_add(&r->chars, '\n', '\n') && dmk_chars_add(&r->chars, '\r', '\r') &&
               dmk_chars_add(&r->chars, 0x2028, 0x2029) && dmk_chars_invert(&r->chars));
    } else if (take(r, "[")) {
        rc = read_class(r);
    } else {
        dmk_chars_clear(&r->chars);
        if (take(r, "\\")) {
            rc = read_escape(r, &r->chars, &single, &code);
        } else {
            code = dmk_chars_next(r->text, &r->at);
        }
        if (rc == 0 && single) {
            (void)dmk_chars_add(&r->chars, code, code);
        }
    }
    if (rc == 0) {
        set_chars(r);
    }
    return rc;
}

static int read_next(struct reader *r)
{
    switch (peek(r)) {
    case '|':
        r->at++;
        close_branch(r);
        return 0;
    case '(':
        r->at++;
        return open_group(r);
    case ')':
        r->at++;
        return close_group(r);
    case '*':
        r->at++;
        return repeat(r, 0, DMK_BUILD_NO_MAX);
    case '+':
        r->at++;
        return repeat(r, 1, DMK_BUILD_NO_MAX);
    case '?':
        r->at++;
        return repeat(r, 0, 1);
    case '{':
        r->at++;
        return read_count(r);
    case '^':
        r->at++;
        return read_anchor(r, true);
    case '$':
        r->at++;
        return read_anchor(r, false);
    default:
        return read_atom(r);
    }
}

int dmk_regex_piece(struct dmk_build *build, struct dmk_str pattern, enum dmk_regex_match match,
                    enum dmk_spelling spelling, bool tick, struct dmk_piece *ret,
                    struct dmk_error *reterr)
{
    struct reader r = {.b = build,
                       .text = pattern,
                       .match = match,
                       .spelling = spelling,
                       .tick = tick,
                       .err = reterr};

    if (pattern.len > DMK_REGEX_MAX_BYTES) {
        return dmk_error_set(reterr, -DMK_EINVAL, "the expression has %zu bytes, at most %u may be",
                             pattern.len, DMK_REGEX_MAX_BYTES);
    }
    while (!at_end(&r)) {
        const int rc = read_next(&r);

        if (rc < 0) {
            return rc;
        }
        if (dmk_build_failed(build)) {
            return dmk_error_set(reterr, -DMK_EINVAL, "%s", dmk_build_why(build));
        }
    }
    if (r.depth > 0) {
        return bad(&r, "a group is not closed");
    }
    close_branch(&r);
    *ret = r.groups[0].alternatives;
    return 0;
}
