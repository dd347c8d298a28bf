#!/usr/bin/env python3
"""The whole cluster on a GPU: router, prefill and decode workers as real processes, pages in device memory.

    tests/gpu/run.py [--build DIR] [--transports cuda,tcp] [--only NAME,...] [--speed MODEL]

Needs the programs and the standard library, nothing else, so that it also runs where no test client is. What one
worker alone answers on the same backend is the measure of every other answer. Each cluster ends with: idle, pages
balanced. `--backend cpu` runs the same on the host. Exits with 77 where no GPU is.

All workers share the first GPU unless told otherwise: `--prefill-devices 1 --decode-devices 0` gives either pool its own
(CUDA_VISIBLE_DEVICES of its workers), `1,0` lets it see both and begin with the second.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from cluster import Cluster, get, random_model, stream_chat, tiny_model  # noqa: E402

MODEL = "gpt-oss-tiny"
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 200, 513, 2047, 4097, 9000]
KINDS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "top_p": 0.95, "seed": 77}}
QUESTIONS = {"What is 47 + 35?": "82", "What is 12 + 30?": "42"}


class Failure(Exception):
    pass


def check(good, text):
    if not good:
        raise Failure(text)


def ids(n, seed):
    rng = random.Random(seed)
    return [rng.randrange(0, 199998) for _ in range(n)]


def complete(cluster, prompt, max_tokens=12, timeout=120, **more):
    """Text, tokens and log-probabilities of an answer, and its usage."""
    conn = http.client.HTTPConnection(cluster.url.split("//", 1)[1], timeout=timeout)
    conn.request("POST", "/v1/completions", json.dumps(
        {"model": cluster.model_name, "prompt": prompt, "max_tokens": max_tokens, "logprobs": 5, "ignore_eos": True,
         "temperature": 0, **more}), {"content-type": "application/json"})
    response = conn.getresponse()
    body = response.read().decode()
    conn.close()
    check(response.status == 200, f"HTTP {response.status}: {body[:300]}")
    body = json.loads(body)
    choice = body["choices"][0]
    log = choice["logprobs"]
    return (choice["text"], log["tokens"], log["token_logprobs"], log["top_logprobs"], choice["finish_reason"]), body["usage"]


class Stream(threading.Thread):
    """A streamed completion that can be left; times of its chunks."""

    def __init__(self, cluster, prompt, max_tokens=12):
        super().__init__(daemon=True)
        self.conn = http.client.HTTPConnection(cluster.url.split("//", 1)[1], timeout=60)
        self.body = json.dumps({"model": cluster.model_name, "prompt": prompt, "stream": True, "max_tokens": max_tokens,
                                "temperature": 0, "ignore_eos": True})
        self.started, self.times, self.text, self.done, self.status = 0.0, [], "", False, None
        self.first = threading.Event()
        self.start()

    def run(self):
        try:
            self.started = time.monotonic()
            self.conn.request("POST", "/v1/completions", self.body, {"content-type": "application/json"})
            response = self.conn.getresponse()
            self.status = response.status
            for raw in response:
                line = raw.decode().strip()
                if line.startswith("data: {"):
                    self.times.append(time.monotonic() - self.started)
                    self.text += "".join(c["text"] for c in json.loads(line[6:]).get("choices", []))
                    self.first.set()
                self.done |= line == "data: [DONE]"
        except (OSError, http.client.HTTPException, AttributeError):
            pass

    def leave(self):
        if self.conn.sock:
            self.conn.sock.shutdown(2)


def state(worker):
    status, text = get(worker.admin + "/state")
    check(status == 200, f"{worker.name}: /state answered {status}")
    return json.loads(text)


def balance(cluster, limit_s=20):
    """Every living worker comes to rest with free + cached + leased + draining == total, and nothing leased."""
    deadline = time.monotonic() + limit_s
    for w in cluster.prefill + cluster.decode:
        while w.alive():
            pools = state(w)["pools"]
            for name in ("full", "window"):
                p = pools[name]
                check(p["free"] + p["cached"] + p["leased"] + p["draining"] == p["total"], f"{w.name}: {name} {p}")
            if all(pools[n][k] == 0 for n in ("full", "window") for k in ("leased", "draining")):
                break
            check(time.monotonic() < deadline, f"{w.name} still holds pages when idle: {pools}")
            time.sleep(0.05)


def end(c):
    """SIGTERM to all; each ends by itself and well. Returns how the pages travelled."""
    puts = moved = staged = 0
    for p in c.prefill:
        found = dict(re.findall(r"^(damask_(?:transfer_puts|transfer_bytes|prefills_staged)_total)\{[^}]*\} (\S+)$",
                                get(p.admin + "/metrics")[1], re.M))
        puts += float(found.get("damask_transfer_puts_total", 0))
        moved += float(found.get("damask_transfer_bytes_total", 0))
        staged += float(found.get("damask_prefills_staged_total", 0))
    status = c.stop()
    check(not any(status.values()), f"a program did not end well: {status}")
    return f"{puts:.0f} writes of {moved / max(puts, 1) / 16384:.1f} pages, {staged:.0f} prompts staged"


class Suite:
    def __init__(self, args):
        self.args, self.model = args, random_model(args.build)
        self.long = 20000 if args.backend == "cuda" else 3000  # tokens that take long enough to be struck in their midst
        self.alone_made, self.expected, self.clusters = None, {}, []

    def cluster_of(self, name, prefill=1, decode=1, transport="tcp", model=None, prefill_args=(), decode_args=(), **ranks):
        threshold = "0" if prefill else "max"
        common = self.args.worker_args
        devices = {"prefill_devices": self.args.prefill_devices, "decode_devices": self.args.decode_devices}
        c = Cluster(self.args.build, model or self.model, prefill=prefill, decode=decode, transport=transport,
                    name=f"gpu-{name}", model_name=MODEL, backend=self.args.backend,
                    prefill_args=[*common, *self.args.prefill_args, *prefill_args],
                    decode_args=[*common, "--local-prefill-below", threshold, *decode_args],
                    threads=1 if self.args.backend == "cpu" else 0, **devices, **ranks)
        self.clusters.append(c)
        return c

    def cluster(self, *args, **more):
        return self.cluster_of(*args, **more).start(120)

    @property
    def alone(self):
        if not self.alone_made:
            self.alone_made = self.cluster("alone", prefill=0, transport="none")
        return self.alone_made

    def want(self, n, which, max_tokens=12, **kind):
        key = (n, which, max_tokens, json.dumps(kind))
        if key not in self.expected:
            self.expected[key] = complete(self.alone, ids(n, which), max_tokens, **kind)[0]
        return self.expected[key]

    def stop(self):
        for c in self.clusters:
            c.stop(kill=True)


def same(suite, c, n, which, max_tokens=12, **kind):
    """The answer to the prompt of n tokens that `which` names is that of one worker alone, to the bit."""
    got, usage = complete(c, ids(n, which), max_tokens, **kind)
    want = suite.want(n, which, max_tokens, **kind)
    check(got == want, f"{n} tokens, prompt {which}: {got[:3]} instead of {want[:3]}")
    return usage


def test_equal(suite, c):
    """Every length twice (the second time from both caches), greedy and drawn: the bits of one worker alone."""
    for kind in KINDS.values():
        for n in LENGTHS:
            same(suite, c, n, n, **kind)
            usage = same(suite, c, n, n, **kind)
            check(n < 129 or usage["prompt_tokens_details"]["cached_tokens"] >= 64, f"{n}: nothing was reused")
    return f"{2 * 2 * len(LENGTHS)} answers"


def test_streams(suite, c):
    """Sixteen at a time, many lengths, so that transfers and steps mix."""
    rng = random.Random(5)
    jobs = [(rng.choice([5, 100, 700, 1500, 3000, 6000]), 100 + i) for i in range(64)]
    for n, seed in jobs:
        suite.want(n, seed, 20)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for f in [pool.submit(same, suite, c, n, seed, 20) for n, seed in jobs]:
            f.result()
    return f"{len(jobs)} answers, 16 at a time"


def test_cancel(suite, c):
    """Clients that leave before, while and after the pages travel."""
    rng = random.Random(9)
    for i in range(30):
        s = Stream(c, ids(rng.choice([300, 3000, 12000]), 500 + i), 200)
        if i % 3 == 0:
            s.first.wait(20)
        else:
            time.sleep(rng.random() * 0.15)
        s.leave()
    balance(c)
    same(suite, c, 3000, 3)
    return "30 clients left"


def at_work(c, answer):
    """The prefill worker that computes and has claimed its pages; None when the answer came first."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not answer.done():
        if state(c.decode[0])["tickets"]["claimed"]:
            for p in c.prefill:
                if state(p)["jobs"]["running"]:
                    return p
    return None


