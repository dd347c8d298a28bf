/* A device that is none: backend "cuda" for tests, on which the host's kernels run late and out of order.
 *
 * Linked before the backends, it takes the place of dmk_backend_cuda. Calls only queue; when the host waits for a
 * stream or an event, operations of all streams run one by one in an order drawn from the seed, as far as streams
 * and events allow it. So what two ranks do without an event between them happens in either order, and graphs run
 * in another order each time. What a real capture would refuse is asserted. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct fake_device_stats {
    uint64_t n_allocs, n_events, n_graphs; /* made so far */
    uint64_t n_graph_runs, n_kernels;
};

void fake_device_seed(uint64_t seed);
/* Whether backends opened from here on say that they are on one device; then kernels must not wait for others. */
void fake_device_share(bool share);
/* Memory of each device, and what other programs hold of it. Nothing is refused for it: it is only told. */
void fake_device_memory(uint64_t total, uint64_t others);
struct fake_device_stats fake_device_stats(void);
