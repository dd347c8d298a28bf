"""The gRPC server as a foreign client sees it: Python's grpcio with stubs made from proto/, against the
small test server of tests/unit/rpc (rpc_test_server)."""

import importlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time

import grpc
import pytest
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))


@pytest.fixture(scope="module")
def pb(tmp_path_factory):
    """The generated modules, by name."""
    out = tmp_path_factory.mktemp("stubs")
    names = ["damask_worker", "grpc_health"]
    args = ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}", f"--grpc_python_out={out}"]
    assert protoc.main(args + [f"{n}.proto" for n in names]) == 0
    sys.path.insert(0, str(out))
    try:
        yield {f"{n}{s}": importlib.import_module(f"{n}{s}")
               for n in names for s in ("_pb2", "_pb2_grpc")}
    finally:
        sys.path.remove(str(out))


class Server:
    def __init__(self):
        self.popen = subprocess.Popen([BUILD / "tests" / "unit" / "rpc" / "rpc_test_server"],
                                      stdout=subprocess.PIPE, text=True)
        self.target = f"127.0.0.1:{int(self.popen.stdout.readline())}"
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(self.target, options=options)

    def bidi(self, path):
        """A call of bytes in both directions."""
        return self.channel.stream_stream(path)

    def stop(self):
        self.popen.send_signal(signal.SIGTERM)
        out, _ = self.popen.communicate(timeout=10)
        return self.popen.returncode, out


@pytest.fixture
def server():
    s = Server()
    yield s
    s.channel.close()
    if s.popen.poll() is None:
        status, out = s.stop()
        assert status == 0, out  # every stream that was opened has been closed


class Feed:
    """Requests of a stream, one by one, until closed."""

    def __init__(self, *first):
        self.queue = queue.Queue()
        for item in first:
            self.queue.put(item)

    def send(self, item):
        self.queue.put(item)

    def close(self):
        self.queue.put(None)

    def __iter__(self):
        return iter(self.queue.get, None)


def code_of(call):
    with pytest.raises(grpc.RpcError) as e:
        list(call)
    return e.value.code(), e.value.details()


def test_health_check(server, pb):
    stub = pb["grpc_health_pb2_grpc"].HealthStub(server.channel)
    ask = pb["grpc_health_pb2"].HealthCheckRequest
    for service in ("", "damask.v1.Worker", "test.Test", "readiness", "liveness"):
        assert stub.Check(ask(service=service), timeout=5).status == 1
    with pytest.raises(grpc.RpcError) as e:
        stub.Check(ask(service="nobody"), timeout=5)
    assert e.value.code() == grpc.StatusCode.NOT_FOUND
    for service in ("damask.v1.Worker\0", "\0", "a" * 200):  # no name is taken for its beginning
        with pytest.raises(grpc.RpcError) as e:
            stub.Check(ask(service=service), timeout=5)
        assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_health_watch_follows(server, pb):
    stub = pb["grpc_health_pb2_grpc"].HealthStub(server.channel)
    watch = stub.Watch(pb["grpc_health_pb2"].HealthCheckRequest(service="damask.v1.Worker"), timeout=20)
    assert next(watch).status == 1
    server.popen.send_signal(signal.SIGUSR1)
    assert next(watch).status == 2
    assert stub.Check(pb["grpc_health_pb2"].HealthCheckRequest(), timeout=5).status == 2
    assert stub.Check(pb["grpc_health_pb2"].HealthCheckRequest(service="liveness"), timeout=5).status == 1
    server.popen.send_signal(signal.SIGUSR2)
    assert next(watch).status == 1
    watch.cancel()


def router_message(pb, **body):
    return pb["damask_worker_pb2"].RouterMessage(**body)


def connect(server, pb, feed):
    return pb["damask_worker_pb2_grpc"].WorkerStub(server.channel).Connect(iter(feed), timeout=20)


def generate(pb, prompt, **fields):
    w = pb["damask_worker_pb2"]
    fields.setdefault("sampling", w.Sampling(top_p=1))
    return router_message(pb, generate=w.Generate(id=w.RequestId(hi=1, lo=2, attempt=3), prompt=prompt,
                                                  max_tokens=fields.pop("max_tokens", 8), **fields))


