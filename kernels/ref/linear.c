/* Plain dot products of bf16 and MXFP4 rows, and the dense matrix product. */
#include "kernels/ref/ref.h"

float dmk_ref_dot(const uint16_t *w, const uint16_t *x, uint32_t k)
{
    float lane[DMK_LANES] = {0};
    for (uint32_t block = 0; block < k; block += DMK_K_BLOCK) {
        for (uint32_t l = 0; l < DMK_LANES; l++) {
            for (uint32_t i = block + 2 * l; i <= block + 2 * l + 1; i++) {
                lane[l] = fmaf(dmk_bf16_to_f32(w[i]), dmk_bf16_to_f32(x[i]), lane[l]);
            }
        }
    }
    return dmk_lanes_sum(lane);
}

float dmk_ref_dot_mxfp4(const uint8_t *blocks, const uint8_t *scales, const uint16_t *x, uint32_t k)
{
    float lane[DMK_LANES] = {0};
    for (uint32_t block = 0; block < k / DMK_MXFP4_BLOCK; block++) {
        float scale = dmk_ue8m0_to_f32(scales[block]);
        const uint8_t *pair = blocks + block * DMK_MXFP4_BLOCK_BYTES;
        const uint16_t *xb = x + block * DMK_MXFP4_BLOCK;
        for (uint32_t l = 0; l < DMK_LANES; l++) {
            float even = dmk_e2m1_to_f32(pair[l] & 15) * scale;
            float odd = dmk_e2m1_to_f32(pair[l] >> 4) * scale;
            lane[l] = fmaf(even, dmk_bf16_to_f32(xb[2 * l]), lane[l]);
            lane[l] = fmaf(odd, dmk_bf16_to_f32(xb[2 * l + 1]), lane[l]);
        }
    }
    return dmk_lanes_sum(lane);
}

void dmk_ref_linear(const struct dmk_linear_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        for (uint32_t n = 0; n < a->n_out; n++) {
            const uint16_t *w = a->w + n * a->w_stride;
            const uint16_t *x = a->x + t * a->x_stride;
            float leaf[8];
            for (uint32_t s = 0; s < a->n_slices; s++) {
                leaf[s] = dmk_ref_dot(w + (size_t)s * a->k, x + (size_t)s * a->k, a->k);
            }
            for (uint32_t width = a->n_slices; width > 1; width /= 2) {
                for (uint32_t s = 0; s < width / 2; s++) {
                    leaf[s] = leaf[2 * s] + leaf[2 * s + 1];
                }
            }
            float y = a->bias ? leaf[0] + dmk_bf16_to_f32(a->bias[n]) : leaf[0];
            if (a->y_bf16) {
                a->y_bf16[t * a->y_stride + n] = dmk_f32_to_bf16(y);
            } else {
                a->y_f32[t * a->y_stride + n] = y;
            }
        }
    }
}
