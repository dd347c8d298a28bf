/* YaRN frequencies and the cos/sin table; pure arithmetic, at start only.
 *
 * The angle is the fp32 product, as the model was trained with; its cosine and sine are exact to fp32.
 * The ends of the ramp are not rounded to whole pairs. */
#include "common/model/rope.h"

#include <math.h>
#include <stddef.h>

enum { N_PAIRS = DMK_ROPE_PAIRS };

/* The pair (a real number) whose wave turns `turns` times within the original context. */
static double pair_of_turns(const struct dmk_shape *s, double turns)
{
    return N_PAIRS * log(s->rope_original_positions / (turns * 2.0 * M_PI)) / log(s->rope_theta);
}

void dmk_rope_inv_freq(const struct dmk_shape *s, float ret_freq[DMK_ROPE_PAIRS])
{
    double low = pair_of_turns(s, s->rope_beta_fast);
    double high = pair_of_turns(s, s->rope_beta_slow);
    for (int i = 0; i < DMK_ROPE_PAIRS; i++) {
        double freq = pow(s->rope_theta, (double)i / N_PAIRS);
        double ramp = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        double inv = ramp / (s->rope_factor * freq) + (1.0 - ramp) / freq;
        ret_freq[i] = (float)(s->rope_factor == 1.0 ? 1.0 / freq : inv);
    }
}

double dmk_rope_concentration(const struct dmk_shape *s)
{
    return s->rope_factor == 1.0 ? 1.0 : 0.1 * log(s->rope_factor) + 1.0;
}

void dmk_rope_table(const struct dmk_shape *s, uint32_t n_positions, float *ret_table)
{
    float freq[DMK_ROPE_PAIRS];
    double concentration = dmk_rope_concentration(s);
    dmk_rope_inv_freq(s, freq);
    for (uint32_t p = 0; p < n_positions; p++) {
        float *row = ret_table + (size_t)p * DMK_ROPE_PAIRS * 2;
        for (int i = 0; i < DMK_ROPE_PAIRS; i++) {
            float angle = (float)p * freq[i];
            row[2 * i] = (float)(cos((double)angle) * concentration);
            row[2 * i + 1] = (float)(sin((double)angle) * concentration);
        }
    }
}
