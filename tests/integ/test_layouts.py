"""Layouts of real processes: whatever the ranks of the two pools, answers and their log-probabilities are those of
one worker with one rank. Every pair of layouts is walked through in one process (test_heart_model.c); here are the
ones that matter most, with pages that travel between processes, and what a refused layout says."""

import concurrent.futures
import json
import re
import subprocess

import pytest

from cluster import Cluster, get
from conftest import pools_balance
from test_equality import KINDS, answer, ids

# name: prefill tp, decode tp, decode dp, transport
LAYOUTS = {
    "tp1-to-ep4-tp4": (1, 4, 1, "tcp"),
    "tp8-to-ep4-tp4": (8, 4, 1, "shm"),
    "tp8-to-ep4-tp2": (8, 2, 2, "tcp"),
    "tp2-to-ep8-tp1": (2, 1, 8, "tcp"),
}
LENGTHS = [2, 65, 200, 513]


@pytest.fixture(scope="module")
def wanted(build, model):
    """What one worker with one rank answers: {(length, kind): answer}."""
    c = Cluster(build, model, prefill=0, decode=1, name="layouts-alone", decode_args=["--local-prefill-below", "max"])
    with c:
        return {(n, kind): answer(c, ids(n, n), **KINDS[kind])[0] for n in LENGTHS for kind in KINDS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_changes_nothing(build, model, wanted, name):
    prefill_tp, tp, dp, transport = LAYOUTS[name]
    c = Cluster(build, model, prefill=1, decode=1, prefill_tp=prefill_tp, decode_tp=tp, decode_dp=dp,
                transport=transport, name=f"layouts-{name}", decode_args=["--local-prefill-below", "60"])
    with c, concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        for _ in range(2):  # the second time with what the caches hold
            together = {key: pool.submit(answer, c, ids(key[0], key[0]), **KINDS[key[1]]) for key in wanted}
            for key, future in together.items():
                assert future.result()[0] == wanted[key], f"{name}: {key}"
        state = json.loads(get(c.decode[0].admin + "/state")[1])
        assert len(state["groups"]) == dp
        used = sum(g["full"]["cached"] > 0 for g in state["groups"])
        assert used >= min(dp, 4), f"{used} of {dp} groups had a sequence: {state['groups']}"
        for worker in c.prefill + c.decode:
            pools_balance(worker)


def test_pools_by_a_share_of_the_memory(build, model, wanted):
    share = ["--kv-memory", "2%"]
    c = Cluster(build, model, prefill=1, decode=1, name="layouts-share", prefill_tp=2, prefill_args=share,
                decode_args=[*share, "--local-prefill-below", "60"])
    with c:
        for n, kind in wanted:
            assert answer(c, ids(n, n), **KINDS[kind])[0] == wanted[n, kind]
        for worker in c.prefill + c.decode:
            pools = json.loads(get(worker.admin + "/state")[1])["pools"]
            said = re.search(r"kv-memory 2%: (\d+) full and (\d+) window pages in each group", worker.log_tail(100))
            assert [int(n) for n in said.groups()] == [pools["full"]["total"], pools["window"]["total"]]
            pools_balance(worker)


def test_a_share_that_is_too_small(build, model):
    p = Cluster(build, model, prefill=0, decode=1, name="layouts-small", decode_args=["--kv-memory", "0.01%"]).decode[0]
    p.start()
    assert p.popen.wait(30) == 1
    assert re.search(r"can not start: 0\.01% of the [\d.]+ GiB of rank 0 are 0\.0 GiB but the model and the smallest pools "
                     r"for 64 sequences take [\d.]+ GiB: give [\d.]+% or more\n$", p.log_tail(1))


@pytest.mark.parametrize("program, argv, sentence", [
    ("decode", ["--tp", "3"], "tp is 3 but must be 1, 2, 4 or 8"),
    ("decode", ["--tp", "4", "--dp", "4"], "tp 4 x dp 4 makes 16 ranks but a node has 8 at most"),
    ("prefill", ["--tp", "2", "--dp", "2"], "dp is 2 but a prefill worker has dp 1: run more workers instead"),
])
def test_refused_layouts(build, model, program, argv, sentence):
    r = subprocess.run([build / program / f"damask-{program}", "--model", model, *argv], capture_output=True,
                       text=True, timeout=30)
    assert (r.returncode, r.stderr) == (2, f"damask-{program}: {sentence}\n")
