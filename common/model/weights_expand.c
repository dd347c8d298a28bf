/* FP8 experts made BF16 for hosts, whose kernels know no FP8: codes have four significant bits and scales are
 * powers of two, so the numbers are the same. Into memory of the process, twice the size of the codes. */
#include <stdlib.h>
#include "common/model/weights_internal.h"
#include "kernels/dtype.h"
#include "kernels/pack.h"

struct job {
    const uint8_t *codes;
    const float *scales;
    uint16_t *dst;
    uint32_t rows, cols;
};

static void expand_matrix(const void *jobs, uint32_t i)
{
    const struct job *job = (const struct job *)jobs + i;
    const uint32_t across = (job->cols + DMK_FP8_BLOCK - 1) / DMK_FP8_BLOCK;
    float values[256];

    for (uint32_t code = 0; code < 256; code++) {
        values[code] = dmk_e4m3_to_f32((uint8_t)code);
    }
    for (uint32_t r = 0; r < job->rows; r++) {
        const float *scales = job->scales + (size_t)(r / DMK_FP8_BLOCK) * across;

        for (uint32_t c = 0; c < job->cols; c++) {
            const size_t at = (size_t)r * job->cols + c;

            job->dst[at] = dmk_f32_to_bf16(values[job->codes[at]] * scales[c / DMK_FP8_BLOCK]);
        }
    }
}

static int plan_matrix(struct dmk_weights *w, struct dmk_expert_matrix *m, uint32_t n_experts,
                       uint32_t rows, uint32_t cols, struct job *jobs)
{
    const size_t n = (size_t)rows * cols;
    const size_t n_scales = (size_t)((rows + DMK_FP8_BLOCK - 1) / DMK_FP8_BLOCK) *
                            ((cols + DMK_FP8_BLOCK - 1) / DMK_FP8_BLOCK);
    uint16_t *dst = dmk_weights_own(w, n * n_experts * sizeof(uint16_t));

    if (!dst) {
        return -DMK_ENOMEM;
    }
    for (uint32_t e = 0; e < n_experts; e++) {
        jobs[e] =
            (struct job){m->blocks + n * e, (const float *)(const void *)m->scales + n_scales * e,
                         dst + n * e, rows, cols};
    }
    m->blocks = (const uint8_t *)dst;
    m->scales = NULL;
    return 0;
}

int dmk_weights_expand_rank(struct dmk_weights *w, struct dmk_rank_weights *rank,
                            uint32_t n_experts, struct dmk_error *reterr)
{
    const struct dmk_shape *s = &w->shape;
    const uint32_t n_jobs = 2 * s->n_layers * n_experts;
    struct job *jobs = calloc(n_jobs, sizeof(jobs[0]));
    int r = jobs ? 0 : -DMK_ENOMEM;

    for (uint32_t i = 0; i < s->n_layers && r == 0; i++) {
        struct job *at = jobs + (size_t)2 * i * n_experts;

        r = plan_matrix(w, &rank->layers[i].gate_up, n_experts, 2 * s->intermediate, s->hidden, at);
        if (r == 0) {
            r = plan_matrix(w, &rank->layers[i].down, n_experts, s->hidden, s->intermediate,
                            at + n_experts);
        }
    }
    if (r == 0) {
        dmk_weights_parallel(expand_matrix, jobs, n_jobs);
    }
    free(jobs);
    return r < 0 ? dmk_error_set(reterr, r, "no memory to make the FP8 experts of %u layers BF16",
                                 s->n_layers)
                 : 0;
}
