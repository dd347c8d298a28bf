/* The largest logits of a row; see select.h. */
#include "common/sample/select.h"
#include "common/base/assert.h"
#include "common/sample/sample.h"
#include <math.h>
#include <string.h>

#define INSERTION_MAX 64
#define CUTOFF_MAX    128 /* a larger k than this is not looked for among the block maxima */

static uint32_t block_len(const struct dmk_row *row, uint32_t start)
{
    return row->n - start < DMK_SAMPLE_BLOCK ? row->n - start : DMK_SAMPLE_BLOCK;
}

uint32_t dmk_select_above(const struct dmk_row *row, float cutoff, struct dmk_candidate *ret)
{
    uint32_t n = 0;

    for (uint32_t start = 0; start < row->n; start += DMK_SAMPLE_BLOCK) {
        const uint32_t len = block_len(row, start);
        const float max = row->block_max[start / DMK_SAMPLE_BLOCK];

        if (max < cutoff || max == -INFINITY) {
            continue;
        }
        for (uint32_t i = start; i < start + len; i++) {
            if (row->x[i] >= cutoff && row->x[i] > -INFINITY) {
                ret[n++] = (struct dmk_candidate){row->x[i], i};
            }
        }
    }
    return n;
}

/* Puts c into the sorted list of at most k > 0; equals stay behind those that are there. Returns its length. */
static uint32_t insert(struct dmk_candidate *list, uint32_t n, uint32_t k, struct dmk_candidate c)
{
    uint32_t at = n;

    if (n == k) {
        if (list[n - 1].x >= c.x) {
            return n;
        }
        at = --n;
    }
    while (at > 0 && list[at - 1].x < c.x) {
        list[at] = list[at - 1];
        at--;
    }
    list[at] = c;
    return n + 1;
}

float dmk_select_cutoff(const struct dmk_row *row, uint32_t k)
{
    const uint32_t n_blocks = (row->n + DMK_SAMPLE_BLOCK - 1) / DMK_SAMPLE_BLOCK;
    struct dmk_candidate list[CUTOFF_MAX];
    uint32_t n = 0;

    if (k == 0 || k > n_blocks || k > CUTOFF_MAX) {
        return -INFINITY;
    }
    for (uint32_t b = 0; b < n_blocks; b++) {
        n = insert(list, n, k, (struct dmk_candidate){row->block_max[b], b});
    }
    return list[k - 1].x;
}

uint32_t dmk_select_top(const struct dmk_row *row, uint32_t k, struct dmk_candidate *ret)
{
    const float cutoff = dmk_select_cutoff(row, k);
    uint32_t n = 0;

    for (uint32_t start = 0; k > 0 && start < row->n; start += DMK_SAMPLE_BLOCK) {
        const uint32_t len = block_len(row, start);
        const float max = row->block_max[start / DMK_SAMPLE_BLOCK];

        if (max < cutoff || (n == k && max <= ret[n - 1].x)) {
            continue;
        }
        for (uint32_t i = start; i < start + len; i++) {
            if (row->x[i] > (n < k ? -INFINITY : ret[n - 1].x)) {
                n = insert(ret, n, k, (struct dmk_candidate){row->x[i], i});
            }
        }
    }
    return n;
}

/* Larger x, smaller key. -0 counts as +0. */
static uint32_t sort_key(float x)
{
    uint32_t bits;

    x += 0.0f;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

static void sort_by_insertion(struct dmk_candidate *c, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        const struct dmk_candidate item = c[i];
        uint32_t at = i;

        while (at > 0 && c[at - 1].x < item.x) {
            c[at] = c[at - 1];
            at--;
        }
        c[at] = item;
    }
}

/* Long lists: radix sort by the key's four bytes, the lowest first; time is linear whatever the row. */
void dmk_select_sort(struct dmk_candidate *c, struct dmk_candidate *tmp, uint32_t n)
{
    if (n <= INSERTION_MAX) {
        sort_by_insertion(c, n);
        return;
    }
    for (unsigned shift = 0; shift < 32; shift += 8) {
        uint32_t start[256] = {0}, sum = 0;

        for (uint32_t i = 0; i < n; i++) {
            start[sort_key(c[i].x) >> shift & 255]++;
        }
        for (unsigned d = 0; d < 256; d++) {
            const uint32_t count = start[d];

            start[d] = sum;
            sum += count;
        }
        for (uint32_t i = 0; i < n; i++) {
            tmp[start[sort_key(c[i].x) >> shift & 255]++] = c[i];
        }
        memcpy(c, tmp, n * sizeof(*c));
    }
}
