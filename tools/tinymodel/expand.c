/* From a compact checkpoint's numbers to those of the Hugging Face layout; see expand.h. */
#include "tools/tinymodel/expand.h"

#include <string.h>
#include "common/base/assert.h"
#include "tools/tinymodel/internal.h"

#define BLOCK 32u

static bool ends_with(const char *text, size_t len, const char *end)
{
    const size_t n = strlen(end);

    return len > n && memcmp(text + len - n, end, n) == 0;
}

/* The compact tensor that a tensor of the checkpoint is made of. */
static const struct dmk_compact_tensor *find_origin(const struct dmk_compact *c, const char *name,
                                                    bool *ret_is_blocks, bool *ret_is_scales)
{
    size_t len = strlen(name);

    *ret_is_blocks = ends_with(name, len, "_blocks");
    *ret_is_scales = ends_with(name, len, "_scales");
    len -= *ret_is_blocks || *ret_is_scales ? strlen("_blocks") : 0;
    return dmk_compact_find(c, name, len);
}

/* BF16 of element i of an MXINT8 tensor: a byte times a power of two, exact. */
static uint16_t take_mxint8(const struct dmk_compact_tensor *t, uint64_t i)
{
    const uint32_t scale_bits = (uint32_t)t->data[t->n_elements + i / BLOCK] << 23;
    float scale, value;
    uint32_t bits;

    memcpy(&scale, &scale_bits, sizeof(scale));
    value = (float)(int8_t)t->data[i] * scale;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

static void fill_rows(const struct dmk_compact *c, const struct dmk_compact_tensor *t,
                      uint64_t first, uint64_t n, uint16_t *out)
{
    const uint64_t cols = t->dims[1];

    for (uint64_t i = first; i < first + n;) {
        const uint64_t id = i / cols, end = (id + 1) * cols;
        const uint64_t row = c->row_of_id[id] * cols;

        for (; i < end && i < first + n; i++) {
            *out++ = take_mxint8(t, row + i % cols);
        }
    }
}

static void fill(const void *ud, const char *name, uint64_t begin, uint64_t n, uint8_t *out)
{
    const struct dmk_compact *c = ud;
    bool is_blocks, is_scales;
    const struct dmk_compact_tensor *t = find_origin(c, name, &is_blocks, &is_scales);
    uint16_t *values = (uint16_t *)(void *)out; /* buffers of the writer are aligned */

    dmk_assert(t);
    switch (t->format) {
    case DMK_COMPACT_BF16:
        memcpy(out, t->data + begin, n);
        return;
    case DMK_COMPACT_MXFP4:
        memcpy(out, t->data + (is_scales ? t->n_elements / 2 : 0) + begin, n);
        return;
    case DMK_COMPACT_MXINT8:
        for (uint64_t i = 0; i < n / 2; i++) {
            values[i] = take_mxint8(t, begin / 2 + i);
        }
        return;
    case DMK_COMPACT_ROWS:
        fill_rows(c, t, begin / 2, n / 2, values);
        return;
    case DMK_COMPACT_U32:
        break;
    }
    dmk_unreachable("format of a tensor");
}

/* Whether the origin holds as many numbers, in rows of the same length, as the tensor has. */
static bool fits(const struct dmk_compact *c, const struct tm_tensor *tensor,
                 const struct dmk_compact_tensor *t, bool is_mxfp4)
{
    if (t->format == DMK_COMPACT_ROWS) {
        const struct dmk_compact_tensor *ids = dmk_compact_find(c, "ids", 3);

        return tensor->rank == 2 && tensor->is_bf16 && tensor->dims[0] == c->shape.vocab &&
               t->rank == 2 && t->dims[0] == ids->n_elements + 1 && t->dims[1] == tensor->dims[1];
    }
    if (is_mxfp4 != (t->format == DMK_COMPACT_MXFP4) || t->format == DMK_COMPACT_U32) {
        return false;
    }
    for (uint32_t d = 0; d < 2 && d < t->rank; d++) {
        if (t->dims[d] != tensor->dims[d]) {
            return false;
        }
    }
    if (is_mxfp4) { /* [E, rows, K/32, 16] and [E, rows, K/32] of [E, rows, K] */
        return t->rank == 3 && t->dims[2] == tensor->dims[2] * BLOCK;
    }
    return t->rank == tensor->rank && t->rank <= 2;
}

static int check_plan(const struct dmk_compact *c, const struct tm_plan *plan,
                      struct dmk_error *reterr)
{
    uint32_t n_used = 1; /* the ids */

    for (uint32_t i = 0; i < plan->n_tensors; i++) {
        bool is_blocks, is_scales;
        const struct tm_tensor *tensor = &plan->tensors[i];
        const struct dmk_compact_tensor *t = find_origin(c, tensor->name, &is_blocks, &is_scales);

        if (!t || !fits(c, tensor, t, is_blocks || is_scales)) {
            return dmk_error_set(reterr, -DMK_EINVAL, "model.json: the numbers of \"%s\" %s",
                                 tensor->name, t ? "have another shape or format" : "are missing");
        }
        n_used += !is_scales;
    }
    if (n_used != c->n_tensors) {
        return dmk_error_set(reterr, -DMK_EINVAL,
                             "model.json: %u tensors are listed but the checkpoint is made of %u",
                             c->n_tensors, n_used);
    }
    return 0;
}

int dmk_compact_expand(const struct dmk_compact *compact, const struct dmk_tinymodel_conf *conf,
                       uint64_t *ret_bytes, struct dmk_error *reterr)
{
    const struct dmk_tinymodel_source source = {fill, compact};
    struct dmk_tinymodel_conf own = *conf;
    struct tm_plan plan;

    own.shape = compact->shape;
    own.expert_format = DMK_EXPERTS_MXFP4;
    own.source = &source;
    int r = tm_plan_make(&own, &plan, reterr);

    if (r < 0) {
        return r;
    }
    r = check_plan(compact, &plan, reterr);
    tm_plan_free(&plan);
    return r < 0 ? r : dmk_tinymodel_write(&own, ret_bytes, reterr);
}
