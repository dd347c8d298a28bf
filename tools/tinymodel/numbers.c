/* The numbers of a synthetic checkpoint: each a pure function of seed, stream and index.
 *
 * BF16 values are uniform: four from one 64-bit draw. MXFP4 codes are uniform over all sixteen; of every
 * block the exponent is one of two neighbours, drawn so that the mean square comes out as asked. */
#include "tools/tinymodel/internal.h"

#include <math.h>
#include "common/base/assert.h"
#include "common/base/rng.h"

#define REAL_VOCAB 201088u

/* Harmony's frame: when the text ends in `after`, `next` is what comes. */
static const struct plant {
    uint32_t after, next;
} plants[] = {
    {173781, 200005}, /* assistant, <|channel|> */
    {200005, 17196},  /* <|channel|>, final */
    {17196, 200008},  /* final, <|message|> */
};

#define N_PLANTS (sizeof(plants) / sizeof(plants[0]))

/* How far the planted logit stands out; chance alone reaches about 14, and all of it together about
 * 17 in the softmax. The state's cosine with the last token's embedding is near 0.58. */
#define PLANT_LOGIT  30.0f
#define PLANT_COSINE 0.58f

static uint16_t bf16_round(float v)
{
    uint32_t bits;

    memcpy(&bits, &v, sizeof(bits));
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >>
                      16); /* to nearest even; v is finite */
}

static float bf16_float(uint16_t v)
{
    const uint32_t bits = (uint32_t)v << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* Uniform numbers have a deviation of width / sqrt(3). */
static uint16_t uniform_value(uint16_t draw, float mean, float width)
{
    return bf16_round(mean + width * (((float)(int16_t)draw + 0.5f) * 0x1.0p-15f));
}

static float uniform_width(float deviation)
{
    return deviation * 1.7320508f;
}

/* Elements [first, first + n); first is a multiple of 4. */
static void fill_uniform(uint64_t seed, uint64_t stream, float mean, float deviation,
                         uint64_t first, uint64_t n, uint16_t *out)
{
    const float width = uniform_width(deviation);

    for (uint64_t i = 0; i < n; i += 4) {
        const uint64_t draw = dmk_rng_u64(seed, stream, (first + i) / 4);

        for (uint64_t j = 0; j < 4 && i + j < n; j++) {
            out[i + j] = uniform_value((uint16_t)(draw >> (16 * j)), mean, width);
        }
    }
}

static bool is_reserved(uint32_t id)
{
    return id > 200012 || id == 200000 || id == 200001 || id == 200004 ||
           (id >= 200009 && id <= 200011);
}

/* One planted number: the embedding of the token before, scaled so that its logit stands out. */
static uint16_t planted_value(const struct tm_plan *p, uint32_t after, uint64_t col)
{
    const uint64_t h = p->conf->shape.hidden;
    const uint64_t i = (uint64_t)after * h + col;
    const uint64_t draw = dmk_rng_u64(p->conf->seed, p->embedding_stream, i / 4);
    const uint16_t e =
        uniform_value((uint16_t)(draw >> (16 * (i % 4))), 0, uniform_width(p->embedding_deviation));

    return bf16_round(bf16_float(e) * (PLANT_LOGIT / (PLANT_COSINE * (float)h)));
}

static void plant_rows(const struct tm_plan *p, uint64_t first, uint64_t n, uint16_t *out)
{
    const uint64_t h = p->conf->shape.hidden;

    for (uint64_t i = 0; i < n; i++) {
        const uint32_t row = (uint32_t)((first + i) / h);

        if (is_reserved(row)) {
            out[i] = 0;
            continue;
        }
        for (size_t k = 0; k < N_PLANTS; k++) {
            if (row == plants[k].next) {
                out[i] = planted_value(p, plants[k].after, (first + i) % h);
            }
        }
    }
}

static void fill_head(const struct tm_plan *p, const struct tm_tensor *t, uint64_t first,
                      uint64_t n, uint16_t *out)
{
    fill_uniform(p->conf->seed, t->stream, t->mean, t->deviation, first, n, out);
    if (p->conf->shape.vocab == REAL_VOCAB) {
        /* Planted and reserved rows lie above 200000 but for one: look no further where none is. */
        const uint64_t h = p->conf->shape.hidden;

        if (first + n > 199998 * h || (first / h <= 17196 && (first + n) / h >= 17196)) {
            plant_rows(p, first, n, out);
        }
    }
}

/* Bytes [first, first + n) of a plain random stream; first is a multiple of 8. */
static void fill_random(uint64_t seed, uint64_t stream, uint64_t first, uint64_t n, uint8_t *out)
{
    for (uint64_t i = 0; i < n; i += 8) {
        const uint64_t draw = dmk_rng_u64(seed, stream, (first + i) / 8);
        const size_t len = n - i < 8 ? (size_t)(n - i) : 8;

        memcpy(out + i, &draw, len); /* little-endian machines only, as safetensors itself */
    }
}

/* Two neighbouring exponents and how often (of 256) the upper one is to be taken. */
struct exponents {
    uint8_t lower;
    uint32_t upper_share;
};

static struct exponents choose_exponents(float deviation)
{
    const double square = (double)deviation * deviation / 8.5625; /* mean square of the codes */
    const double e = floor(log2(square) / 2);
    const double share = (square / exp2(2 * e) - 1) / 3;

    dmk_assert(e > -120 && e < 120);
    return (struct exponents){(uint8_t)(127 + (int)e), (uint32_t)(share * 256)};
}

static uint8_t scale_of_draw(struct exponents x, uint8_t draw)
{
    return (uint8_t)(x.lower + (draw < x.upper_share));
}

static void fill_scales(const struct tm_plan *p, const struct tm_tensor *t, uint64_t first,
                        uint64_t n, uint8_t *out)
{
    const struct exponents x = choose_exponents(t->deviation);

    fill_random(p->conf->seed, t->stream + 1, first, n, out);
    for (uint64_t i = 0; i < n; i++) {
        out[i] = scale_of_draw(x, out[i]);
    }
}

/* The 16 values of E2M1 at an exponent, as BF16: exact. */
static void fill_codes(uint8_t scale, uint16_t ret_values[16])
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

    for (int i = 0; i < 16; i++) {
        const float v = ldexpf(values[i & 7], scale - 127);

        ret_values[i] = bf16_round(i & 8 ? -v : v);
    }
}

