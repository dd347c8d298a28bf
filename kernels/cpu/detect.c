/* Which vector instructions this processor has and the operating system saves. x86-64 only. */
#include "kernels/cpu/cpu.h"

bool dmk_cpu_has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

bool dmk_cpu_has_avx512(void)
{
    return dmk_cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
