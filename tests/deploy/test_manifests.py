"""The Kubernetes manifests: valid, and true to what the programs take.

Structure is checked by kubernetes-validate; the rest here: every option in a ConfigMap is one the program
knows, GPUs equal tp x dp, grace periods outlast the drain limit, every pod has its three probes.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
FILES = sorted(K8S.rglob("*.yaml"))
PROGRAM = {"router": "router/damask-router", "prefill": "prefill/damask-prefill",
           "decode": "decode/damask-decode"}


def documents(path):
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def pods():
    for path in FILES:
        config = {k: yaml.safe_load(v) for d in documents(path) if d["kind"] == "ConfigMap"
                  for k, v in d["data"].items()}
        for d in documents(path):
            if d["kind"] == "Deployment":
                role = d["metadata"]["labels"]["app.kubernetes.io/component"]
                yield pytest.param(role, d, config[f"{role}.yaml"], id=str(path.relative_to(K8S)))


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h)", str(text)).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(K8S)))
def test_valid(path):
    tool = pathlib.Path(sys.executable).parent / "kubernetes-validate"
    for version in ("1.37", "1.28"):
        run = subprocess.run([tool, "--strict", "-k", version, path], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_a_broken_manifest_is_found(tmp_path):
    text = (K8S / "router.yaml").read_text().replace("readinessProbe:", "readinesProbe:")
    (tmp_path / "bad.yaml").write_text(text)
    tool = pathlib.Path(sys.executable).parent / "kubernetes-validate"
    assert subprocess.run([tool, "--strict", tmp_path / "bad.yaml"], capture_output=True).returncode != 0


@pytest.mark.parametrize("role, deployment, config", pods())
def test_options_are_known(role, deployment, config, tmp_path):
    path = tmp_path / f"{role}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert command == [f"damask-{role}", "--config", f"/etc/damask/{role}.yaml"]
    run = subprocess.run([BUILD / PROGRAM[role], "--config", path, "--dump-config"],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    dumped = yaml.safe_load(run.stdout)
    for key, value in config.items():
        assert key in dumped, f"{key} is not in --dump-config"


@pytest.mark.parametrize("role, deployment, config", pods())
def test_pod(role, deployment, config):
    spec = deployment["spec"]["template"]["spec"]
    container = spec["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert "httpGet" in container[probe], probe
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    startup = container["startupProbe"]
    if role != "router":  # weights are loaded: ten minutes are not too long
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 600
    pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > seconds(config["drain-limit"]) + pre_stop
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    if role == "router":
        assert gpus is None
    else:
        assert int(gpus) == config["tp"] * config.get("dp", 1)
        assert deployment["spec"]["template"]["metadata"]["labels"]["llm-d.ai/role"] == role


def test_same_node_pods_share_namespaces():
    for path in sorted((K8S / "same-node").glob("*.yaml")):
        spec = next(d for d in documents(path) if d["kind"] == "Deployment")["spec"]["template"]["spec"]
        assert spec["hostIPC"] and spec["hostPID"]
    prefill = next(d for d in documents(K8S / "same-node" / "prefill.yaml") if d["kind"] == "Deployment")
    term = prefill["spec"]["template"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert term["topologyKey"] == "kubernetes.io/hostname"
