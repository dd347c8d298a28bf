"""The failure table in the states of a hand-over that test_failures.py does not strike: nobody has claimed, pages
drain, the transfer is over; a router that is cut off from a worker without a word, or hears nothing of it. Mock workers, as there.
"""

import itertools
import json
import signal
import time

import pytest

from cluster import get
from conftest import metric
from test_failures import (LONG, alone, answered, hang_in_transfer, holder, island, make, right,  # noqa: F401
                           wait_running)
from test_faults import Ask, kill, state, wait_for
from test_traffic import QUICK

HALF = LONG // 2  # tokens: 0.64 s in five chunks


def draining(worker):
    """(pages, tickets) that wait for the last word of a prefill worker."""
    s = state(worker)
    assert s["pools"]["full"]["draining"] + s["pools"]["window"]["draining"] == s["tickets"]["draining_pages"], s
    return s["tickets"]["draining_pages"], s["tickets"]["draining"]


# A prefill worker that hangs may still write where it writes by its own hand.

def test_pages_that_a_hung_worker_may_write_stay_out_of_use(make, right):
    c = make(2, 1, transport="shm", decode_args=["--transfer-budget", "1500ms", "--quiet-ask-every", "100ms",
                                                 "--max-draining-pages", "4"])
    d = c.decode[0]
    seeds = itertools.count(1)
    for end in ("goes on", "killed"):
        ask, victim = hang_in_transfer(c, "prefill", seeds, HALF)
        try:
            assert ask.text() == right(HALF, seed=ask.seed)  # on the other one, when the transfer's time is over
            held = draining(d)
            assert held[0] >= HALF // 64 and held[1] == 1
            # Neither time nor other requests bring them back, and both are told.
            assert Ask(c, 100, seed=3).text() == right(100, seed=3)
            time.sleep(0.5)
            assert draining(d) == held
            assert metric(d.admin, "damask_draining_pages") == held[0] and metric(d.admin, "damask_refusing_claims") == 1
            assert json.loads(get(d.admin + "/health")[1])["refusing_claims"] is True
            if end == "killed":
                kill(victim)
        finally:
            victim.signal(signal.SIGCONT)
        wait_for(lambda: draining(d) == (0, 0), 10)
        assert json.loads(get(d.admin + "/health")[1])["refusing_claims"] is False


# Nobody has claimed yet.

@pytest.mark.parametrize("who", ["the client leaves", "the decode worker is killed", "the prefill worker is killed"])
def test_while_nobody_has_claimed(make, right, who):
    c = make(1, 2, prefill_args=[*QUICK["prefill_args"], "--give-up", "1s"])
    p = c.prefill[0]
    p.signal(signal.SIGSTOP)
    try:
        ask = Ask(c, HALF)
        d = holder(c.decode)
        wait_for(lambda: state(d)["tickets"]["unclaimed"] == 1)
        if who == "the client leaves":
            ask.leave()
            wait_for(lambda: state(d)["requests"] == 0, 2)  # at once: nobody can write
            assert state(d)["tickets"]["draining"] == 0
        elif who == "the decode worker is killed":
            kill(d)
        else:
            kill(p)
    finally:
        p.signal(signal.SIGCONT)
    if who == "the prefill worker is killed":
        assert ask.text() == right(HALF)  # by the decode worker itself
        p.start()
    elif who == "the decode worker is killed":
        assert ask.text() == right(HALF)  # reserved at the other one
        d.start()
    c.wait_connected(time.monotonic() + 30)
    wait_for(lambda: state(p)["running"] + state(p)["waiting"] == 0)


def test_a_decode_worker_that_does_not_answer_a_reservation(make, right):
    c = make(1, 2, router_args=["--reserve-timeout", "1s"], prefill_args=QUICK["prefill_args"])
    asks = []
    c.decode[0].signal(signal.SIGSTOP)
    try:
        asks = [Ask(c, 100, seed=s) for s in range(4)]
        for s, ask in enumerate(asks):
            assert ask.text() == right(100, seed=s)
    finally:
        c.decode[0].signal(signal.SIGCONT)
    wait_for(lambda: all(state(d)["requests"] == 0 for d in c.decode))


def test_a_client_leaves_while_its_request_waits_for_room(make, right):
    full = ["--full-pages", "24", "--window-pages", "64", "--no-reuse", "--max-sequences", "16", "--step-us", "2000"]
    c = make(1, 1, decode_args=full, prefill_args=QUICK["prefill_args"])
    first = [Ask(c, 20, max_tokens=600, seed=s) for s in (1, 2)]
    for ask in first:
        assert ask.first.wait(30)
    waits = Ask(c, 20, max_tokens=600, seed=3)
    wait_for(lambda: metric(c.url, "vllm:num_requests_waiting") == 1)
    waits.leave()
    wait_for(lambda: metric(c.url, "vllm:num_requests_waiting") == 0, 2)
    for s, ask in enumerate(first, 1):
        assert ask.text() == right(20, 600, s)
    assert state(c.decode[0])["requests"] == 0


