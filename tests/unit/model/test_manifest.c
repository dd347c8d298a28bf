/* manifest.json: written and read again; every field that is wrong is refused by name; no damage is taken, whatever
 * it is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "common/base/rng.h"
#include "common/model/manifest.h"
#include "tests/unit/model/maker.h"

static const struct dmk_layout layout = {2, 2};

static struct dmk_shape small_shape(void)
{
    struct dmk_shape s;

    assert_int_equal(dmk_shape_preset("gpt-oss-20b", &s, NULL), 0);
    s.n_layers = 3;
    s.hidden = 96; /* rows that end in no page, and blocks of FP8 that are not full */
    s.intermediate = 160;
    s.n_heads = 16;
    s.vocab = 5000;
    return s;
}

static struct dmk_cut plan(enum dmk_expert_format experts)
{
    const struct dmk_shape s = small_shape();
    struct dmk_cut cut;

    assert_int_equal(dmk_cut_plan(&s, layout, experts, &cut, NULL), 0);
    return cut;
}

static void write_text_from(const struct dmk_cut *cut, char *source, struct dmk_buf *out)
{
    struct dmk_inexact inexact[] = {{1, 17, true, 3, 0.125}};
    struct dmk_manifest_file copied[] = {{"config.json", 100, {1, 2}}};
    struct dmk_manifest m = {.model_id = {3, 4},
                             .source = source,
                             .layout = cut->layout,
                             .experts = cut->experts,
                             .n_files = cut->n_files,
                             .copied = copied,
                             .n_copied = 1,
                             .inexact = inexact,
                             .n_inexact = 1};

    m.files = calloc(cut->n_files, sizeof(m.files[0]));
    assert_non_null(m.files);
    for (uint32_t i = 0; i < cut->n_files; i++) {
        memcpy(m.files[i].name, cut->files[i].name, sizeof(m.files[i].name));
        m.files[i].n_bytes = cut->files[i].n_bytes;
        m.files[i].checksum = (struct dmk_id128){i, i + 1};
    }
    dmk_buf_init(out, 0);
    assert_int_equal(dmk_manifest_write(&m, cut, out, NULL), 0);
    free(m.files);
}

static void write_text(const struct dmk_cut *cut, struct dmk_buf *out)
{
    write_text_from(cut, (char[]){"/models/a \"b\""}, out);
}

static void test_round_trip(void **state)
{
    static const enum dmk_expert_format formats[] = {DMK_EXPERTS_MXFP4, DMK_EXPERTS_FP8};

    (void)state;
    for (size_t k = 0; k < 2; k++) {
        struct dmk_cut cut = plan(formats[k]), other = plan(formats[1 - k]);
        struct dmk_manifest m = {0};
        struct dmk_error err = {0};
        struct dmk_buf text;
        char dir[64];

        write_text(&cut, &text);
        mk_folder(dir);
        mk_file(dir, "manifest.json", text.data, text.len);
        assert_int_equal(dmk_manifest_load(dir, &m, &err), 0);
        assert_int_equal(m.experts, formats[k]);
        assert_string_equal(m.source, "/models/a \"b\"");
        assert_true(m.layout.tp == 2 && m.layout.dp == 2 && m.model_id.lo == 3 &&
                    m.model_id.hi == 4);
        assert_int_equal(m.n_files, cut.n_files);
        assert_true(m.files[5].checksum.lo == 5 && m.files[5].checksum.hi == 6);
        assert_int_equal(dmk_manifest_check(&m, &cut, "x", &err), 0);
        assert_true(dmk_manifest_check(&m, &other, "x", &err) < 0 && err.text[0]);
        dmk_manifest_free(&m);
        dmk_cut_free(&cut);
        dmk_cut_free(&other);
        dmk_buf_fini(&text);
        mk_remove(dir);
    }
}

/* Paths are bytes: one that is no UTF-8 does not keep the manifest from being written. */
static void test_any_path(void **state)
{
    struct dmk_cut cut = plan(DMK_EXPERTS_MXFP4);
    struct dmk_manifest m = {0};
    struct dmk_error err = {0};
    struct dmk_buf text;

    (void)state;
    write_text_from(&cut, (char[]){"/m\xc3\xa9/\xff.x"}, &text);
    assert_int_equal(dmk_manifest_parse(dmk_buf_str(&text), "x", &m, &err), 0);
    assert_string_equal(m.source, "/m?\?/?.x");
    dmk_manifest_free(&m);
    dmk_buf_fini(&text);
    dmk_cut_free(&cut);
}

