/* Reading manifest.json, and whether it lists what the config asks for; see manifest.h. */
#include "common/model/manifest_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "common/base/file.h"
#include "common/json/json.h"

#define MAX_BYTES       (64u << 20)
#define MAX_DEPTH       8u
#define MAX_FILES       8192u
#define MAX_COPIED      64u
#define MAX_SMALL_BYTES (128u << 20) /* of a copied file */

/* Where sentences are about: "DIR/manifest.json: files[3]". */
#define WHERE_BYTES 640

static int read_id(const json_t *obj, const char *where, const char *key, struct dmk_id128 *ret_id,
                   struct dmk_error *reterr)
{
    struct dmk_str text = {0};
    const int r = dmk_json_get_str(obj, where, key, DMK_JSON_REQUIRED, &text, reterr);

    if (r < 0) {
        return r;
    }
    if (!dmk_id128_parse(text.data, text.len, ret_id)) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: \"%s\" must be 32 hexadecimal digits, not \"%.40s\"", where, key,
                             text.data);
    }
    return 0;
}

static int read_word(const json_t *obj, const char *where, const char *key, const char *want,
                     struct dmk_error *reterr)
{
    struct dmk_str text = {0};
    const int r = dmk_json_get_str(obj, where, key, DMK_JSON_REQUIRED, &text, reterr);

    if (r < 0) {
        return r;
    }
    if (!dmk_str_is(text, want)) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "%s: \"%s\" must be \"%s\", not \"%.40s\"",
                             where, key, want, text.data);
    }
    return 0;
}

static int read_file(const json_t *obj, const char *where, struct dmk_manifest_file *f,
                     struct dmk_error *reterr)
{
    struct dmk_str name = {0};
    int r;

    if (!json_is_object(obj)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s must be an object", where);
    }
    if ((r = dmk_json_get_str(obj, where, "name", DMK_JSON_REQUIRED, &name, reterr)) < 0 ||
        (r = dmk_json_get_u64(obj, where, "size", DMK_JSON_REQUIRED, 0, (uint64_t)1 << 50,
                              &f->n_bytes, reterr)) < 0 ||
        (r = read_id(obj, where, "xxh3_128", &f->checksum, reterr)) < 0) {
        return r;
    }
    if (name.len == 0 || name.len >= sizeof(f->name) || name.data[0] == '.' ||
        memchr(name.data, '/', name.len)) {
        return dmk_error_set(reterr, -DMK_EFORMAT,
                             "%s: \"%.80s\" is no name of a file in the folder", where, name.data);
    }
    memcpy(f->name, name.data, name.len);
    return 0;
}

static int read_files(const json_t *root, const char *path, const char *key, uint32_t max,
                      struct dmk_manifest_file **ret_files, uint32_t *ret_n,
                      struct dmk_error *reterr)
{
    struct dmk_manifest_file *files;
    json_t *array = NULL;
    char where[WHERE_BYTES];
    size_t n;
    int r = dmk_json_get_array(root, path, key, DMK_JSON_REQUIRED, &array, reterr);

    if (r < 0) {
        return r;
    }
    n = json_array_size(array);
    if (n > max) {
        return dmk_error_set(reterr, -DMK_EFULL, "%s: \"%s\" lists %zu files, more than %u", path,
                             key, n, max);
    }
    files = calloc(n ? n : 1, sizeof(files[0]));
    if (!files) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory for a list of %zu files", path, n);
    }
    *ret_files = files;
    *ret_n = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        (void)snprintf(where, sizeof(where), "%.500s: %s[%zu]", path, key, i);
        r = read_file(json_array_get(array, i), where, &files[i], reterr);
        if (r < 0) {
            return r;
        }
    }
    return 0;
}

static int read_layout(const json_t *root, const char *path, struct dmk_manifest *m,
                       struct dmk_error *reterr)
{
    struct dmk_str format = {0};
    json_t *layout = NULL;
    char where[WHERE_BYTES];
    int r;

