/* Reading and checking a compact checkpoint; see expand.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/hash.h"
#include "common/json/json.h"
#include "tools/tinymodel/expand.h"

#define MAX_PATH       4096
#define MAX_BIN_BYTES  ((uint64_t)1 << 30)
#define MAX_JSON_BYTES ((size_t)4 << 20)
#define BLOCK          32u

static const char *const format_names[] = {[DMK_COMPACT_BF16] = "bf16",
                                           [DMK_COMPACT_MXINT8] = "mxint8",
                                           [DMK_COMPACT_ROWS] = "rows",
                                           [DMK_COMPACT_MXFP4] = "mxfp4",
                                           [DMK_COMPACT_U32] = "u32"};

#define N_FORMATS (sizeof(format_names) / sizeof(format_names[0]))

static int read_shape(const json_t *root, const char *where, struct dmk_shape *ret_shape,
                      struct dmk_error *reterr)
{
    struct dmk_shape s;
    json_t *obj = NULL;
    char place[MAX_PATH + 16];
    int r = dmk_shape_preset("gpt-oss-20b", &s, reterr);

    if (r < 0 ||
        (r = dmk_json_get_object(root, where, "shape", DMK_JSON_REQUIRED, &obj, reterr)) < 0) {
        return r;
    }
    const struct {
        const char *key;
        uint32_t *value;
    } fields[] = {
        {"layers", &s.n_layers},     {"hidden", &s.hidden},     {"heads", &s.n_heads},
        {"kv_heads", &s.n_kv_heads}, {"experts", &s.n_experts}, {"intermediate", &s.intermediate},
        {"vocab", &s.vocab},
    };

    (void)snprintf(place, sizeof(place), "%s: shape", where);
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        r = dmk_json_get_u32(obj, place, fields[i].key, DMK_JSON_REQUIRED, 1, UINT32_MAX,
                             fields[i].value, reterr);
        if (r < 0) {
            return r;
        }
    }
    *ret_shape = s;
    return dmk_shape_check(&s, reterr);
}

/* Bytes that a tensor of this format has, 0 when its last dimension is no multiple of 32. */
static uint64_t count_bytes(enum dmk_compact_format format, uint64_t n, uint64_t last)
{
    switch (format) {
    case DMK_COMPACT_BF16:
        return 2 * n;
    case DMK_COMPACT_U32:
        return 4 * n;
    case DMK_COMPACT_MXINT8:
    case DMK_COMPACT_ROWS:
        return last % BLOCK ? 0 : n + n / BLOCK;
    case DMK_COMPACT_MXFP4:
        return last % BLOCK ? 0 : n / 2 + n / BLOCK;
    }
    return 0;
}

static int read_dims(const json_t *obj, const char *place, struct dmk_compact_tensor *t,
                     struct dmk_error *reterr)
{
    json_t *dims = NULL;
    const int r = dmk_json_get_array(obj, place, "shape", DMK_JSON_REQUIRED, &dims, reterr);

    if (r < 0) {
        return r;
    }
    t->rank = (uint32_t)json_array_size(dims);
    t->n_elements = 1;
    for (uint32_t i = 0; i < t->rank && i < 3; i++) {
        const json_t *v = json_array_get(dims, i);

        t->dims[i] = json_is_integer(v) ? (uint64_t)json_integer_value(v) : 0;
        if (t->dims[i] < 1 || t->dims[i] > MAX_BIN_BYTES) {
            t->rank = 0;
            break;
        }
        t->n_elements *= t->dims[i];
        if (t->n_elements > MAX_BIN_BYTES * 2) {
            t->rank = 0;
            break;
        }
    }
    if (t->rank < 1 || t->rank > 3) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "%s: \"shape\" must be one to three sizes that fit into the file",
                             place);
    }
    return 0;
}

static int read_tensor(const json_t *obj, const char *place, const struct dmk_compact *c,
                       struct dmk_compact_tensor *ret_tensor, struct dmk_error *reterr)
{
    struct dmk_compact_tensor t = {.rank = 0};
    struct dmk_str name, format;
    uint64_t offset = 0;
    int r;

