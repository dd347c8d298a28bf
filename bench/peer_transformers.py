#!/usr/bin/env python3
"""transformers' GptOss and damask on one GPU with the same checkpoint: how far their logits are from fp32, and how long a
prompt and a decode step take. A check of plausibility: transformers is the reference for numbers, not a rival in speed.

    damask tinymodel --preset gpt-oss-20b --layers 6 --out DIR     (or any checkpoint in the Hugging Face layout)
    bench/peer_transformers.py DIR BENCH_DEVICE CHECK_LOGITS

Weights of transformers are dequantised to bf16, attention is its eager one. Times are medians (lowest to highest) of the host's
clock around the call and a synchronisation.
"""
import pathlib
import re
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Mxfp4Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPTS, BATCHES, CONTEXT, RUNS = (1024, 8192), (1, 8), 8192, 7


def timed(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def spread(ms):
    return f"{statistics.median(ms):.2f} ({min(ms):.2f} to {max(ms):.2f})"


def measure_transformers(model_dir):
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager", device_map="cuda").eval()
    torch.manual_seed(1)
    found = {}
    with torch.no_grad():
        for n in PROMPTS:
            ids = torch.randint(0, 200000, (1, n), device="cuda")
            ms = [timed(lambda: model(ids, logits_to_keep=1)) for _ in range(RUNS + 1)]
            found["prefill", 1, n] = ms[1:]
        for batch in BATCHES:
            cache = DynamicCache(config=model.config)
            for row in range(0, CONTEXT, 1024):
                model(torch.randint(0, 200000, (batch, 1024), device="cuda"), past_key_values=cache,
                      logits_to_keep=1)
            step = torch.randint(0, 200000, (batch, 1), device="cuda")
            ms = [timed(lambda: model(step, past_key_values=cache, logits_to_keep=1)) for _ in range(RUNS + 3)]
            found["decode", batch, CONTEXT] = ms[3:]
            del cache
    return found


def measure_damask(model_dir, program, experts):
    out = subprocess.run([program, "--model", model_dir, "--experts", experts,
                          "--prefill", ",".join(map(str, PROMPTS)), "--batch", ",".join(map(str, BATCHES)),
                          "--context", str(CONTEXT)], capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"(prefill|decode) batch (\d+) context (\d+): ([\d.]+) ms \(([\d.]+) to ([\d.]+)", out)
    return {(phase, int(batch), int(context)): (float(m), f"{m} ({low} to {high})")
            for phase, batch, context, m, low, high in rows}


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model_dir, bench, check = sys.argv[1:]
    import transformers
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, transformers {transformers.__version__}; "
          f"{' '.join(sys.argv)}", flush=True)
    ours = {experts: measure_damask(model_dir, bench, experts) for experts in ("mxfp4", "fp8")}
    theirs = measure_transformers(model_dir)
    torch.cuda.empty_cache()
    print("| ms | transformers bf16 | damask, MXFP4 | damask, FP8 experts |\n| --- | --- | --- | --- |")
    for (phase, batch, context), ms in theirs.items():
        what = f"prompt of {context}" if phase == "prefill" else f"step of batch {batch} at {context}"
        cells = [f"{rows[phase, batch, context][1]}: {statistics.median(ms) / rows[phase, batch, context][0]:.1f} x"
                 for rows in ours.values()]
        print(f"| {what} | {spread(ms)} | {' | '.join(cells)} |", flush=True)
    subprocess.run([sys.executable, ROOT / "tests/check/cuda/compare_hf.py", model_dir, "256", check,
                    "cuda:64", "cuda-fp8:64"], check=False)


if __name__ == "__main__":
    main()
