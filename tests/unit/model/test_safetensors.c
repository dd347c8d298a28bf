/* Every malformed file must be refused with the sentence that says what is wrong with it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common/base/buf.h"
#include "common/model/safetensors.h"
#include "tests/unit/model/maker.h"

#define A4 "\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}"

struct bad {
    const char *header;
    size_t n_data;
    int status;
    const char *sentence; /* a part of it */
};

static const struct bad bad_headers[] = {
    {"", 0, -DMK_EFORMAT, "the header must begin with '{'"},
    {" {}", 0, -DMK_EFORMAT, "the header must begin with '{'"},
    {"{", 0, -DMK_EFORMAT, "header: not valid JSON"},
    {"{} x", 0, -DMK_EFORMAT, "header: not valid JSON"},
    {"{\"a\":\"\xff\"}", 0, -DMK_EFORMAT, "header: not UTF-8"},
    {"{" A4 "," A4 "}", 4, -DMK_EFORMAT, "duplicate object key"},
    {"{\"a\":{\"shape\":[[[[1]]]]}}", 0, -DMK_EFORMAT, "nested deeper than 4 levels"},
    {"{\"__metadata__\":3}", 0, -DMK_EFORMAT, "__metadata__ must be an object"},
    {"{\"__metadata__\":{\"k\":3}}", 0, -DMK_EFORMAT, "__metadata__ entry \"k\" must be a string"},
    {"{\"\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, -DMK_EFORMAT,
     "the name is empty"},
    {"{\"a\":7}", 0, -DMK_EFORMAT, "tensor \"a\": the entry must be an object"},
    {"{\"a\":{}}", 0, -DMK_EFORMAT, "tensor \"a\": \"dtype\" is missing but must be a string"},
    {"{\"a\":{\"dtype\":\"F3\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, -DMK_ENOTSUP,
     "tensor \"a\": dtype \"F3\" is not known"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": \"shape\" is missing but must be an array"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":\"4\",\"data_offsets\":[0,4]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": \"shape\" must be an array, not \"4\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4.0],\"data_offsets\":[0,4]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": dimension 0 of the shape must be a count, not 4.0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": dimension 0 of the shape must be a count, not -4"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
     -DMK_ENOTSUP, "tensor \"a\": shape has 9 dimensions, more than 8"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", 4,
     -DMK_EFORMAT, "tensor \"a\": the shape overflows 64 bits"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,4]}}", 4,
     -DMK_EFORMAT, "must be a count, not 1.8446744073709552e19"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": \"data_offsets\" is missing"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": data_offsets must be [begin, end], not 1 values"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,\"4\"]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": data_offsets must hold two byte counts, not \"4\""},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[-4,0]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": data_offsets must hold two byte counts, not -4"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": data_offsets begin at 4, after their end 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 3, -DMK_EFORMAT,
     "tensor \"a\": data_offsets end at 4 but the file holds 3 bytes of data (cut off?)"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[9223372036854775806,"
     "9223372036854775807]}}",
     3, -DMK_EFORMAT, "tensor \"a\": data_offsets end at 9223372036854775807 but the file holds 3"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": data_offsets cover 4 bytes but shape and dtype need 8"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,4]}}", 4, -DMK_EFORMAT,
     "tensor \"a\": data_offsets cover 4 bytes but shape and dtype need 0"},
    {"{" A4 ",\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[2,6]}}", 6, -DMK_EFORMAT,
     "tensor \"b\": its data begin at 2 and overlap tensor \"a\", which ends at 4"},
    {"{" A4 ",\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, -DMK_EFORMAT,
     "tensor \"b\": its data begin at 0 and overlap tensor \"a\""},
    {"{" A4 ",\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[6,10]}}", 10, -DMK_EFORMAT,
     "tensor \"b\": its data begin at 6 but bytes from 4 belong to no tensor"},
    {"{" A4 "}", 5, -DMK_EFORMAT, "the tensors end at 4 but the file holds 5 bytes of data"},
    {"{}", 1, -DMK_EFORMAT, "the tensors end at 0 but the file holds 1 bytes of data"},
};

static void expect_refusal(const char *path, int status, const char *sentence)
{
    struct dmk_safetensors *file = NULL;
    struct dmk_error err = {0};
    const int r = dmk_safetensors_open(path, &file, &err);

    if (r != status || !strstr(err.text, sentence) || strncmp(err.text, path, strlen(path)) != 0) {
        print_error("want %d ...%s...\ngot  %d %s\n", status, sentence, r, err.text);
    }
    assert_int_equal(r, status);
    assert_int_equal(err.status, status);
    assert_non_null(strstr(err.text, sentence));
    assert_memory_equal(err.text, path, strlen(path));
    assert_null(file);
}

