"""Logits of transformers' GptOss beside ours, on a checkpoint in the Hugging Face layout.

    compare_hf.py MODEL_DIR N_TOKENS CHECK_LOGITS [backend:chunk ...]

Three runs of transformers (fp32, bf16 eager) and ours, same ids; distances are per row, as l2 of the difference over
l2 of the fp32 logits. Rows where a router's tie fell otherwise stand out, so the median is what counts: ours against
fp32 should be no worse than transformers' bf16 against fp32.
"""
import subprocess
import sys
import tempfile

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config


def run_hf(model_dir, ids, dtype):
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager",
        device_map="cuda")
    model = model.to(dtype)
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda")).logits[0].float().cpu().numpy()
    del model
    torch.cuda.empty_cache()
    return logits


def distance(name, a, ref):
    d = np.linalg.norm(a - ref, axis=1) / np.linalg.norm(ref, axis=1)
    print(f"hf      {name}: median {np.median(d):.5f}, p90 {np.quantile(d, 0.9):.5f}, worst {d.max():.4f}, "
          f"argmax equal {np.mean(a.argmax(1) == ref.argmax(1)):.3f}", flush=True)
    return float(np.median(d))


def main():
    model_dir, n, program = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.backends.cuda.matmul.allow_tf32 = False
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 200000, n).tolist()
    exact = run_hf(model_dir, ids, torch.float32)
    theirs = distance("transformers bf16 against fp32", run_hf(model_dir, ids, torch.bfloat16), exact)
    bad = False
    for what in sys.argv[4:]:
        backend, chunk = what.split(":")
        with tempfile.NamedTemporaryFile() as out:
            subprocess.run([program, model_dir, backend, chunk, out.name], input=" ".join(map(str, ids)), text=True,
                           check=True)
            ours = np.fromfile(out.name, np.float32).reshape(n, -1)
        median = distance(f"ours ({what}) against fp32", ours, exact)
        bad = bad or not median <= theirs
    sys.exit(bad)


if __name__ == "__main__":
    main()