/* The engine's files must be as they were, the others where all are asked for. */
static void test_copied(void **state)
{
    struct dmk_manifest_file copied[] = {{"config.json", 2, dmk_checksum128("{}", 2)},
                                         {"chat_template.jinja", 2, dmk_checksum128("hi", 2)}};
    const struct dmk_manifest m = {.copied = copied, .n_copied = 2};
    struct dmk_error err = {0};
    char dir[64];

    (void)state;
    mk_folder(dir);
    assert_int_equal(dmk_manifest_check_copied(&m, dir, false, &err), -DMK_ENOENT);
    mk_text(dir, "config.json", "{}");
    assert_int_equal(dmk_manifest_check_copied(&m, dir, false, &err), 0);
    assert_int_equal(dmk_manifest_check_copied(&m, dir, true, &err), -DMK_ENOENT);
    mk_text(dir, "chat_template.jinja", "ho");
    assert_int_equal(dmk_manifest_check_copied(&m, dir, false, &err), 0);
    assert_int_equal(dmk_manifest_check_copied(&m, dir, true, &err), -DMK_EFORMAT);
    assert_non_null(strstr(err.text, "chat_template.jinja: is not what was converted"));
    mk_text(dir, "config.json", "{ }");
    assert_int_equal(dmk_manifest_check_copied(&m, dir, false, &err), -DMK_EFORMAT);
    mk_remove(dir);
}

