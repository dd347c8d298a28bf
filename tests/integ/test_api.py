"""The public APIs of a running cluster, by the clients that people use: openai's and grpcio's.

The model has random weights, so the tests look at form and at equality (streamed and whole, HTTP and gRPC,
the same seed twice), never at sense.
"""

import concurrent.futures
import http.client
import importlib
import json
import socket
import sys
import time
import urllib.parse

import grpc
import openai
import pytest
from grpc_tools import protoc

from conftest import ROOT, pools_balance

MODEL = "gpt-oss-tiny"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a town.",
                                         "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}}


@pytest.fixture(scope="module")
def client(cluster):
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def frontend(cluster, tmp_path_factory):
    out = tmp_path_factory.mktemp("proto")
    assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}", f"--grpc_python_out={out}",
                        "damask_frontend.proto"]) == 0
    sys.path.insert(0, str(out))
    pb = importlib.import_module("damask_frontend_pb2")
    stubs = importlib.import_module("damask_frontend_pb2_grpc")
    return pb, stubs.FrontendStub(grpc.insecure_channel(cluster.grpc))


def raw(cluster, method, path, body=None, headers=None):
    at = urllib.parse.urlparse(cluster.url)
    c = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
    c.request(method, path, body=json.dumps(body) if isinstance(body, (dict, list)) else body, headers=headers or {})
    r = c.getresponse()
    data = r.read()
    c.close()
    return r.status, {k.lower(): v for k, v in r.getheaders()}, data


def gather(stream):
    """Choices of a stream: content, reasoning, finish; and the last chunk's usage."""
    out, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for c in chunk.choices:
            o = out.setdefault(c.index, {"content": "", "reasoning": "", "finish": None, "roles": 0})
            assert o["finish"] is None
            o["roles"] += c.delta.role is not None
            o["content"] += c.delta.content or ""
            o["reasoning"] += getattr(c.delta, "reasoning", None) or ""
            o["finish"] = c.finish_reason
    return out, usage


def said(choice):
    return choice.message.content or "", getattr(choice.message, "reasoning", None) or "", choice.finish_reason


def test_stream_equals_whole(client):
    ask = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**ask)
    assert whole.object == "chat.completion" and whole.model == MODEL
    assert whole.usage.prompt_tokens > 60 and 0 < whole.usage.completion_tokens <= 40
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.completion_tokens_details.reasoning_tokens <= whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens <= whole.usage.prompt_tokens
    got, usage = gather(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
    assert (got[0]["content"], got[0]["reasoning"], got[0]["finish"]) == said(whole.choices[0])
    assert got[0]["roles"] == 1
    assert usage.completion_tokens == whole.usage.completion_tokens
    got, usage = gather(client.chat.completions.create(stream=True, **ask))
    assert usage is None


@pytest.mark.parametrize("seed", (42, -42))
def test_seed_and_choices(client, seed):
    ask = {"model": MODEL, "messages": HI, "temperature": 1, "max_tokens": 24, "n": 2}
    first = client.chat.completions.create(seed=seed, **ask)
    assert [c.index for c in first.choices] == [0, 1]
    assert said(first.choices[0]) != said(first.choices[1]), "choices of one request must differ"
    second = client.chat.completions.create(seed=seed, **ask)
    assert [said(c) for c in first.choices] == [said(c) for c in second.choices]
    other = client.chat.completions.create(seed=seed + 1, **ask)
    assert [said(c) for c in first.choices] != [said(c) for c in other.choices]
    got, usage = gather(client.chat.completions.create(seed=seed, stream=True,
                                                       stream_options={"include_usage": True}, **ask))
    assert [(got[i]["content"], got[i]["reasoning"], got[i]["finish"]) for i in (0, 1)] == [said(c) for c in first.choices]
    assert usage.prompt_tokens == first.usage.prompt_tokens
    assert usage.completion_tokens == first.usage.completion_tokens


def test_seed_under_load(client):
    """The same seed gives the same tokens, whatever else the workers do."""
    ask = {"model": MODEL, "messages": HI, "temperature": 1, "max_tokens": 32, "seed": 42}
    first = said(client.chat.completions.create(**ask).choices[0])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(client.chat.completions.create, model=MODEL, messages=HI, temperature=1, max_tokens=48,
                              seed=i) for i in range(8)]
        assert said(client.chat.completions.create(**ask).choices[0]) == first
        assert len({said(o.result().choices[0]) for o in others}) > 1


