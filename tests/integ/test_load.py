"""The load generator: what it sends is what a trace says, what it reports is what happened."""

import html.parser
import json
import subprocess

import pytest

from cluster import Cluster
from conftest import metric


@pytest.fixture(scope="module")
def mocks(build):
    with Cluster(build, "mock", mock=True, prefill=0, decode=1, name="load",
                 decode_args=["--local-prefill-below", "max", "--step-us", "5000", "--prompt-token-us", "1"]) as c:
        yield c


def run(build, cluster, folder, *args):
    out, page = folder / "report.json", folder / "report.html"
    done = subprocess.run([build / "bench" / "load" / "bench_load", "--port", cluster.url.rsplit(":", 1)[1],
                           "--json", out, "--html", page, "--commit", "test", *map(str, args)],
                          capture_output=True, text=True, timeout=100)
    return done, json.loads(out.read_text()), page.read_text()


def test_a_trace_is_replayed(build, mocks, tmp_path):
    trace = tmp_path / "trace.jsonl"
    # Three with the same first block (the first one ends behind it, so that it is kept), one with another; over
    # 300 ms, since the trace's clock runs twice as fast.
    rows = [{"timestamp": t, "input_length": n, "output_length": m, "hash_ids": ids}
            for t, n, m, ids in ((0, 513, 5, [1, 2]), (200, 700, 1, [1, 3]), (400, 520, 9, [1, 4]), (600, 30, 2, [5]))]
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    hits = metric(mocks.decode[0].admin, "vllm:prefix_cache_hits_total")
    done, report, _ = run(build, mocks, tmp_path, "--trace", trace, "--requests", 0, "--speedup", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report["requests"], report["answered"]) == (4, 4)
    assert report["tokens_in"] == 513 + 700 + 520 + 30  # every word is one token
    assert report["tokens_out"] == 5 + 1 + 9 + 2
    assert report["seconds"] >= 0.3
    assert metric(mocks.decode[0].admin, "vllm:prefix_cache_hits_total") - hits == 2 * 512  # the shared block


def test_limits_decide_what_is_good(build, mocks, tmp_path):
    args = ("--requests", 8, "--concurrency", 4, "--input", 20, "--output", 10)
    done, report, page = run(build, mocks, tmp_path, *args, "--ttft-limit", "20s", "--tpot-limit-ms", 5000)
    assert report["good"] == 8 and "100.0% of all requests" in done.stdout
    assert report["tpot_ms"]["p50"] >= 4.5  # a step takes 5 ms
    _, report, _ = run(build, mocks, tmp_path, *args, "--ttft-limit", "20s", "--tpot-limit-ms", 1)
    assert report["good"] == 0
    parser = html.parser.HTMLParser()
    parser.feed(page)
    assert page.count("<svg") == 3 and "http://" not in page and "src=" not in page


def test_open_loop_keeps_its_rate(build, mocks, tmp_path):
    _, report, _ = run(build, mocks, tmp_path, "--requests", 20, "--rate", 20, "--even", "--input", 5, "--output", 1)
    assert 0.95 <= report["seconds"] < 5
    assert report["answered"] == 20


def test_failures_are_told(build, mocks, tmp_path):
    done, report, _ = run(build, mocks, tmp_path, "--requests", 2, "--concurrency", 1, "--model", "another")
    assert done.returncode == 1 and report["answered"] == 0
    assert "another" in done.stdout.split("failed: request 0: ")[1]


@pytest.mark.parametrize("line, says", [('{"timestamp":1,"output_length":1}', "input_length"), ("nonsense", "line 1"),
                                        ("", "has no requests")])
def test_a_bad_trace_is_refused(build, mocks, tmp_path, line, says):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line + "\n")
    done = subprocess.run([build / "bench" / "load" / "bench_load", "--trace", trace], capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr
