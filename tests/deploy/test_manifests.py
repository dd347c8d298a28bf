"""The Kubernetes manifests: valid, and true to what the programs take.

Structure is checked by kubernetes-validate; the rest here: every option in a ConfigMap is one the program
knows, GPUs equal tp x dp, grace periods outlast the drain limit, every pod has its three probes.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
KUSTOMIZE = set(K8S.rglob("kustomization.yaml"))
PATCHES = sorted(set((K8S / "secure").glob("*.yaml")) - KUSTOMIZE)
FILES = sorted(set(K8S.rglob("*.yaml")) - set(PATCHES) - KUSTOMIZE)
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
    text = (K8S / "base" / "router.yaml").read_text().replace("readinessProbe:", "readinesProbe:")
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
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"] and own["capabilities"] == {"drop": ["ALL"]}
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert ports["admin"] == config["admin-port"] and {container[f"{p}Probe"]["httpGet"]["port"] for p in (
        "startup", "liveness", "readiness")} == {"admin"}
    assert deployment["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(config["admin-port"])
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    if role == "router":
        assert gpus is None
    else:
        assert int(gpus) == config["tp"] * config.get("dp", 1)
        assert deployment["spec"]["template"]["metadata"]["labels"]["llm-d.ai/role"] == role


@pytest.mark.parametrize("topology", ["network", "same-node"])
def test_kustomizations_name_what_is_there(topology):
    """Each file of a folder is listed, and what is listed is there."""
    for folder, key in ((topology, "resources"), ("base", "resources"), ("secure", "patches")):
        listed = yaml.safe_load((K8S / folder / "kustomization.yaml").read_text())[key]
        names = {x["path"] if isinstance(x, dict) else x for x in listed}
        assert names - {"../base"} == {p.name for p in (K8S / folder).glob("*.yaml")} - {"kustomization.yaml"}
    if shutil.which("kubectl"):
        run = subprocess.run(["kubectl", "kustomize", K8S / topology], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        want = [d for f in ("base", topology) for p in (K8S / f).glob("*.yaml") if p not in KUSTOMIZE for d in documents(p)]
        by_name = lambda d: (d["kind"], d["metadata"]["name"])  # noqa: E731
        assert sorted(yaml.safe_load_all(run.stdout), key=by_name) == sorted(want, key=by_name)


def test_same_node_pods_share_namespaces():
    for path in [K8S / "same-node" / "decode.yaml", K8S / "same-node" / "prefill.yaml"]:
        spec = next(d for d in documents(path) if d["kind"] == "Deployment")["spec"]["template"]["spec"]
        assert spec["hostIPC"] and spec["hostPID"]
    prefill = next(d for d in documents(K8S / "same-node" / "prefill.yaml") if d["kind"] == "Deployment")
    term = prefill["spec"]["template"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert term["topologyKey"] == "kubernetes.io/hostname"


def merged(base, patch):
    """A strategic merge, as kubectl patch does it: entries of lists are found by their name, path or port."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {k: merged(base[k], patch[k]) if k in base and k in patch else patch.get(k, base.get(k))
                for k in base.keys() | patch.keys()}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(x, dict) for x in base + patch):
        key = next(k for k in ("mountPath", "port", "name") if all(k in x for x in base + patch))
        known = {x[key]: x for x in base}
        return [merged(x, next((p for p in patch if p[key] == x[key]), {})) for x in base] + \
            [p for p in patch if p[key] not in known]
    return patch


@pytest.mark.parametrize("topology", ["network", "same-node"])
@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_secure_patches(topology, patch, tmp_path):
    """Valid on both topologies; every option is one of the program; every file lies in a mounted Secret."""
    kind, role = ("Service", "router") if patch.stem == "service" else ("Deployment", patch.stem)
    source = K8S / "base" / "router.yaml" if role == "router" else K8S / topology / f"{role}.yaml"
    base = next(d for d in documents(source) if d["kind"] == kind)
    change, = documents(patch)
    whole = merged(base, change)
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(whole))
    tool = pathlib.Path(sys.executable).parent / "kubernetes-validate"
    run = subprocess.run([tool, "--strict", tmp_path / "whole.yaml"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    if kind == "Service":
        assert {p["name"]: p.get("appProtocol") for p in whole["spec"]["ports"]} == {"http": None, "grpc": "https"}
        return
    container, = whole["spec"]["template"]["spec"]["containers"]
    assert container["image"] and container["startupProbe"]["failureThreshold"], "the patch has lost the rest"
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in whole["spec"]["template"]["spec"]["volumes"]}
    given = change["spec"]["template"]["spec"]["containers"][0]["env"]
    for e in given:
        if e["value"].startswith("/"):
            assert "secret" in volumes[mounts[os.path.dirname(e["value"])]], e
    env = {**os.environ, **{e["name"]: e["value"] for e in given}}
    needed = ["--decode", "d:1", "--vocab", "v"] if role == "router" else ["--model", "m"]
    run = subprocess.run([BUILD / PROGRAM[role], *needed, "--dump-config"], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    dumped = yaml.safe_load(run.stdout)
    prefix = f"DAMASK_{role.upper()}_"
    for e in given:
        assert dumped[e["name"][len(prefix):].lower().replace("_", "-")] == e["value"], e


def test_metrics_of_the_page_exist():
    text = (ROOT / "deploy" / "README.md").read_text()
    named = set(re.findall(r"`((?:damask_|vllm:)[a-z_]+)`", text))
    sources = "".join(p.read_text() for folder in ("common/worker", "router", "prefill", "decode")
                      for p in (ROOT / folder).glob("*.c"))
    assert len(named) > 10
    assert {n for n in named if f'"{n}"' not in sources} == set()
