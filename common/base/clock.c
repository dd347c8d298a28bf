#include "common/base/clock.h"
#include <time.h>

uint64_t dmk_clock_ns(void)
{
    struct timespec ts;

    (void)clock_gettime(CLOCK_MONOTONIC, &ts); /* can not fail with this clock */
    return (uint64_t)ts.tv_sec * DMK_NS_PER_S + (uint64_t)ts.tv_nsec;
}

int64_t dmk_clock_unix_s(void)
{
    return (int64_t)time(NULL);
}
