"""Workers without a model (damask mock): the real protocol, answers that depend on the request only, and the
speed that was asked for."""

import json
import queue
import signal
import subprocess
import time
import urllib.request

import grpc
import pytest

import fake_worker
from cluster import Cluster
from conftest import metric, pools_balance
from test_faults import wait_for

STEP_MS = 10


def mocks(build, name, prefill, below, prefill_args=(), decode_args=()):
    return Cluster(build, "mock", mock=True, prefill=prefill, decode=1, name=name,
                   prefill_args=["--prompt-token-us", "1", *prefill_args],
                   decode_args=["--step-us", STEP_MS * 1000, "--prompt-token-us", "1",
                                "--local-prefill-below", below, *decode_args])


@pytest.fixture(scope="module")
def split(build):
    with mocks(build, "mock-split", 1, "0") as c:
        yield c


@pytest.fixture(scope="module")
def alone(build):
    with mocks(build, "mock-alone", 0, "max") as c:
        yield c


def post(cluster, path, **body):
    request = urllib.request.Request(cluster.url + path, json.dumps({"model": cluster.model_name, **body}).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize("length", [1, 2, 64, 129, 700, 5000])
def test_split_equals_alone(split, alone, length):
    prompt = [(i * 7919 + length) % 190000 for i in range(length)]
    want = post(alone, "/v1/completions", prompt=prompt, max_tokens=12)["choices"][0]["text"]
    for _ in range(2):  # the second time from the prefix cache
        got = post(split, "/v1/completions", prompt=prompt, max_tokens=12)
        assert got["choices"][0]["text"] == want
        assert got["usage"]["completion_tokens"] == 12
    for worker in split.prefill + split.decode + alone.decode:
        pools_balance(worker)


def test_mixed_pools_equal_alone(build, alone):
    """Prompts in one format, steps in another; a mock's words are the same in each."""
    with mocks(build, "mock-mixed", 1, "256", ["--experts", "fp8"], ["--prompt-experts", "fp8"]) as mixed:
        for length in (1, 129, 700):
            prompt = [(i * 7919 + length) % 190000 for i in range(length)]
            want = post(alone, "/v1/completions", prompt=prompt, max_tokens=12)["choices"][0]["text"]
            for _ in range(2):
                assert post(mixed, "/v1/completions", prompt=prompt, max_tokens=12)["choices"][0]["text"] == want
        assert metric(mixed.url, "damask_router_prefills_forced_local_total") == 0
        assert metric(mixed.url, 'damask_router_prefills_total{where="prefill"}') >= 2
        for worker in mixed.prefill + mixed.decode:
            pools_balance(worker)


def test_a_conversation_is_answered_in_the_final_channel(split):
    answer = post(split, "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=12)
    message = answer["choices"][0]["message"]
    assert len(message["content"].split()) == 9  # three more tokens name the channel
    assert not message.get("tool_calls")


def test_a_step_takes_its_time(alone):
    start = time.monotonic()
    post(alone, "/v1/completions", prompt="time", max_tokens=30)
    assert time.monotonic() - start >= 30 * STEP_MS / 1000


def test_a_router_that_reads_late_gets_the_last_words(build):
    """The worker has drained; what its router has not read, the end of an answer with it, keeps it from ending."""
    pb, stubs = fake_worker._generate("damask_worker")
    messages = queue.Queue()
    with Cluster(build, "mock", mock=True, decode=1, name="mock-late", decode_args=["--local-prefill-below", "max"]) as c:
        worker = c.decode[0]
        with grpc.insecure_channel(worker.address, options=[("grpc.http2.lookahead_bytes", 64),
                                                            ("grpc.http2.bdp_probe", 0)]) as channel:
            call = stubs.WorkerStub(channel).Connect(iter(messages.get, None))
            messages.put(pb.RouterMessage(hello=pb.RouterHello(version=1, router_id="late", incarnation=1)))
            incarnation = next(call).incarnation
            messages.put(pb.RouterMessage(worker_incarnation=incarnation, generate=pb.Generate(
                id=pb.RequestId(lo=1), prompt=range(9), max_tokens=500, sampling=pb.Sampling(top_p=1))))
            while not any(e.HasField("tokens") for e in next(call).events):
                pass
            worker.signal(signal.SIGTERM)
            wait_for(lambda: "drained" in worker.log_tail(20))
            time.sleep(0.5)
            assert worker.popen.poll() is None, "it ended before its router had read"
            events = [e for batch in call for e in batch.events]
            assert any(e.HasField("finished") for e in events) and call.code() == grpc.StatusCode.OK
            assert worker.popen.wait(10) == 0 and "cut off" not in worker.log_tail(20)


@pytest.mark.parametrize("args, says", [(["decode", "--tp", "2"], "one rank"),
                                        (["prefill", "--page-bytes", "700"], "multiple of 512"),
                                        (["engine"], "usage")])
def test_refuses_what_a_mock_can_not_do(build, args, says):
    done = subprocess.run([build / "tools" / "damask", "mock", *args], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert says in done.stderr
