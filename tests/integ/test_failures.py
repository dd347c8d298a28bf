"""The failure table, row by row, with real processes: what dies, hangs, is cut off, fills up or jumps, and when.

The workers are mocks: the real protocol, transport, pools and scheduling, at a set speed, with answers that
depend on the request alone. So every answer that comes is compared with the one that a worker alone gives. Each test
ends with: living workers idle with their pages balanced, and the next request answered rightly.
"""

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import time

import pytest

from cluster import Cluster, get
from conftest import metric, pools_balance
from test_faults import Ask, kill, prompt, state, wait_for

LONG = 640  # tokens: at 2 ms each a prompt takes 1.3 s in ten chunks
SLOW_P = ["--prompt-token-us", "2000", "--chunk-tokens", "64"]


@pytest.fixture(scope="module")
def alone(build):
    c = Cluster(build, "mock", mock=True, prefill=0, decode=1, name="failures-alone",
                decode_args=["--local-prefill-below", "max", "--step-us", "0", "--prompt-token-us", "0"])
    with c:
        yield c


@pytest.fixture
def right(alone):
    """The answer that a worker alone gives."""
    return lambda n, max_tokens=8, seed=1: Ask(alone, n, max_tokens, seed).text()


@pytest.fixture
def make(build, request, right):
    clusters = []

    def start(prefill=2, decode=1, *, decode_args=(), prefill_args=(), start=True, **more):
        c = Cluster(build, "mock", mock=True, prefill=prefill, decode=decode, name="failures-" + request.node.name[:40],
                    prefill_args=[*SLOW_P, *prefill_args],
                    decode_args=["--local-prefill-below", "0", "--step-us", "5000", *decode_args], **more)
        clusters.append(c)
        return c.start() if start else c

    yield start
    try:
        for c in clusters:
            for w in c.prefill + c.decode:
                if w.alive():
                    pools_balance(w, limit_s=30)
            if all(any(p.alive() for p in group) for group in (c.prefill, c.decode)) and c.routers[0].alive():
                wait_for(lambda: get(c.url + "/readyz")[0] == 200, 20)
                assert Ask(c, 150, 2, seed=9).text() == right(150, 2, 9)
    finally:
        for c in clusters:
            c.stop(kill=True)


def wait_running(workers, n=1):
    """The first of them that computes prompts, once n of these are with it."""
    found = []

    def look():
        found[:] = [w for w in workers if w.alive() and state(w).get("running", 0) > 0
                    and state(w)["running"] + state(w)["waiting"] >= n]
        return found
    wait_for(look)
    return found[0]


def holder(workers):
    wait_for(lambda: any(state(w).get("requests", 0) > 0 for w in workers))
    return [w for w in workers if state(w).get("requests", 0) > 0][0]


def hang_in_transfer(c, role, seeds=range(1, 11), n=LONG, max_tokens=8):
    """(request, worker): the worker of that role was stopped in the midst of the request's hand-over to the only decode
    worker. On a busy machine the stroke may come late: then another request is tried.
    """
    d = c.decode[0]
    for seed in itertools.islice(seeds, 10):
        ask = Ask(c, n, max_tokens, seed)
        wait_for(lambda: ask.first.is_set() or state(d)["tickets"]["claimed"] == 1)
        p = next((p for p in c.prefill if state(p)["running"]), c.prefill[0])
        hung = p if role == "prefill" else d
        hung.signal(signal.SIGSTOP)
        if role == "prefill":  # what it has begun stays open
            tickets = state(d)["tickets"]
            in_time = tickets["claimed"] + tickets["draining"] == 1
        else:  # it can not have had what is yet to be computed
            in_time = state(p)["tokens_waiting"] > 0
        if in_time:
            return ask, hung
        hung.signal(signal.SIGCONT)
        ask.leave()
        wait_for(lambda: state(d)["requests"] == 0)
    raise AssertionError("ten hand-overs ended before the stroke")


def answered(ask):
    """Ends in time, with an answer or a clear error."""
    ask.join(60)
    assert not ask.is_alive(), "no end of the answer"
    return not ask.failed()


# P dies, hangs

