/* Bounds of the sampling parameters; see sample.h. Cold code. */
#include "common/sample/sample.h"
#include <math.h>
#include <stddef.h>

struct bound {
    const char *name;
    float value, min, max;
};

int dmk_sample_params_check(const struct dmk_sample_params *p, uint32_t vocab,
                            struct dmk_error *reterr)
{
    const struct bound bounds[] = {
        {"temperature", p->temperature, 0.0f, DMK_SAMPLE_MAX_TEMPERATURE},
        {"top_p", p->top_p, 0.0f, 1.0f},
        {"min_p", p->min_p, 0.0f, 1.0f},
        {"frequency_penalty", p->frequency_penalty, -DMK_SAMPLE_MAX_SHIFT, DMK_SAMPLE_MAX_SHIFT},
        {"presence_penalty", p->presence_penalty, -DMK_SAMPLE_MAX_SHIFT, DMK_SAMPLE_MAX_SHIFT},
        {"repetition_penalty", p->repetition_penalty, 1.0f / DMK_SAMPLE_MAX_REPETITION,
         DMK_SAMPLE_MAX_REPETITION},
    };

    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++) {
        const struct bound *b = &bounds[i];

        if (!(b->value >= b->min && b->value <= b->max)) { /* NaN too */
            return dmk_error_set(reterr, -DMK_EINVAL, "%s must be from %g to %g, not %g", b->name,
                                 (double)b->min, (double)b->max, (double)b->value);
        }
    }
    if (p->top_p == 0.0f) {
        return dmk_error_set(reterr, -DMK_EINVAL, "top_p must be above 0");
    }
    if (p->top_logprobs > DMK_SAMPLE_MAX_TOP) {
        return dmk_error_set(reterr, -DMK_EINVAL, "top_logprobs must be at most %d, not %u",
                             DMK_SAMPLE_MAX_TOP, p->top_logprobs);
    }
    if (p->n_bias > DMK_SAMPLE_MAX_BIAS) {
        return dmk_error_set(reterr, -DMK_EINVAL, "logit_bias may name %d tokens, not %u",
                             DMK_SAMPLE_MAX_BIAS, p->n_bias);
    }
    for (uint32_t i = 0; i < p->n_bias; i++) {
        const float v = p->bias_values[i];

        if (p->bias_ids[i] >= vocab) {
            return dmk_error_set(reterr, -DMK_EINVAL,
                                 "logit_bias names the token %u, the vocabulary ends at %u",
                                 p->bias_ids[i], vocab - 1);
        }
        if (!(v >= -DMK_SAMPLE_MAX_SHIFT && v <= DMK_SAMPLE_MAX_SHIFT) && v != -INFINITY) {
            return dmk_error_set(reterr, -DMK_EINVAL,
                                 "logit_bias of token %u must be from %g to %g, not %g",
                                 p->bias_ids[i], (double)-DMK_SAMPLE_MAX_SHIFT,
                                 (double)DMK_SAMPLE_MAX_SHIFT, (double)v);
        }
    }
    return 0;
}
