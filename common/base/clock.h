/* Time. Durations and deadlines are monotonic nanoseconds; only people see the wall clock. */
#pragma once

#include <stdint.h>

#define DMK_NS_PER_MS 1000000ull
#define DMK_NS_PER_S  1000000000ull

uint64_t dmk_clock_ns(void);    /* CLOCK_MONOTONIC */
int64_t dmk_clock_unix_s(void); /* wall clock, seconds */
