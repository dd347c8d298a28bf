"""Traffic as it comes: clients that leave in every way, requests that can never fit, workers that are stopped,
killed and started again while others are answered. Mock workers; see test_failures.py.
"""

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

from cluster import get
from conftest import metric, pools_balance
from test_failures import alone, hang_in_transfer, holder, make, post, right, wait_running  # noqa: F401
from test_faults import Ask, kill, prompt, state, wait_for

LENGTH = 640  # tokens: 1.3 s in ten chunks
QUICK = {"prefill_args": ["--prompt-token-us", "100", "--step-us", "1000"]}  # later options win


def pages(worker):
    pools = state(worker)["pools"]
    return {n: (pools[n]["leased"], pools[n]["draining"]) for n in pools}


# Clients

@pytest.mark.parametrize("way", ["close", "reset", "half-closed, then gone"])
def test_a_client_that_leaves_stops_its_answer(make, way):
    c = make(1, 1, decode_args=["--step-us", "5000"])
    before = pages(c.decode[0]), pages(c.prefill[0])
    gone = metric(c.url, "damask_router_client_gone_total")
    host, port = c.url.split("//", 1)[1].split(":")
    s = socket.create_connection((host, int(port)))
    body = json.dumps({"model": c.model_name, "prompt": prompt(150), "stream": True, "max_tokens": 4000,
                       "ignore_eos": True}).encode()
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    got = b""
    while got.count(b"data: ") < 20:
        got += s.recv(4096)
    if way == "reset":
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif way != "close":
        s.shutdown(socket.SHUT_WR)
    s.close()
    wait_for(lambda: state(c.decode[0])["requests"] == 0, 10)  # the whole answer takes 20 s
    assert metric(c.url, "damask_router_client_gone_total") == gone + 1
    steps = state(c.decode[0])["steps"]
    time.sleep(0.3)
    assert state(c.decode[0])["steps"] <= steps + 1  # nobody is left to decode for
    wait_for(lambda: (pages(c.decode[0]), pages(c.prefill[0])) == before)


def test_two_requests_with_one_id_have_their_own_answers(make, right):
    c = make(1, 1, **QUICK)

    class Named(Ask):
        def __init__(self, seed):
            super().__init__(c, 100, max_tokens=200, seed=seed)

        def run(self):
            request = self.conn.request
            self.conn.request = lambda method, path, body, headers: request(
                method, path, body, {**headers, "X-Request-Id": "same"})
            super().run()

    asks = [Named(1), Named(2)]
    texts = [a.text() for a in asks]
    assert texts == [right(100, 200, 1), right(100, 200, 2)] and texts[0] != texts[1]


# What can never fit, what never ends

def test_a_request_that_can_never_fit_blocks_nobody(make, right):
    small = ["--full-pages", "16", "--max-context", "4096", "--no-reuse"]
    c = make(1, 1, prefill_args=[*QUICK["prefill_args"], *small], decode_args=small)
    begin = time.monotonic()
    status, _ = post(c, prompt=prompt(1500), max_tokens=10)
    assert status in (400, 503) and time.monotonic() - begin < 10
    asks = [Ask(c, 20, max_tokens=8, seed=s) for s in range(1, 11)]
    for s, ask in enumerate(asks, 1):
        assert ask.text() == right(20, 8, s)
    # As large as the pool and a little more: an end by length, or an error; no loop.
    ask = Ask(c, 900, max_tokens=200)
    assert ask.failed() or '"length"' in ask.lines[-2]
    ask = Ask(c, 900, max_tokens=100)
    assert ask.text() == right(900, 100)


