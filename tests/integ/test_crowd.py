"""64 clients for a minute, random lengths, some leave, some stop reading, workers are killed and come back."""

import os
import pathlib
import random
import subprocess
import time

import pytest

from cluster import Cluster
from conftest import pools_balance
from crowd import Crowd, open_files, resident_kib, speck_model

SECONDS = float(os.environ.get("DAMASK_CROWD_SECONDS", "60"))
PATIENCE = ["--transfer-budget", "240s"]
POOLS = ["--full-pages", "1024", "--window-pages", "512"]


@pytest.fixture
def crowd_cluster(build):
    with Cluster(build, speck_model(build), prefill=2, decode=2, name="crowd", threads=1,
                 prefill_args=POOLS + PATIENCE + ["--queue-budget", "240s"],
                 decode_args=POOLS + PATIENCE + ["--ticket-expiry", "240s", "--local-prefill-below", "64"],
                 router_args=["--queue-timeout", "240s"]) as c:
        yield c


@pytest.fixture
def alone(build):
    with Cluster(build, speck_model(build), prefill=0, decode=1, name="crowd-alone", threads=1,
                 decode_args=["--local-prefill-below", "max"]) as c:
        yield c


@pytest.mark.timeout(600)
def test_crowd(crowd_cluster, alone):
    c = crowd_cluster
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    t = SECONDS / 60
    files_before = {p.name: open_files(p.pid) for p in c.processes}
    report = Crowd(c, alone, seconds=SECONDS, seed=seed,
                   faults=[(15 * t, "kill", c.prefill[0]), (20 * t, "start", c.prefill[0]),
                           (35 * t, "kill", c.decode[0]), (40 * t, "start", c.decode[0])]).run()
    print(dict(report.counts), f"{report.n_compared} compared", dict(report.errors), report.faults)
    assert report.violations == []
    assert report.counts["answer"] >= 64
    assert report.counts["left"] > 0
    for w in c.prefill + c.decode:
        pools_balance(w, 60)
    for p in c.processes:
        # Two sockets for each worker of the other pool, and probes that end in this moment.
        assert open_files(p.pid) <= files_before[p.name] + 2 * 2 + 4, f"{p.name} holds open files"
    # Those that lived all the time: what is resident has stopped growing, but for pages touched the first time.
    for p in (c.prefill[1], c.decode[1], c.routers[0]):
        rss = [found[p.name]["rss"] for at, found in report.samples if at > SECONDS / 2 and p.name in found]
        pages = 0 if p in c.routers else (1024 + 512) * 8 * 16
        assert max(rss) - rss[0] <= 16384 + pages, f"{p.name} grew from {rss[0]} to {max(rss)} KiB"


def test_a_process_that_has_ended_is_not_sampled():
    """It is still listed until somebody asks for its status, without memory."""
    with subprocess.Popen(["true"]) as ended:
        while "State:\tZ" not in pathlib.Path(f"/proc/{ended.pid}/status").read_text():
            time.sleep(0.01)
        with pytest.raises(ProcessLookupError):
            resident_kib(ended.pid)
