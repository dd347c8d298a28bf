"""Tickets in wrong hands: a router made by hand talks to real workers (mocks of an engine, but real pages, tickets
and transfers) and hands a prefill worker tickets that are used up, given back, expired, damaged or another's. None
may change an answer: each ends with a clear failure, and the requests beside it are answered rightly.
"""

import queue
import random
import threading
import time

import grpc
import pytest

from cluster import Cluster, get
from conftest import pools_balance
from fake_worker import pb, pb_grpc
from test_faults import prompt

ROUTER = f"by-hand-{random.randrange(1 << 30)}"


class Stream:
    """A router's stream to one worker."""

    def __init__(self, worker):
        self.out, self.events, self.lock = queue.Queue(), [], threading.Condition()
        self.channel = grpc.insecure_channel(worker.address)
        self.call = pb_grpc.WorkerStub(self.channel).Connect(iter(self.out.get, None))
        self.out.put(pb.RouterMessage(hello=pb.RouterHello(version=1, router_id=ROUTER, incarnation=1)))
        threading.Thread(target=self.read, daemon=True).start()
        self.hello = self.wait("hello")

    def read(self):
        try:
            for m in self.call:
                with self.lock:
                    self.incarnation = m.incarnation
                    self.events += m.events
                    self.lock.notify_all()
        except grpc.RpcError:
            pass

    def wait(self, *kinds, id=None, limit_s=10):
        """The first event of these kinds (of the request), which is taken out."""
        deadline = time.monotonic() + limit_s
        with self.lock:
            while True:
                for e in self.events:
                    body = getattr(e, e.WhichOneof("body"))
                    if e.WhichOneof("body") in kinds and (id is None or body.id == id):
                        self.events.remove(e)
                        return body
                assert time.monotonic() < deadline, f"no {kinds} came; {[e.WhichOneof('body') for e in self.events]}"
                self.lock.wait(0.1)

    def send(self, **body):
        self.out.put(pb.RouterMessage(worker_incarnation=self.incarnation, **body))

    def close(self):
        self.out.put(None)
        self.call.cancel()
        self.channel.close()


class Hand:
    def __init__(self, cluster):
        self.d, self.p = Stream(cluster.decode[0]), Stream(cluster.prefill[0])
        self.n = 0

    def reserve(self, n, seed, max_tokens=8, **more):
        """(id, prompt, ticket)"""
        self.n += 1
        id, ids = pb.RequestId(hi=77, lo=self.n, attempt=1), prompt(n, seed)
        self.d.send(generate=pb.Generate(id=id, prompt=ids, sampling=pb.Sampling(top_p=1), max_tokens=max_tokens,
                                         ignore_eos=True, **more))
        r = self.d.wait("reserved", "failed", id=id)
        assert isinstance(r, pb.Reserved), r
        return id, ids, r.ticket

    def prefill(self, id, ids, ticket):
        self.p.send(prefill=pb.Prefill(id=id, prompt=ids, ticket=ticket))

    def answer(self, id):
        """Token ids, once all are there."""
        got = []
        while True:
            e = self.d.wait("tokens", "finished", "failed", id=id)
            if isinstance(e, pb.Tokens):
                got += e.ids
                continue
            assert isinstance(e, pb.Finished), e
            return got

    def right(self, n, seed, max_tokens=8):
        """As the decode worker says alone."""
        id, _, _ = self.reserve(n, seed, max_tokens, force_local=True)
        return self.answer(id)

    def refused(self, ids, ticket, codes):
        """P, handed the ticket, says no in time and in words."""
        self.n += 1
        id = pb.RequestId(hi=78, lo=self.n, attempt=1)
        self.prefill(id, ids, ticket)
        e = self.p.wait("failed", "prefill_done", id=id, limit_s=5)
        assert isinstance(e, pb.Failed) and e.code in codes and len(e.text) > 10, e
        return e.text


