/* Writing manifest.json; see manifest.h. */
#include "common/model/manifest_internal.h"

#include <stdlib.h>
#include <string.h>
#include "common/json/json.h"

/* ---- what it lists ---- */

static json_t *describe_tensor(const struct dmk_cut_tensor *t)
{
    json_t *shape = json_array();

    for (uint32_t i = 0; i < t->rank; i++) {
        (void)json_array_append_new(shape, json_integer((json_int_t)t->dims[i]));
    }
    return json_pack("{s:s, s:s, s:o, s:I, s:{s:i, s:I, s:I, s:I}}", "name", t->name, "dtype",
                     dmk_dtype_name(t->dtype), "shape", shape, "offset", (json_int_t)t->offset,
                     "slice", "axis", (int)t->axis, "begin", (json_int_t)t->begin, "end",
                     (json_int_t)t->end, "of", (json_int_t)t->of);
}

json_t *dmk_manifest__tensors(const struct dmk_cut *cut, const struct dmk_cut_file *f)
{
    json_t *list = json_array();

    for (uint32_t i = f->first; i < f->first + f->n_tensors; i++) {
        (void)json_array_append_new(list, describe_tensor(&cut->tensors[i]));
    }
    return list;
}

/* ---- writing ---- */

static json_t *describe_file(const struct dmk_manifest_file *f)
{
    char hex[33];

    dmk_id128_format(f->checksum, hex);
    return json_pack("{s:s, s:I, s:s}", "name", f->name, "size", (json_int_t)f->n_bytes, "xxh3_128",
                     hex);
}

static json_t *describe_files(const struct dmk_manifest *m, const struct dmk_cut *cut)
{
    const uint32_t n_ranks = cut->layout.tp * cut->layout.dp;
    json_t *list = json_array();

    for (uint32_t i = 0; i < cut->n_files; i++) {
        const struct dmk_cut_file *f = &cut->files[i];
        json_t *file = describe_file(&m->files[i]), *ranks = json_array();

        for (uint32_t r = 0; r < n_ranks; r++) {
            if (dmk_cut_serves(cut, f, r)) {
                (void)json_array_append_new(ranks, json_integer(r));
            }
        }
        (void)json_object_set_new(file, "kind", json_string(dmk_cut_kind_name(f->kind)));
        (void)json_object_set_new(file, "ranks", ranks);
        (void)json_object_set_new(file, "tensors", dmk_manifest__tensors(cut, f));
        (void)json_array_append_new(list, file);
    }
    return list;
}

static json_t *describe_exactness(const struct dmk_manifest *m)
{
    json_t *list = json_array();
    uint64_t n_blocks = 0;
    double largest = 0;

    for (uint32_t i = 0; i < m->n_inexact; i++) {
        const struct dmk_inexact *e = &m->inexact[i];

        n_blocks += e->n_blocks;
        largest = e->largest_error > largest ? e->largest_error : largest;
        (void)json_array_append_new(
            list,
            json_pack("{s:I, s:I, s:s, s:I, s:f}", "layer", (json_int_t)e->layer, "expert",
                      (json_int_t)e->expert, "matrix", e->gate_up ? "gate_up_proj" : "down_proj",
                      "blocks", (json_int_t)e->n_blocks, "largest_error", e->largest_error));
    }
    return json_pack("{s:I, s:I, s:f, s:o}", "blocks", (json_int_t)m->n_blocks, "inexact_blocks",
                     (json_int_t)n_blocks, "largest_error", largest, "matrices", list);
}

/* A manifest is UTF-8 but a path may be any bytes: in one that is not, those beyond ASCII become question marks. */
static json_t *describe_path(const char *path)
{
    json_t *text = json_string(path);
    char *plain = text ? NULL : strdup(path);

    for (char *p = plain; p && *p; p++) {
        *p = (char)((unsigned char)*p < 0x80 ? *p : '?');
    }
    if (plain) {
        text = json_string(plain);
        free(plain);
    }
    return text;
}

static json_t *describe(const struct dmk_manifest *m, const struct dmk_cut *cut)
{
    const json_int_t tp = cut->layout.tp, dp = cut->layout.dp;
    json_t *copied = json_array();
    char id[33];

    dmk_id128_format(m->model_id, id);
    for (uint32_t i = 0; i < m->n_copied; i++) {
        (void)json_array_append_new(copied, describe_file(&m->copied[i]));
    }
    return json_pack("{s:s, s:i, s:s, s:{s:o}, s:{s:I, s:I, s:I}, s:s, s:s, s:i, s:o, s:o}",
                     "format", DMK_MANIFEST_FORMAT, "version", (int)DMK_MANIFEST_VERSION,
                     "model_id", id, "source", "path", describe_path(m->source), "layout", "tp", tp,
                     "dp", dp, "ep", tp * dp, "dense", "bf16", "experts",
                     dmk_cut_format_name(cut->experts), "alignment", (int)DMK_CUT_ALIGN,
                     "exactness", describe_exactness(m), "copied", copied);
}

static void put_value(struct dmk_buf *out, const json_t *value)
{
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));

    dmk_buf_puts(out, text ? text : "");
    out->failed = out->failed || !text;
    free(text);
}

/* A value a line, so that people can read it: of an object its members, of an array its elements. */
static void put_lines(struct dmk_buf *out, json_t *value, const char *indent)
{
    const char *key;
    json_t *member;
    size_t i;
    bool first = true;

    json_array_foreach(value, i, member)
    {
        dmk_buf_printf(out, "%s\n%s", i ? "," : "", indent);
        put_value(out, member);
    }
    json_object_foreach(value, key, member)
    {
        dmk_buf_printf(out, "%s\n%s\"%s\": ", first ? "" : ",", indent, key);
        put_value(out, member);
        first = false;
    }
}

/* Files with a line for each tensor. */
static void put_files(struct dmk_buf *out, json_t *files)
{
    json_t *file;
    size_t i;

    json_array_foreach(files, i, file)
    {
        json_t *tensors = json_incref(json_object_get(file, "tensors"));

        (void)json_object_del(file, "tensors");
        dmk_buf_printf(out, "%s\n  ", i ? "," : "");
        put_value(out, file);
        out->len -= 1; /* its brace */
        dmk_buf_puts(out, ",\"tensors\":[");
        put_lines(out, tensors, "    ");
        dmk_buf_puts(out, "]}");
        json_decref(tensors);
    }
}

int dmk_manifest_write(const struct dmk_manifest *m, const struct dmk_cut *cut, struct dmk_buf *out,
                       struct dmk_error *reterr)
{
    json_t *root = describe(m, cut), *files = describe_files(m, cut);
    char hex[33];

    if (root && files) {
        dmk_buf_puts(out, "{");
        put_lines(out, root, " ");
        dmk_buf_puts(out, ",\n \"files\": [");
        put_files(out, files);
        dmk_buf_puts(out, "],\n ");
    }
    if (root && files && !out->failed) {
        dmk_id128_format(dmk_checksum128(out->data, out->len), hex);
        dmk_buf_printf(out, DMK_MANIFEST_CHECKSUM ": \"%s\"\n}\n", hex);
    }
    out->failed = out->failed || !root || !files;
    json_decref(root);
    json_decref(files);
    return out->failed ? dmk_error_set(reterr, -DMK_ENOMEM,
                                       "no memory for the manifest of %u files", cut->n_files)
                       : 0;
}
