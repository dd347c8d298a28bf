"""What the router costs, with mock workers behind it: CPU time for prompts and for streamed tokens, latency it adds
to a token, memory. One router, its CPU time as the kernel counts it (all threads), so other programs of the machine
disturb latencies but hardly the CPU times.

usage: bench/router.py BUILD [--rounds N] [--only prompts|tokens|latency]
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]
from cluster import Cluster  # noqa: E402
from tokenizer import gather  # noqa: E402

FAST = ["--step-us", "0", "--sequence-us", "0", "--prompt-token-us", "0", "--max-sequences", "1024"]
MODEL = "gpt-oss-tiny"


def cpu_s(pid):
    """CPU seconds of all threads; one that ended meanwhile is not counted (the router's live as long as it)."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def rss_mib(pid, field="VmRSS"):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def machine():
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; commit {commit.stdout.strip()}"


class Bench:
    def __init__(self, build, name, prefill=0, decode_args=(), below="max"):
        self.build = build
        self.cluster = Cluster(build, "mock", mock=True, prefill=prefill, decode=1, name=f"bench-{name}",
                               prefill_args=["--prompt-token-us", "0", "--step-us", "0"],
                               decode_args=["--local-prefill-below", below, *decode_args],
                               router_args=["--log-level", "warn"])

    def __enter__(self):
        self.cluster.start()
        self.pid = self.cluster.routers[0].pid
        return self

    def __exit__(self, *exc):
        self.cluster.__exit__(*exc)

    def load(self, *args):
        """(report of the load generator, CPU seconds of the router)."""
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            before = cpu_s(self.pid)
            done = subprocess.run([self.build / "bench/load/bench_load", "--port",
                                   self.cluster.url.rsplit(":", 1)[1], "--json", out.name, *map(str, args)],
                                  capture_output=True, text=True)
            spent = cpu_s(self.pid) - before
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            return json.loads(pathlib.Path(out.name).read_text()), spent


def bare_write_us(n=20000, size=250):
    """System time of one write of an event's size to a reader on loopback: the floor of a write a token."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        reader = socket.create_connection(listener.getsockname())
        while reader.recv(65536):
            pass
        os._exit(0)
    writer, _ = listener.accept()
    writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b"x" * size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    for _ in range(n):
        writer.send(data)
    spent = resource.getrusage(resource.RUSAGE_SELF).ru_stime - before
    writer.close()
    listener.close()
    os.waitpid(child, 0)
    return spent / n * 1e6


def show(values, form="{:.2f}"):
    return (form + " (" + form + " to " + form + ")").format(statistics.median(values), min(values), max(values))


def bare_tokens_ms(build, rounds):
    """CPU time of tokenizing alone, 10000 tokens of English: the floor of a prompt's."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(gather("/usr/share/doc", {"", ".txt", ".md", ".html", ".rst"}, 4_000_000))
        file.flush()
        out = subprocess.run([build / "bench/bench_tokenizer", ROOT / ".deps/vocab", str(rounds), file.name],
                             capture_output=True, text=True, check=True).stdout
    _, size, n, *speeds = out.splitlines()[1].split()
    return [int(size) / int(n) * 1e4 / (float(speed) * 1e3) for speed in speeds]


def bare_hops_ms(n=2000, size=250):
    """Times of an event's way over two loopback sockets with a process that does nothing else in between: the floor of
    what worker, router and client can add to a token."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        relay, _ = listener.accept()
        relay.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := relay.recv(size):
            relay.sendall(data)
        os._exit(0)
    end = socket.create_connection(listener.getsockname())
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(n):
        time.sleep(0.001)
        start = time.perf_counter()
        end.sendall(b"x" * size)
        got = 0
        while got < size:
            got += len(end.recv(size))
        times.append((time.perf_counter() - start) * 1e3)
    end.close()
    listener.close()
    os.waitpid(child, 0)
    times.sort()
    return times[n // 2], times[n * 99 // 100]


def prompts(build, rounds):
    print("router CPU ms for 10000 prompt tokens, median (lowest to highest); goal at most 3")
    print(f"  limit: tokenizing alone takes {show(bare_tokens_ms(build, rounds))}")
    for name, prefill, below, extra in (("completions, colocated", 0, "max", []),
                                        ("chat, colocated", 0, "max", ["--chat"]),
                                        ("chat, by a prefill worker", 1, "0", ["--chat"])):
        with Bench(build, "prompts", prefill, FAST, below) as b:
            b.load("--requests", 4, "--concurrency", 2, "--input", 9000, "--output", 1, "--seed", 999, *extra)
            values = []
            for r in range(rounds):
                report, spent = b.load("--requests", 30, "--concurrency", 4, "--input", 9000, "--output", 1,
                                       "--seed", r + 1, *extra)
                values.append(spent * 1e3 / report["tokens_in"] * 1e4)
        print(f"  {name:28} {show(values)}")


def tokens(build, rounds):
    print("streamed tokens for each second of the router's CPU, in thousands; goal at least 300")
    bare = [bare_write_us() for _ in range(rounds)]
    print(f"  limit of a write for each token: {1e3 / statistics.median(bare):.0f} (a bare write of 250 bytes on loopback "
          f"takes {show(bare)} us of system time)")
    for name, streams, output, speed, extra in (
            ("as fast as they come", 64, 2000, FAST, []),
            ("as fast as they come, chat", 64, 2000, FAST, ["--chat"]),
            ("a token every 5 ms a stream", 64, 300, ["--step-us", "5000", "--sequence-us", "0"], [])):
        with Bench(build, "tokens", 0, speed) as b:
            b.load("--requests", 8, "--concurrency", 8, "--input", 10, "--output", 50, *extra)
            values, reads = [], []
            for r in range(rounds):
                report, spent = b.load("--requests", streams, "--concurrency", streams, "--input", 10, "--output",
                                       output, "--seed", r + 1, *extra)
                values.append(report["tokens_out"] / spent / 1e3)
                reads.append(report["events"] / report["reads"])
        print(f"  {name:28} {show(values)}; {statistics.median(reads):.1f} events in a read of the client")


def latency(build, rounds):
    print("from the end of a worker's step to the client's reading of its token, ms; memory of the router, MiB; each the "
          "median of the rounds (lowest to highest)")
    bare = [bare_hops_ms() for _ in range(rounds)]
    print(f"  limit: two bare hops over loopback: p50 {show([b[0] for b in bare], '{:.3f}')}, p99 "
          f"{show([b[1] for b in bare], '{:.3f}')}")
    for streams, step_ms, output in ((1, 10, 300), (100, 20, 150), (1000, 100, 40)):
        p50, p99, idle, top = [], [], [], []
        for r in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                log = str(pathlib.Path(folder) / "steps")
                with Bench(build, "latency", 0, ["--step-us", step_ms * 1000, "--sequence-us", "0", "--prompt-token-us",
                                                 "0", "--max-sequences", "1024", "--step-log", log]) as b:
                    idle.append(rss_mib(b.pid))
                    report, _ = b.load("--requests", streams, "--concurrency", streams, "--input", 100, "--output",
                                       output, "--step-log", log, "--seed", r + 1)
                    top.append(rss_mib(b.pid, "VmHWM"))
            p50.append(report["added_ms"]["p50"])
            p99.append(report["added_ms"]["p99"])
        print(f"  {streams:4} streams, a step every {step_ms:3} ms: p50 {show(p50, '{:.3f}')}, p99 {show(p99)}; RSS "
              f"{show(idle, '{:.1f}')} idle, at most {show(top, '{:.1f}')}")


def main():
    parts = {"prompts": prompts, "tokens": tokens, "latency": latency}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=parts)
    args = parser.parse_args()
    print(machine())
    print("bench/router.py " + " ".join(sys.argv[1:]))
    for name, part in parts.items():
        if args.only in (None, name):
            part(args.build.resolve(), args.rounds)


if __name__ == "__main__":
    main()