def test_kill(suite, c):
    """kill -9 of the prefill worker that computes and puts: the other one does it again; D's pages come back."""
    rng = random.Random(3)
    hits = 0
    for i in range(3):
        jobs = [(suite.long, 700 + i), *((3000, 750 + 4 * i + k) for k in range(4))]  # one that is hit, and company
        for job in jobs:
            suite.want(*job)
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            answers = [pool.submit(same, suite, c, *job) for job in jobs]
            victim = at_work(c, answers[0])
            time.sleep(rng.random() * 0.04)
            if victim:
                hits += not answers[0].done()
                victim.signal(signal.SIGKILL)
                victim.popen.wait(10)
            for answer in answers:
                answer.result()
        balance(c)
        if victim:
            victim.start(c.env)
            victim.wait_ready(time.monotonic() + 60)
            c.wait_connected(time.monotonic() + 30)
    check(hits > 0, "no prefill worker was hit while it worked")
    d = state(c.decode[0])
    check(d["consistent"], f"the decode worker's pools disagree with themselves: {d}")
    return f"{hits} of 3 hit at work"


def test_stopped(suite, c):
    """A prefill worker that hangs is not dead: D keeps the pages it may still write to, until it speaks again."""
    suite.want(suite.long, 800)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(same, suite, c, suite.long, 800)
        victim = at_work(c, answer)
        if not victim:
            return "not hit"
        victim.signal(signal.SIGSTOP)
        try:
            answer.result()  # by the other one, once the budget is spent
            kept = state(c.decode[0])["tickets"]["draining_pages"]
        finally:
            victim.signal(signal.SIGCONT)
    balance(c)
    return f"{kept} pages were kept while it hung"


