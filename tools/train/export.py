"""The compact checkpoint: model.json (what lies where, checksum) and model.bin (the numbers).

`damask expand` makes the Hugging Face layout of it. Formats of a tensor's bytes:
    bf16    little-endian BF16, as in the checkpoint
    mxint8  signed bytes [rows, cols], then one scale byte for each 32 of a row: value = q * 2^(scale - 127),
            exact in BF16
    rows    mxint8 of the vocabulary rows in use, in the order of the tensor "ids", and one more row that all
            other ids share
    mxfp4   blocks, then scales, as in the checkpoint (tensors NAME_blocks and NAME_scales)
    u32     little-endian whole numbers
Run by itself it makes the two files from a training's state-*.pt.
"""

import argparse
import json
import pathlib

import torch
import xxhash

from model import KV, VOCAB, D, Model, Shape, mxfp4_codes, mxint8_codes

ALIGN = 16


def bytes_of(t):
    return t.contiguous().cpu().numpy().tobytes()


def bf16(t):
    return bytes_of(t.detach().to(torch.bfloat16).view(torch.int16))


def mxint8(t):
    q, e = mxint8_codes(t.detach())
    return bytes_of(q.to(torch.int8)) + bytes_of((e + 127).to(torch.uint8))


def mxfp4(t):
    code, e = mxfp4_codes(t.detach())
    code = code.to(torch.uint8)
    return bytes_of(code[..., 0::2] | (code[..., 1::2] << 4)) + bytes_of((e + 127).to(torch.uint8))


def tensors_of(model, used):
    yield "ids", "u32", [len(used)], bytes_of(torch.as_tensor(used).to(torch.int32))
    yield "model.embed_tokens.weight", "rows", list(model.embed.shape), mxint8(model.embed)
    yield "lm_head.weight", "rows", list(model.head.shape), mxint8(model.head)
    yield "model.norm.weight", "bf16", list(model.norm.shape), bf16(model.norm)
    for n, layer in enumerate(model.layers):
        for name, fmt, p in (
                ("input_layernorm.weight", "bf16", layer.norm1),
                ("self_attn.q_proj.weight", "mxint8", layer.wq), ("self_attn.q_proj.bias", "bf16", layer.bq),
                ("self_attn.k_proj.weight", "mxint8", layer.wk), ("self_attn.k_proj.bias", "bf16", layer.bk),
                ("self_attn.v_proj.weight", "mxint8", layer.wv), ("self_attn.v_proj.bias", "bf16", layer.bv),
                ("self_attn.o_proj.weight", "mxint8", layer.wo), ("self_attn.o_proj.bias", "bf16", layer.bo),
                ("self_attn.sinks", "bf16", layer.sinks), ("post_attention_layernorm.weight", "bf16", layer.norm2),
                ("mlp.router.weight", "bf16", layer.router), ("mlp.router.bias", "bf16", layer.router_bias),
                ("mlp.experts.gate_up_proj", "mxfp4", layer.w1), ("mlp.experts.gate_up_proj_bias", "bf16", layer.b1),
                ("mlp.experts.down_proj", "mxfp4", layer.w2), ("mlp.experts.down_proj_bias", "bf16", layer.b2)):
            yield f"model.layers.{n}.{name}", fmt, list(p.shape), {"bf16": bf16, "mxint8": mxint8, "mxfp4": mxfp4}[fmt](p)


def write(model, used, folder):
    data, listed = bytearray(), []
    for name, fmt, shape, raw in tensors_of(model, used):
        data += bytes(-len(data) % ALIGN)
        listed.append({"name": name, "format": fmt, "shape": shape, "offset": len(data), "bytes": len(raw)})
        data += raw
    s = model.s
    head = {"format": "damask-compact", "version": 1, "bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(bytes(data)),
            "shape": {"layers": s.layers, "hidden": s.hidden, "heads": s.heads, "kv_heads": KV, "head_dim": D,
                      "experts": s.experts, "intermediate": s.inter, "vocab": VOCAB}}
    rows = ",\n  ".join(json.dumps(t) for t in listed)
    text = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items())
    (folder / "model.bin").write_bytes(data)
    (folder / "model.json").write_text("{" + text + ',\n "tensors": [\n  ' + rows + "\n ]\n}\n")
    return len(data)


def load(folder):
    """(model, used) of a training's folder."""
    state = {}
    for f in sorted(pathlib.Path(folder).glob("state-*.pt")):
        state.update(torch.load(f))
    used = state.pop("used").numpy()
    layers = 1 + max(int(k.split(".")[1]) for k in state if k.startswith("layers."))
    w1, wq = state["layers.0.w1"], state["layers.0.wq"]
    model = Model(Shape(layers, w1.shape[2], wq.shape[0] // D, w1.shape[0], w1.shape[1] // 2), len(used))
    model.load_state_dict(state)
    model.quantise = True
    return model, used


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--state", required=True)
    p.add_argument("--out", required=True, type=pathlib.Path)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    print(write(*load(a.state), a.out), "bytes")