# SIGTERM in the midst of a hand-over

@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_terminated_worker_ends_its_hand_overs(make, right, role):
    """One is being computed, one waits for its turn; both come to their ends."""
    c = make(1, 1)
    asks = [Ask(c, HALF, max_tokens=50, seed=s) for s in range(2)]
    wait_running(c.prefill, 2)
    worker = getattr(c, role)[0]
    worker.signal(signal.SIGTERM)
    for s, ask in enumerate(asks):
        assert ask.text() == right(HALF, 50, s)
    assert worker.popen.wait(20) == 0


# The transfer is over: a partition changes nothing.

def test_partition_when_the_pages_have_come(island, make, right):
    address, cut = island
    bound = ["--xfer-bind", address]
    c = make(1, 1, decode_args=bound, prefill_args=[*bound, *QUICK["prefill_args"], "--give-up", "1s"])
    for w in c.prefill + c.decode:
        assert state(w)["device"] != "lo"  # the interface that the address lies on
    ask = Ask(c, 150, max_tokens=150)
    assert ask.first.wait(30)
    cut(True)
    try:
        assert ask.text() == right(150, 150)
        wait_for(lambda: state(c.prefill[0])["pools"]["full"]["leased"] == 0, 10)
    finally:
        cut(False)


# A router and a worker that hear nothing of each other, and no connection that says so

@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_router_cut_off_from_a_worker(island, make, right, role):
    address, cut = island
    alert = ["--keepalive", "500ms", "--keepalive-timeout", "500ms"]
    c = make(1, 1, start=False, decode_args=alert, prefill_args=alert,
             router_args=["--token-timeout", "2s", "--prefill-timeout", "3s", "--reserve-timeout", "2s", "--local-prefill"])
    worker = getattr(c, role)[0]
    old, worker.address = worker.address, worker.address.replace("127.0.0.1", address)
    for p in (worker, c.routers[0]):
        p.argv = [a.replace(old, worker.address) for a in p.argv]
    c.start()
    ask = Ask(c, 20 if role == "decode" else LONG, max_tokens=1000 if role == "decode" else 8)
    if role == "decode":
        assert ask.first.wait(30)
    else:
        wait_running(c.prefill)
    cut(True)
    try:
        if role == "decode":
            assert ask.failed() and any('"error"' in line for line in ask.lines), ask.lines[-2:]
        elif answered(ask):
            assert ask.text() == right(LONG)
        # The worker has ended what it had for a router that it no longer hears.
        wait_for(lambda: state(c.decode[0])["requests"] == 0 and state(c.prefill[0])["running"] == 0, 10)
    finally:
        cut(False)
    c.wait_connected(time.monotonic() + 30)


# Workers say nothing, and their connections stand.

def hang(c, *workers):
    for w in workers:
        w.signal(signal.SIGSTOP)
    wait_for(lambda: metric(c.url, "damask_router_workers_hanging") == len(workers), 10)


def go_on(c, *workers):
    for w in workers:
        w.signal(signal.SIGCONT)
    wait_for(lambda: metric(c.url, "damask_router_workers_hanging") == 0, 10)


def test_silent_workers_get_no_more_work(make, right):
    c = make(2, 2, **QUICK)
    silent = c.prefill[0], c.decode[1]
    hang(c, *silent)
    try:
        for s in range(6):  # in turn they would go to all
            assert Ask(c, 100, seed=s).text() == right(100, seed=s)
        assert metric(c.url, "damask_router_retries_total") == 0
        fleet = json.loads(get(c.url + "/health")[1])["fleet"]
        assert {w["address"] for w in fleet if w["hangs"]} == {w.address for w in silent}
    finally:
        go_on(c, *silent)


def test_a_silent_worker_is_better_than_none(make, right):
    c = make(1, 1, **QUICK)
    hang(c, c.prefill[0])
    assert Ask(c, 150).text() == right(150)  # by the decode worker itself
    assert metric(c.url, "damask_router_prefills_forced_local_total") == 1
    go_on(c, c.prefill[0])
    hang(c, c.decode[0])
    ask = Ask(c, 120)
    go_on(c, c.decode[0])
    assert ask.text() == right(120)
