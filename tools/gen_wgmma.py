#!/usr/bin/env python3
"""Writes kernels/cuda/moe_wgmma.cuh: one wrapper for each shape of wgmma that the kernels use."""
import sys

HEAD = '''/* The shapes of wgmma in use, D[64][N] (+)= A[64][32] B[N][32]^T in fp32; written by tools/gen_wgmma.py.
 *
 * Thread t of the warpgroup holds D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + i] in
 * d[4 * j + 2 * h + i]. `add` false: D is overwritten. */
#pragma once

#include <stdint.h>

namespace dmk
{

/* E4M3, K = 32: A in registers, thread t's row 16 * (t / 32) + t % 32 / 4 + 8 * h, columns 16 * i + 4 * (t % 4) to
 * + 3 in a[2 * i + h]; B in shared memory. */
template <int N>
__device__ __forceinline__ void wgmma_e4m3_rs(float (&d)[N / 2], const uint32_t *a, uint64_t b, int add);
'''


def wrapper(n):
    regs = n // 2
    d = [f'%{i}' for i in range(regs)]
    lines = []
    for i in range(0, regs, 8):
        lines.append('"' + ', '.join(d[i:i + 8]) + (', "' if i + 8 < regs else '"'))
    body = '\n                 '.join(lines)
    sig = (f'template <>\n__device__ __forceinline__ void wgmma_e4m3_rs<{n}>(float (&d)[{regs}], '
           f'const uint32_t *a, uint64_t b,\n                                                  int add)')
    name = f'wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3'
    tail = f'"}}, {{%{regs}, %{regs + 1}, %{regs + 2}, %{regs + 3}}}, %{regs + 4}, p, 1, 1;\\n}}"'
    pred = regs + 5
    inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)'
    outs = []
    for i in range(0, regs, 4):
        outs.append(', '.join(f'"+f"(d[{j}])' for j in range(i, min(i + 4, regs))))
    out = ',\n                   '.join(outs)
    return f'''
{sig}
{{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{pred}, 0;\\n"
                 "{name} {{"
                 {body}
                 {tail}
                 : {out}
                 : {inputs});
}}
'''


def main():
    text = HEAD
    for n in range(16, 129, 16):
        text += wrapper(n)
    sys.stdout.write(text + '\n} // namespace dmk\n')


main()
