"""What must happen when a process, a connection or a client goes away at a bad moment.

Every test ends with the pools of all living workers balanced: whatever was pinned, leased or draining has
come back.
"""

import http.client
import json
import signal
import threading
import time

import pytest

from cluster import Cluster, get
from conftest import TRANSPORTS, pools_balance

LONG = 1500  # tokens of a prompt that takes long enough to be struck in its midst


@pytest.fixture
def make(build, model, request):
    """Clusters of this test; living workers are checked at its end."""
    clusters = []

    def start(prefill, decode, transport="tcp", decode_args=(), prefill_args=(), router_args=()):
        c = Cluster(build, model, prefill=prefill, decode=decode, transport=transport, threads=1,
                    name=f"faults-{request.node.name[:40]}",
                    decode_args=["--local-prefill-below", "0", *decode_args],
                    prefill_args=["--chunk-tokens", "64", *prefill_args], router_args=router_args)
        clusters.append(c)
        return c.start()

    yield start
    try:
        for c in clusters:
            for w in c.prefill + c.decode:
                if w.alive():
                    pools_balance(w, limit_s=30)
    finally:
        for c in clusters:
            c.stop(kill=True)


def prompt(n, seed=1):
    return [(i * 7919 + seed * 104729) % 190000 for i in range(n)]


class Ask(threading.Thread):
    """One streamed completion in a thread of its own."""

    def __init__(self, cluster, n, max_tokens=8, seed=1):
        super().__init__(daemon=True)
        self.seed = seed
        self.body = json.dumps({"model": cluster.model_name, "prompt": prompt(n, seed), "stream": True,
                                "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
        host = cluster.url.split("//", 1)[1]
        self.conn = http.client.HTTPConnection(host, timeout=120)
        self.status, self.lines, self.error = None, [], None
        self.first = threading.Event()
        self.start()

    def run(self):
        try:
            self.conn.request("POST", "/v1/completions", self.body, {"content-type": "application/json"})
            response = self.conn.getresponse()
            self.status = response.status
            for raw in response:
                line = raw.decode().strip()
                if line:
                    self.lines.append(line)
                    if line.startswith("data: {"):
                        self.first.set()
        except OSError as e:
            self.error = e
        except http.client.HTTPException as e:
            self.error = e

    def leave(self):
        """The client goes away."""
        if self.conn.sock:
            self.conn.sock.shutdown(2)
        self.join(10)

    def text(self):
        self.join(120)
        assert not self.is_alive(), "no end of the answer"
        assert self.status == 200, (self.status, self.lines)
        assert self.lines[-1] == "data: [DONE]", self.lines[-3:]
        return "".join(c["text"] for line in self.lines if line.startswith("data: {")
                       for c in json.loads(line[6:])["choices"])

    def failed(self):
        """True when the client could tell that something went wrong."""
        self.join(120)
        assert not self.is_alive(), "no end of the answer"
        return (self.status != 200 or self.error is not None
                or not self.lines or self.lines[-1] != "data: [DONE]"
                or any('"error"' in line for line in self.lines))


def state(worker):
    status, text = get(worker.admin + "/state")
    return json.loads(text) if status == 200 else {}


def wait_for(what, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.01)


def busy(workers):
    """The worker that is computing a prompt, once there is one."""
    found = []

    def look():
        found[:] = [w for w in workers if w.alive() and state(w).get("running", 0) > 0]
        return found
    wait_for(look)
    return found[0]


def kill(process):
    process.signal(signal.SIGKILL)
    process.popen.wait(10)


def test_client_leaves_while_its_prompt_is_computed(make):
    c = make(1, 1)
    ask = Ask(c, LONG)
    busy(c.prefill)
    ask.leave()
    wait_for(lambda: state(c.prefill[0])["running"] == 0 and state(c.decode[0])["requests"] == 0)


def test_client_leaves_in_the_midst_of_its_answer(make):
    c = make(1, 1)
    ask = Ask(c, 20, max_tokens=2000)
    assert ask.first.wait(60)
    ask.leave()
    wait_for(lambda: state(c.decode[0])["requests"] == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prefill_worker_is_killed(make, transport):
    c = make(2, 1, transport)
    want = Ask(c, LONG).text()
    ask = Ask(c, LONG, seed=2)
    victim = busy(c.prefill)
    kill(victim)
    got = ask.text()  # retried on the other one
    assert got == Ask(c, LONG, seed=2).text()
    assert got != want
    pools_balance(c.decode[0], 30)


def test_the_only_prefill_worker_is_killed_and_comes_back(make):
    c = make(1, 1)
    ask = Ask(c, LONG)
    kill(busy(c.prefill))
    ask.join(120)
    assert not ask.is_alive()
    pools_balance(c.decode[0], 30)
    c.prefill[0].start()
    c.prefill[0].wait_ready(time.monotonic() + 30)
    c.wait_connected(time.monotonic() + 30)
    assert Ask(c, LONG, seed=3).text() != ""


def test_prefill_worker_hangs(make):
    c = make(2, 1, decode_args=["--transfer-budget", "4s"], router_args=["--prefill-timeout", "7s"])
    Ask(c, LONG).text()
    ask = Ask(c, LONG, seed=2)
    victim = busy(c.prefill)
    victim.signal(signal.SIGSTOP)
    try:
        got = ask.text()  # retried on the other one
    finally:
        victim.signal(signal.SIGCONT)
    pools_balance(c.decode[0], 30)
    assert got == Ask(c, LONG, seed=2).text()


def test_decode_worker_is_killed_before_the_first_token(make):
    c = make(1, 2)
    ask = Ask(c, LONG)
    wait_for(lambda: any(state(w).get("requests", 0) > 0 for w in c.decode))
    victim = [w for w in c.decode if state(w).get("requests", 0) > 0][0]
    kill(victim)
    assert ask.text() == Ask(c, LONG).text()


def test_decode_worker_is_killed_in_the_midst_of_an_answer(make):
    c = make(1, 1)
    ask = Ask(c, 20, max_tokens=2000)
    assert ask.first.wait(60)
    kill(c.decode[0])
    assert ask.failed()


def test_router_is_killed(make):
    c = make(1, 1)
    first = Ask(c, 20, max_tokens=2000)
    assert first.first.wait(60)
    Ask(c, LONG)
    busy(c.prefill)
    kill(c.routers[0])
    wait_for(lambda: state(c.decode[0])["requests"] == 0)
    wait_for(lambda: state(c.prefill[0])["running"] == 0)


def test_terminated_decode_worker_ends_what_it_has(make):
    c = make(1, 2)
    ask = Ask(c, 20, max_tokens=60)
    assert ask.first.wait(60)
    victim = [w for w in c.decode if state(w).get("requests", 0) > 0][0]
    victim.signal(signal.SIGTERM)
    wait_for(lambda: get(victim.admin + "/readyz")[0] != 200)
    other = Ask(c, 20, max_tokens=4, seed=5)
    assert other.text() != ""
    assert ask.text() != "" and not ask.failed()
    assert victim.popen.wait(30) == 0


def test_terminated_prefill_worker_ends_what_it_has(make):
    c = make(1, 1)
    ask = Ask(c, LONG)
    busy(c.prefill).signal(signal.SIGTERM)
    assert ask.text() != ""
    assert c.prefill[0].popen.wait(30) == 0