@pytest.mark.parametrize("stroke", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("when", ["running", "queued"])
def test_prefill(make, right, stroke, when):
    limits = {"decode_args": ["--transfer-budget", "3s", "--ticket-expiry", "3s"],
              "router_args": ["--prefill-timeout", "5s"]} if stroke == signal.SIGSTOP else {}
    c = make(**limits)
    # Two are spread over both workers; each of four has one to wait for on its worker.
    asks = [Ask(c, LONG, seed=s) for s in range(1, 2 if when == "running" else 5)]
    victim = wait_running(c.prefill, 1 if when == "running" else 2)
    victim.signal(stroke)
    try:
        for s, ask in enumerate(asks, 1):
            assert ask.text() == right(LONG, seed=s)  # retried on the other one
    finally:
        victim.signal(signal.SIGCONT)


@pytest.mark.parametrize("local", [True, False], ids=["local", "refuse"])
def test_prefill_killed_when_its_pages_have_come(make, right, local):
    c = make(prefill=2, router_args=["--local-prefill" if local else "--no-local-prefill", "--queue-timeout", "2s"])
    ask = Ask(c, LONG, max_tokens=300)
    assert ask.first.wait(30)
    for p in c.prefill:
        kill(p)
    assert ask.text() == right(LONG, 300)
    # Nobody is left to compute prompts: the decode worker does, or says so; no silence.
    ask = Ask(c, LONG, seed=2)
    if local:
        assert ask.text() == right(LONG, seed=2)
    else:
        assert ask.failed() and any("worker_unavailable" in line for line in ask.lines), (ask.status, ask.lines)
    for p in c.prefill:
        p.start()
    c.wait_connected(time.monotonic() + 30)


# D dies, hangs

@pytest.mark.parametrize("stroke", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_decode(make, right, stroke, when):
    c = make(1, 2, prefill_args=["--transfer-budget", "4s"], router_args=["--prefill-timeout", "4s", "--token-timeout", "2s",
                                                                         "--reserve-timeout", "2s"])
    ask = Ask(c, LONG if when == "before" else 20, max_tokens=400)
    if when == "after":
        assert ask.first.wait(30)
    victim = holder(c.decode)
    victim.signal(stroke)
    try:
        if when == "before":
            assert ask.text() == right(LONG, 400)
        else:
            assert ask.failed() and any('"error"' in line for line in ask.lines), ask.lines[-2:]
        assert Ask(c, 100, seed=3).text() == right(100, seed=3)
    finally:
        victim.signal(signal.SIGCONT)
    wait_for(lambda: state(c.prefill[0])["running"] == 0, 20)


# A router dies, hangs

@pytest.mark.parametrize("stroke", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("when", ["reserved", "claimed", "decoding"])
def test_router(make, right, stroke, when):
    alert = ["--keepalive", "1s", "--keepalive-timeout", "1s"]
    c = make(1, 1, routers=2, decode_args=alert, prefill_args=alert)
    other = Ask(c, LONG, seed=7)
    other_router = c.routers[0]
    wait_running(c.prefill)
    c.routers.reverse()  # the other one's requests from here on
    if when == "reserved":
        c.prefill[0].signal(signal.SIGSTOP)  # nobody claims
    ask = Ask(c, 20 if when == "decoding" else LONG, max_tokens=1000, seed=2)
    if when == "decoding":
        assert ask.first.wait(30)
    else:
        wait_for(lambda: state(c.decode[0])["requests"] == 2)
    if when == "claimed":
        wait_for(lambda: state(c.prefill[0])["running"] + state(c.prefill[0])["waiting"] >= 1)
    victim = c.routers[0]
    assert victim is not other_router
    victim.signal(stroke)
    c.prefill[0].signal(signal.SIGCONT)
    assert other.text() == right(LONG, seed=7)
    wait_for(lambda: state(c.decode[0])["requests"] == 0, 20)
    wait_for(lambda: state(c.prefill[0])["running"] == 0, 20)
    pools_balance(c.decode[0], 20)
    victim.signal(signal.SIGCONT)
    if stroke == signal.SIGKILL:
        c.routers.reverse()
    if answered(ask):  # a stopped router goes on, and may try once more
        assert stroke == signal.SIGSTOP and when != "decoding"
        assert ask.text() == right(LONG, 1000, 2)


# Cut, half-open and slow connections

def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True).returncode == 0


@pytest.fixture
def island():
    """An address for pages alone, and a switch: when on, every packet to it vanishes."""
    pid = os.getpid()  # test processes beside each other have one each
    address, link = f"10.254.{pid // 250 % 250}.{pid % 250 + 1}", f"damask{pid}"
    if not ip("link", "add", link, "type", "veth", "peer", "name", link + "b"):
        pytest.skip("no right to add a network interface: a partition can not be made here")

    def cut(on):
        assert ip("route", "replace", *(["blackhole", address] if on else ["local", address, "dev", link]),
                  "table", "local")

    try:
        for args in (["address", "add", address + "/32", "dev", link], ["link", "set", link, "up"],
                     ["link", "set", link + "b", "up"]):
            assert ip(*args), args
        yield address, cut
    finally:
        ip("route", "del", "blackhole", address, "table", "local")
        ip("link", "del", link)


@pytest.mark.parametrize("when", ["before the claim", "claimed"])
def test_partition_between_prefill_and_decode(island, make, right, when):
    address, cut = island
    c = make(1, 1, decode_args=["--xfer-bind", address, "--transfer-budget", "3s", "--ticket-expiry", "3s"],
             prefill_args=["--xfer-bind", address, "--transfer-budget", "3s", "--give-up", "2s"],
             router_args=["--prefill-timeout", "5s"])
    assert Ask(c, 100, seed=4).text() == right(100, seed=4)
    if when == "claimed":
        steps = state(c.prefill[0])["steps"]
        ask = Ask(c, LONG)
        wait_for(lambda: state(c.prefill[0])["steps"] > steps)  # the first pages are on their way
    cut(True)
    try:
        if when != "claimed":
            ask = Ask(c, LONG)
        if answered(ask):
            assert ask.text() == right(LONG)
        wait_for(lambda: state(c.decode[0])["requests"] == 0, 20)
        wait_for(lambda: state(c.prefill[0])["running"] == 0, 20)
    finally:
        cut(False)


def test_clients_that_stall(make, right):
    c = make(1, 1, router_args=["--read-timeout", "1s", "--max-write", "64Ki"])
    host, port = c.url.split("//", 1)[1].split(":")
    half = socket.create_connection((host, int(port)))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    body = json.dumps({"model": c.model_name, "prompt": prompt(20), "stream": True, "max_tokens": 100000, "logprobs": 5,
                       "n": 4, "ignore_eos": True}).encode()
    deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    wait_for(lambda: state(c.decode[0])["requests"] == 1)
    assert Ask(c, 100, seed=5).text() == right(100, seed=5)
    half.settimeout(10)
    assert b" 408 " in half.recv(4096).split(b"\r\n")[0]  # told, then closed
    wait_for(lambda: state(c.decode[0])["requests"] == 0, 60)  # cut off at its bound
    half.close()
    deaf.close()


# Full pools

def post(c, **body):
    """(status, Retry-After)"""
    conn = http.client.HTTPConnection(c.url.split("//", 1)[1], timeout=60)
    conn.request("POST", "/v1/completions", json.dumps({"model": c.model_name, "ignore_eos": True, **body}),
                 {"content-type": "application/json"})
    response = conn.getresponse()
    response.read()
    return response.status, response.getheader("Retry-After")


def test_full_decode_pool(make, right):
    # 24 pages: two requests of 9 pages each, the third waits.
    c = make(1, 1, decode_args=["--full-pages", "24", "--window-pages", "64", "--no-reuse",
                                  "--max-sequences", "16"],
             router_args=["--max-waiting", "2", "--queue-timeout", "2s"])
    asks = [Ask(c, 20, max_tokens=500, seed=s) for s in range(1, 4)]
    wait_for(lambda: state(c.decode[0])["requests"] >= 2)
    for s, ask in enumerate(asks, 1):
        if answered(ask):
            assert ask.text() == right(20, 500, s)
        else:
            assert ask.status == 503, (ask.status, ask.lines)
    assert sum(a.status == 200 for a in asks) >= 2
    long = [Ask(c, 20, max_tokens=1000, seed=s) for s in range(11, 13)]
    wait_for(lambda: state(c.decode[0])["requests"] >= 1)
    queued = [Ask(c, 20, max_tokens=1000, seed=s) for s in range(13, 15)]
    wait_for(lambda: metric(c.url, "vllm:num_requests_waiting") == 2)
    status, wait = zip(*[post(c, prompt=prompt(20, s), max_tokens=1000) for s in (15, 16)])
    assert set(status) <= {429, 503} and all(w and int(w) >= 1 for w in wait), (status, wait)
    for s, ask in enumerate(long + queued, 11):
        if answered(ask):
            assert ask.text() == right(20, 1000, s)
        else:
            assert ask.status in (429, 503)


# Full disks, clocks

def test_logs_go_to_a_full_disk(make, right):
    c = make(1, 1, start=False)
    for p in c.processes:
        p.log = "/dev/full"
        p.argv += ["--log-level", "debug"]
    c.start()
    for s in range(1, 4):
        assert Ask(c, 150, seed=s).text() == right(150, seed=s)
    leaver = Ask(c, LONG, seed=8)
    wait_running(c.prefill)
    leaver.leave()
    assert all(p.alive() for p in c.processes)


SHIM = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset;
__attribute__((constructor)) static void start(void)
{
    int fd = open(getenv("CLOCK_FILE"), O_RDONLY);
    offset = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
}
int clock_gettime(clockid_t id, struct timespec *ts)
{
    int r = (int)syscall(SYS_clock_gettime, id, ts);
    if (offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) ts->tv_sec += *offset;
    return r;
}
time_t time(time_t *ret)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    if (ret) *ret = ts.tv_sec;
    return ts.tv_sec;
}
int gettimeofday(struct timeval *tv, void *tz)
{
    struct timespec ts;
    (void)tz;
    clock_gettime(CLOCK_REALTIME, &ts);
    tv->tv_sec = ts.tv_sec;
    tv->tv_usec = ts.tv_nsec / 1000;
    return 0;
}
"""


@pytest.mark.parametrize("jump_s", [86400, -86400], ids=["forward", "back"])
def test_wall_clock_jumps(make, right, tmp_path, jump_s):
    (tmp_path / "clock.c").write_text(SHIM)
    clock = tmp_path / "clock"
    clock.write_bytes(bytes(8))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c"], check=True)
    c = make(1, 1, env={**os.environ, "LD_PRELOAD": str(tmp_path / "clock.so"), "CLOCK_FILE": str(clock)})
    stream = Ask(c, 20, max_tokens=400, seed=2)
    assert stream.first.wait(30)
    ask = Ask(c, LONG)
    wait_running(c.prefill)
    with open(clock, "r+b") as f:
        f.write(jump_s.to_bytes(8, "little", signed=True))
    assert stream.text() == right(20, 400, 2)
    assert ask.text() == right(LONG)
    assert all(p.alive() for p in c.processes)
    begin = time.monotonic()
    assert Ask(c, 100, seed=3).text() == right(100, seed=3)
    assert time.monotonic() - begin < 10


# A worker comes back under its address

@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_restart_on_the_same_address(make, right, role):
    c = make(1, 1)
    assert Ask(c, LONG, seed=3).text() == right(LONG, seed=3)
    old = json.loads(get(getattr(c, role)[0].admin + "/health")[1])["incarnation"]
    ask = Ask(c, LONG)
    wait_running(c.prefill)
    worker = getattr(c, role)[0]
    kill(worker)
    worker.start()
    worker.wait_ready(time.monotonic() + 30)
    assert json.loads(get(worker.admin + "/health")[1])["incarnation"] != old
    if answered(ask):
        assert ask.text() == right(LONG)
    c.wait_connected(time.monotonic() + 30)
    # The old one's prefixes are forgotten: the same prompt is computed and sent again.
    assert Ask(c, LONG, seed=3).text() == right(LONG, seed=3)


# SIGTERM

def test_router_terminated(make, right):
    c = make(1, 1, router_args=["--drain-settle", "500ms"])
    ask = Ask(c, LONG, max_tokens=200)
    wait_running(c.prefill)
    c.routers[0].signal(signal.SIGTERM)
    wait_for(lambda: get(c.url + "/readyz")[0] == 503, 30)
    assert ask.text() == right(LONG, 200)
    assert c.routers[0].popen.wait(20) == 0


def test_drain_limit(make):
    c = make(1, 1, decode_args=["--drain-limit", "1s"])
    ask = Ask(c, 20, max_tokens=20000)
    assert ask.first.wait(30)
    c.decode[0].signal(signal.SIGTERM)
    assert ask.failed()
    assert '"error"' in ask.lines[-2] and ask.lines[-1] == "data: [DONE]", ask.lines[-2:]
    assert c.decode[0].popen.wait(10) == 0


# The engine is stuck

@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_stuck_engine(make, role):
    slow = {"prefill_args": ["--stuck-after", "500ms", "--step-us", "1500000"]} if role == "prefill" else {
        "decode_args": ["--stuck-after", "500ms", "--step-us", "1500000"]}
    c = make(1, 1, **slow)
    worker = getattr(c, role)[0]
    ask = Ask(c, 40, max_tokens=1)
    # In one step, which takes 1.5 s: the second answer may come after its end.
    wait_for(lambda: get(worker.admin + "/livez")[0] == 503 and "stuck" in get(worker.admin + "/readyz")[1])
    assert answered(ask)
    wait_for(lambda: get(worker.admin + "/livez")[0] == 200)  # it moves again
    wait_for(lambda: metric(c.url, "damask_router_workers_hanging") == 0)
    assert "its engine is stuck" in c.routers[0].log_tail(100)  # told with the load
