#!/usr/bin/env python3
"""Makes tests/vectors/*.safetensors: what transformers' GptOssForCausalLM computes, layer by layer.

Needs PyTorch, transformers (made with 5.17) and the built `damask` tool; a CPU is enough:

    tools/vectors/make_vectors.py --damask build/tools/damask --out tests/vectors

Nobody needs it to run the tests. Two synthetic checkpoints (`damask tinymodel`, fixed seeds) are written
to a temporary folder: "tiny", the whole model at small width, and "wide", two layers at the published
width. Each layer is fed its own input: seeded random rows that the test makes again (no file holds them),
so that errors do not pile up and a layer stands for itself. Of each case the output at chosen positions
is kept, in float32 (bf16 weights, everything computed in float32) and in bfloat16 (the model as it is
used), and whether the position is to be skipped because its routing is a toss-up: 4th and 5th expert
within 2 bf16 ulps of each other, or other experts chosen in bfloat16 than in float32.

Tensors in a file, for a case "l0.n200" (layer, length) or "l0.from3968.n232" (rows before are absent):
    CASE.positions  I32 [P]      CASE.fp32  F32 [P,H]     CASE.bf16  BF16 [P,H]    CASE.skip  U8 [P]
and of the whole model, for "model.n200" (ids seeded too):
    CASE.positions  I32 [P]      CASE.ids   I32 [P,64], the largest logits in float32
    CASE.fp32       F32 [P,64]   CASE.bf16  F32 [P,64], the logits of these ids in both
"""
import argparse
import copy
import json
import pathlib
import subprocess
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import DynamicCache, GptOssForCausalLM, Mxfp4Config

WINDOW = 128
CHUNK = 512  # query rows at a time: bounds the memory of a long full layer
INPUT_SEED, INPUT_DEVIATION, IDS_SEED = 11, 1.5, 12
TOP = 64

MODELS = {
    "tiny": dict(options=["--layers", "4", "--hidden", "256", "--intermediate", "256", "--experts", "32",
                          "--heads", "16", "--vocab-size", "2048", "--seed", "21"],
                 lengths=[96, 200, 4200], parts=[], whole=[96, 200, 4200]),
    "wide": dict(options=["--layers", "2", "--hidden", "2880", "--intermediate", "2880", "--experts", "16",
                          "--heads", "64", "--vocab-size", "512", "--seed", "22"],
                 lengths=[96, 200], parts=[(0, 3968, 232)], whole=[]),
}


# ---- the counter-based generator of common/base/rng.h ----

def mix(x):
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def rng_u64(seed, stream, counters):
    with np.errstate(over="ignore"):
        s = mix(np.array([seed], dtype=np.uint64))
        return mix(mix(s ^ np.uint64(stream)) ^ counters.astype(np.uint64))


def layer_input(layer, first, n, hidden):
    """Rows [first, first + n) of a layer's input: uniform bf16, four numbers from a draw."""
    index = np.arange(first * hidden, (first + n) * hidden, dtype=np.uint64)
    draw = rng_u64(INPUT_SEED, layer, index // np.uint64(4))
    part = (draw >> (np.uint64(16) * (index % np.uint64(4)))).astype(np.uint16).view(np.int16)
    width = np.float32(INPUT_DEVIATION * 3 ** 0.5)
    value = width * ((part.astype(np.float32) + np.float32(0.5)) * np.float32(2.0 ** -15))
    return torch.from_numpy(value).to(torch.bfloat16).reshape(1, n, hidden)


def prompt_ids(n, vocab):
    draw = rng_u64(IDS_SEED, n, np.arange(n, dtype=np.uint64))
    return torch.from_numpy((draw % np.uint64(vocab)).astype(np.int64)).reshape(1, n)


def choose_positions(first, n, want):
    """The edges of blocks and windows, and some places in between; all of them see a whole window where
    rows before `first` are absent."""
    low = first + WINDOW - 1 if first else 0
    edges = [0, 1, 2, 31, 63, 64, 65, 95, 126, 127, 128, 129, 130, 191, 192, 199, 4094, 4095, 4096, 4097,
             4098, first + n - 1]
    chosen = {p for p in edges if low <= p < first + n}
    step = 0
    while len(chosen) < want:
        chosen.add(low + int(rng_u64(13, n, np.array([step]))[0] % np.uint64(first + n - low)))
        step += 1
    return sorted(chosen)


# ---- one layer ----

def additive_mask(q_first, n_q, k_first, n_k, window, dtype):
    q = torch.arange(q_first, q_first + n_q)[:, None]
    k = torch.arange(k_first, k_first + n_k)[None, :]
    seen = k <= q
    if window:
        seen &= k > q - window
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]


def run_layer(model, layer, x, first, window):
    """Output rows and router logits of one decoder layer over the input x [1, n, H]."""
    module, dtype, n = model.model.layers[layer], model.lm_head.weight.dtype, x.shape[1]
    x, cache, outputs, routers = x.to(dtype), DynamicCache(), [], []
    hook = module.mlp.router.register_forward_hook(lambda _m, _i, o: routers.append(o[0].float()))
    module.self_attn.layer_idx = 0  # the cache holds this layer alone
    for at in range(0, n, CHUNK):
        rows = min(CHUNK, n - at)
        positions = torch.arange(first + at, first + at + rows)[None]
        part = x[:, at:at + rows]
        outputs.append(module(
            part, attention_mask=additive_mask(first + at, rows, first, at + rows, window, dtype),
            position_ids=positions, position_embeddings=model.model.rotary_emb(part, positions),
            past_key_values=cache, use_cache=True))
    module.self_attn.layer_idx = layer
    hook.remove()
    return torch.cat(outputs, 1)[0], torch.cat(routers, 0)