def test_scores_of_a_prompt_alone(client):
    """As an evaluation asks: the prompt's log-probabilities are those that it has in front of an answer."""
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    ask = {"model": MODEL, "prompt": [prompt, prompt[:3]], "echo": True, "logprobs": 2, "temperature": 0}
    alone = client.completions.create(max_tokens=0, **ask)
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (11, 0)
    longer = client.completions.create(max_tokens=2, **ask)
    for a, b, ids in zip(alone.choices, longer.choices, ask["prompt"]):
        n = len(ids)
        assert a.finish_reason == "length" and len(a.logprobs.tokens) == n < len(b.logprobs.tokens) and b.text.startswith(a.text)
        for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(a.logprobs, part) == getattr(b.logprobs, part)[:n]
    got = list(client.completions.create(max_tokens=0, stream=True, **ask))
    for i, choice in enumerate(alone.choices):
        chunks = [c.choices[0] for c in got if c.choices[0].index == i]
        assert "".join(c.text for c in chunks) == choice.text and chunks[-1].finish_reason == "length"
        assert sum((c.logprobs.token_logprobs for c in chunks), []) == choice.logprobs.token_logprobs
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=0)


def test_max_tokens_ends_by_length(client):
    r = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=3)
    assert r.usage.completion_tokens <= 3
    assert r.choices[0].finish_reason == "length" or r.usage.completion_tokens < 3
    r = client.completions.create(model=MODEL, prompt=[5, 6, 7], temperature=0, max_tokens=1)
    assert r.usage.completion_tokens == 1


def test_completions(client):
    ask = {"model": MODEL, "prompt": list(range(100, 300)), "temperature": 0, "max_tokens": 8, "logprobs": 3,
           "extra_body": {"ignore_eos": True}}
    r = client.completions.create(**ask)
    c = r.choices[0]
    assert r.usage.prompt_tokens == 200 and r.usage.completion_tokens == 8
    assert len(c.logprobs.tokens) == len(c.logprobs.token_logprobs) == len(c.logprobs.top_logprobs)
    assert all(lp <= 0 for lp in c.logprobs.token_logprobs)
    assert all(max(top.values()) == pytest.approx(lp) for lp, top in zip(c.logprobs.token_logprobs, c.logprobs.top_logprobs))
    text = "".join(x.choices[0].text for x in client.completions.create(stream=True, **ask))
    assert text == c.text
    echoed = client.completions.create(**{**ask, "echo": True})
    e = echoed.choices[0]
    assert e.text.endswith(c.text)
    assert len(e.logprobs.tokens) == 200 + len(c.logprobs.tokens)
    assert e.logprobs.token_logprobs[0] is None
    assert e.logprobs.token_logprobs[200:] == pytest.approx(c.logprobs.token_logprobs, abs=1e-4)
    words = client.completions.create(model=MODEL, prompt="The quick brown fox", temperature=0, max_tokens=4)
    assert words.usage.prompt_tokens == 4


def test_stop_string(client):
    ask = {"model": MODEL, "prompt": "The quick brown fox", "temperature": 0, "max_tokens": 32,
           "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**ask).choices[0].text
    assert len(text) > 4
    stop = text[len(text) // 2:len(text) // 2 + 3]
    r = client.completions.create(stop=[stop], **ask)
    assert r.choices[0].text == text[:text.index(stop)]
    assert r.choices[0].finish_reason == "stop"
    streamed = list(client.completions.create(stop=[stop], stream=True, **ask))
    assert "".join(c.choices[0].text for c in streamed) == text[:text.index(stop)]


def test_chat_logprobs(client):
    r = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=24, logprobs=True,
                                       top_logprobs=2)
    lps = r.choices[0].logprobs
    for entry in lps.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2 and entry.bytes
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
    if r.choices[0].message.content:
        joined = bytes(b for entry in lps.content for b in entry.bytes).decode("utf-8", "replace")
        assert joined.strip() and len(lps.content) <= r.usage.completion_tokens


def test_tools_are_accepted_and_history_goes_back(client):
    r = client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL], max_tokens=8, temperature=0)
    assert r.choices[0].finish_reason in ("stop", "length", "tool_calls")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town":"Ulm"}'}}
    with_history = client.chat.completions.create(
        model=MODEL, tools=[TOOL], max_tokens=8, temperature=0, reasoning_effort="low",
        messages=HI + [{"role": "assistant", "tool_calls": [call]},
                       {"role": "tool", "tool_call_id": "call_1", "content": "rain"}])
    assert with_history.usage.prompt_tokens > r.usage.prompt_tokens


def test_models(client, cluster):
    models = client.models.list().data
    assert [m.id for m in models] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


