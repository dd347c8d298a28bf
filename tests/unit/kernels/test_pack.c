/* Packed weights say what the checkpoint says, and MXFP4 made FP8 is exact as far as it promises. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "kernels/dtype.h"
#include "kernels/pack.h"

struct matrix {
    uint32_t rows, cols;
    uint8_t *blocks, *scales;
};

static uint64_t seed = 20251;

static uint32_t next_u32(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

static struct matrix make_matrix(uint32_t rows, uint32_t cols, uint32_t scale_first,
                                 uint32_t n_scales)
{
    struct matrix m = {rows, cols, malloc((size_t)rows * cols / 2),
                       malloc((size_t)rows * cols / 32)};
    for (size_t i = 0; i < (size_t)rows * cols / 2; i++) {
        m.blocks[i] = (uint8_t)next_u32();
    }
    for (size_t i = 0; i < (size_t)rows * cols / 32; i++) {
        m.scales[i] = (uint8_t)(scale_first + next_u32() % n_scales);
    }
    return m;
}

static void free_matrix(struct matrix *m)
{
    free(m->blocks);
    free(m->scales);
}

static float value_of(const struct matrix *m, uint32_t row, uint32_t col)
{
    size_t at = (size_t)row * m->cols + col;
    uint8_t byte = m->blocks[at / 2];
    return dmk_e2m1_to_f32(col % 2 ? byte >> 4 : byte & 15) * dmk_ue8m0_to_f32(m->scales[at / 32]);
}

static void packed_mxfp4_is_the_matrix(void **state)
{
    (void)state;
    const uint32_t shapes[][2] = {{64, 960}, {2, 32}, {96, 160}, {130, 992}, {192, 1952}};
    for (size_t i = 0; i < 5; i++) {
        for (int paired = 0; paired < 2; paired++) {
            struct matrix m = make_matrix(shapes[i][0], shapes[i][1], 0, DMK_MXPACK_MAX_SCALE + 1);
            size_t bytes = dmk_mxfp4_pack_bytes(m.rows, m.cols);
            assert_int_equal(bytes % DMK_MXPACK_STAGE_BYTES, 0);
            uint8_t *packed = malloc(bytes);
            assert_int_equal(dmk_mxfp4_pack(m.blocks, m.scales, m.rows, m.cols, paired, packed), 0);
            for (uint32_t r = 0; r < m.rows; r++) {
                for (uint32_t c = 0; c < m.cols; c++) {
                    float want = value_of(&m, r, c);
                    float got = dmk_mxfp4_packed_value(packed, m.rows, m.cols, paired, r, c);
                    assert_int_equal(dmk_f32_bits(want), dmk_f32_bits(got));
                }
            }
            free(packed);
            free_matrix(&m);
        }
    }
}

/* The multiplier 2^(scale - 1) is a bf16 number up to scale 128. */
static void too_large_scales_are_counted(void **state)
{
    (void)state;
    struct matrix m = make_matrix(64, 576, 118, 8);
    uint8_t *packed = malloc(dmk_mxfp4_pack_bytes(m.rows, m.cols));
    m.scales[5] = DMK_MXPACK_MAX_SCALE;
    assert_int_equal(dmk_mxfp4_pack(m.blocks, m.scales, m.rows, m.cols, false, packed), 0);
    m.scales[7] = DMK_MXPACK_MAX_SCALE + 1;
    m.scales[90] = 254;
    assert_int_equal(dmk_mxfp4_pack(m.blocks, m.scales, m.rows, m.cols, false, packed), 2);
    free(packed);
    free_matrix(&m);
}

