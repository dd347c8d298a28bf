"""A damask checkpoint as a GGUF file, so that llama.cpp can be timed on the same weights: bench/engine.sh calls it.

usage: bench/peer_gguf.py CHECKPOINT OUT.gguf [--dense bf16|q8_0]

The experts stay MXFP4, bit for bit; llama.cpp orders the values of a block differently and keeps gate and up apart.
Attention, embedding and head stay bf16, or become Q8_0 (half the bytes, 8 bits a weight), as in the files that most
people run. There is no vocabulary in it: good for timing only. Needs numpy.
"""

import argparse
import json
import pathlib
import struct
import sys

try:
    import numpy as np
except ImportError:
    sys.exit("peer_gguf.py: numpy is missing: .deps/venv/bin/pip install numpy")

F32, Q8_0, BF16, MXFP4 = 0, 8, 30, 39  # tensor types of the format
BLOCK_BYTES = {Q8_0: 34, MXFP4: 17}  # of 32 values
ALIGN = 32
SLICE = 1 << 24  # values turned at a time


class Checkpoint:
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
            data = np.memmap(path, np.uint8, "r", offset=8 + size)
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    kind = np.uint16 if entry["dtype"] == "BF16" else np.uint8
                    self.tensors[name] = data[begin:end].view(kind).reshape(entry["shape"])


def to_f32(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_q8_0(x):
    """Rows of 32 values: an fp16 step and 32 signed bytes."""
    x = to_f32(x).reshape(-1, 32)
    step = np.abs(x).max(axis=1) / 127
    out = np.empty((len(x), BLOCK_BYTES[Q8_0]), np.uint8)
    out[:, :2] = step.astype(np.float16).view(np.uint8).reshape(-1, 2)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    out[:, 2:] = np.rint(x * inverse[:, None]).astype(np.int8).view(np.uint8)
    return out


def to_mxfp4(blocks, scales):
    """Scale first; byte i holds values i and i + 16 instead of 2i and 2i + 1."""
    out = np.empty((*scales.shape, BLOCK_BYTES[MXFP4]), np.uint8)
    out[..., 0] = scales
    values = np.empty((*scales.shape, 32), np.uint8)
    values[..., 0::2] = blocks & 15
    values[..., 1::2] = blocks >> 4
    out[..., 1:] = values[..., :16] | values[..., 16:] << 4
    return out


def tensors(model, dense):
    """(name, shape, type, the parts of its data as they are asked for), in the order of the file."""
    t = model.tensors

    def plain(name, x):
        return name, x.shape, F32, lambda: [to_f32(x[...])]

    def matrix(name, x):
        flat = x.reshape(-1)
        turn = to_q8_0 if dense == Q8_0 else lambda part: part
        return name, x.shape, dense, lambda: (turn(flat[i:i + SLICE]) for i in range(0, flat.size, SLICE))

    def experts(name, blocks, scales):
        shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
        return name, shape, MXFP4, lambda: (to_mxfp4(b, s) for b, s in zip(blocks, scales))

    yield matrix("token_embd.weight", t["model.embed_tokens.weight"])
    yield plain("output_norm.weight", t["model.norm.weight"])
    yield matrix("output.weight", t["lm_head.weight"])
    for layer in range(model.config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for name, norm in (("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")):
            yield plain(f"{theirs}{name}.weight", t[f"{ours}{norm}.weight"])
        for name, part in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj")):
            yield matrix(f"{theirs}{name}.weight", t[f"{ours}self_attn.{part}.weight"])
            yield plain(f"{theirs}{name}.bias", t[f"{ours}self_attn.{part}.bias"])
        yield plain(f"{theirs}attn_sinks.weight", t[f"{ours}self_attn.sinks"])
        for part in ("weight", "bias"):
            yield plain(f"{theirs}ffn_gate_inp.{part}", t[f"{ours}mlp.router.{part}"])
        blocks, scales, bias = (t[f"{ours}mlp.experts.gate_up_proj_{part}"] for part in ("blocks", "scales", "bias"))
        for first, name in enumerate(("ffn_gate_exps", "ffn_up_exps")):
            yield experts(f"{theirs}{name}.weight", blocks[:, first::2], scales[:, first::2])
            yield plain(f"{theirs}{name}.bias", bias[:, first::2])
        blocks, scales, bias = (t[f"{ours}mlp.experts.down_proj_{part}"] for part in ("blocks", "scales", "bias"))
        yield experts(f"{theirs}ffn_down_exps.weight", blocks, scales)
        yield plain(f"{theirs}ffn_down_exps.bias", bias)


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def metadata(c):
    rope = c["rope_scaling"]
    numbers = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "expert_feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "attention.sliding_window": c["sliding_window"],
        "expert_count": c["num_local_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "vocab_size": c["vocab_size"],
        "rope.freq_base": float(c["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    pairs = {"general.architecture": "gpt-oss", "general.name": "random weights", "tokenizer.ggml.model": "no_vocab"}
    pairs.update({f"gpt-oss.{key}": value for key, value in numbers.items()})
    out = b""
    for key, value in pairs.items():
        if isinstance(value, str):
            out += text(key) + struct.pack("<I", 8) + text(value)
        elif isinstance(value, float):
            out += text(key) + struct.pack("<If", 6, value)
        else:
            out += text(key) + struct.pack("<II", 4, value)
    return len(pairs), out


def data_bytes(shape, kind):
    n = int(np.prod(shape))
    return n * {F32: 4, BF16: 2}[kind] if kind in (F32, BF16) else n // 32 * BLOCK_BYTES[kind]


def write(model, out, dense):
    entries = list(tensors(model, dense))
    n_pairs, pairs = metadata(model.config)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), n_pairs) + pairs
    offset = 0
    for name, shape, kind, _ in entries:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        offset += -(-data_bytes(shape, kind) // ALIGN) * ALIGN
    with out.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGN))
        for name, shape, kind, parts in entries:
            written = 0
            for part in parts():
                written += file.write(np.ascontiguousarray(part).data.cast("B"))
            assert written == data_bytes(shape, kind), name
            file.write(bytes(-written % ALIGN))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--dense", choices=("bf16", "q8_0"), default="bf16")
    args = parser.parse_args()
    part = args.out.with_suffix(".part")
    write(Checkpoint(args.checkpoint), part, Q8_0 if args.dense == "q8_0" else BF16)
    part.rename(args.out)


if __name__ == "__main__":
    main()
