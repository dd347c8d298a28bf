"""No network, a root that can not be written to, no home: everything starts and answers.

The cluster runs in namespaces of its own: one interface, lo, and no route; whatever would ask a name server or
fetch a vocabulary would be counted by the kernel as a packet without a route.
"""

import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
sys.path.insert(0, str(ROOT / "tools"))
from cluster import VOCAB, tiny_model  # noqa: E402

INSIDE = f"""
import json, os, sys, urllib.request
sys.path.insert(0, {str(ROOT / "tools")!r})
from cluster import Cluster, tiny_model
try:
    open({str(ROOT / "written")!r}, "w")
    sys.exit("the root can be written to")
except OSError:
    pass
def no_routes():
    names, values = [l.split()[1:] for l in open("/proc/self/net/snmp") if l.startswith("Ip:")]
    return int(dict(zip(names, values))["OutNoRoutes"])
with Cluster({str(BUILD)!r}, tiny_model({str(BUILD)!r}), name="offline", threads=1,
             decode_args=["--local-prefill-below", "0"]) as c:
    body = json.dumps({{"model": c.model_name, "temperature": 0, "max_tokens": 200,
                        "messages": [{{"role": "user", "content": "What is 47 + 35?"}}]}}).encode()
    request = urllib.request.Request(c.url + "/v1/chat/completions", body, {{"content-type": "application/json"}})
    print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
print("without a route:", no_routes())
"""


def test_starts_and_answers_without_network_or_a_writable_root():
    tiny_model(BUILD)
    (BUILD / "cluster").mkdir(exist_ok=True)
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("no right to make namespaces here")
    script = ("ip link set lo up && mount --make-rprivate / && mount -t tmpfs tmpfs \"$1\" && "
              "mount -o remount,bind,ro / && exec \"$2\" -c \"$3\"")
    run = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", script, "sh", BUILD / "cluster", sys.executable,
                          INSIDE], capture_output=True, text=True, timeout=120,
                         env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"})
    assert run.returncode == 0, run.stdout + run.stderr
    assert "82" in run.stdout and "without a route: 0" in run.stdout, run.stdout


def test_a_missing_vocabulary_ends_the_start_at_once(tmp_path):
    begin = time.monotonic()
    run = subprocess.run([BUILD / "router" / "damask-router", "--http-port", "0", "--decode", "127.0.0.1:9",
                          "--vocab", tmp_path / "none.tiktoken"], capture_output=True, text=True, timeout=20)
    assert run.returncode != 0 and "none.tiktoken" in run.stderr
    assert time.monotonic() - begin < 10
    assert VOCAB.exists()  # and it is there because set-up put it there, not a program at run time
