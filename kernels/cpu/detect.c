/* Which vector instructions this processor has and the operating system saves. x86-64 only. */
#include "kernels/cpu/cpu.h"

#include <cpuid.h>

/* Conversions of half precision, which clang 14's builtin has no name for. They need the same saved registers as AVX2. */
static bool has_f16c(void)
{
    unsigned a, b, c = 0, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool dmk_cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool dmk_cpu_has_avx512(void)
{
    return dmk_cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
