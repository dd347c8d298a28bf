/* How many pages a given memory has room for. */
#include "common/kv/layout.h"
#include "common/base/error.h"

#define MIN_FULL_PAGES 4
#define MAX_PAGES      16777216u

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint64_t dmk_kv_least_bytes(const struct dmk_kv_layout *layout, uint32_t n_sequences)
{
    struct dmk_kv_layout least = *layout;

    least.n_full_pages = MIN_FULL_PAGES;
    least.n_window_pages = DMK_WINDOW_RING * n_sequences;
    return dmk_kv_full_bytes(&least) + dmk_kv_window_bytes(&least);
}

int dmk_kv_fit(struct dmk_kv_layout *layout, uint64_t bytes, uint32_t n_sequences)
{
    const uint64_t head = (uint64_t)layout->n_local_heads * layout->page_bytes;
    const uint64_t full = layout->n_full_layers * head, window = layout->n_window_layers * head;
    const uint64_t rings = (uint64_t)DMK_WINDOW_RING * n_sequences;
    uint64_t n_window;

    if (dmk_kv_least_bytes(layout, n_sequences) > bytes || 4 * full + window == 0) {
        return -DMK_EINVAL;
    }
    n_window = bytes / (4 * full + window);
    n_window = min_u64(n_window > rings ? n_window : rings, MAX_PAGES);
    layout->n_window_pages = (uint32_t)n_window;
    if (full > 0) {
        layout->n_full_pages = (uint32_t)min_u64((bytes - n_window * window) / full, MAX_PAGES);
    }
    return 0;
}
