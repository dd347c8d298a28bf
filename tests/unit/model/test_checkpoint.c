/* Which files belong to a checkpoint, and every way in which an index can be wrong about them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "common/model/checkpoint.h"
#include "tests/unit/model/maker.h"

#define INDEX "model.safetensors.index.json"

static void expect_refusal(const char *dir, int status, const char *sentence)
{
    struct dmk_checkpoint *c = NULL;
    struct dmk_error err = {0};
    const int r = dmk_checkpoint_open(dir, &c, &err);

    if (r != status || !strstr(err.text, sentence)) {
        print_error("want %d %s\ngot  %d %s\n", status, sentence, r, err.text);
    }
    assert_int_equal(r, status);
    assert_non_null(strstr(err.text, sentence));
    assert_null(c);
}

/* One tensor of two bytes. */
static void write_one(const char *dir, const char *file, const char *tensor)
{
    char header[128];

    (void)snprintf(header, sizeof(header),
                   "{\"%s\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", tensor);
    mk_safetensors(dir, file, header, 2);
}

static void test_refused_folders(void **state)
{
    char dir[64], path[128];

    (void)state;
    expect_refusal("/tmp/damask-test-is-not-there", -DMK_ENOENT, "can not be opened: No such file");
    mk_folder(dir);
    expect_refusal(dir, -DMK_ENOENT,
                   "holds no checkpoint: neither model.safetensors.index.json nor "
                   "model.safetensors, there or in original/");
    write_one(dir, "model-00000-of-00001.safetensors", "a"); /* no pattern is looked for */
    mk_subfolder(dir, "deeper");
    expect_refusal(dir, -DMK_ENOENT, "holds no checkpoint");
    (void)snprintf(path, sizeof(path), "%s/model-00000-of-00001.safetensors", dir);
    expect_refusal(path, -DMK_EINVAL, "not a folder");
    mk_remove(dir);
}

static const struct {
    const char *index;
    int status;
    const char *sentence;
} bad[] = {
    {"[]", -DMK_EFORMAT, INDEX ": the top level must be an object"},
    {"{}", -DMK_EFORMAT, INDEX ": \"weight_map\" is missing but must be an object"},
    {"{\"weight_map\":[]}", -DMK_EFORMAT, "\"weight_map\" must be an object, not []"},
    {"{\"weight_map\":{}}", -DMK_EFORMAT, INDEX ": weight_map is empty"},
    {"{\"weight_map\":{\"a\":1}}", -DMK_EFORMAT,
     "tensor \"a\" must map to the name of a file in the folder, not 1"},
    {"{\"weight_map\":{\"a\":\"\"}}", -DMK_EFORMAT, "must map to the name of a file in the folder"},
    {"{\"weight_map\":{\"a\":\"..\"}}", -DMK_EFORMAT,
     "must map to the name of a file in the folder"},
    {"{\"weight_map\":{\"a\":\"../x.safetensors\"}}", -DMK_EFORMAT,
     "must map to the name of a file in the folder, not \"../x.safetensors\""},
    {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", -DMK_EFORMAT,
     "must map to the name of a file in the folder, not \"/etc/passwd\""},
    {"{\"weight_map\":{\"a\":\"sub/x.safetensors\"}}", -DMK_EFORMAT,
     "must map to the name of a file in the folder"},
    {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"z.safetensors\"}}", -DMK_ENOENT,
     INDEX ": names file \"z.safetensors\", which is not in the folder"},
    {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\",\"c\":\"y.safetensors\"}}",
     -DMK_EMISMATCH, INDEX ": tensor \"c\" is said to be in y.safetensors but is not"},
    {"{\"weight_map\":{\"a\":\"y.safetensors\",\"b\":\"x.safetensors\"}}", -DMK_EMISMATCH,
     "is said to be in"},
    {"{\"weight_map\":{\"b\":\"y.safetensors\",\"c\":\"x.safetensors\"}}", -DMK_EMISMATCH,
     "tensor \"c\" is said to be in x.safetensors but is not"},
    {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"broken.safetensors\"}}", -DMK_EFORMAT,
     "/broken.safetensors: 3 bytes are too few"},
    {"{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"twin.safetensors\"}}", -DMK_EFORMAT,
     "/twin.safetensors: tensor \"a\": stands in "},
};

static void test_refused_indexes(void **state)
{
    struct dmk_checkpoint *c = NULL;
    struct dmk_error err = {0};
    char dir[64];

    (void)state;
    mk_folder(dir);
    write_one(dir, "x.safetensors", "a");
    write_one(dir, "y.safetensors", "b");
    write_one(dir, "twin.safetensors", "a");
    mk_text(dir, "broken.safetensors", "abc");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        mk_text(dir, INDEX, bad[i].index);
        expect_refusal(dir, bad[i].status, bad[i].sentence);
    }
    mk_safetensors(dir, "x.safetensors",
                   "{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},"
                   "\"stray\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[1,2]}}",
                   2);
    mk_text(dir, INDEX, "{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\"}}");
    expect_refusal(dir, -DMK_EMISMATCH, "/x.safetensors is not in the weight_map");

    write_one(dir, "x.safetensors", "a"); /* and now a good one */
    assert_int_equal(dmk_checkpoint_open(dir, &c, &err), 0);
    assert_int_equal(dmk_checkpoint_n_files(c), 2);
    assert_int_equal(dmk_checkpoint_count(c), 2);
    assert_string_equal(dmk_checkpoint_at(c, 1)->tensor->name, "b");
    {
        size_t index = 7;

        assert_non_null(dmk_checkpoint_find(c, "b", &index));
        assert_int_equal(index, 1);
        assert_null(dmk_checkpoint_find(c, "c", &index));
        assert_null(dmk_checkpoint_find(c, "", NULL));
    }
    dmk_checkpoint_close(&c);
    mk_remove(dir);
}

/* A download cache keeps the files elsewhere and links to them. */
static void test_links(void **state)
{
    struct dmk_checkpoint *c = NULL;
    struct dmk_error err = {0};
    char blobs[64], dir[64], from[128], to[128];

    (void)state;
    mk_folder(blobs);
    mk_folder(dir);
    write_one(blobs, "0123abcd", "a");
    (void)snprintf(from, sizeof(from), "%s/0123abcd", blobs);
    (void)snprintf(to, sizeof(to), "%s/model.safetensors", dir);
    assert_int_equal(symlink(from, to), 0);
    assert_int_equal(dmk_checkpoint_open(dir, &c, &err), 0);
    assert_int_equal(dmk_checkpoint_count(c), 1);
    assert_string_equal(dmk_checkpoint_source(c), to);
    dmk_checkpoint_close(&c);
    mk_remove(blobs);
    mk_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_folders),
        cmocka_unit_test(test_refused_indexes),
        cmocka_unit_test(test_links),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