def test_decode_killed(suite, c):
    """kill -9 of the decode worker in the middle: a clear end, then a new start serves again."""
    s = Stream(c, ids(suite.long, 900), 400)
    s.first.wait(20)
    victim = c.decode[0]
    victim.signal(signal.SIGKILL)
    victim.popen.wait(10)
    s.join(30)
    check(not s.is_alive(), "the stream hangs after its decode worker was killed")
    victim.start(c.env)
    victim.wait_ready(time.monotonic() + 60)
    c.wait_connected(time.monotonic() + 30)
    same(suite, c, 3000, 3)
    return "one stream ended"


def chat(c, question):
    parts = []

    def on_line(line):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                parts.append(choice.get("delta", {}).get("content") or "")

    stream_chat(c.url, {"model": MODEL, "stream": True, "max_tokens": 160, "temperature": 0, "reasoning_effort": "low",
                        "messages": [{"role": "user", "content": question}]}, on_line=on_line)
    return "".join(parts)


def test_answers(suite, c):
    for question, part in QUESTIONS.items():
        text = chat(c, question)
        check(part in text, f"{question} {text!r}")
    return f"{len(QUESTIONS)} questions"


def speed(label, c, lengths):
    """Milliseconds to the first token, medians over fresh prompts, and what the router's log says of each."""
    for n in lengths:
        first, each = [], []
        for i in range(6):
            s = Stream(c, ids(n, 10000 + n * 10 + i), 8)
            s.join(60)
            check(s.done, f"no answer to {n} tokens")
            if i:  # the first one warms up
                first.append(s.times[0] * 1e3)
                each.append((s.times[-1] - s.times[0]) * 1e3 / max(len(s.times) - 1, 1))
        line = c.routers[0].log_tail(1)
        said = [m[0] for m in re.findall(r"((prefill_compute|prefill|transfer|first_token)_(ms|bytes|gb_s)=\S+)", line)]
        print(f"  {label:6} prompt {n:6}: first token {statistics.median(first):7.1f} ms ({min(first):.1f} to "
              f"{max(first):.1f}), then {statistics.median(each):.2f} ms a token; last: {' '.join(said)}", flush=True)


def measure(suite):
    lengths = [int(n) for n in suite.args.lengths.split(",")]
    pools = ["--full-pages", "4096", "--window-pages", "256", "--weights", "random", "--max-context", "65536"]
    chunk = ["--chunk-tokens", str(suite.args.chunk)]
    model = suite.args.speed
    for transport in suite.args.transports:
        if transport == "none":  # colocated
            c = suite.cluster("speed-alone", prefill=0, transport="none", model=model, decode_args=[*pools, *chunk])
            speed("alone", c, lengths)
            c.stop()
            continue
        c = suite.cluster(f"speed-{transport}", transport=transport, model=model,
                          prefill_args=[*pools, *chunk], decode_args=pools)
        speed(transport, c, lengths)
        print(f"  {transport:6} {end(c)}", flush=True)


