"""The crowd for a long time: `./dev soak [--minutes 30]`.

64 clients with random lengths, some of which leave or stop reading, at two prefill and two decode workers; every
minute or so one of the two that have others beside them is killed and started again. The log of the run, with
resident memory, open files and pages over time, goes to docs/logs/soak-DATE.md. The exit status is 0 when nothing
was wrong: see what `crowd.py` checks, and below what must stay flat.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import time

from cluster import ROOT, Cluster, get
from crowd import Crowd, open_files, speck_model

PATIENCE = ["--transfer-budget", "240s"]
POOLS = ["--full-pages", "1024", "--window-pages", "512"]
RSS_SLACK_KIB = 24 * 1024  # that memory may grow by from early on to the end
FILES_SLACK = 8


def start(args):
    build = pathlib.Path(args.build).resolve()
    model = "mock" if args.mock else speck_model(build)
    speed = ["--step-us", "1000", "--prompt-token-us", "10"] if args.mock else []
    wide = ["--max-sequences", "64"] if args.mock else []
    cluster = Cluster(build, model, mock=args.mock, prefill=2, decode=2, name="soak", threads=1,
                      prefill_args=POOLS + PATIENCE + speed + ["--queue-budget", "240s"],
                      decode_args=POOLS + PATIENCE + speed + wide
                      + ["--ticket-expiry", "240s", "--local-prefill-below", "64"],
                      router_args=["--queue-timeout", "240s"])
    alone = Cluster(build, model, mock=args.mock, prefill=0, decode=1, name="soak-alone", threads=1,
                    decode_args=["--local-prefill-below", "max", *speed])
    return cluster, alone


def plan(cluster, seconds, every_s):
    """prefill-0 and decode-0 by turns; the others live all the time and show whether anything grows."""
    faults, at, turn = [], every_s / 2, 0
    while at + 15 < seconds:
        victim = (cluster.prefill[0], cluster.decode[0])[turn % 2]
        faults += [(at, "kill", victim), (at + 5, "start", victim)]
        at, turn = at + every_s, turn + 1
    return faults


def middle(values):
    return sorted(values)[len(values) // 2] if values else 0


def check_flat(report, cluster, seconds):
    """Medians of an early part of the time and of the last quarter must be alike."""
    lines, wrong = [], []
    for p in (cluster.routers[0], cluster.prefill[1], cluster.decode[1]):
        for field, slack in (("rss", RSS_SLACK_KIB), ("files", FILES_SLACK)):
            def part(begin, end):
                return middle([found[p.name][field] for at, found in report.samples
                               if begin <= at / seconds <= end and p.name in found])
            # The beginning is left out: pages are touched for the first time, the caches fill.
            first, last = part(0.2, 0.5), part(0.75, 1.0)
            unit = "KiB" if field == "rss" else "files"
            lines.append(f"{p.name}: {first} to {last} {unit}")
            if last > first + slack:
                wrong.append(f"{p.name} grew from {first} to {last} {unit}")
    return lines, wrong


def settle(cluster, limit_s=60):
    """No page leased or draining any more on any worker."""
    wrong = []
    for w in cluster.prefill + cluster.decode:
        deadline = time.monotonic() + limit_s
        while True:
            pools = json.loads(get(w.admin + "/state")[1])["pools"]
            if all(p["leased"] == 0 and p["draining"] == 0 for p in pools.values()):
                break
            if time.monotonic() > deadline:
                wrong.append(f"{w.name} still holds pages when idle: {pools}")
                break
            time.sleep(0.2)
    return wrong


def table(report, cluster, rows):
    """Resident MiB, open files and full pages (free, cached, leased, draining) over time."""
    names = [p.name for p in cluster.processes]
    out = ["| time | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    step = max(1, len(report.samples) // rows)
    for at, found in report.samples[::step]:
        cells = []
        for name in names:
            s = found.get(name)
            pools = (s or {}).get("pools")
            pages = ""
            if pools:
                f = pools["full"]
                pages = f", pages {f['free']}+{f['cached']}+{f['leased']}+{f['draining']}"
            cells.append(f"{s['rss'] // 1024} MiB, {s['files']} files{pages}" if s else "down")
        out.append(f"| {at:.0f} s | " + " | ".join(cells) + " |")
    return out


def write_log(path, args, seed, report, cluster, flat, wrong):
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    kinds = ", ".join(f"{n} {k}" for k, n in sorted(report.counts.items()))
    lines = [f"# Soak of {args.minutes:g} minutes, {datetime.date.today()}", "",
             f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; commit "
             f"{commit.stdout.strip()}; seed {seed}; {args.clients} clients, {'mock workers' if args.mock else 'a small checkpoint'}.",
             "", f"Requests: {kinds}. {report.n_compared} answers compared with one worker alone. "
             f"{sum(1 for _, f in report.faults if f.startswith('kill'))} workers killed.", "",
             "Errors that clients were told:", ""]
    lines += [f"* {n} times: {text}" for text, n in report.errors.most_common()] or ["* none"]
    lines += ["", "Medians of the second to fifth tenth of the time, and of its last quarter:", ""]
    lines += [f"* {line}" for line in flat]
    lines += ["", "Result: " + ("nothing was wrong." if not wrong else "**wrong:**"), ""]
    lines += [f"* {line}" for line in wrong[:50]]
    lines += ["", "Pages are free+cached+leased+draining of the full pool; their sum is checked in every sample.", ""]
    lines += table(report, cluster, 40)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(prog="./dev soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", default=str(ROOT / "build"), help="build folder")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--mock", action="store_true", help="workers without a model: many more requests")
    parser.add_argument("--log", type=pathlib.Path, help="where the log goes",
                        default=ROOT / "docs" / "logs" / f"soak-{datetime.date.today()}.md")
    args = parser.parse_args()
    seconds = args.minutes * 60
    cluster, alone = start(args)
    print(f"seed {args.seed}; {args.minutes:g} minutes; the log will be {args.log}", flush=True)
    with cluster, alone:
        files_before = {p.name: open_files(p.pid) for p in cluster.processes}
        report = Crowd(cluster, alone, seconds=seconds, seed=args.seed, clients=args.clients,
                       faults=plan(cluster, seconds, min(args.every, seconds / 2)),
                       sample_every_s=max(1.0, seconds / 400)).run()
        wrong = report.violations + settle(cluster)
        flat, grown = check_flat(report, cluster, seconds)
        wrong += grown
        for p in cluster.processes:
            if open_files(p.pid) > files_before[p.name] + FILES_SLACK:
                wrong.append(f"{p.name} holds {open_files(p.pid)} open files, {files_before[p.name]} at the start")
    if report.counts["answer"] == 0:
        wrong.append("no request was answered")
    write_log(args.log, args, args.seed, report, cluster, flat, wrong)
    print(f"{dict(report.counts)}, {report.n_compared} compared, {len(wrong)} wrong")
    print("\n".join(wrong[:10] + flat))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
