/* Stop strings over text that comes in pieces. */
#include "router/stop.h"

#include <stdlib.h>
#include "common/base/assert.h"
#include "common/base/status.h"

static void fill_failures(struct dmk_str text, uint16_t *fail)
{
    size_t k = 0;

    fail[0] = 0;
    for (size_t i = 1; i < text.len; i++) {
        while (k > 0 && text.data[i] != text.data[k]) {
            k = fail[k - 1];
        }
        k += text.data[i] == text.data[k];
        fail[i] = (uint16_t)k;
    }
}

int dmk_stop_init(struct dmk_stop *stop, const struct dmk_str *words, size_t n)
{
    dmk_assert(n <= DMK_STOP_MAX);
    *stop = (struct dmk_stop){0};
    dmk_buf_init(&stop->held, 0);
    for (size_t i = 0; i < n; i++) {
        dmk_assert(words[i].len > 0 && words[i].len <= UINT16_MAX);
        stop->words[i].text = words[i];
        stop->words[i].fail = malloc(words[i].len * sizeof(uint16_t));
        if (!stop->words[i].fail) {
            dmk_stop_fini(stop);
            return -DMK_ENOMEM;
        }
        stop->n = i + 1;
        fill_failures(words[i], stop->words[i].fail);
    }
    return 0;
}

void dmk_stop_fini(struct dmk_stop *stop)
{
    for (size_t i = 0; i < stop->n; i++) {
        free(stop->words[i].fail);
    }
    dmk_buf_fini(&stop->held);
    *stop = (struct dmk_stop){0};
}

/* Moves every automaton by one byte; returns the length of the longest word that ends here, or 0.
 * */
static size_t step(struct dmk_stop *stop, char c)
{
    size_t matched = 0;

    for (size_t i = 0; i < stop->n; i++) {
        const struct dmk_str text = stop->words[i].text;
        size_t at = stop->words[i].at;

        while (at > 0 && text.data[at] != c) {
            at = stop->words[i].fail[at - 1];
        }
        at += text.data[at] == c;
        if (at == text.len && at > matched) {
            matched = at;
            stop->matched = i;
        }
        stop->words[i].at = at;
    }
    return matched;
}

bool dmk_stop_push(struct dmk_stop *stop, struct dmk_str piece, struct dmk_buf *out)
{
    size_t keep = 0;

    for (size_t i = 0; i < piece.len; i++) {
        const size_t matched = step(stop, piece.data[i]);

        if (matched > 0) {
            dmk_buf_append(&stop->held, piece.data, i + 1);
            dmk_assert(stop->held.len >= matched);
            dmk_buf_append(out, stop->held.data, stop->held.len - matched);
            dmk_buf_reset(&stop->held);
            return true;
        }
    }
    for (size_t i = 0; i < stop->n; i++) {
        keep = stop->words[i].at > keep ? stop->words[i].at : keep;
    }
    dmk_buf_append(&stop->held, piece.data, piece.len);
    dmk_assert(stop->held.len >= keep);
    if (stop->held.len > keep) {
        const size_t n = stop->held.len - keep;

        dmk_buf_append(out, stop->held.data, n);
        dmk_buf_consume(&stop->held, n);
    }
    return false;
}

void dmk_stop_flush(struct dmk_stop *stop, struct dmk_buf *out)
{
    dmk_buf_append(out, stop->held.data, stop->held.len);
    dmk_buf_reset(&stop->held);
    for (size_t i = 0; i < stop->n; i++) {
        stop->words[i].at = 0;
    }
}
