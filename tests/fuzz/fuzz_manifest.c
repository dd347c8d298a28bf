/* Fuzz target of a converted folder's manifest.json, as far as it is read before its checksum is known.
 *
 * Checked: the text is refused with a sentence, or what it holds lies within the bounds that the loader relies on;
 * and then it either matches the plan of a small model to the byte or is refused. */
#include "common/base/assert.h"
#include "common/model/manifest.h"
#include "tests/fuzz/fuzz.h"

static void check(const struct dmk_manifest *m)
{
    struct dmk_error err = {0};
    struct dmk_shape shape;
    struct dmk_cut cut;

    dmk_assert(dmk_layout_check_ranks(m->layout, false, &err) == 0);
    dmk_assert(m->experts == DMK_EXPERTS_MXFP4 || m->experts == DMK_EXPERTS_FP8);
    dmk_assert(m->source && m->root);
    for (uint32_t i = 0; i < m->n_files; i++) {
        const size_t len = strnlen(m->files[i].name, sizeof(m->files[i].name));

        dmk_assert(len < sizeof(m->files[i].name) && !strchr(m->files[i].name, '/'));
    }
    dmk_assert(dmk_shape_preset("gpt-oss-20b", &shape, &err) == 0);
    shape.n_layers = 2;
    dmk_assert(dmk_cut_plan(&shape, m->layout, m->experts, &cut, &err) == 0);
    dmk_assert(dmk_manifest_check(m, &cut, "manifest.json", &err) == 0 || err.text[0]);
    dmk_cut_free(&cut);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dmk_manifest m = {0};
    struct dmk_error err = {0};

    if (dmk_manifest_parse((struct dmk_str){(const char *)data, size}, "manifest.json", &m, &err) <
        0) {
        dmk_assert(!m.root && err.status < 0 && err.text[0]);
        return 0;
    }
    check(&m);
    dmk_manifest_free(&m);
    return 0;
}
