/* The letters of EBNF: blanks, names, and characters with their escapes; see ebnf_read.h. */
#include "common/schema/ebnf_read.h"

#include <string.h>
#include "common/base/spell.h"

int dmk_ebnf__bad(struct dmk_ebnf_reader *r, const char *what)
{
    return dmk_error_set(r->err, -DMK_EINVAL, "line %u: %s", r->line, what);
}

void dmk_ebnf__skip(struct dmk_ebnf_reader *r, bool lines)
{
    while (!dmk_ebnf__at_end(r)) {
        const char c = dmk_ebnf__peek(r);

        if (c == '#' && lines) {
            while (!dmk_ebnf__at_end(r) && dmk_ebnf__peek(r) != '\n') {
                r->at++;
            }
        } else if (c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r'))) {
            r->line += c == '\n';
            r->at++;
        } else {
            return;
        }
    }
}

struct dmk_str dmk_ebnf__take_name(struct dmk_ebnf_reader *r)
{
    const size_t from = r->at;

    while (!dmk_ebnf__at_end(r) && dmk_ebnf__is_name(dmk_ebnf__peek(r), r->at == from)) {
        r->at++;
    }
    return (struct dmk_str){r->text.data + from, r->at - from};
}

bool dmk_ebnf__at_rule(const struct dmk_ebnf_reader *r)
{
    struct dmk_ebnf_reader ahead = {.text = r->text, .at = r->at};

    (void)dmk_ebnf__take_name(&ahead);
    dmk_ebnf__skip(&ahead, false);
    return ahead.at > r->at && dmk_ebnf__is_name(dmk_ebnf__peek(r), true) &&
           ahead.text.len - ahead.at >= 3 && memcmp(ahead.text.data + ahead.at, "::=", 3) == 0;
}

static int read_hex(struct dmk_ebnf_reader *r, unsigned n, uint32_t *ret)
{
    uint32_t v = 0;

    for (unsigned i = 0; i < n; i++) {
        const int digit = dmk_hex_digit(dmk_ebnf__peek(r));

        if (digit < 0) {
            return dmk_ebnf__bad(r, "an escape has too few hexadecimal digits");
        }
        v = v * 16 + (uint32_t)digit;
        r->at++;
    }
    if (v > DMK_CHARS_MAX || (v >= 0xd800 && v <= 0xdfff)) {
        return dmk_ebnf__bad(r, "an escape is no character");
    }
    *ret = v;
    return 0;
}

int dmk_ebnf__char(struct dmk_ebnf_reader *r, uint32_t *ret)
{
    static const char plain[] = "\\\"'[]-^/.|(){}*+?$";

    if (dmk_ebnf__peek(r) == '\n' || dmk_ebnf__at_end(r)) {
        return dmk_ebnf__bad(r, "a text or a class does not end on its line");
    }
    if (dmk_ebnf__peek(r) != '\\') {
        *ret = dmk_chars_next(r->text, &r->at);
        return 0;
    }
    r->at++;
    const char c = dmk_ebnf__peek(r);

    r->at++;
    switch (c) {
    case 'n':
        *ret = '\n';
        return 0;
    case 'r':
        *ret = '\r';
        return 0;
    case 't':
        *ret = '\t';
        return 0;
    case 'x':
        return read_hex(r, 2, ret);
    case 'u':
        return read_hex(r, 4, ret);
    case 'U':
        return read_hex(r, 8, ret);
    default:
        if (c == 0 || !strchr(plain, c)) {
            return dmk_ebnf__bad(r, "an escape is not known");
        }
        *ret = (uint32_t)c;
        return 0;
    }
}
