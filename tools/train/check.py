"""Asks transformers' GptOssForCausalLM (CPU, bf16, greedy) the questions of an evaluation.

    check.py --model FOLDER [--n 5] [--engine URL]

FOLDER is the expanded checkpoint. With --engine, a router's /v1/completions answers the same token ids, and
both texts of ids must be equal. One line a skill; ends with 1 when an engine's answer differs.
"""

import argparse
import json
import sys
import urllib.request

import torch
from transformers import GptOssForCausalLM, Mxfp4Config

import harmony
import tasks


def ask_engine(url, ids, n):
    body = {"model": "damask-tiny", "prompt": ids, "max_tokens": n, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as r:
        return json.load(r)["choices"][0]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--n", type=int, default=5)
    p.add_argument("--seed", type=int, default=900)
    p.add_argument("--engine")
    args = p.parse_args()
    torch.set_num_threads(2)
    model = GptOssForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="eager",
                                              quantization_config=Mxfp4Config(dequantize=True)).eval()
    renderer, maker, differ = harmony.Renderer(), tasks.Maker(args.seed, held=True), 0
    for skill, make in tasks.SKILLS.items():
        n = 1 if skill == "recall_long" else args.n
        right = same = 0
        for _ in range(n):
            task = make(maker)
            prompt, want = renderer.render(task), renderer.completion(task)
            with torch.no_grad():
                out = model.generate(torch.tensor([prompt]), max_new_tokens=len(want), do_sample=False,
                                     eos_token_id=[harmony.RETURN, harmony.CALL], pad_token_id=199999)
            got = out[0, len(prompt):].tolist()
            right += got == want
            if args.engine:
                text = ask_engine(args.engine, prompt, len(want))["text"]
                plain = renderer.encoder.decode([i for i in got if i < 199998])
                same += text == plain
                if text != plain:
                    print("differ:", repr(text), repr(plain))
        differ += n - same if args.engine else 0
        print(json.dumps({"skill": skill, "n": n, "right": right, **({"same": same} if args.engine else {})}), flush=True)
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