TESTS = {"equal": test_equal, "streams": test_streams, "cancel": test_cancel, "kill": test_kill, "stopped": test_stopped,
         "decode-killed": test_decode_killed}


def run_transport(suite, transport, names):
    """Two prefill workers and a decode worker; returns the number of failures."""
    failed, budget = 0, "3s" if suite.args.backend == "cuda" else "20s"
    try:
        c = suite.cluster(transport, prefill=2, transport=transport, decode_args=["--transfer-budget", budget,
                          "--ticket-expiry", budget])
    except Exception as e:  # what the log says is in it
        print(f"FAIL {transport} start: {e}", flush=True)
        return 1
    for name in names:
        started = time.monotonic()
        try:
            text = TESTS[name](suite, c)
            balance(c)
            print(f"ok   {transport:5} {name:14} {text} ({time.monotonic() - started:.1f} s)", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAIL {transport:5} {name:14} {type(e).__name__}: {e}", flush=True)
            for p in c.processes:
                print("\n".join(f"     {p.name}: {line}" for line in p.log_tail(6).splitlines()))
            if not all(p.alive() for p in c.processes):
                return failed
    try:
        print(f"ok   {transport:5} end            {end(c)}", flush=True)
    except Failure as e:
        failed += 1
        print(f"FAIL {transport:5} end            {e}", flush=True)
    return failed


def run_answers(suite, transports):
    failed = 0
    for transport in transports:
        try:
            c = suite.cluster(f"answers-{transport}", transport=transport, model=tiny_model(suite.args.build))
            print(f"ok   {transport:5} answers        {test_answers(suite, c)}", flush=True)
            end(c)
        except Exception as e:
            failed += 1
            print(f"FAIL {transport:5} answers        {type(e).__name__}: {e}", flush=True)
    return failed


def run_ranks(suite, transport):
    """Layouts that differ between the pools; where fewer GPUs are than ranks, these share them."""
    failed = 0
    for p_tp, d_tp, d_dp in [(2, 1, 1), (1, 4, 1), (4, 2, 2)]:
        label = f"tp{p_tp} to ep{d_tp * d_dp}-tp{d_tp}"
        try:
            c = suite.cluster(f"ranks-{p_tp}-{d_tp}-{d_dp}", transport=transport, prefill_tp=p_tp, decode_tp=d_tp,
                              decode_dp=d_dp)
            for n in [1, 65, 200, 2047, 9000]:
                same(suite, c, n, n)
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                for f in [pool.submit(same, suite, c, 300 + 400 * (i % 5), 30 + i, 20) for i in range(16)]:
                    f.result()
            balance(c)
            print(f"ok   {transport:5} ranks          {label}: 21 answers, {end(c)}", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAIL {transport:5} ranks          {label}: {type(e).__name__}: {e}", flush=True)
    return failed


def memory_used():
    """Of the first GPU: MiB in use, and in all."""
    out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", "-i", "0"],
                         check=True, capture_output=True, text=True).stdout
    return [int(n) for n in out.split(",")]


def filled(low, high):
    used, total = memory_used()
    check(low <= used / total <= high, f"{used} of {total} MiB are in use, {100 * used / total:.1f}%")
    return f"{100 * used / total:.2f}% of {total / 1024:.1f} GiB in use"


def refused_beside(suite, model, share, part, transport="none", pools=None):
    """The sentence with which one more worker does not start."""
    pools = pools or ["--kv-memory", f"{share}%"]
    p = suite.cluster_of("share-more", prefill=0, transport=transport, model=model,
                         decode_args=["--weights", "random", *pools]).decode[0]
    p.start()
    check(p.popen.wait(60) == 1, "it started")
    told = p.log_tail(1).strip().split("can not start: ")[-1]
    check(part in told, told)
    return told


def run_share(suite):
    """kv-memory as a share of a GPU: alone, two workers on one, and one that does not find as much."""
    args = ["--weights", "random", "--kv-memory"]
    failed = 0
    for name, prefill, model, share, low, high in [("one", 0, "gpt-oss-120b", 90, 0.88, 0.9),
                                                   ("large", 0, "gpt-oss-20b", 99, 0.97, 0.99),
                                                   ("two", 1, "gpt-oss-20b", 45, 0.87, 0.9)]:
        try:
            c = suite.cluster(f"share-{name}", prefill=prefill, transport="cuda" if prefill else "none", model=model,
                              prefill_args=[*args, f"{share}%"], decode_args=[*args, f"{share}%"])
            for n in (1000, 30000):
                s = Stream(c, ids(n, n), 20)
                s.join(60)
                check(s.done, f"no answer to {n} tokens")
            text = filled(low, high)
            said = re.search(r"kv-memory .*", c.decode[0].log_tail(1000))[0]
            if name == "two":  # no room for the weights of a third
                said += "; a third: " + refused_beside(suite, model, share, "GiB are wanted")
            balance(c)
            end(c)
            print(f"ok   share {name}: {text}; {said}", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAIL share {name}: {type(e).__name__}: {e}", flush=True)
    try:  # what one leaves is less than another wants, and as much as it is told
        c = suite.cluster("share-most", prefill=0, transport="none", model="gpt-oss-20b", decode_args=[*args, "60%"])
        told = refused_beside(suite, "gpt-oss-20b", 60, "other programs hold the rest")
        fits = re.search(r"give ([\d.]+)% or less", told)[1]
        other = suite.cluster("share-rest", prefill=0, transport="none", model="gpt-oss-20b", decode_args=[*args, f"{fits}%"])
        for each in (c, other):
            s = Stream(each, ids(3000, 3), 20)
            s.join(60)
            check(s.done, "no answer")
        print(f"ok   share rest: {told}; {fits}% it is: {filled(0.95, 1)}", flush=True)
        end(other)
        end(c)
    except Exception as e:
        failed += 1
        print(f"FAIL share rest: {type(e).__name__}: {e}", flush=True)
    try:
        told = refused_beside(suite, "gpt-oss-20b", 5, "", transport="shm", pools=["--full-pages", "4096"])
        check('"shm" is for pages in host memory' in told, told)
        print(f"ok   share shm: {told}", flush=True)
    except Exception as e:
        failed += 1
        print(f"FAIL share shm: {type(e).__name__}: {e}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", default=str(ROOT / "build"), help="build folder")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--transports", default="cuda,tcp", help="also shm with --backend cpu; none with --speed: "
                        "one worker alone")
    parser.add_argument("--only", default="", help=f"of {', '.join([*TESTS, 'answers', 'ranks', 'share'])}")
    parser.add_argument("--speed", default="", metavar="MODEL", help="instead of the tests: time to the first token with "
                        "random weights of gpt-oss-20b or gpt-oss-120b")
    parser.add_argument("--lengths", default="1024,8192,32768", help="prompts of --speed")
    parser.add_argument("--chunk", type=int, default=8192, help="--chunk-tokens for --speed")
    parser.add_argument("--worker-args", default="", help="further arguments of all workers")
    parser.add_argument("--prefill-args", default="", help="further arguments of prefill workers")
    parser.add_argument("--prefill-devices", metavar="LIST", help="CUDA_VISIBLE_DEVICES of prefill workers")
    parser.add_argument("--decode-devices", metavar="LIST", help="of decode workers")
    args = parser.parse_args()
    args.transports, args.worker_args = args.transports.split(","), args.worker_args.split()
    args.prefill_args = args.prefill_args.split()
    names = args.only.split(",") if args.only else [*TESTS, "answers", "ranks", *(["share"] if args.backend == "cuda" else [])]
    for name in names:
        if name not in (*TESTS, "answers", "ranks", "share"):
            parser.error(f"--only: no test is called '{name}'")
    if args.backend == "cuda" and not os.path.exists("/dev/nvidiactl"):
        print("gpu tests: skipped, this machine has no NVIDIA device")
        return 77
    suite, failed, started = Suite(args), 0, time.monotonic()
    try:
        if args.speed:
            measure(suite)
            return 0
        if [n for n in names if n in TESTS]:
            _ = suite.alone
            for t in args.transports:
                failed += run_transport(suite, t, [n for n in names if n in TESTS])
        if "answers" in names:
            failed += run_answers(suite, args.transports)
        if "ranks" in names:
            failed += run_ranks(suite, args.transports[0])
        if "share" in names:
            failed += run_share(suite)
    finally:
        suite.stop()
    print(f"gpu tests: {failed} failed ({time.monotonic() - started:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