static void test_bad_headers(void **state)
{
    char dir[64], path[128];

    (void)state;
    mk_folder(dir);
    (void)snprintf(path, sizeof(path), "%s/x.safetensors", dir);
    for (size_t i = 0; i < sizeof(bad_headers) / sizeof(bad_headers[0]); i++) {
        mk_safetensors(dir, "x.safetensors", bad_headers[i].header, bad_headers[i].n_data);
        expect_refusal(path, bad_headers[i].status, bad_headers[i].sentence);
    }
    mk_remove(dir);
}

static void test_bad_files(void **state)
{
    static const uint8_t huge[16] = {1, 225, 245, 5, 0, 0, 0, 0, '{', '}'}; /* 100,000,001 */
    static const uint8_t text[] = "<!DOCTYPE html>";
    static const uint8_t longer[12] = {5, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    char dir[64], path[128];

    (void)state;
    mk_folder(dir);
    (void)snprintf(path, sizeof(path), "%s/x.safetensors", dir);
    expect_refusal(path, -DMK_ENOENT, "can not be opened: No such file");
    mk_file(dir, "x.safetensors", "", 0);
    expect_refusal(path, -DMK_EFORMAT, "0 bytes are too few");
    mk_file(dir, "x.safetensors", "1234567", 7);
    expect_refusal(path, -DMK_EFORMAT, "7 bytes are too few");
    mk_file(dir, "x.safetensors", huge, sizeof(huge));
    expect_refusal(path, -DMK_EFORMAT,
                   "the header claims 100000001 bytes, more than the format's limit of 100000000");
    mk_file(dir, "x.safetensors", text, sizeof(text));
    expect_refusal(path, -DMK_EFORMAT, "not a safetensors file?");
    mk_file(dir, "x.safetensors", longer, sizeof(longer));
    expect_refusal(path, -DMK_EFORMAT, "the header claims 5 bytes but only 4 follow (cut off?)");
    expect_refusal(dir, -DMK_EFORMAT, "not a regular file");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0); /* a pipe that nobody writes to is not waited for */
    expect_refusal(path, -DMK_EFORMAT, "not a regular file");
    mk_remove(dir);
}

/* Empty tensors, scalars, padding and every dtype are fine. */
static void test_good_file(void **state)
{
    struct dmk_safetensors *file = NULL;
    struct dmk_error err = {0};
    const struct dmk_tensor *t;
    char dir[64], path[128];

    (void)state;
    mk_folder(dir);
    (void)snprintf(path, sizeof(path), "%s/x.safetensors", dir);
    mk_safetensors(
        dir, "x.safetensors",
        "{\"z\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
        "\"e\":{\"dtype\":\"BF16\",\"shape\":[4294967296,0,4294967296],\"data_offsets\":[4,4]},"
        "\"__metadata__\":{\"format\":\"pt\"},"
        "\"y\":{\"dtype\":\"I64\",\"shape\":[1,2],\"data_offsets\":[4,20],\"extra\":1}}   ",
        20);
    assert_int_equal(dmk_safetensors_open(path, &file, &err), 0);
    assert_int_equal(dmk_safetensors_count(file), 3);
    assert_int_equal(dmk_safetensors_data(file).len, 20);
    t = dmk_safetensors_at(file, 0);
    assert_string_equal(t->name, "z");
    assert_int_equal(t->rank, 0);
    assert_int_equal(t->n_bytes, 4);
    assert_int_equal(t->data[0], 1);
    t = dmk_safetensors_at(file, 1);
    assert_string_equal(t->name, "e");
    assert_int_equal(t->n_bytes, 0);
    t = dmk_safetensors_at(file, 2);
    assert_string_equal(t->name, "y");
    assert_int_equal(t->rank, 2);
    assert_int_equal(t->dims[1], 2);
    assert_int_equal(t->data[0], 4 * 7 + 1);
    dmk_safetensors_close(&file);
    assert_null(file);
    dmk_safetensors_close(&file);

    for (uint32_t i = 0; i < DMK_N_DTYPES; i++) {
        char header[256];

        (void)snprintf(header, sizeof(header),
                       "{\"a\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%u]}}",
                       dmk_dtype_name((enum dmk_dtype)i), 3 * dmk_dtype_bytes((enum dmk_dtype)i));
        mk_safetensors(dir, "x.safetensors", header, 3 * dmk_dtype_bytes((enum dmk_dtype)i));
        assert_int_equal(dmk_safetensors_open(path, &file, &err), 0);
        assert_int_equal(dmk_safetensors_at(file, 0)->dtype, i);
        dmk_safetensors_close(&file);
    }
    mk_safetensors(dir, "x.safetensors", "{}", 0);
    assert_int_equal(dmk_safetensors_open(path, &file, &err), 0);
    assert_int_equal(dmk_safetensors_count(file), 0);
    dmk_safetensors_close(&file);
    mk_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_headers),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_good_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
