/* Strict parsing and typed getters; see json.h. */
#include "common/json/json.h"
#include "common/json/fast.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/spell.h"

#define MIN_WIDE_DIGITS 19 /* of the numbers that may not fit into 64 bits */

/* jansson recurses once a level, so the depth is bounded before it sees the text. */
static bool is_too_deep(struct dmk_str text, uint32_t max_depth)
{
    uint32_t depth = 0;
    bool in_string = false;

    for (size_t i = 0; i < text.len; i++) {
        const char c = text.data[i];

        if (in_string) {
            if (c == '\\') {
                i++;
            } else if (c == '"') {
                in_string = false;
            }
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            if (++depth > max_depth) {
                return true;
            }
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
        }
    }
    return false;
}

/* The value of the escape \\uXXXX at text[at], or -1. */
static int read_escape(struct dmk_str text, size_t at)
{
    return at + 6 <= text.len && text.data[at] == '\\' && text.data[at + 1] == 'u'
               ? (int)dmk_hex_value(text.data + at + 2, 4)
               : -1;
}

static bool is_surrogate(int code, int half)
{
    return code >= half && code < half + 0x400;
}

/* Where the next escape from at on is that no string can hold: half a character without its other half, or
 * NUL. text.len when there is none. */
static size_t find_lone_escape(struct dmk_str text, size_t at)
{
    while (at < text.len) {
        const char *next = memchr(text.data + at, '\\', text.len - at);

        if (!next) {
            break;
        }
        at = (size_t)(next - text.data);
        const int code = read_escape(text, at);

        if (is_surrogate(code, 0xd800) && is_surrogate(read_escape(text, at + 6), 0xdc00)) {
            at += 12;
        } else if (code == 0 || is_surrogate(code, 0xd800) || is_surrogate(code, 0xdc00)) {
            return at;
        } else {
            at += 2;
        }
    }
    return text.len;
}

/* Writes U+FFFD over all such escapes, the first of which is at. */
static void repair_escapes(char *copy, struct dmk_str text, size_t at)
{
    static const char digits[] = {'f', 'f', 'f', 'd'};

    while (at < text.len) {
        memcpy(copy + at + 2, digits, sizeof(digits));
        at = find_lone_escape(text, at + 6);
    }
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The end of the number whose first digit or sign is at; *ret_whole: it has neither point nor exponent. */
static size_t end_of_number(struct dmk_str text, size_t at, bool *ret_whole)
{
    *ret_whole = true;
    for (at += text.data[at] == '-'; at < text.len; at++) {
        const char c = text.data[at];

        if (c == '.' || c == 'e' || c == 'E') {
            *ret_whole = false;
        } else if (!is_digit(c) && c != '+' && c != '-') {
            break;
        }
    }
    return at;
}

/* Of the text of a whole number: is it beyond what json_int_t holds? */
static bool is_wide(const char *text, size_t len)
{
    char digits[24];

    if (len < MIN_WIDE_DIGITS || len >= sizeof(digits)) {
        return len >= MIN_WIDE_DIGITS;
    }
    memcpy(digits, text, len);
    digits[len] = '\0';
    errno = 0;
    (void)strtoll(digits, NULL, 10);
    return errno == ERANGE;
}

/* A copy in which whole numbers that 64 bits do not hold are reals. NULL: no memory. */
static char *widen_integers(struct dmk_str text, size_t *ret_len)
{
    char *copy = malloc(text.len + text.len / MIN_WIDE_DIGITS * 2 + 2);
    bool in_string = false;
    size_t n = 0;

    for (size_t i = 0; copy && i < text.len;) {
        const char c = text.data[i];
        size_t end = i + 1;
        bool whole = false;

        if (in_string) {
            end += c == '\\' && end < text.len;
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == '-' || is_digit(c)) {
            end = end_of_number(text, i, &whole);
        }
        memcpy(copy + n, text.data + i, end - i);
        n += end - i;
        if (whole && is_wide(text.data + i, end - i)) {
            copy[n++] = 'e';
            copy[n++] = '0';
        }
        i = end;
    }
    *ret_len = n;
    return copy;
}

static int refuse_text(struct dmk_str text, const char *name, const json_error_t *err,
                       struct dmk_error *reterr)
{
    switch (json_error_code(err)) {
    case json_error_invalid_utf8:
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: not UTF-8 at byte %d: %s", name,
                             err->position, err->text);
    case json_error_out_of_memory:
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to parse %zu bytes of JSON", name,
                             text.len);
    case json_error_numeric_overflow:
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: the number at line %d column %d is beyond what a double holds",
                             name, err->line, err->column);
    default:
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: not valid JSON at line %d column %d: %s",
                             name, err->line, err->column, err->text);
    }
}

