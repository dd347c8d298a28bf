/* Bearer keys; see keys.h. */
#include "common/conf/keys.h"
#include <stdlib.h>
#include <strings.h>
#include "common/base/assert.h"
#include "common/base/clock.h"
#include "common/base/file.h"
#include "common/base/log.h"

#define MAX_FILE_BYTES (DMK_KEYS_MAX * (DMK_KEY_MAX_BYTES + 2))
#define LOOK_EVERY_NS  DMK_NS_PER_S

struct dmk_keys {
    const struct dmk_conf_list *list;
    const char *path; /* NULL: none */
    struct dmk_buf text;
    struct dmk_str file_keys[DMK_KEYS_MAX]; /* in text */
    size_t n_file_keys;
    struct dmk_file_stamp stamp;
    uint64_t looked_ns;
};

static bool is_fit(struct dmk_str key)
{
    for (size_t i = 0; i < key.len; i++) {
        if (key.data[i] <= 0x20 || key.data[i] == 0x7f) {
            return false;
        }
    }
    return key.len >= 1 && key.len <= DMK_KEY_MAX_BYTES;
}

static struct dmk_str trim(struct dmk_str line)
{
    while (line.len > 0 && strchr(" \t\r", line.data[line.len - 1])) {
        line.len--;
    }
    while (line.len > 0 && strchr(" \t", line.data[0])) {
        line.data++;
        line.len--;
    }
    return line;
}

static int add_lines(struct dmk_keys *keys, struct dmk_error *reterr)
{
    const char *at = keys->text.data, *end = at + keys->text.len;

    for (unsigned n = 1; at < end; n++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        const struct dmk_str line = trim((struct dmk_str){at, (size_t)((stop ? stop : end) - at)});

        at = stop ? stop + 1 : end;
        if (line.len == 0 || line.data[0] == '#') {
            continue;
        }
        if (!is_fit(line) || keys->n_file_keys == DMK_KEYS_MAX) {
            return dmk_error_set(reterr, -DMK_EFORMAT,
                                 "the key file \"%s\" line %u: a key has 1 to %d printable "
                                 "characters, and there may be %d",
                                 keys->path, n, DMK_KEY_MAX_BYTES, DMK_KEYS_MAX);
        }
        keys->file_keys[keys->n_file_keys++] = line;
    }
    return keys->n_file_keys > 0 ? 0
                                 : dmk_error_set(reterr, -DMK_EFORMAT,
                                                 "the key file \"%s\" holds no key", keys->path);
}

/* Reads the file; what was there before stays on a failure. */
static int read_keys(struct dmk_keys *keys, struct dmk_error *reterr)
{
    struct dmk_keys *fresh = calloc(1, sizeof(*fresh));
    int rc;

    dmk_assert(fresh);
    fresh->path = keys->path;
    dmk_buf_init(&fresh->text, MAX_FILE_BYTES);
    rc = dmk_file_read(keys->path, "key", MAX_FILE_BYTES, &fresh->text, &fresh->stamp, reterr);
    if (rc == 0) {
        keys->stamp = fresh->stamp; /* a bad file is told once, not at every call */
        rc = add_lines(fresh, reterr);
    }
    if (rc == 0) {
        struct dmk_buf old = keys->text;

        keys->text = fresh->text;
        memcpy(keys->file_keys, fresh->file_keys, sizeof(keys->file_keys));
        keys->n_file_keys = fresh->n_file_keys;
        fresh->text = old;
    }
    dmk_buf_fini(&fresh->text);
    free(fresh);
    return rc;
}

int dmk_keys_new(const struct dmk_conf_list *list, const char *path, struct dmk_keys **ret,
                 struct dmk_error *reterr)
{
    struct dmk_keys *keys;
    int rc = 0;

    for (size_t i = 0; i < list->n; i++) {
        if (!is_fit(dmk_str_from(list->items[i])) || list->n > DMK_KEYS_MAX) {
            return dmk_error_set(reterr, -DMK_EINVAL,
                                 "key %zu of the options: a key has 1 to %d printable characters, "
                                 "and there may be %d",
                                 i + 1, DMK_KEY_MAX_BYTES, DMK_KEYS_MAX);
        }
    }
    keys = calloc(1, sizeof(*keys));
    dmk_assert(keys);
    keys->list = list;
    keys->path = path && path[0] ? path : NULL;
    dmk_buf_init(&keys->text, MAX_FILE_BYTES);
    if (keys->path) {
        rc = read_keys(keys, reterr);
    }
    if (rc < 0) {
        dmk_keys_free(&keys);
        return rc;
    }
    *ret = keys;
    return 0;
}

void dmk_keys_free(struct dmk_keys **keys)
{
    if (*keys) {
        dmk_buf_fini(&(*keys)->text);
        free(*keys);
        *keys = NULL;
    }
}

bool dmk_keys_needed(const struct dmk_keys *keys)
{
    return keys->list->n + keys->n_file_keys > 0;
}

static bool is_key(struct dmk_str sent, struct dmk_str key)
{
    unsigned char differs = sent.len != key.len;

    if (key.len == 0) {
        return false; /* an empty key opens nothing */
    }
    for (size_t i = 0; i < sent.len; i++) {
        differs |= (unsigned char)(sent.data[i] ^ key.data[i % key.len]);
    }
    return differs == 0;
}

static void look_at_file(struct dmk_keys *keys)
{
    const uint64_t now = dmk_clock_ns();
    struct dmk_error error;

    if (!keys->path || now - keys->looked_ns < LOOK_EVERY_NS) {
        return;
    }
    keys->looked_ns = now;
    if (!dmk_file_changed(keys->path, &keys->stamp)) {
        return;
    }
    if (read_keys(keys, &error) < 0) {
        dmk_log_error("%s; the keys from before stay", error.text);
    } else {
        dmk_log_info("the key file \"%s\" was read again: %zu keys", keys->path, keys->n_file_keys);
    }
}

bool dmk_keys_allow(struct dmk_keys *keys, struct dmk_str text)
{
    static const char bearer[] = "Bearer ";
    const size_t skip = sizeof(bearer) - 1;
    bool found = false;

    look_at_file(keys);
    if (!dmk_keys_needed(keys)) {
        return true;
    }
    if (!text.data || text.len <= skip || strncasecmp(text.data, bearer, skip) != 0) {
        return false;
    }
    text = (struct dmk_str){text.data + skip, text.len - skip};
    for (size_t i = 0; i < keys->list->n; i++) {
        found |= is_key(text, dmk_str_from(keys->list->items[i]));
    }
    for (size_t i = 0; i < keys->n_file_keys; i++) {
        found |= is_key(text, keys->file_keys[i]);
    }
    return found;
}
