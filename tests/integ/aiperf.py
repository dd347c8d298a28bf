"""aiperf, unmodified, against a cluster of the trained checkpoint: chat, completions and responses, streamed and whole.

By hand, for it brings 229 MB of its own: python3 -m venv V && V/bin/pip install aiperf==0.13.0, then
.deps/venv/bin/python tests/integ/aiperf.py V/bin/aiperf. docs/logs/aiperf.txt is a run.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from cluster import Cluster, tiny_model  # noqa: E402

RUNS = [["chat", "--streaming"], ["chat"], ["completions", "--streaming"], ["responses", "--streaming"]]
SHOWN = ("request_count", "error_request_count", "request_throughput", "time_to_first_token", "inter_token_latency",
         "request_latency", "output_token_throughput", "input_sequence_length", "output_sequence_length")


def run(aiperf, url, args):
    command = ["profile", "--model", "gpt-oss-tiny", "--url", url, "--endpoint-type", *args, "--tokenizer", "builtin",
               "--use-server-token-count", "--request-count", "20", "--concurrency", "4", "--isl", "64", "--osl", "16",
               "--ui", "none"]
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run([aiperf, *command, "--artifact-dir", out], capture_output=True, text=True,
                              env={**os.environ, "TIKTOKEN_CACHE_DIR": str(ROOT / ".deps" / "vocab")})
        print("$ aiperf", *command, "--artifact-dir A")
        print("exit status", done.returncode)
        if done.returncode != 0:
            print((done.stdout + done.stderr)[-4000:])
            return False
        report = json.loads(next(pathlib.Path(out).rglob("profile_export_aiperf.json")).read_text())
    for name in SHOWN:
        value = report.get(name)
        if value:
            print(f"  {name}: " + " ".join(f"{k}={value[k]:.6g}" for k in ("avg", "p50", "p99") if value.get(k) is not None),
                  value.get("unit", ""))
    errors = report.get("error_request_count") or {}
    return report["request_count"]["avg"] == 20 and not errors.get("avg")


def main():
    build = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
    with Cluster(build, tiny_model(build), name="aiperf") as c:
        good = [run(sys.argv[1], c.url, args) for args in RUNS]
    print("all requests answered" if all(good) else "some requests failed")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
