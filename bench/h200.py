#!/usr/bin/env python3
"""Completes rows of bench_device with the roofline and the best measured rival, and appends them to
bench/results/h200.csv, whose other rows get them anew; draws decode speed against cost.

    bench/h200.py RAW.csv [RAW.csv ...]

Roofline: the larger of bytes over 4.1 TB/s (what a copy reaches) and operations over 790 TFLOP/s (what a large bf16
product reaches; products in FP8 twice as much), for each of dense products, experts, attention and head, added up.
Routing is uniform; experts are read at four bits in every format. Rivals are the rows of bench/results/rivals.csv, the fastest of each configuration.
"""
import csv
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).parent / "results"
COLUMNS = ["date", "commit", "machine", "driver", "model", "format", "phase", "tp", "ep", "dp", "batch", "context",
           "median_ms", "p10_ms", "p90_ms", "roofline_ms", "rival", "rival_ms"]
MODELS = {"gpt-oss-120b": (36, 128), "gpt-oss-20b": (24, 32)}
NO_ROOM = "does not fit"  # in place of a median: weights and pages of the case exceed the device's memory
BYTES_S, FLOP_S, FP8_FLOP_S, PRICE = 4.1e12, 790e12, 1580e12, 3.0
DENSE, EXPERT, HEAD = 26.54e6, 24.88e6, 579.1e6  # parameters
EXPERT_BYTES = EXPERT * 0.53125