def test_connect_stream(server, pb):
    w = pb["damask_worker_pb2"]
    feed = Feed(router_message(pb, hello=w.RouterHello(version=1, router_id="py", incarnation=9)))
    call = connect(server, pb, feed)
    hello = next(call)
    assert hello.incarnation == 77
    assert hello.events[0].hello.worker_id == "py"
    assert hello.events[0].hello.role == w.ROLE_DECODE

    feed.send(generate(pb, [1, 2, 999]))
    message = next(call)
    tokens, finished = message.events[0].tokens, message.events[1].finished
    assert list(tokens.ids) == [1, 2, 999]
    assert (tokens.id.hi, tokens.id.lo, tokens.id.attempt) == (1, 2, 3)
    assert finished.reason == w.FINISH_LENGTH and finished.n_tokens == 3

    feed.send(generate(pb, [1, 1000]))
    failed = next(call).events[0].failed
    assert failed.code == w.FAILURE_INVALID
    assert failed.text == "prompt token 1 is 1000, but the vocabulary ends at 999"
    feed.send(generate(pb, [1], sampling=w.Sampling(top_p=1, temperature=float("nan"))))
    assert "temperature is nan" in next(call).events[0].failed.text
    feed.send(generate(pb, [1] * 100))
    assert "100 tokens" in next(call).events[0].failed.text

    feed.close()  # half-close: the stream ends well
    assert list(call) == []
    assert call.code() == grpc.StatusCode.OK


def test_connect_refuses_what_is_no_message(server, pb):
    call = server.bidi("/damask.v1.Worker/Connect")(iter([b"\xff\xff"]), timeout=5)
    code, text = code_of(call)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "not a RouterMessage" in text
    w = pb["damask_worker_pb2"]
    code, text = code_of(connect(server, pb, [router_message(pb, cancel=w.Cancel())]))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "cancel has no request id" in text


def test_connect_ignores_what_a_later_version_adds(server, pb):
    w = pb["damask_worker_pb2"]
    hello = router_message(pb, hello=w.RouterHello(version=1, router_id="x")).SerializeToString()
    later = hello + b"\xa2\x06\x03abc"  # field 100 of the message
    call = server.bidi("/damask.v1.Worker/Connect")(iter([later]), timeout=5)
    assert w.WorkerMessage.FromString(next(call)).events[0].hello.worker_id == "x"


def test_echo_many_and_half_close(server):
    messages = [bytes([i % 256]) * (i % 700) for i in range(2000)]
    assert list(server.bidi("/test.Test/Echo")(iter(messages), timeout=20)) == messages
    call = server.bidi("/test.Test/Burst")(iter([b"5000"]), timeout=20)
    assert [int(m) for m in call] == list(range(5000))


def test_status_deadline_cancel_unimplemented(server):
    code, text = code_of(server.bidi("/test.Test/Fail")(iter([b"me"]), timeout=5))
    assert code == grpc.StatusCode.NOT_FOUND and text == "no such thing: me"
    begin = time.monotonic()
    code, _ = code_of(server.bidi("/test.Test/Hold")(iter([]), timeout=0.3))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.25 < time.monotonic() - begin < 10
    call = server.bidi("/test.Test/Hold")(iter(Feed()), timeout=20)
    time.sleep(0.1)
    call.cancel()
    assert code_of(call)[0] == grpc.StatusCode.CANCELLED
    for path in ("/test.Test/Nothing", "/nobody.Nothing/Here"):
        assert code_of(server.bidi(path)(iter([b"x"]), timeout=5))[0] == grpc.StatusCode.UNIMPLEMENTED


def test_metadata(server):
    call = server.bidi("/test.Test/Metadata")
    assert next(call(iter(Feed(b"")), timeout=5, metadata=[("x-test", "value 1")])) == b"value 1"
    assert next(call(iter(Feed(b"")), timeout=5)) == b"none"


def test_too_large_and_compressed_messages_are_refused(server):
    code, _ = code_of(server.bidi("/test.Test/Echo")(iter([b"x" * (4 << 20) + b"y"]), timeout=10))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    call = server.channel.stream_stream("/test.Test/Echo")
    code, _ = code_of(call(iter([b"x" * 100000]), timeout=10, compression=grpc.Compression.Gzip))
    assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


def test_killed_server_is_noticed(server):
    feed = Feed(b"x")
    call = server.bidi("/test.Test/Echo")(iter(feed), timeout=20)
    assert next(call) == b"x"
    begin = time.monotonic()
    server.popen.kill()
    assert code_of(call)[0] == grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - begin < 10
    server.popen.wait()


def test_sigterm_closes_open_streams(server):
    call = server.bidi("/test.Test/Echo")(iter(Feed(b"x")), timeout=20)
    assert next(call) == b"x"
    status, out = server.stop()
    assert status == 0 and "opened 1 closed 1" in out
    assert code_of(call)[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