    if (!json_is_object(obj)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: must be an object", place);
    }
    if ((r = dmk_json_get_str(obj, place, "name", DMK_JSON_REQUIRED, &name, reterr)) < 0 ||
        (r = dmk_json_get_str(obj, place, "format", DMK_JSON_REQUIRED, &format, reterr)) < 0 ||
        (r = read_dims(obj, place, &t, reterr)) < 0 ||
        (r = dmk_json_get_u64(obj, place, "offset", DMK_JSON_REQUIRED, 0, c->n_bytes, &offset,
                              reterr)) < 0 ||
        (r = dmk_json_get_u64(obj, place, "bytes", DMK_JSON_REQUIRED, 1, c->n_bytes - offset,
                              &t.n_bytes, reterr)) < 0) {
        return r;
    }
    if (name.len >= sizeof(t.name)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: \"name\" has %zu bytes but may have %zu",
                             place, name.len, sizeof(t.name) - 1);
    }
    memcpy(t.name, name.data, name.len);
    while (t.format < N_FORMATS && !dmk_str_is(format, format_names[t.format])) {
        t.format++;
    }
    if (t.format == N_FORMATS ||
        t.n_bytes != count_bytes(t.format, t.n_elements, t.dims[t.rank - 1])) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "%s: %s has %llu bytes, which does not go with its format \"%.*s\" "
                             "and shape",
                             place, t.name, (unsigned long long)t.n_bytes, (int)format.len,
                             format.data);
    }
    t.data = c->data + offset;
    *ret_tensor = t;
    return 0;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct dmk_compact_tensor *)a)->name,
                  ((const struct dmk_compact_tensor *)b)->name);
}

static int read_tensors(const json_t *root, const char *where, struct dmk_compact *c,
                        struct dmk_error *reterr)
{
    json_t *list = NULL;
    char place[MAX_PATH + 32];
    int r = dmk_json_get_array(root, where, "tensors", DMK_JSON_REQUIRED, &list, reterr);

    if (r < 0) {
        return r;
    }
    const size_t n = json_array_size(list);

    if (n < 1 || n > DMK_COMPACT_MAX_TENSORS) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: %zu tensors are listed", where, n);
    }
    c->tensors = calloc(n, sizeof(c->tensors[0]));
    if (!c->tensors) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory for %zu tensors", where, n);
    }
    for (size_t i = 0; i < n; i++) {
        (void)snprintf(place, sizeof(place), "%s: tensors[%zu]", where, i);
        r = read_tensor(json_array_get(list, i), place, c, &c->tensors[i], reterr);
        if (r < 0) {
            return r;
        }
    }
    c->n_tensors = (uint32_t)n;
    qsort(c->tensors, n, sizeof(c->tensors[0]), compare_names);
    return 0;
}

static int read_data(const char *path, struct dmk_compact *c, struct dmk_error *reterr)
{
    FILE *f = fopen(path, "rb");
    size_t got = 0;
    bool more = false;

    if (!f) {
        return dmk_error_set(reterr, -DMK_ENOENT, "%s: can not be opened: %s", path,
                             strerror(errno));
    }
    c->data = malloc(c->n_bytes);
    if (c->data) {
        got = fread(c->data, 1, c->n_bytes, f);
        more = fgetc(f) != EOF;
    }
    (void)fclose(f);
    if (!c->data) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory for %llu bytes", path,
                             (unsigned long long)c->n_bytes);
    }
    if (got != c->n_bytes || more) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "%s: holds %s bytes than the %llu that model.json says", path,
                             more ? "more" : "fewer", (unsigned long long)c->n_bytes);
    }
    return 0;
}

static int check_sum(const json_t *root, const char *where, const char *bin,
                     const struct dmk_compact *c, struct dmk_error *reterr)
{
    struct dmk_str want;
    char have[17];
    const int r = dmk_json_get_str(root, where, "xxh3", DMK_JSON_REQUIRED, &want, reterr);

    if (r < 0) {
        return r;
    }
    (void)snprintf(have, sizeof(have), "%016llx",
                   (unsigned long long)dmk_hash64(c->data, c->n_bytes, 0));
    if (!dmk_str_is(want, have)) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: its checksum is %s but must be %.*s", bin,
                             have, (int)want.len, want.data);
    }
    return 0;
}

/* Scales outside 1..254 are no normal powers of two. */
static int check_scales(const struct dmk_compact *c, struct dmk_error *reterr)
{
    for (uint32_t i = 0; i < c->n_tensors; i++) {
        const struct dmk_compact_tensor *t = &c->tensors[i];

        if (t->format != DMK_COMPACT_MXINT8 && t->format != DMK_COMPACT_ROWS) {
            continue;
        }
        for (uint64_t k = t->n_elements; k < t->n_bytes; k++) {
            if (t->data[k] == 0 || t->data[k] == 255) {
                return dmk_error_set(reterr, -DMK_EINVAL, "%s: a scale byte is %u", t->name,
                                     t->data[k]);
            }
        }
    }
    return 0;
}

