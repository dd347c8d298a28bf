"""Processes of a local cluster see the GPUs that they are given, and no others."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
from cluster import Cluster, Process  # noqa: E402


@pytest.mark.parametrize("devices, env, seen", [
    (None, {"CUDA_VISIBLE_DEVICES": "3"}, "3"), ("1,0", {"CUDA_VISIBLE_DEVICES": "3"}, "1,0"), (0, {}, "0")])
def test_devices(tmp_path, devices, env, seen):
    p = Process("p", ["/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], tmp_path / "log", devices=devices)
    p.start(env)
    assert p.popen.wait(10) == 0
    assert p.log_tail() == seen + "\n"


def test_pools_have_devices_of_their_own(tmp_path):
    c = Cluster(tmp_path, "model", prefill=2, decode=1, prefill_devices="2,3", decode_devices="0")
    assert [p.devices for p in c.processes] == ["2,3", "2,3", "0", None]