    (void)snprintf(where, sizeof(where), "%.500s: layout", path);
    if ((r = dmk_json_get_object(root, path, "layout", DMK_JSON_REQUIRED, &layout, reterr)) < 0 ||
        (r = dmk_json_get_u32(layout, where, "tp", DMK_JSON_REQUIRED, 1, 8, &m->layout.tp,
                              reterr)) < 0 ||
        (r = dmk_json_get_u32(layout, where, "dp", DMK_JSON_REQUIRED, 1, 8, &m->layout.dp,
                              reterr)) < 0) {
        return r;
    }
    if (dmk_layout_check_ranks(m->layout, false, reterr) < 0) {
        return dmk_error_prefix(reterr, "%s", where);
    }
    if ((r = read_word(root, path, "dense", "bf16", reterr)) < 0 ||
        (r = dmk_json_get_str(root, path, "experts", DMK_JSON_REQUIRED, &format, reterr)) < 0) {
        return r;
    }
    if (dmk_str_is(format, "fp8")) {
        m->experts = DMK_EXPERTS_FP8;
    } else if (dmk_str_is(format, "mxfp4")) {
        m->experts = DMK_EXPERTS_MXFP4;
    } else {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "%s: \"experts\" must be \"mxfp4\" or \"fp8\", not \"%.40s\"", path,
                             format.data);
    }
    return 0;
}

static int read_source(const json_t *root, const char *path, struct dmk_manifest *m,
                       struct dmk_error *reterr)
{
    struct dmk_str folder = {0};
    json_t *source = NULL;
    char where[WHERE_BYTES];
    int r;

    (void)snprintf(where, sizeof(where), "%.500s: source", path);
    if ((r = dmk_json_get_object(root, path, "source", DMK_JSON_REQUIRED, &source, reterr)) < 0 ||
        (r = dmk_json_get_str(source, where, "path", DMK_JSON_REQUIRED, &folder, reterr)) < 0) {
        return r;
    }
    m->source = strdup(folder.data);
    return m->source ? 0 : dmk_error_set(reterr, -DMK_ENOMEM, "%s: no memory to read it", path);
}

/* The version comes first: the rest of another one may mean anything. */
static int read_root(const char *path, struct dmk_manifest *m, struct dmk_error *reterr)
{
    uint32_t version = 0;
    int r;

    if (!json_is_object(m->root)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: must be an object", path);
    }
    if ((r = read_word(m->root, path, "format", DMK_MANIFEST_FORMAT, reterr)) < 0 ||
        (r = dmk_json_get_u32(m->root, path, "version", DMK_JSON_REQUIRED, 0, UINT32_MAX, &version,
                              reterr)) < 0) {
        return r;
    }
    if (version != DMK_MANIFEST_VERSION) {
        return dmk_error_set(
            reterr, -DMK_ENOTSUP,
            "%s: version %u is not known, only %u: convert the checkpoint again with this "
            "release",
            path, version, DMK_MANIFEST_VERSION);
    }
    if ((r = read_id(m->root, path, "model_id", &m->model_id, reterr)) < 0 ||
        (r = read_source(m->root, path, m, reterr)) < 0 ||
        (r = read_layout(m->root, path, m, reterr)) < 0 ||
        (r = read_files(m->root, path, "files", MAX_FILES, &m->files, &m->n_files, reterr)) < 0) {
        return r;
    }
    return read_files(m->root, path, "copied", MAX_COPIED, &m->copied, &m->n_copied, reterr);
}

int dmk_manifest_parse(struct dmk_str text, const char *path, struct dmk_manifest *ret_manifest,
                       struct dmk_error *reterr)
{
    struct dmk_manifest m = {0};
    int r = dmk_json_parse(text, path, MAX_DEPTH, &m.root, reterr);

    if (r < 0) {
        return r;
    }
    r = read_root(path, &m, reterr);
    if (r < 0) {
        dmk_manifest_free(&m);
        return r;
    }
    *ret_manifest = m;
    return 0;
}

/* Where the last member begins, or NULL. */
static const char *find_checksum(struct dmk_str text)
{
    const size_t len = strlen(DMK_MANIFEST_CHECKSUM);

    for (size_t at = text.len; at-- > 0;) {
        if (text.len - at >= len && memcmp(text.data + at, DMK_MANIFEST_CHECKSUM, len) == 0) {
            return text.data + at;
        }
    }
    return NULL;
}

static int check_text(struct dmk_str text, const char *path, struct dmk_error *reterr)
{
    const char *at = find_checksum(text);
    struct dmk_id128 is, says = {0};
    char hex[33];
    size_t skip;

    if (!at) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: its own checksum is missing (cut off?)",
                             path);
    }
    is = dmk_checksum128(text.data, (size_t)(at - text.data));
    skip = (size_t)(at - text.data) + strlen(DMK_MANIFEST_CHECKSUM ": \"");
    if (skip + 32 <= text.len && dmk_id128_parse(text.data + skip, 32, &says) &&
        dmk_id128_equal(is, says)) {
        return 0;
    }
    dmk_id128_format(is, hex);
    return dmk_error_set(
        reterr, -DMK_EFORMAT,
        "%s: its text has checksum %s, not the one at its end (damaged, or changed by hand?)", path,
        hex);
}