static int map_ids(struct dmk_compact *c, struct dmk_error *reterr)
{
    const struct dmk_compact_tensor *ids = dmk_compact_find(c, "ids", 3);
    const uint64_t n = ids && ids->format == DMK_COMPACT_U32 ? ids->n_elements : 0;
    uint32_t last = 0;

    if (n == 0 || n >= c->shape.vocab) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "there must be a tensor \"ids\" of u32, fewer than the vocabulary");
    }
    c->row_of_id = malloc(c->shape.vocab * sizeof(uint32_t));
    if (!c->row_of_id) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for %u ids", c->shape.vocab);
    }
    for (uint32_t i = 0; i < c->shape.vocab; i++) {
        c->row_of_id[i] = (uint32_t)n;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id;

        memcpy(&id, ids->data + 4ull * i, 4);
        if (id >= c->shape.vocab || (i > 0 && id <= last)) {
            return dmk_error_set(reterr, -DMK_EINVAL,
                                 "ids must ascend inside the vocabulary, but %u follows %u", id,
                                 last);
        }
        c->row_of_id[id] = i;
        last = id;
    }
    return 0;
}

static int read_all(const json_t *root, const char *where, const char *bin, struct dmk_compact *c,
                    struct dmk_error *reterr)
{
    struct dmk_str format;
    uint32_t version = 0;
    int r;

    if ((r = dmk_json_get_str(root, where, "format", DMK_JSON_REQUIRED, &format, reterr)) < 0 ||
        (r = dmk_json_get_u32(root, where, "version", DMK_JSON_REQUIRED, 1, 1, &version, reterr)) <
            0) {
        return r;
    }
    if (!dmk_str_is(format, "damask-compact")) {
        return dmk_error_set(reterr, -DMK_EINVAL, "%s: \"format\" is \"%.*s\", not damask-compact",
                             where, (int)format.len, format.data);
    }
    if ((r = dmk_json_get_u64(root, where, "bytes", DMK_JSON_REQUIRED, 1, MAX_BIN_BYTES,
                              &c->n_bytes, reterr)) < 0 ||
        (r = read_shape(root, where, &c->shape, reterr)) < 0 ||
        (r = read_data(bin, c, reterr)) < 0 || (r = check_sum(root, where, bin, c, reterr)) < 0 ||
        (r = read_tensors(root, where, c, reterr)) < 0) {
        return r;
    }
    r = check_scales(c, reterr);
    return r < 0 ? r : map_ids(c, reterr);
}

int dmk_compact_open(const char *dir, struct dmk_compact *ret_compact, struct dmk_error *reterr)
{
    struct dmk_compact c = {.n_tensors = 0};
    char json_path[MAX_PATH], bin_path[MAX_PATH];
    json_t *root = NULL;

    (void)snprintf(json_path, sizeof(json_path), "%.4000s/model.json", dir);
    (void)snprintf(bin_path, sizeof(bin_path), "%.4000s/model.bin", dir);
    int r = dmk_json_load(json_path, MAX_JSON_BYTES, 8, &root, reterr);

    if (r == -DMK_ENOENT) {
        return dmk_error_set(reterr, r, "%s: there is no such file", json_path);
    }
    if (r < 0) {
        return r;
    }
    r = read_all(root, json_path, bin_path, &c, reterr);
    json_decref(root);
    if (r < 0) {
        dmk_compact_close(&c);
        return r;
    }
    *ret_compact = c;
    return 0;
}

void dmk_compact_close(struct dmk_compact *compact)
{
    free(compact->data);
    free(compact->tensors);
    free(compact->row_of_id);
    *compact = (struct dmk_compact){.n_tensors = 0};
}

const struct dmk_compact_tensor *dmk_compact_find(const struct dmk_compact *compact,
                                                  const char *name, size_t name_len)
{
    struct dmk_compact_tensor key = {.rank = 0};

    if (name_len >= sizeof(key.name)) {
        return NULL;
    }
    memcpy(key.name, name, name_len);
    return bsearch(&key, compact->tensors, compact->n_tensors, sizeof(key), compare_names);
}