/* [E][cols][rows]: element (e, k, r) is the MXFP4 element (e, r, k). Neighbours in r lie a row apart in
 * the other layout, so each is drawn by itself. */
static void fill_experts_bf16(const struct tm_plan *p, const struct tm_tensor *t, uint64_t first,
                              uint64_t n, uint16_t *out)
{
    const uint64_t seed = p->conf->seed, cols = t->dims[1], rows = t->dims[2];
    const struct exponents x = choose_exponents(t->deviation);
    uint16_t codes[2][16];

    fill_codes(x.lower, codes[0]);
    fill_codes((uint8_t)(x.lower + 1), codes[1]);
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t at = first + i;
        const uint64_t r = at % rows, k = at / rows % cols, e = at / rows / cols;
        const uint64_t element = (e * rows + r) * cols + k; /* 2 a byte, 16 a draw */
        const uint64_t group = element / 32;
        const uint8_t byte =
            (uint8_t)(dmk_rng_u64(seed, t->stream, element / 16) >> (8 * (element / 2 % 8)));
        const uint8_t draw =
            (uint8_t)(dmk_rng_u64(seed, t->stream + 1, group / 8) >> (8 * (group % 8)));

        out[i] = codes[draw < x.upper_share][element & 1 ? byte >> 4 : byte & 15];
    }
}

void tm_fill_bytes(const struct tm_plan *plan, const struct tm_tensor *tensor, uint64_t begin,
                   uint64_t n, uint8_t *out)
{
    const uint64_t seed = plan->conf->seed;
    uint16_t *values = (uint16_t *)(void *)out; /* buffers of the writer are aligned */

    dmk_assert(begin % 16 == 0);
    if (plan->conf->source) {
        plan->conf->source->fill(plan->conf->source->ud, tensor->name, begin, n, out);
        return;
    }
    switch (tensor->fill) {
    case TM_UNIFORM:
        fill_uniform(seed, tensor->stream, tensor->mean, tensor->deviation, begin / 2, n / 2,
                     values);
        return;
    case TM_HEAD:
        fill_head(plan, tensor, begin / 2, n / 2, values);
        return;
    case TM_BLOCKS:
        fill_random(seed, tensor->stream, begin, n, out);
        return;
    case TM_SCALES:
        fill_scales(plan, tensor, begin, n, out);
        return;
    case TM_EXPERTS_BF16:
        fill_experts_bf16(plan, tensor, begin / 2, n / 2, values);
        return;
    }
    dmk_unreachable("kind of numbers");
}