int dmk_json_parse(struct dmk_str text, const char *name, uint32_t max_depth, json_t **ret_root,
                   struct dmk_error *reterr)
{
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY;
    json_error_t err = {0};
    json_t *root = dmk_json__parse_fast(text, max_depth);

    if (root) {
        *ret_root = root;
        return 0;
    }
    if (is_too_deep(text, max_depth)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: nested deeper than %u levels", name,
                             max_depth);
    }
    const size_t lone = find_lone_escape(text, 0);
    char *copy = lone < text.len ? malloc(text.len) : NULL;

    if (lone < text.len && !copy) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to parse %zu bytes of JSON", name,
                             text.len);
    }
    if (copy) {
        memcpy(copy, text.data, text.len);
        repair_escapes(copy, text, lone);
        text.data = copy;
    }
    root = json_loadb(text.data ? text.data : "", text.len, flags, &err);
    if (!root && json_error_code(&err) == json_error_numeric_overflow) {
        size_t len;
        char *wide = widen_integers(text, &len);

        root = wide ? json_loadb(wide, len, flags, &err) : NULL;
        free(wide);
    }
    free(copy);
    if (!root) {
        return refuse_text(text, name, &err, reterr);
    }
    *ret_root = root;
    return 0;
}

/* Reads a whole regular file into malloc'd memory. */
static int read_file(const char *path, size_t max_bytes, char **ret_data, size_t *ret_len,
                     struct dmk_error *reterr)
{
    struct stat st;
    size_t len = 0;
    char *data = NULL;
    int r;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* of a pipe: do not wait */

    if (fd < 0) {
        return dmk_error_set(reterr, errno == ENOENT ? -DMK_ENOENT : -DMK_EIO,
                             "%s: can not be opened: %s", path, strerror(errno));
    }
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        r = dmk_error_set(reterr, -DMK_EFORMAT, "%s: not a regular file", path);
        goto out;
    }
    if ((uint64_t)st.st_size > max_bytes) {
        r = dmk_error_set(reterr, -DMK_EFULL, "%s: %lld bytes are more than the bound of %zu", path,
                          (long long)st.st_size, max_bytes);
        goto out;
    }
    data = malloc((size_t)st.st_size + 1);
    if (!data) {
        r = dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory for %lld bytes", path,
                          (long long)st.st_size);
        goto out;
    }
    while (len < (size_t)st.st_size) {
        const ssize_t n = read(fd, data + len, (size_t)st.st_size - len);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            r = dmk_error_set(reterr, -DMK_EIO, "%s: can not be read: %s", path, strerror(errno));
            goto out;
        }
        if (n == 0) {
            break;
        }
        len += (size_t)n;
    }
    *ret_data = data;
    *ret_len = len;
    data = NULL;
    r = 0;
out:
    free(data);
    close(fd);
    return r;
}

int dmk_json_load(const char *path, size_t max_bytes, uint32_t max_depth, json_t **ret_root,
                  struct dmk_error *reterr)
{
    json_t *root = NULL;
    char *data = NULL;
    size_t len = 0;
    int r = read_file(path, max_bytes, &data, &len, reterr);

    if (r < 0) {
        return r;
    }
    r = dmk_json_parse((struct dmk_str){data, len}, path, max_depth, &root, reterr);
    free(data);
    if (r < 0) {
        return r;
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: the top level must be an object", path);
    }
    *ret_root = root;
    return 0;
}

const char *dmk_json_show(const json_t *value, char ret_text[DMK_JSON_SHOW_BYTES])
{
    size_t n;

    if (json_is_object(value)) {
        return json_object_size(value) ? "an object" : "{}";
    }
    if (json_is_array(value)) {
        return json_array_size(value) ? "an array" : "[]";
    }
    n = json_dumpb(value, ret_text, DMK_JSON_SHOW_BYTES - 1, JSON_ENCODE_ANY);
    if (n >= DMK_JSON_SHOW_BYTES) { /* nothing useful was kept of a longer value */
        return json_is_string(value) ? "a longer string" : "a longer value";
    }
    ret_text[n < DMK_JSON_SHOW_BYTES ? n : 0] = '\0';
    return ret_text;
}

/* 1 and the value, 0 when absent or null and optional, else the sentence. */
static int find_value(const json_t *obj, const char *where, const char *key,
                      enum dmk_json_need need, const char *what, json_t **ret,
                      struct dmk_error *reterr)
{
    json_t *value = json_object_get(obj, key);

