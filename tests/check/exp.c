/* exp in vectors against the scalar one, over all magnitudes; whole-operation tests round to bf16 and
 * would hardly see its last bit. */
#include <string.h>
#include "kernels/numeric.h"
#include "tests/check/check.h"
#include "tests/check/exp_isa.h"

void check_exp(struct check *c)
{
    enum { N = 1 << 16 };
    float *x = check_buf(c, N * sizeof(*x)), *want = check_buf(c, N * sizeof(*x)),
          *got = check_buf(c, N * sizeof(*x));
    const float special[] = {0.0f,   -0.0f,      INFINITY, -INFINITY, NAN,
                             -87.3f, -87.30001f, 88.72f,   89.0f,     1e-40f};
    if (c->bench || strcmp(c->fast.name, "ref") == 0) {
        check_end(c, "exp");
        return;
    }
    for (uint32_t i = 0; i < N; i++) {
        uint32_t bits = check_u32(c, 1u << 16) << 16 | check_u32(c, 1u << 16);
        x[i] = i % 2 ? dmk_f32_from_bits(bits) : (float)(int32_t)bits * 0x1p-24f;
    }
    memcpy(x, special, sizeof(special));
    for (uint32_t i = 0; i < N; i++) {
        want[i] = dmk_expf(x[i]);
    }
    if (strcmp(c->fast.name, "avx2") == 0) {
        check_exp_avx2(x, got, N);
    } else {
        check_exp_avx512(x, got, N);
    }
    for (uint32_t i = 0; i < N; i++) {
        if (isnan(want[i]) && isnan(got[i])) {
            got[i] = want[i]; /* which NaN is nobody's business */
        }
    }
    check_equal(c, want, got, N * sizeof(*x), sizeof(*x), "exp");
    check_end(c, "exp");
}
