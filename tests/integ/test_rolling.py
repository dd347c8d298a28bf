"""A rolling restart of every worker and of one of two routers, under load: no request fails.

Each process is told to end (SIGTERM), ends what it has, and is started again. Clients reach the routers as through
a service: a moment after a router's end has begun nothing new goes there, and a refused connection is tried at the
other one.
"""

import random

import pytest

from cluster import Cluster
from conftest import pools_balance
from crowd import Crowd, speck_model


@pytest.fixture
def two_routers(build):
    with Cluster(build, speck_model(build), prefill=2, decode=2, routers=2, name="rolling", threads=1,
                 router_args=["--drain-settle", "2s"], decode_args=["--local-prefill-below", "64"]) as c:
        yield c


@pytest.fixture
def alone(build):
    with Cluster(build, speck_model(build), prefill=0, decode=1, name="rolling-alone", threads=1,
                 decode_args=["--local-prefill-below", "max"]) as c:
        yield c


@pytest.mark.timeout(400)
def test_rolling_restart(two_routers, alone):
    c = two_routers
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    plan = []
    for i, p in enumerate(c.prefill + c.decode + c.routers[:1]):
        plan += [(2 + 4 * i, "term", p), (2 + 4 * i, "start", p)]
    crowd = Crowd(c, alone, seconds=26, seed=seed, clients=12, faults=plan, max_prompt=500, ill_behaved=False)
    report = crowd.run()
    print(dict(report.counts), report.faults)
    assert report.violations == []
    assert set(report.counts) == {"answer"}
    assert report.counts["answer"] >= 24
    assert len(report.faults) == len(plan)
    for w in c.prefill + c.decode:
        pools_balance(w)