static void e4m3_numbers(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        float x = dmk_e4m3_to_f32((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(x));
        } else {
            assert_int_equal(dmk_f32_to_e4m3(x), code);
        }
    }
    assert_int_equal(dmk_f32_to_e4m3(448.0f), 0x7e);
    assert_int_equal(dmk_f32_to_e4m3(1e9f), 0x7e);
    assert_int_equal(dmk_f32_to_e4m3(-INFINITY), 0xfe);
    assert_int_equal(dmk_f32_to_e4m3(NAN), 0x7f);
    assert_int_equal(dmk_f32_to_e4m3(1.0625f), 0x38); /* halfway, to the even 1.0 */
    assert_int_equal(dmk_f32_to_e4m3(1.1875f), 0x3a); /* halfway, to the even 1.25 */
    assert_int_equal(dmk_f32_to_e4m3(0x1p-10f), 0);   /* half of the smallest */
    assert_int_equal(dmk_f32_to_e4m3(0x1.8p-10f), 1);
    assert_int_equal(dmk_f32_to_e4m3(0x1.fp-7f), 8); /* up into the first normal */
}

static size_t count_wrong(const struct matrix *m, const uint8_t *codes, const float *scales)
{
    size_t n = 0;
    uint32_t n_col_blocks = (m->cols + 127) / 128;
    for (uint32_t r = 0; r < m->rows; r++) {
        for (uint32_t c = 0; c < m->cols; c++) {
            float got = dmk_e4m3_to_f32(codes[(size_t)r * m->cols + c]) *
                        scales[r / 128 * n_col_blocks + c / 128];
            n += dmk_f32_bits(got) != dmk_f32_bits(value_of(m, r, c));
        }
    }
    return n;
}

/* 14 octaves of spread are exact to the bit, sign of zero included; one more is counted and is not. */
static void fp8_is_exact_up_to_14_octaves(void **state)
{
    (void)state;
    for (uint32_t spread = 0; spread <= 15; spread++) {
        struct matrix m = make_matrix(200, 320, 90, spread + 1);
        m.scales[0] = 90;
        m.scales[1] = (uint8_t)(90 + spread);
        /* The smallest value under the smallest scale. */
        memset(m.blocks, 0x19, 32);
        uint8_t *codes = malloc((size_t)m.rows * m.cols);
        float scales[2 * 3];
        size_t n_inexact = dmk_mxfp4_to_fp8(m.blocks, m.scales, m.rows, m.cols, codes, scales);
        size_t n_wrong = count_wrong(&m, codes, scales);
        if (spread <= 14) {
            assert_int_equal(n_inexact, 0);
            assert_int_equal(n_wrong, 0);
        } else {
            assert_true(n_inexact > 0);
            assert_true(n_wrong > 0);
        }
        for (size_t i = 0; i < 6; i++) {
            int exponent;
            assert_true(frexpf(scales[i], &exponent) == 0.5f);
        }
        free(codes);
        free_matrix(&m);
    }
}

/* The scale of a group of zeros says nothing. */
static void zero_groups_do_not_count(void **state)
{
    (void)state;
    struct matrix m = make_matrix(128, 128, 120, 4);
    m.scales[9] = 3;
    m.scales[70] = 250;
    memset(m.blocks + 9 * 16, 0x80, 16);
    memset(m.blocks + 70 * 16, 0, 16);
    uint8_t codes[128 * 128];
    float scale;
    assert_int_equal(dmk_mxfp4_to_fp8(m.blocks, m.scales, 128, 128, codes, &scale), 0);
    assert_int_equal(count_wrong(&m, codes, &scale), 0);
    free_matrix(&m);
}