def toss_ups(router32, router16):
    top = router32.topk(5).values
    fourth, fifth = top[:, 3], top[:, 4]
    ulp = 2.0 ** (torch.floor(torch.log2(torch.maximum(fourth.abs(), fifth.abs()))) - 7)
    same = (router32.topk(4).indices.sort().values == router16.topk(4).indices.sort().values).all(1)
    return (fourth - fifth <= 2 * ulp) | ~same


def norm(x):
    return x.double().norm().item()


def layer_case(models, layer, first, n, tensors, report):
    m32, m16 = models
    window = WINDOW if layer % 2 == 0 else 0
    x = layer_input(layer, first, n, m32.config.hidden_size)
    y32, r32 = run_layer(m32, layer, x, first, window)
    y16, r16 = run_layer(m16, layer, x, first, window)
    at = torch.tensor(choose_positions(first, n, 24 if m32.config.hidden_size < 1000 else 16))
    rows = at - first
    skip = toss_ups(r32, r16)[rows]
    name = f"l{layer}" + (f".from{first}" if first else "") + f".n{n}"
    tensors[name + ".positions"] = at.to(torch.int32)
    tensors[name + ".fp32"] = y32[rows].contiguous()
    tensors[name + ".bf16"] = y16[rows].contiguous()
    tensors[name + ".skip"] = skip.to(torch.uint8)
    keep = rows[~skip]
    error = norm(y16[keep].float() - y32[keep])
    line = (f"{name}: {len(at)} positions, {int(skip.sum())} skipped, |out| {norm(y32[keep]):.2f}, "
            f"|out-in| {norm(y32[keep] - x[0, keep].float()):.2f}, bf16 error {error:.4f}")
    if window and n > WINDOW:  # how far a window that is off by one would stand out
        late = keep[keep + first >= WINDOW] if not first else keep
        base = norm(y16[late].float() - y32[late])
        for off in (-1, 1):
            other, _ = run_layer(m32, layer, x, first, window + off)
            line += f", window {window + off}: {norm(other[late] - y32[late]) / base:.1f} of it"
    print(line, flush=True)
    report[name] = line.split(": ", 1)[1]


# ---- the whole model ----

def model_logits(model, ids):
    cache, out = DynamicCache(config=model.config), []
    for at in range(0, ids.shape[1], CHUNK):
        out.append(model(ids[:, at:at + CHUNK], past_key_values=cache, use_cache=True).logits.float())
    return torch.cat(out, 1)[0]


def model_case(models, n, tensors, report):
    m32, m16 = models
    ids = prompt_ids(n, m32.config.vocab_size)
    l32, l16 = model_logits(m32, ids), model_logits(m16, ids)
    at = torch.tensor(choose_positions(0, n, 24))
    top = l32[at].topk(TOP).indices
    name = f"model.n{n}"
    tensors[name + ".positions"] = at.to(torch.int32)
    tensors[name + ".ids"] = top.to(torch.int32)
    tensors[name + ".fp32"] = l32[at].gather(1, top).contiguous()
    tensors[name + ".bf16"] = l16[at].gather(1, top).contiguous()
    error = (tensors[name + ".fp32"] - tensors[name + ".bf16"]).norm(dim=1)
    same = (l32[at].argmax(1) == l16[at].argmax(1)).float().mean().item()
    line = f"{name}: bf16 error of the top {TOP}, median {error.median():.3f}, best token alike {same:.0%}"
    print(line, flush=True)
    report[name] = line.split(": ", 1)[1]


def check_mask(model):
    """Our masks are transformers' own."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    x = torch.zeros(1, 200, model.config.hidden_size)
    args = dict(config=model.config, inputs_embeds=x, attention_mask=None, past_key_values=None)
    for make, window in ((create_causal_mask, 0), (create_sliding_window_causal_mask, WINDOW)):
        theirs = make(**args)
        ours = additive_mask(0, 200, 0, 200, window, torch.float32)
        assert torch.equal(theirs.expand_as(ours) == 0, ours == 0), "mask differs from transformers'"


@torch.no_grad()
def make(name, spec, damask, out):
    tensors, report = {}, {}
    with tempfile.TemporaryDirectory() as tmp:
        folder = pathlib.Path(tmp) / name
        subprocess.run([damask, "tinymodel", "--out", folder, *spec["options"]], check=True)
        m16 = GptOssForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True),
            attn_implementation="eager").eval()
    m32 = copy.deepcopy(m16).float()
    for model in (m32, m16):
        model.config._attn_implementation = "eager"
    assert m32.model.layers[0].mlp.experts.down_proj.dtype == torch.float32
    check_mask(m32)
    for layer in range(m32.config.num_hidden_layers):
        for n in spec["lengths"]:
            layer_case((m32, m16), layer, 0, n, tensors, report)
    for layer, first, n in spec["parts"]:
        layer_case((m32, m16), layer, first, n, tensors, report)
    for n in spec["whole"]:
        model_case((m32, m16), n, tensors, report)
    meta = {"options": " ".join(spec["options"]), "transformers": transformers.__version__,
            "torch": torch.__version__, "input_seed": str(INPUT_SEED), "ids_seed": str(IDS_SEED),
            "report": json.dumps(report)}
    save_file(tensors, out / f"{name}.safetensors", metadata=meta)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--damask", default="build/tools/damask", help="the built tool")
    parser.add_argument("--out", default="tests/vectors", type=pathlib.Path)
    parser.add_argument("--only", choices=list(MODELS), help="one file of the two")
    args = parser.parse_args()
    for name, spec in MODELS.items():
        if args.only in (None, name):
            make(name, spec, args.damask, args.out)


if __name__ == "__main__":
    main()
