#!/usr/bin/env python3
"""Writes the wrappers of wgmma, one for each shape that the kernels use: kernels/cuda/wgmma_e4m3.cuh (E4M3, A in
registers), kernels/cuda/wgmma_e4m3_ss.cuh (E4M3, both in shared memory) and kernels/cuda/wgmma_bf16.cuh.

usage: gen_wgmma.py [--check]     (--check: compare with the files instead of writing them)
"""
import pathlib
import sys

CUDA = pathlib.Path(__file__).resolve().parent.parent / "kernels" / "cuda"

E4M3_HEAD = '''/* The shapes of dmk_wgmma_e4m3 in use, D[64][N] (+)= A[64][32] B[N][32]^T in fp32; written by tools/gen_wgmma.py.
 *
 * Thread t of the warpgroup holds D[16 * (t / 32) + t % 32 / 4 + 8 * h][8 * j + 2 * (t % 4) + i] in
 * d[4 * j + 2 * h + i]. `add` false: D is overwritten. */
#pragma once

#include <stdint.h>

/* E4M3, K = 32: A in registers, thread t's row 16 * (t / 32) + t % 32 / 4 + 8 * h, columns 16 * i + 4 * (t % 4) to
 * + 3 in a[2 * i + h]; B in shared memory. */
template <int N>
__device__ __forceinline__ void dmk_wgmma_e4m3(float (&d)[N / 2], const uint32_t *a, uint64_t b, int add);
'''

BF16_HEAD = '''/* The shapes of dmk_wgmma in use (see wgmma.h): both sides bf16 in shared memory, K = 16; written by tools/gen_wgmma.py. */
#pragma once

#include <stdint.h>

/* add 0: d is overwritten. */
template <int N> struct dmk_wgmma;
'''


E4M3_SS_HEAD = '''/* The shapes of dmk_wgmma_e4m3_ss in use (see wgmma.h): both sides E4M3 in shared memory, K = 32; written by
 * tools/gen_wgmma.py. */
#pragma once

#include <stdint.h>

/* add 0: d is overwritten. */
template <int N> struct dmk_wgmma_e4m3_ss;
'''


def rows(items, n, between):
    return between.join(", ".join(items[i:i + n]) for i in range(0, len(items), n))


def instruction(name, n, sides, tail, inputs):
    """The asm statement: n / 2 accumulators, then `sides` as operands behind them, then the predicate."""
    regs = n // 2
    body = rows([f"%{i}" for i in range(regs)], 8, ', "\n                 "')
    out = rows([f'"+f"(d[{i}])' for i in range(regs)], 4, ",\n                   ")
    operands = sides(regs)
    predicate = regs + inputs.count("(") - 1
    return f'''    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{predicate}, 0;\\n"
                 "{name} {{"
                 "{body}"
                 "}}, {operands}, p, {tail};\\n}}"
                 : {out}
                 : {inputs});
'''


def e4m3(n):
    text = instruction(f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3", n,
                       lambda r: f"{{%{r}, %{r + 1}, %{r + 2}, %{r + 3}}}, %{r + 4}", "1, 1",
                       '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)')
    return f'''
template <>
__device__ __forceinline__ void dmk_wgmma_e4m3<{n}>(float (&d)[{n // 2}], const uint32_t *a, uint64_t b,
                                                   int add)
{{
{text}}}
'''


def shared(struct, name, tail, n):
    text = instruction(name, n, lambda r: f"%{r}, %{r + 1}", tail, '"l"(a), "l"(b), "r"(add)')
    return f'''
template <> struct {struct}<{n}> {{
    static __device__ __forceinline__ void run(float (&d)[{n // 2}], uint64_t a, uint64_t b, int add)
    {{
{text.replace(chr(10) + "    ", chr(10) + "        ").replace("    asm", "        asm", 1)}    }}
}};
'''


def bf16(n):
    return shared("dmk_wgmma", f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16", "1, 1, 0, 0", n)


def e4m3_ss(n):
    return shared("dmk_wgmma_e4m3_ss", f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3", "1, 1", n)


def main():
    files = {
        "wgmma_e4m3.cuh": E4M3_HEAD + "".join(map(e4m3, range(16, 129, 16))),
        "wgmma_e4m3_ss.cuh": E4M3_SS_HEAD + "".join(map(e4m3_ss, (8, 16, 32, 64, 128))),
        "wgmma_bf16.cuh": BF16_HEAD + "".join(map(bf16, (8, 16, 32, 64, 96, 128, 160, 192, 256))),
    }
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    for name, text in files.items():
        if not sys.argv[1:]:
            (CUDA / name).write_text(text)
        elif (CUDA / name).read_text() != text:
            sys.exit(f"kernels/cuda/{name} is not what tools/gen_wgmma.py writes; run it")


main()