@pytest.fixture
def start(build):
    made = []

    def begin(prefill_args=(), decode_args=()):
        c = Cluster(build, "mock", mock=True, prefill=1, decode=1, routers=0, name="replay",
                    prefill_args=["--prompt-token-us", "100", "--step-us", "500", "--no-reuse", "--give-up", "1s", *prefill_args],
                    decode_args=["--local-prefill-below", "0", "--step-us", "500", "--no-reuse", *decode_args])
        made.append(c)
        c.start()
        made.append(Hand(c))
        return c, made[-1]

    yield begin
    c, hand = made
    hand.d.close()
    hand.p.close()
    for w in c.prefill + c.decode:
        pools_balance(w, limit_s=20)
    c.stop()


def failed_total(c):
    text = get(c.prefill[0].admin + "/metrics")[1]
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if line.startswith("damask_prefills_failed_total"))


def test_tickets_that_are_over(start):
    c, hand = start(decode_args=["--full-pages", "24", "--ticket-expiry", "1s"])
    want = hand.right(600, 1)

    # Used: while its request decodes, and when that is over.
    before = failed_total(c)
    id, ids, used = hand.reserve(600, 1)
    hand.prefill(id, ids, used)
    hand.p.wait("prefill_done", id=id)
    hand.refused(ids, used, [pb.FAILURE_REFUSED])
    assert hand.answer(id) == want
    hand.refused(ids, used, [pb.FAILURE_REFUSED])

    # Given back, and its pages are another's by now: ten pages of 24, then 20 of the same.
    id, ids, given_back = hand.reserve(600, 1)
    hand.d.send(cancel=pb.Cancel(id=id))
    other, other_ids, ticket = hand.reserve(1200, 2)
    hand.refused(ids, given_back, [pb.FAILURE_REFUSED])
    hand.prefill(other, other_ids, ticket)
    hand.refused(ids, given_back, [pb.FAILURE_REFUSED])
    got = hand.answer(other)
    assert got == hand.right(1200, 2)

    # Expired.
    id, ids, expired = hand.reserve(600, 1)
    e = hand.d.wait("failed", id=id, limit_s=5)
    assert e.code in (pb.FAILURE_TIMEOUT, pb.FAILURE_PEER) and "claim" in e.text, e
    hand.refused(ids, expired, [pb.FAILURE_REFUSED])
    assert failed_total(c) == before + 5
    assert hand.right(600, 1) == want


def test_tickets_that_are_damaged_or_another_s(start):
    c, hand = start()
    id, ids, ticket = hand.reserve(600, 1)
    rng = random.Random(5)
    for _ in range(40):  # a page number, a cookie, an address: no bit can change unseen
        bad = bytearray(ticket)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        hand.refused(ids, bytes(bad), [pb.FAILURE_INVALID, pb.FAILURE_MISMATCH, pb.FAILURE_REFUSED])
    hand.refused(ids, ticket[:-9], [pb.FAILURE_INVALID, pb.FAILURE_MISMATCH, pb.FAILURE_REFUSED])
    hand.refused(prompt(700, 1), ticket, [pb.FAILURE_INVALID, pb.FAILURE_MISMATCH])  # of another prompt
    # The true one still works.
    hand.prefill(id, ids, ticket)
    got = hand.answer(id)
    assert got == hand.right(600, 1)
    # The decode worker starts again on its address: what it gave out before is nothing.
    id, ids, old = hand.reserve(600, 1)
    hand.d.close()
    c.decode[0].stop()
    c.decode[0].start()
    c.decode[0].wait_ready(time.monotonic() + 20)
    hand.d = Stream(c.decode[0])
    hand.refused(ids, old, [pb.FAILURE_REFUSED, pb.FAILURE_PEER, pb.FAILURE_MISMATCH])
    id, ids, ticket = hand.reserve(600, 1)
    hand.prefill(id, ids, ticket)
    assert hand.answer(id) == got


def test_pages_of_another_size_are_refused_by_name(start):
    _, hand = start(prefill_args=["--page-bytes", "1024"])
    id, ids, ticket = hand.reserve(600, 1)
    assert "page" in hand.refused(ids, ticket, [pb.FAILURE_MISMATCH])
    hand.d.send(cancel=pb.Cancel(id=id))