@pytest.mark.parametrize("fields, param", [
    ({"temperature": 9}, "temperature"), ({"n": 0}, "n"), ({"top_p": 0}, "top_p"), ({"stop": ""}, "stop"),
    ({"tool_choice": "required"}, "tool_choice"), ({"max_tokens": 0}, "max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"), ({"messages": []}, "messages"),
    ({"reasoning_effort": "minimal"}, "reasoning_effort"),
])
def test_bad_requests(client, fields, param):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as e:
            client.chat.completions.create(**{"model": MODEL, "messages": HI, "stream": stream, "extra_body": fields})
        assert e.value.body["param"] == param and e.value.body["type"] == "invalid_request_error"


def test_other_errors(client, cluster):
    with pytest.raises(openai.NotFoundError) as e:
        client.chat.completions.create(model="nothing", messages=HI)
    assert e.value.body["code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=MODEL, messages=HI, max_tokens=100_000_000)
    assert e.value.body["code"] == "context_length_exceeded"
    status, headers, data = raw(cluster, "GET", "/v1/chat/completions")
    assert status == 405 and headers["allow"] == "POST, OPTIONS" and json.loads(data)["error"]
    status, _, data = raw(cluster, "GET", "/v1/nothing")
    assert status == 404 and json.loads(data)["error"]
    status, _, data = raw(cluster, "POST", "/v1/chat/completions", "{:")
    assert status == 400 and json.loads(data)["error"]["type"] == "invalid_request_error"
    at = urllib.parse.urlparse(cluster.url)
    c = http.client.HTTPConnection(at.hostname, at.port, timeout=10)
    c.putrequest("POST", "/v1/chat/completions")
    c.putheader("content-length", str(1 << 30))
    c.endheaders()
    assert c.getresponse().status == 413


def test_request_id_and_timeline(cluster):
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Hi {time.time()} " + "word " * 600}],
            "max_tokens": 4}
    status, headers, _ = raw(cluster, "POST", "/v1/chat/completions", body,
                             {"x-request-id": "test-77", "x-damask-timeline": "1"})
    assert status == 200 and headers["x-request-id"] == "test-77"
    timeline = dict(part.split("=") for part in headers["x-damask-timeline"].split())
    assert float(timeline["total_ms"]) >= float(timeline["first_token_ms"]) > 0
    assert int(timeline["transfer_bytes"]) > 0, "a long prompt must have come from a prefill worker"
    status, headers, data = raw(cluster, "POST", "/v1/chat/completions", {**body, "stream": True},
                                {"x-damask-timeline": "1"})
    assert len(headers["x-request-id"]) == 32
    blocks = data.decode().split("\n\n")
    assert blocks[-2] == "data: [DONE]" and blocks[-3].startswith(": timeline tokenise_ms=")


def test_clients_that_leave(cluster):
    at = urllib.parse.urlparse(cluster.url)
    body = json.dumps({"model": MODEL, "messages": HI, "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
    for _ in range(3):
        s = socket.create_connection((at.hostname, at.port))
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        s.recv(1000)
        s.close()
    for worker in cluster.decode + cluster.prefill:
        pools_balance(worker)


def test_grpc_says_what_http_says(client, frontend):
    pb, stub = frontend
    r = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=24)
    events = list(stub.Chat(pb.ChatRequest(model=MODEL, temperature=0, max_tokens=24,
                                           messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")])))
    deltas = [e.delta for e in events if e.WhichOneof("kind") == "delta"]
    finish = {pb.CHAT_FINISH_STOP: "stop", pb.CHAT_FINISH_LENGTH: "length", pb.CHAT_FINISH_TOOL_CALLS: "tool_calls"}
    assert ("".join(d.content for d in deltas), "".join(d.reasoning for d in deltas),
            finish[[d.finish for d in deltas if d.WhichOneof("kind") == "finish"][0]]) == said(r.choices[0])
    assert events[-1].ended.usage.completion_tokens == r.usage.completion_tokens
    assert [m.id for m in stub.ListModels(pb.ListModelsRequest()).models] == [MODEL]
    with pytest.raises(grpc.RpcError) as e:
        list(stub.Chat(pb.ChatRequest(model="nothing", messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")])))
    assert e.value.code() == grpc.StatusCode.NOT_FOUND


def test_grpc_cancel(cluster, frontend):
    pb, stub = frontend
    call = stub.Chat(pb.ChatRequest(model=MODEL, max_tokens=2000,
                                    messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")]))
    for _ in range(2):
        next(call, None)
    call.cancel()
    for worker in cluster.decode + cluster.prefill:
        pools_balance(worker)