    if (value && !json_is_null(value)) {
        *ret = value;
        return 1;
    }
    if (need == DMK_JSON_OPTIONAL) {
        return 0;
    }
    return dmk_error_set(reterr, -DMK_EFORMAT, "%s: \"%s\" is %s but must be %s", where, key,
                         value ? "null" : "missing", what);
}

static int refuse_value(const json_t *value, const char *where, const char *key, const char *what,
                        struct dmk_error *reterr)
{
    char shown[DMK_JSON_SHOW_BYTES];

    return dmk_error_set(reterr, -DMK_EFORMAT, "%s: \"%s\" must be %s, not %s", where, key, what,
                         dmk_json_show(value, shown));
}

int dmk_json_get_u64(const json_t *obj, const char *where, const char *key, enum dmk_json_need need,
                     uint64_t min, uint64_t max, uint64_t *ret, struct dmk_error *reterr)
{
    char what[96];
    json_t *value = NULL;
    json_int_t v;
    int r;

    (void)snprintf(what, sizeof(what), "an integer from %llu to %llu", (unsigned long long)min,
                   (unsigned long long)max);
    r = find_value(obj, where, key, need, what, &value, reterr);
    if (r <= 0) {
        return r;
    }
    v = json_integer_value(value);
    if (!json_is_integer(value) || v < 0 || (uint64_t)v < min || (uint64_t)v > max) {
        return refuse_value(value, where, key, what, reterr);
    }
    *ret = (uint64_t)v;
    return 1;
}

int dmk_json_get_u32(const json_t *obj, const char *where, const char *key, enum dmk_json_need need,
                     uint32_t min, uint32_t max, uint32_t *ret, struct dmk_error *reterr)
{
    uint64_t v = 0;
    const int r = dmk_json_get_u64(obj, where, key, need, min, max, &v, reterr);

    if (r > 0) {
        *ret = (uint32_t)v;
    }
    return r;
}

int dmk_json_get_real(const json_t *obj, const char *where, const char *key,
                      enum dmk_json_need need, double min, double max, double *ret,
                      struct dmk_error *reterr)
{
    char what[96];
    json_t *value = NULL;
    double v;
    int r;

    (void)snprintf(what, sizeof(what), "a number from %g to %g", min, max);
    r = find_value(obj, where, key, need, what, &value, reterr);
    if (r <= 0) {
        return r;
    }
    v = json_number_value(value);
    if (!json_is_number(value) || !(v >= min && v <= max)) {
        return refuse_value(value, where, key, what, reterr);
    }
    *ret = v;
    return 1;
}

int dmk_json_get_bool(const json_t *obj, const char *where, const char *key,
                      enum dmk_json_need need, bool *ret, struct dmk_error *reterr)
{
    json_t *value = NULL;
    const int r = find_value(obj, where, key, need, "true or false", &value, reterr);

    if (r <= 0) {
        return r;
    }
    if (!json_is_boolean(value)) {
        return refuse_value(value, where, key, "true or false", reterr);
    }
    *ret = json_is_true(value);
    return 1;
}

int dmk_json_get_str(const json_t *obj, const char *where, const char *key, enum dmk_json_need need,
                     struct dmk_str *ret, struct dmk_error *reterr)
{
    json_t *value = NULL;
    const int r = find_value(obj, where, key, need, "a string", &value, reterr);

    if (r <= 0) {
        return r;
    }
    if (!json_is_string(value)) {
        return refuse_value(value, where, key, "a string", reterr);
    }
    *ret = (struct dmk_str){json_string_value(value), json_string_length(value)};
    return 1;
}

int dmk_json_get_object(const json_t *obj, const char *where, const char *key,
                        enum dmk_json_need need, json_t **ret, struct dmk_error *reterr)
{
    json_t *value = NULL;
    const int r = find_value(obj, where, key, need, "an object", &value, reterr);

    if (r <= 0) {
        return r;
    }
    if (!json_is_object(value)) {
        return refuse_value(value, where, key, "an object", reterr);
    }
    *ret = value;
    return 1;
}

int dmk_json_get_array(const json_t *obj, const char *where, const char *key,
                       enum dmk_json_need need, json_t **ret, struct dmk_error *reterr)
{
    json_t *value = NULL;
    const int r = find_value(obj, where, key, need, "an array", &value, reterr);

    if (r <= 0) {
        return r;
    }
    if (!json_is_array(value)) {
        return refuse_value(value, where, key, "an array", reterr);
    }
    *ret = value;
    return 1;
}
