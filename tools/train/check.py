"""Compares the compact checkpoint with transformers' GptOssForCausalLM, in two steps on one or two machines.

    check.py ask --compact models/tiny --config FOLDER --out answers.json [--n 8]
        (torch, transformers, safetensors) unpacks the compact checkpoint by itself, with the config.json of an
        expanded one, and keeps greedy answers (CPU, bf16) to unseen prompts, and a SHA-256 of each tensor.
    check.py compare --answers answers.json --model FOLDER --url http://127.0.0.1:8000
        (nothing but tiktoken) the tensors of the expanded checkpoint must be the same bytes, and the router's
        /v1/completions must answer the same token ids with the same text, greedy too.

One JSON line a skill; ends with 1 when something differs.
"""

import argparse
import hashlib
import json
import pathlib
import struct
import sys
import tempfile
import urllib.request

import harmony
import tasks


def unpack(folder):
    """{tensor name: torch tensor} of the checkpoint, from model.json and model.bin."""
    import numpy as np
    import torch
    head = json.loads((folder / "model.json").read_text())
    data = (folder / "model.bin").read_bytes()
    out, ids = {}, None

    def mxint8(raw, shape):
        n = int(np.prod(shape))
        q = np.frombuffer(raw[:n], np.int8).reshape(-1, 32).astype(np.float32)
        e = np.frombuffer(raw[n:], np.uint8).astype(np.float32) - 127
        return torch.from_numpy((q * np.exp2(e)[:, None]).reshape(shape)).to(torch.bfloat16)

    for t in head["tensors"]:
        raw, name, shape = data[t["offset"]:t["offset"] + t["bytes"]], t["name"], t["shape"]
        if t["format"] == "u32":
            ids = torch.from_numpy(np.frombuffer(raw, np.int32).copy()).long()
        elif t["format"] == "bf16":
            out[name] = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).reshape(shape)
        elif t["format"] == "mxint8":
            out[name] = mxint8(raw, shape)
        elif t["format"] == "rows":
            rows = mxint8(raw, shape)
            full = rows[-1:].repeat(head["shape"]["vocab"], 1)
            full[ids] = rows[:-1]
            out[name] = full
        else:
            e, n, k = shape
            blocks = np.frombuffer(raw[:e * n * k // 2], np.uint8).reshape(e, n, k // 32, 16)
            scales = np.frombuffer(raw[e * n * k // 2:], np.uint8).reshape(e, n, k // 32)
            out[name + "_blocks"], out[name + "_scales"] = torch.from_numpy(blocks.copy()), torch.from_numpy(scales.copy())
    return out


def ask(args):
    import torch
    from safetensors.torch import save_file
    from transformers import GptOssForCausalLM, Mxfp4Config
    tensors = unpack(args.compact)
    sums = {k: hashlib.sha256(v.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for k, v in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder + "/model.safetensors", {"format": "pt"})
        for name in ("config.json", "generation_config.json"):
            (pathlib.Path(folder) / name).write_text((args.config / name).read_text())
        model = GptOssForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager",
                                                  quantization_config=Mxfp4Config(dequantize=True)).eval()
    renderer, maker, kept = harmony.Renderer(), tasks.Maker(args.seed, held=True), []
    for skill, make in tasks.SKILLS.items():
        n, right = args.long if skill == "recall_long" else args.n, 0
        for _ in range(n):
            task = make(maker)
            prompt, want = renderer.render(task), renderer.completion(task)
            with torch.no_grad():
                out = model.generate(torch.tensor([prompt]), max_new_tokens=len(want), do_sample=False,
                                     eos_token_id=[harmony.RETURN, harmony.CALL], pad_token_id=199999)
            got = out[0, len(prompt):].tolist()
            right += got == want
            kept.append({"skill": skill, "prompt": prompt, "want": want, "got": got})
        print(json.dumps({"skill": skill, "n": n, "right": right}), flush=True)
    args.out.write_text(json.dumps({"sums": sums, "answers": kept}))
    return True


def tensor_sums(path):
    """SHA-256 of each tensor of a safetensors file."""
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + n])
    head.pop("__metadata__", None)
    return {k: hashlib.sha256(data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]).hexdigest()
            for k, v in head.items()}


def compare(args):
    kept = json.loads(args.answers.read_text())
    equal = tensor_sums(args.model / "model.safetensors") == kept["sums"]
    print(json.dumps({"tensors": len(kept["sums"]), "equal": equal}))
    renderer, counts = harmony.Renderer(), {}
    for a in kept["answers"]:
        body = {"model": args.model_name, "prompt": a["prompt"], "max_tokens": len(a["want"]), "temperature": 0}
        request = urllib.request.Request(args.url + "/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as r:
            text = json.load(r)["choices"][0]["text"]
        stop = a["got"][-1] in (harmony.RETURN, harmony.CALL)
        want = "".join(renderer.encoder.decode([i]) if i < 199998 else "" for i in a["got"][:len(a["got"]) - stop])
        for mark in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|return|>", "<|call|>"):
            text = text.replace(mark, "")
        c = counts.setdefault(a["skill"], [0, 0])
        c[0] += 1
        c[1] += text == want
        if text != want:
            print(json.dumps({"differ": text, "transformers": want}), file=sys.stderr)
    for skill, (n, same) in counts.items():
        print(json.dumps({"skill": skill, "n": n, "same": same}))
    return equal and all(n == same for n, same in counts.values())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("step", choices=["ask", "compare"])
    p.add_argument("--compact", type=pathlib.Path)
    p.add_argument("--config", type=pathlib.Path)
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--n", type=int, default=8)
    p.add_argument("--long", type=int, default=2, help="prompts of recall_long: minutes each on a CPU")
    p.add_argument("--seed", type=int, default=900)
    p.add_argument("--answers", type=pathlib.Path)
    p.add_argument("--model", type=pathlib.Path)
    p.add_argument("--model-name", default="gpt-oss-tiny")
    p.add_argument("--url", default="http://127.0.0.1:8000")
    args = p.parse_args()
    sys.exit(0 if (ask if args.step == "ask" else compare)(args) else 1)


if __name__ == "__main__":
    main()
