"""Clusters of real processes for the integration tests.

DAMASK_BUILD names the build folder. A cluster's logs stay in BUILD/cluster/NAME (BUILD/cluster/gwN/NAME where
pytest -n shares the files among processes); on a failure their ends are part of the report. After each test the
page pools of every worker must balance.
"""

import json
import os
import pathlib
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from cluster import Cluster, get, random_model, tiny_model  # noqa: E402

# How pages travel in tests that try each way; with --backend cuda also "cuda".
TRANSPORTS = ["tcp", "shm"]

BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))


# The files that take longest, in this order: with pytest -n they begin first, so that none is left alone at the end.
LONG = ["test_equality", "test_failures", "test_crowd", "test_faults", "test_security", "test_convert", "test_tokenizer",
        "test_router", "test_traffic", "test_harmony", "test_handover_states", "test_rolling", "test_answers",
        "test_layouts", "test_structured", "test_agent"]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_addoption(parser):
    parser.addoption("--backend", default="cpu", choices=["cpu", "ref", "cuda"],
                     help="of all workers with a model; tests/gpu/test.sh names the tests that suit a GPU")


def pytest_configure(config):
    Cluster.backend = config.getoption("--backend")
    if hasattr(config, "workerinput"):  # one of several processes that share the tests
        Cluster.folder = f"cluster/{config.workerinput['workerid']}"
    if Cluster.backend == "cuda":
        TRANSPORTS.append("cuda")


@pytest.fixture(scope="session")
def build():
    return BUILD


@pytest.fixture(scope="session")
def model(build):
    return random_model(build)


@pytest.fixture(scope="session")
def trained(build):
    """The checkpoint that answers."""
    return tiny_model(build)


@pytest.fixture(scope="session")
def cluster(build, model):
    """Two prefill and two decode workers behind one router: the cluster that most tests share."""
    c = Cluster(build, model, prefill=2, decode=2, name="tests", threads=1)
    with c:
        yield c


@pytest.fixture
def workers():
    """Makes workers of paper, and ends them."""
    from fake_worker import FakeWorker

    made = []

    def make(role, **kw):
        made.append(FakeWorker(role, **kw))
        return made[-1]

    yield make
    for w in made:
        w.kill()


@pytest.fixture
def pair(workers):
    """One decode and one prefill worker of paper, and a router."""
    from router_test import HELLO, Router, says

    d, p = workers("decode", script=says(HELLO)), workers("prefill")
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        yield r, d, p


@pytest.fixture(scope="module")
def paper_cluster():
    from fake_worker import FakeWorker
    from router_test import Router

    d, p = FakeWorker("decode", grammar=1), FakeWorker("prefill")
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        yield r, d, p
    d.kill()
    p.kill()


@pytest.fixture
def paper(paper_cluster):
    """As pair, but one for all tests of a file, which kill nobody; each begins with clean workers."""
    from router_test import HELLO, says

    r, d, p = paper_cluster
    d.script, d.on_generate, p.on_prefill, d.token_delay_s = says(HELLO), None, None, 0.0
    with d.lock, p.lock:
        d.seen.clear()
        p.seen.clear()
        d.cancels.clear()
    return r, d, p


def metric(base, name):
    """The value of a metric at an address, summed over its labels."""
    text = get(base + "/metrics")[1]
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
              if line.startswith(name) and line[len(name)] in " {"]
    assert values, f"no metric {name}"
    return sum(values)


def pools_balance(worker, limit_s=10):
    """Waits until the worker is idle, then checks free + cached + leased + draining == total."""
    deadline = time.monotonic() + limit_s
    while True:
        status, text = get(worker.admin + "/state")
        assert status == 200, f"{worker.name}: /state answered {status}"
        state = json.loads(text)
        for name in ("full", "window"):
            pool = state["pools"][name]
            assert pool["free"] + pool["cached"] + pool["leased"] + pool["draining"] == pool["total"], (
                f"{worker.name}: {name} pool {pool}")
        for name in ("full", "window") if "groups" in state else ():
            for group in state["groups"]:
                pool = group[name]
                assert pool["free"] + pool["cached"] + pool["leased"] + pool["draining"] == pool["total"], (
                    f"{worker.name}: {name} pool of a group {pool}")
            for part in ("total", "free", "cached", "leased", "draining"):
                assert sum(g[name][part] for g in state["groups"]) == state["pools"][name][part], (
                    f"{worker.name}: the {name} pools of the groups do not make the whole: {text}")
        idle = all(state["pools"][n]["leased"] == 0 and state["pools"][n]["draining"] == 0
                   for n in ("full", "window"))
        if idle:
            return
        assert time.monotonic() < deadline, f"{worker.name} still holds pages when idle: {text}"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def workers_balance_after(request):
    yield
    if "cluster" in request.fixturenames:
        c = request.getfixturevalue("cluster")
        for worker in c.prefill + c.decode:
            if worker.alive():
                pools_balance(worker)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    c = item.funcargs.get("cluster") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and c is not None:
        for p in c.processes:
            report.sections.append((f"end of {p.log}", p.log_tail(10)))