/* The kernel's codes and scales are those of dmk_mxfp4_to_fp8, up to 14 octaves the matrix and beyond them rounded. */
static void packed_fp8_is_the_fp8_matrix(void **state)
{
    (void)state;
    const uint32_t shapes[][2] = {{128, 128}, {2, 32}, {96, 160}, {130, 288}, {320, 544}};
    for (size_t i = 0; i < 5; i++) {
        for (int paired = 0; paired < 2; paired++) {
            const uint32_t spread = paired ? 15 : 24;
            struct matrix m = make_matrix(shapes[i][0], shapes[i][1], 100, spread);
            const size_t n = (size_t)m.rows * m.cols,
                         n_scales = (size_t)((m.rows + 127) / 128) * ((m.cols + 127) / 128);
            memset(m.blocks + n / 2 - 16, 0x80, 16); /* zeros of either sign */
            const size_t bytes = dmk_fp8_pack_bytes(m.rows, m.cols);
            assert_int_equal(bytes, n_scales * DMK_FP8PACK_PIECE_BYTES);
            uint8_t *codes = malloc(n), *packed = malloc(bytes);
            float *want = malloc(n_scales * sizeof(float)), *got = malloc(n_scales * sizeof(float));
            const size_t n_inexact =
                dmk_mxfp4_to_fp8(m.blocks, m.scales, m.rows, m.cols, codes, want);
            assert_int_equal(dmk_fp8_pack(m.blocks, m.scales, m.rows, m.cols, paired, packed, got),
                             n_inexact);
            assert_memory_equal(want, got, n_scales * sizeof(float));
            for (uint32_t r = 0; r < m.rows; r++) {
                for (uint32_t c = 0; c < m.cols; c++) {
                    assert_int_equal(dmk_fp8_packed_code(packed, m.cols, paired, r, c),
                                     codes[(size_t)r * m.cols + c]);
                }
            }
            free(codes);
            free(packed);
            free(want);
            free(got);
            free_matrix(&m);
        }
    }
}

/* Exact or rounded, with groups of zeros and ends of matrices: the numbers are those of FP8. */
static void fp8_goes_back(void **state)
{
    (void)state;
    const uint32_t shapes[][2] = {{128, 128}, {64, 32}, {96, 160}, {1, 2880}};
    for (uint32_t i = 0; i < 12; i++) {
        const uint32_t octaves = i < 4 ? 15 : i < 8 ? 1 : 20;
        struct matrix m = make_matrix(shapes[i % 4][0], shapes[i % 4][1], 100, octaves);
        const size_t n = (size_t)m.rows * m.cols;
        uint8_t *codes = malloc(n), *blocks = malloc(n / 2), *scales = malloc(n / 32);
        float shared[23];
        memset(m.blocks, 0x80, 16); /* zeros of both signs */
        dmk_mxfp4_to_fp8(m.blocks, m.scales, m.rows, m.cols, codes, shared);
        assert_true(dmk_fp8_to_mxfp4(codes, shared, m.rows, m.cols, blocks, scales));
        struct matrix back = {m.rows, m.cols, blocks, scales};
        for (uint32_t r = 0; r < m.rows; r++) {
            for (uint32_t c = 0; c < m.cols; c++) {
                const float want = dmk_e4m3_to_f32(codes[(size_t)r * m.cols + c]) * shared[c / 128];
                assert_int_equal(dmk_f32_bits(want), dmk_f32_bits(value_of(&back, r, c)));
            }
        }
        codes[n - 1] = 0x4a; /* 2.5 beside whatever is there: no number of MXFP4 */
        assert_false(dmk_fp8_to_mxfp4(codes, shared, m.rows, m.cols, blocks, scales));
        codes[n - 1] = 0x7f;
        assert_false(dmk_fp8_to_mxfp4(codes, shared, m.rows, m.cols, blocks, scales));
        codes[n - 1] = 0;
        shared[0] *= 1.5f;
        assert_false(dmk_fp8_to_mxfp4(codes, shared, m.rows, m.cols, blocks, scales));
        free(codes);
        free(blocks);
        free(scales);
        free_matrix(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_mxfp4_is_the_matrix),
        cmocka_unit_test(too_large_scales_are_counted),
        cmocka_unit_test(e4m3_numbers),
        cmocka_unit_test(fp8_is_exact_up_to_14_octaves),
        cmocka_unit_test(zero_groups_do_not_count),
        cmocka_unit_test(fp8_goes_back),
        cmocka_unit_test(packed_fp8_is_the_fp8_matrix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