/* Of a pipe the opening would wait for one who writes to it. */
static int read_regular(const char *path, const char *name, size_t max_bytes, struct dmk_buf *out,
                        struct dmk_error *reterr)
{
    struct stat st;

    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        return dmk_error_set(reterr, -DMK_EFORMAT, "%s: not a regular file", path);
    }
    return dmk_file_read(path, name, max_bytes, out, NULL, reterr);
}

int dmk_manifest_load(const char *dir, struct dmk_manifest *ret_manifest, struct dmk_error *reterr)
{
    struct dmk_buf text;
    char path[4096];
    int r;

    (void)snprintf(path, sizeof(path), "%.4000s/" DMK_MANIFEST_NAME, dir);
    dmk_buf_init(&text, MAX_BYTES);
    r = read_regular(path, "manifest", MAX_BYTES, &text, reterr);
    if (r == 0 && (r = check_text(dmk_buf_str(&text), path, reterr)) == 0) {
        r = dmk_manifest_parse(dmk_buf_str(&text), path, ret_manifest, reterr);
    }
    dmk_buf_fini(&text);
    return r;
}

void dmk_manifest_free(struct dmk_manifest *m)
{
    json_decref(m->root);
    free(m->source);
    free(m->files);
    free(m->copied);
    free(m->inexact);
    *m = (struct dmk_manifest){0};
}

static int check_file(const struct dmk_manifest *m, const struct dmk_cut *cut, uint32_t at,
                      const char *path, struct dmk_error *reterr)
{
    const struct dmk_cut_file *f = &cut->files[at];
    const json_t *listed = json_array_get(json_object_get(m->root, "files"), at);
    json_t *want;
    bool equal;

    if (strcmp(m->files[at].name, f->name) != 0) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "%.300s: files[%u] is \"%s\" but must be \"%s\"", path, at,
                             m->files[at].name, f->name);
    }
    if (m->files[at].n_bytes != f->n_bytes) {
        return dmk_error_set(
            reterr, -DMK_EMISMATCH, "%.300s: %s has %llu bytes but config.json asks for %llu", path,
            f->name, (unsigned long long)m->files[at].n_bytes, (unsigned long long)f->n_bytes);
    }
    want = dmk_manifest__tensors(cut, f);
    equal = json_equal(want, json_object_get(listed, "tensors")) != 0;
    json_decref(want);
    return equal
               ? 0
               : dmk_error_set(reterr, -DMK_EMISMATCH,
                               "%.300s: the tensors of %s are not those that config.json asks for",
                               path, f->name);
}

int dmk_manifest_check(const struct dmk_manifest *m, const struct dmk_cut *cut, const char *path,
                       struct dmk_error *reterr)
{
    if (m->n_files != cut->n_files) {
        return dmk_error_set(reterr, -DMK_EMISMATCH,
                             "%.300s: lists %u files but tp %u, dp %u make %u", path, m->n_files,
                             cut->layout.tp, cut->layout.dp, cut->n_files);
    }
    for (uint32_t i = 0; i < cut->n_files; i++) {
        const int r = check_file(m, cut, i, path, reterr);

        if (r < 0) {
            return r;
        }
    }
    return 0;
}

static int check_copied(const struct dmk_manifest_file *f, const char *dir,
                        struct dmk_error *reterr)
{
    char path[4096];
    struct dmk_buf text;
    bool same;
    int r;

    (void)snprintf(path, sizeof(path), "%.4000s/%s", dir, f->name);
    dmk_buf_init(&text, MAX_SMALL_BYTES);
    r = read_regular(path, f->name, MAX_SMALL_BYTES, &text, reterr);
    same = r == 0 && dmk_id128_equal(dmk_checksum128(text.data, text.len), f->checksum);
    dmk_buf_fini(&text);
    return r < 0 || same
               ? r
               : dmk_error_set(reterr, -DMK_EFORMAT,
                               "%s: is not what was converted: its checksum differs from the "
                               "manifest's (damaged, or changed by hand?)",
                               path);
}

int dmk_manifest_check_copied(const struct dmk_manifest *m, const char *dir, bool all,
                              struct dmk_error *reterr)
{
    for (uint32_t i = 0; i < m->n_copied; i++) {
        const char *name = m->copied[i].name;
        const bool wanted =
            all || strcmp(name, "config.json") == 0 || strcmp(name, "generation_config.json") == 0;
        const int r = wanted ? check_copied(&m->copied[i], dir, reterr) : 0;

        if (r < 0) {
            return r;
        }
    }
    return 0;
}