def test_an_endless_answer_ends_at_the_context_limit(make):
    c = make(1, 1, decode_args=["--max-context", "512", "--step-us", "0"], prefill_args=QUICK["prefill_args"])
    conn = http.client.HTTPConnection(c.url.split("//", 1)[1], timeout=60)
    conn.request("POST", "/v1/chat/completions", json.dumps({
        "model": c.model_name, "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}),
        {"content-type": "application/json"})
    answer = json.loads(conn.getresponse().read())
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


@pytest.mark.parametrize("n", [1, 2, 16])
def test_max_tokens_is_exact(make, right, n):
    c = make(1, 1, **QUICK)
    ask = Ask(c, 200, max_tokens=n)
    assert ask.text() == right(200, n)
    chunks = [json.loads(line[6:])["choices"][0] for line in ask.lines if line.startswith("data: {")]
    assert "".join(k["text"] for k in chunks) == right(200, n)
    assert [k["finish_reason"] for k in chunks if k["finish_reason"]] == ["length"]
    conn = http.client.HTTPConnection(c.url.split("//", 1)[1], timeout=60)
    conn.request("POST", "/v1/completions", json.dumps({
        "model": c.model_name, "prompt": prompt(200), "max_tokens": n, "ignore_eos": True, "temperature": 0, "logprobs": 0}),
        {"content-type": "application/json"})
    answer = json.loads(conn.getresponse().read())
    assert answer["usage"]["completion_tokens"] == n == len(answer["choices"][0]["logprobs"]["tokens"])
    assert answer["choices"][0]["text"] == right(200, n)


# Workers that die and come back

def test_twenty_transfers_lose_their_prefill_worker(make, right):
    c = make(1, 1, decode_args=["--transfer-budget", "4s", "--ticket-expiry", "4s", "--max-sequences", "64"],
             router_args=["--no-local-prefill", "--queue-timeout", "1s", "--prefill-timeout", "5s"])
    first = state(c.decode[0])["incarnation"]
    asks = [Ask(c, LENGTH, seed=s) for s in range(1, 21)]
    wait_for(lambda: state(c.decode[0])["requests"] == 20)
    wait_running(c.prefill)
    kill(c.prefill[0])
    for ask in asks[::2]:
        ask.leave()
    for ask in asks[1::2]:
        assert ask.failed(), ask.lines[-2:]
    wait_for(lambda: pages(c.decode[0])["full"] == (0, 0), 15)
    c.prefill[0].start()
    c.wait_connected(time.monotonic() + 30)
    assert Ask(c, 150, seed=30).text() == right(150, seed=30)
    assert state(c.decode[0])["incarnation"] == first


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_back_on_its_address_serves_at_once(make, right, role):
    c = make(2, 2, **QUICK)
    for s in range(4):
        assert Ask(c, 150, seed=s).text() == right(150, seed=s)
    worker = getattr(c, role)[0]
    kill(worker)
    worker.start()
    worker.wait_ready(time.monotonic() + 30)
    c.wait_connected(time.monotonic() + 30)
    for base in range(0, 100, 10):
        asks = [Ask(c, 100, 2, seed=base + s) for s in range(10)]
        for s, ask in enumerate(asks):
            assert ask.text() == right(100, 2, base + s)
    assert state(worker)["steps"] > 0  # it had its share


class Load(threading.Thread):
    """Requests at a rate, until told to stop."""

    def __init__(self, c, per_s, n_prompt=20, max_tokens=10):
        super().__init__(daemon=True)
        self.c, self.per_s, self.n_prompt, self.max_tokens = c, per_s, n_prompt, max_tokens
        self.asks, self.over = [], threading.Event()
        self.start()

    def run(self):
        begin = time.monotonic()
        while not self.over.is_set():
            ask = Ask(self.c, self.n_prompt, self.max_tokens, seed=1000 + len(self.asks))
            ask.begun = time.monotonic()
            self.asks.append(ask)
            time.sleep(max(0, begin + len(self.asks) / self.per_s - time.monotonic()))

    def end(self):
        self.over.set()
        self.join()
        return self.asks


def test_a_terminated_decode_worker_fails_no_request(make, right):
    c = make(2, 2, **QUICK)
    streams = [Ask(c, 20, max_tokens=600, seed=s) for s in range(20)]
    victim = c.decode[0]
    wait_for(lambda: state(victim)["requests"] >= 5)
    for s in streams:
        assert s.first.wait(30)
    load = Load(c, 50)
    time.sleep(0.3)
    victim.signal(signal.SIGTERM)
    time.sleep(1.2)
    wait_for(lambda: len(load.asks) >= 45)
    asks = load.end()
    for s, ask in enumerate(streams):
        assert ask.text() == right(20, 600, s)
    assert len(asks) >= 45
    for i, ask in enumerate(asks):
        assert ask.text() == right(20, 10, 1000 + i)
    assert victim.popen.wait(30) == 0


def test_a_terminated_prefill_worker_waits_for_its_answers(make, right):
    c = make(1, 1)
    ask, _ = hang_in_transfer(c, "decode", n=LENGTH)
    try:
        wait_for(lambda: state(c.prefill[0])["tokens_waiting"] == 0)
        c.prefill[0].signal(signal.SIGTERM)
        time.sleep(1)
        assert c.prefill[0].alive()
    finally:
        c.decode[0].signal(signal.SIGCONT)
    assert ask.text() == right(LENGTH, seed=ask.seed)
    assert c.prefill[0].popen.wait(15) == 0


def test_a_killed_decode_worker_fails_what_it_held_alone(make, right):
    c = make(2, 2, **QUICK)
    load = Load(c, 20, max_tokens=60)  # 0.3 s each: some are in the middle
    time.sleep(1)
    victim = c.decode[0]
    wait_for(lambda: state(victim).get("requests", 0) > 0)
    placed = {a for a in list(load.asks) if a.first.is_set()}  # a worker has them, or had
    held = state(victim)["requests"]
    kill(victim)
    killed = time.monotonic()
    time.sleep(1.5)
    asks = load.end()
    failed = [a for a in asks if a.failed()]
    assert len(failed) <= held + sum(a.begun < killed and a not in placed for a in asks)  # and what was on its way
    assert all(a.begun < killed + 0.05 for a in failed)
    for i, ask in enumerate(asks):
        if ask not in failed:
            assert ask.text() == right(20, 60, 1000 + i)


# How pages travel

def test_transport_and_device_are_named(make, build):
    c = make(1, 1)
    for w in c.prefill + c.decode:
        assert 'transport="tcp",device="lo"' in get(w.admin + "/metrics")[1]
        assert (state(w)["transport"], state(w)["device"], state(w)["lane"]) == ("tcp", "lo", "emulated")
        assert 'pages by tcp on "lo" 127.0.0.1:' in open(w.log).read()
    ready = lambda w: get(w.admin + "/readyz")  # noqa: E731
    assert ready(c.decode[0]) == (200, 'ok\npages by tcp on "lo", emulated\n')
    assert ready(c.prefill[0]) == (200, 'ok\npages by tcp on "lo", emulated, not measured yet\n')
    Ask(c, 600, max_tokens=2).text()
    status, text = ready(c.prefill[0])
    rate = float(re.fullmatch(r'ok\npages by tcp on "lo", emulated, (\d+\.\d{3}) GB/s\n', text).group(1))
    assert 0 < rate < 1000 and state(c.prefill[0])["transfer_gb_s"] == rate
    gauge = re.search(r"damask_transfer_gb_per_second\{[^}]*\} (\S+)", get(c.prefill[0].admin + "/metrics")[1])
    assert abs(float(gauge.group(1)) - rate) < 0.001


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU here")
def test_a_transport_whose_device_is_missing_is_an_error_at_the_start(build):
    run = subprocess.run([build / "tools" / "damask", "mock", "prefill", "--listen", "127.0.0.1:0", "--admin-port", "0",
                          "--xfer-transport", "cuda"], capture_output=True, text=True, timeout=30)
    assert run.returncode != 0 and "CUDA" in run.stderr, run.stderr


def test_not_ready_before_the_engine_has_computed(make):
    """The first steps take a second each: alive at once, ready when they are through."""
    c = make(1, 1, start=False, prefill_args=["--step-us", "1000000"], decode_args=["--step-us", "1000000"])
    for w in c.prefill + c.decode:
        w.start()
    seen = {w.name: [] for w in c.prefill + c.decode}

    def all_ready():
        for w in c.prefill + c.decode:
            status = get(w.admin + "/livez")[0], get(w.admin + "/readyz")[0]
            if status[0] and status not in seen[w.name]:
                seen[w.name].append(status)
        return all((200, 200) in s for s in seen.values())

    wait_for(all_ready)
    assert all(s == [(200, 503), (200, 200)] for s in seen.values()), seen
    for w in c.prefill + c.decode:
        w.wait_ready(time.monotonic() + 10)
        assert w.stop() == 0


# Waiting costs nothing

def cpu_s(worker):
    fields = open(f"/proc/{worker.pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_waiting_for_a_peer_that_hangs_costs_no_cpu(make, role):
    c = make(1, 1, decode_args=["--transfer-budget", "30s"])
    waits = getattr(c, role)[0]
    ask, hung = hang_in_transfer(c, "prefill" if role == "decode" else "decode", n=LENGTH, max_tokens=2000)
    try:
        if role == "prefill":
            wait_for(lambda: state(waits)["tokens_waiting"] == 0)
        time.sleep(0.3)
        begin, used = time.monotonic(), cpu_s(waits)
        time.sleep(2)
        assert (cpu_s(waits) - used) / (time.monotonic() - begin) < 0.05
    finally:
        hung.signal(signal.SIGCONT)
    ask.leave()
    wait_for(lambda: state(c.decode[0])["requests"] == 0, 20)