def roofline_ms(model, format, phase, batch, context, tp=1, dp=1):
    """Of a rank: its share of heads and head for the tokens of its group, its share of experts for all tokens."""
    layers, experts = MODELS[model]
    expert_flop_s = FP8_FLOP_S if format.startswith("fp8") else FLOP_S
    dense_bytes, dense_flop_s = (1, FP8_FLOP_S) if format.endswith("-dense8") else (2, FLOP_S)
    tokens = batch if phase == "decode" else context
    used = experts * (1 - (1 - 4 / experts) ** tokens)
    moe = max(used * EXPERT_BYTES / BYTES_S, 2 * 4 * EXPERT * tokens / expert_flop_s) / (tp * dp)
    batch = -(-batch // dp)
    tokens = batch if phase == "decode" else context
    dense = max(DENSE * dense_bytes / BYTES_S, 2 * DENSE * tokens / dense_flop_s) / tp
    if phase == "decode":
        full, window = batch * context * 2048 / BYTES_S, batch * min(context, 128) * 2048 / BYTES_S
        head = max(HEAD * dense_bytes / BYTES_S, 2 * HEAD * batch / dense_flop_s)
    else:
        full = 4 * 4096 * context * context / 2 / FLOP_S
        window = 4 * 4096 * context * min(context, 128) / FLOP_S
        head = 0
    return 1e3 * (layers * (dense + moe) + (layers / 2 * (full + window) + head) / tp)


def find_rival(rivals, row):
    """The fastest on as many devices, however it spreads experts over them."""
    n = int(row["tp"]) * int(row["dp"])
    machine = "H200" if n == 1 else f"H200x{n}"
    same = [r for r in rivals if r["machine"] == machine and all(r[k] == row[k] for k in ("model", "phase", "batch"))
            and (r["context"] == row["context"] or (r["context"] == "130000" and row["context"] == "131072"))
            and r["tp"] == row["tp"] and row["dp"] == "1"]
    return min(same, key=lambda r: float(r["median_ms"]), default=None)


def lines_of(rows):
    """{(model, name): {batch: (tokens a second for one user, dollars for a million tokens)}} of decode at context 8192 on one
    rank; the name is a format, or the engine of a rival."""
    lines = {}
    for r in rows:
        if r["phase"] == "decode" and r["context"] == "8192" and r["ep"] == "1" and r["median_ms"] != NO_ROOM:
            for name, ms in ((r["format"], r["median_ms"]), (r["rival"].split(" ")[0], r["rival_ms"])):
                if ms:
                    ms = float(ms)
                    cost = PRICE / 3600 * ms / 1e3 / int(r["batch"]) * 1e6
                    lines.setdefault((r["model"], name), {})[int(r["batch"])] = (1e3 / ms, cost)
    return lines


def axis(values, begin, end):
    """A logarithmic scale from the first of 1, 2, 5 times a power of ten below all values to the first above: a function from
    value to place, and the marks."""
    marks = [m * 10.0 ** e for e in range(-4, 7) for m in (1, 2, 5)]
    low = max(m for m in marks if m <= min(values))
    high = min(m for m in marks if m >= max(values))
    span = math.log(high / low)
    return (lambda v: begin + (end - begin) * math.log(v / low) / span), [m for m in marks if low <= m <= high]


def draw(rows, path):
    """Tokens a second for one user against dollars for a million tokens: a colour for each model, rivals dashed."""
    lines = lines_of(rows)
    if not lines:
        return
    width, height, pad = 760, 520, 60
    points = [p for line in lines.values() for p in line.values()]
    place_x, marks_x = axis([p[0] for p in points], pad, width - pad)
    place_y, marks_y = axis([p[1] for p in points], height - pad, pad)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
           f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>']
    for m in marks_x:
        out.append(f'<text x="{place_x(m):.0f}" y="{height - pad + 18}" text-anchor="middle">{m:g}</text>'
                   f'<line x1="{place_x(m):.0f}" x2="{place_x(m):.0f}" y1="{pad}" y2="{height - pad}" stroke="#eee"/>')
    for m in marks_y:
        out.append(f'<text x="{pad - 6}" y="{place_y(m) + 4:.0f}" text-anchor="end">{m:g}</text>'
                   f'<line x1="{pad}" x2="{width - pad}" y1="{place_y(m):.0f}" y2="{place_y(m):.0f}" stroke="#eee"/>')
    out.append(f'<text x="{width / 2}" y="{height - 14}" text-anchor="middle">tokens a second for one user</text>'
               f'<text x="{pad}" y="{pad - 36}">$ a million output tokens, one H200 at ${PRICE:.2f} an hour, context 8192</text>'
               f'<text x="{pad}" y="{pad - 18}">numbers are batch sizes; lower and further right is better</text>')
    colours = {("gpt-oss-120b", "mxfp4"): "#06c", ("gpt-oss-120b", "mxfp4-dense8"): "#0ac", ("gpt-oss-120b", "fp8"): "#639",
               ("gpt-oss-20b", "mxfp4"): "#c60", ("gpt-oss-20b", "mxfp4-dense8"): "#ea0", ("gpt-oss-20b", "fp8"): "#a33"}
    for i, ((model, name), line) in enumerate(sorted(lines.items())):
        ours = (model, name) in colours
        c = colours.get((model, name)) or ("#889" if model == "gpt-oss-120b" else "#a98")
        label = f"{model}, " + (f"damask, {name}" if ours else name)
        xy = [(place_x(s), place_y(d), b) for b, (s, d) in sorted(line.items())]
        dash = "" if ours else ' stroke-dasharray="6 4"'
        out.append(f'<polyline fill="none" stroke="{c}" stroke-width="2"{dash} points="'
                   + " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in xy) + '"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{c}"/>' for x, y, _ in xy]
        if name == "mxfp4" or not ours:  # the other formats' points stand right beside these
            out += [f'<text x="{x + (6 if ours else -6):.1f}" y="{y + (12 if ours else -5):.1f}" fill="{c}" '
                    f'text-anchor="{"start" if ours else "end"}">{b}</text>' for x, y, b in xy]
        y = height - pad - 16 * (len(lines) - i) + 4
        out.append(f'<line x1="{width - pad - 268}" x2="{width - pad - 240}" y1="{y - 4}" y2="{y - 4}" stroke="{c}" '
                   f'stroke-width="2"{dash}/><text x="{width - pad - 232}" y="{y}" fill="{c}">{label}</text>')
    path.write_text("\n".join(out) + "\n</svg>\n")


def main():
    with open(HERE / "rivals.csv") as f:
        rivals = list(csv.DictReader(f))
    table = HERE / "h200.csv"
    rows = list(csv.DictReader(open(table))) if table.exists() else []
    for name in sys.argv[1:]:
        with open(name) as f:
            for values in csv.reader(f):
                rows.append(dict(zip(COLUMNS, values)))
    for row in rows:
        sizes = [int(row[k]) for k in ("batch", "context", "tp", "dp")]
        row["roofline_ms"] = f'{roofline_ms(row["model"], row["format"], row["phase"], *sizes):.3f}'
        rival = find_rival(rivals, row)
        row["rival"] = f'{rival["engine"]} {rival["moe_backend"]}' if rival else ""
        row["rival_ms"] = rival["median_ms"] if rival else ""
    with open(table, "w") as f:
        out = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    newest = {}
    for r in rows:
        newest[tuple(r[k] for k in ("model", "format", "phase", "tp", "dp", "batch", "context"))] = r
    draw(list(newest.values()), HERE / "h200-decode.svg")
    print(f"{'model':13} {'format':12} {'tp':>2} {'dp':>2} {'phase':8} {'batch':>5} {'context':>7} {'ms':>12} {'roofline':>9} {'rival':>9}")
    for r in newest.values():
        print(f"{r['model']:13} {r['format']:12} {r['tp']:>2} {r['dp']:>2} {r['phase']:8} {r['batch']:>5} {r['context']:>7} {r['median_ms']:>12.12} "
              f"{float(r['roofline_ms']):9.3f} {r['rival_ms']:>9}")


if __name__ == "__main__":
    main()