/* A pipe that nobody writes to is not waited for. */
static void test_pipe(void **state)
{
    struct dmk_manifest m = {0};
    struct dmk_error err = {0};
    char dir[64], path[96];

    (void)state;
    mk_folder(dir);
    (void)snprintf(path, sizeof(path), "%s/manifest.json", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(dmk_manifest_load(dir, &m, &err), -DMK_EFORMAT);
    assert_non_null(strstr(err.text, "manifest.json: not a regular file"));
    mk_remove(dir);
}

/* Every file's plan must be a safetensors file to the last byte, with each tensor on its border. */
static void test_plan_is_packed(void **state)
{
    struct dmk_cut cut = plan(DMK_EXPERTS_FP8);
    char dir[64], path[160];

    (void)state;
    mk_folder(dir);
    for (uint32_t i = 0; i < cut.n_files; i++) {
        const struct dmk_cut_file *f = &cut.files[i];
        struct dmk_safetensors *file = NULL;
        struct dmk_error err = {0};
        struct dmk_buf bytes;

        dmk_buf_init(&bytes, 0);
        dmk_cut_header(&cut, f, &bytes);
        assert_int_equal(bytes.len, f->data_start);
        assert_int_equal(bytes.len % DMK_CUT_ALIGN, 0);
        while (bytes.len < f->n_bytes) {
            dmk_buf_putc(&bytes, 0);
        }
        mk_file(dir, f->name, bytes.data, bytes.len);
        (void)snprintf(path, sizeof(path), "%s/%s", dir, f->name);
        if (dmk_safetensors_open(path, &file, &err) < 0) {
            fail_msg("%s", err.text);
        }
        for (uint32_t k = f->first; k < f->first + f->n_tensors; k++) {
            assert_int_equal(cut.tensors[k].offset % DMK_CUT_ALIGN, 0);
        }
        dmk_safetensors_close(&file);
        dmk_buf_fini(&bytes);
    }
    mk_remove(dir);
    dmk_cut_free(&cut);
}

/* Text with one place replaced, then parsed and checked against the plan. */
static void refuse(const struct dmk_buf *text, const char *old, const char *new,
                   const char *sentence)
{
    const char *at = strstr(text->data, old);
    struct dmk_manifest m = {0};
    struct dmk_error err = {0};
    struct dmk_buf changed;
    int r;

    assert_non_null(at);
    dmk_buf_init(&changed, 0);
    dmk_buf_append(&changed, text->data, (size_t)(at - text->data));
    dmk_buf_puts(&changed, new);
    dmk_buf_puts(&changed, at + strlen(old));
    r = dmk_manifest_parse(dmk_buf_str(&changed), "/m/manifest.json", &m, &err);
    if (r == 0) {
        const struct dmk_shape s = small_shape();
        struct dmk_cut cut;

        assert_int_equal(dmk_cut_plan(&s, m.layout, m.experts, &cut, NULL), 0);
        r = dmk_manifest_check(&m, &cut, "/m/manifest.json", &err);
        dmk_cut_free(&cut);
        dmk_manifest_free(&m);
    }
    if (r >= 0 || !strstr(err.text, sentence) || !strstr(err.text, "/m/manifest.json")) {
        print_error("%s -> %s\nwant ...%s...\ngot  %d %s\n", old, new, sentence, r, err.text);
    }
    assert_true(r < 0);
    assert_non_null(strstr(err.text, sentence));
    assert_non_null(strstr(err.text, "/m/manifest.json"));
    dmk_buf_fini(&changed);
}

static void test_wrong_fields(void **state)
{
    struct dmk_cut cut = plan(DMK_EXPERTS_MXFP4);
    struct dmk_buf text;

    (void)state;
    write_text(&cut, &text);
    refuse(&text, "damask-converted", "other",
           "\"format\" must be \"damask-converted\", not \"other\"");
    refuse(&text, "\"version\": 2", "\"version\": 1",
           "version 1 is not known, only 2: convert the checkpoint again");
    refuse(&text, "\"model_id\": \"00", "\"model_id\": \"x0",
           "\"model_id\" must be 32 hexadecimal digits");
    refuse(&text, "\"tp\":2", "\"tp\":3", "layout: tp is 3 but must be 1, 2, 4 or 8");
    refuse(&text, "\"tp\":2", "\"tp\":4", "lists 17 files but tp 4, dp 2 make 33");
    refuse(&text, "\"tp\":2", "\"tp\":9", "\"tp\" must be");
    refuse(&text, "\"experts\": \"mxfp4\"", "\"experts\": \"int4\"",
           "must be \"mxfp4\" or \"fp8\", not \"int4\"");
    refuse(&text, "\"dense\": \"bf16\"", "\"dense\": \"fp8\"", "\"dense\" must be \"bf16\"");
    refuse(&text, "\"shared.safetensors\"", "\"../x\"", "files[0]: \"../x\" is no name of a file");
    refuse(&text, "\"shared.safetensors\"", "\"a.safetensors\"",
           "files[0] is \"a.safetensors\" but must be");
    refuse(&text, "\"xxh3_128\":\"00", "\"xxh3_128\":\"0",
           "\"xxh3_128\" must be 32 hexadecimal digits");
    refuse(&text, "\"begin\":0", "\"begin\":1", "the tensors of shared.safetensors are not those");
    refuse(&text, "\"offset\":", "\"offset\":1", "the tensors of shared.safetensors are not those");
    refuse(&text, "\"files\": [", "\"files\": [7,", "files[0] must be an object");
    refuse(&text, "\"files\"", "\"fils\"", "\"files\"");
    dmk_buf_fini(&text);
    dmk_cut_free(&cut);
}

/* Damage of any kind, under the checksum: one byte changed, pieces cut out or doubled. */
static void test_damage(void **state)
{
    const uint64_t seed = dmk_random_u64();
    struct dmk_cut cut = plan(DMK_EXPERTS_MXFP4);
    struct dmk_buf text;
    char dir[64];

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    write_text(&cut, &text);
    mk_folder(dir);
    for (uint64_t i = 0; i < 300; i++) {
        struct dmk_manifest m = {0};
        struct dmk_error err = {0};
        char *bytes = malloc(text.len);
        const size_t at = dmk_rng_u64(seed, i, 0) % (text.len - 8);
        size_t len = text.len;

        assert_non_null(bytes);
        memcpy(bytes, text.data, text.len);
        if (i % 3 == 0) {
            bytes[at] = (char)(bytes[at] ^ (1 << dmk_rng_u64(seed, i, 1) % 8));
        } else if (i % 3 == 1) {
            len = at;
        } else {
            memmove(bytes + at, bytes + at + 3, text.len - at - 3);
            len -= 3;
        }
        mk_file(dir, "manifest.json", bytes, len);
        assert_true(dmk_manifest_load(dir, &m, &err) < 0);
        assert_true(strstr(err.text, "manifest.json") != NULL);
        free(bytes);
    }
    mk_remove(dir);
    dmk_buf_fini(&text);
    dmk_cut_free(&cut);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_any_path),
        cmocka_unit_test(test_copied),         cmocka_unit_test(test_pipe),
        cmocka_unit_test(test_plan_is_packed), cmocka_unit_test(test_wrong_fields),
        cmocka_unit_test(test_damage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
