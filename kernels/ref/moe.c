/* Plain mixture of experts: choose, group, gate and up with SwiGLU, down, combine. */
#include "kernels/ref/ref.h"

void dmk_ref_topk(const struct dmk_topk_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        const uint16_t *score = a->scores + (size_t)t * a->n_experts;
        uint32_t *ids = a->ids + (size_t)t * a->k;
        float *weights = a->weights + (size_t)t * a->k;
        float sum = 0.0f, best[DMK_MAX_TOPK];
        for (uint32_t i = 0; i < a->k; i++) {
            uint32_t at = DMK_NONE;
            for (uint32_t e = 0; e < a->n_experts; e++) {
                bool taken = false;
                for (uint32_t j = 0; j < i; j++) {
                    taken = taken || ids[j] == e;
                }
                if (!taken && (at == DMK_NONE || dmk_bf16_to_f32(score[e]) > best[i])) {
                    at = e;
                    best[i] = dmk_bf16_to_f32(score[e]);
                }
            }
            ids[i] = at;
            weights[i] = dmk_expf(best[i] - best[0]);
            sum += weights[i];
        }
        for (uint32_t i = 0; i < a->k; i++) {
            weights[i] = dmk_bf16_to_f32(dmk_f32_to_bf16(weights[i] / sum));
        }
    }
}

void dmk_ref_moe_group(const struct dmk_moe_group_args *a, struct dmk_stream *stream)
{
    (void)stream;
    const struct dmk_moe_plan *plan = &a->plan;
    const uint32_t n_live = a->n_live ? *a->n_live : a->n_rows;
    memset(plan->expert_begin, 0, (a->n_experts + 1) * sizeof(uint32_t));
    for (uint32_t i = 0; i < n_live * a->k; i++) {
        uint32_t e = a->ids[i] - a->expert_first; /* wraps for experts before the first */
        if (e < a->n_experts) {
            plan->expert_begin[e + 1]++;
        }
    }
    for (uint32_t e = 0; e < a->n_experts; e++) {
        plan->expert_begin[e + 1] += plan->expert_begin[e];
        plan->row_at[e] = plan->expert_begin[e];
    }
    for (uint32_t t = 0; t < a->n_rows; t++) {
        uint32_t *slots = plan->row_slots + (size_t)t * a->k, n = 0;
        for (uint32_t i = 0; t < n_live && i < a->k; i++) {
            uint32_t e = a->ids[(size_t)t * a->k + i] - a->expert_first;
            if (e >= a->n_experts) {
                continue;
            }
            uint32_t slot = plan->row_at[e]++;
            plan->slot_row[slot] = t;
            plan->slot_weight[slot] = a->weights[(size_t)t * a->k + i];
            plan->slot_group[slot] = e / a->experts_per_group;
            /* Slots ascend with experts, so sorting by slot sorts by expert. */
            uint32_t at = n++;
            for (; at > 0 && slots[at - 1] > slot; at--) {
                slots[at] = slots[at - 1];
            }
            slots[at] = slot;
        }
        for (; n < a->k; n++) {
            slots[n] = DMK_NONE;
        }
    }
}

/* dot(row of one expert's matrix, x) + bias */
static float expert_row(const struct dmk_expert_weights *w, uint32_t expert, uint32_t row,
                        const uint16_t *x)
{
    size_t at = (size_t)expert * w->rows + row;
    float dot;
    if (w->format == DMK_WEIGHT_MXFP4) {
        size_t n_blocks = w->cols / DMK_MXFP4_BLOCK;
        dot = dmk_ref_dot_mxfp4(w->blocks + at * n_blocks * DMK_MXFP4_BLOCK_BYTES,
                                w->scales + at * n_blocks, x, w->cols);
    } else {
        dot = dmk_ref_dot((const uint16_t *)(const void *)w->blocks + at * w->cols, x, w->cols);
    }
    return dot + dmk_bf16_to_f32(w->bias[at]);
}

void dmk_ref_moe_gate_up(const struct dmk_moe_gate_up_args *a, struct dmk_stream *stream)
{
    (void)stream;
    uint32_t n_z = a->w.rows / 2;
    for (uint32_t e = 0; e < a->n_experts; e++) {
        for (uint32_t s = a->plan.expert_begin[e]; s < a->plan.expert_begin[e + 1]; s++) {
            const uint16_t *x = a->x + (size_t)a->plan.slot_row[s] * a->w.cols;
            for (uint32_t j = 0; j < n_z; j++) {
                float gate = expert_row(&a->w, e, 2 * j, x);
                float up = expert_row(&a->w, e, 2 * j + 1, x);
                gate = gate > a->limit ? a->limit : gate;
                up = up > a->limit ? a->limit : up;
                up = up < -a->limit ? -a->limit : up;
                float z = (gate * dmk_sigmoidf(a->alpha * gate)) * (up + 1.0f);
                a->z[(size_t)s * n_z + j] = dmk_f32_to_bf16(z);
            }
        }
    }
}

void dmk_ref_moe_down(const struct dmk_moe_down_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t e = 0; e < a->n_experts; e++) {
        for (uint32_t s = a->plan.expert_begin[e]; s < a->plan.expert_begin[e + 1]; s++) {
            for (uint32_t i = 0; i < a->w.rows; i++) {
                a->y[(size_t)s * a->w.rows + i] =
                    expert_row(&a->w, e, i, a->z + (size_t)s * a->w.cols);
            }
        }
    }
}

void dmk_ref_moe_combine(const struct dmk_moe_combine_args *a, struct dmk_stream *stream)
{
    (void)stream;
    for (uint32_t t = 0; t < a->n_rows; t++) {
        const uint32_t *slots = a->plan.row_slots + (size_t)t * a->k;
        for (uint32_t i = 0; i < a->hidden; i++) {
            float group[8] = {0};
            for (uint32_t n = 0; n < a->k && slots[n] != DMK_NONE; n++) {
                uint32_t g = a->plan.slot_group[slots[n]];
                group[g] = fmaf(a->plan.slot_weight[slots[n]],
                                a->y[(size_t)slots[n] * a->hidden + i], group[g]);
            }
            for (uint32_t width = a->n_groups; width > 1; width /= 2) {
                for (uint32_t g = 0; g < width / 2; g++) {
                    group[g] = group[2 * g] + group[2 * g + 1];
                }
            }
            a->out[(size_t)t * a->hidden + i] = group[0];
        }
    }
}
