"""The router alone, in front of workers made of paper: what it says to clients, what it says to workers,
and what it does when they refuse, hang, die or lie.
"""

import http.client
import json
import os
import pathlib
import socket
import subprocess
import threading
import time

import grpc
import pytest

import fake_worker
from cluster import free_port
from fake_worker import CALL, RETURN, FakeWorker, key_of, pb
from router_test import HELLO, LONG, MODEL, ROOT, TOOLS, TWO_CALLS, Router, events, gather, harmony, ids, says

# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("text, content, reasoning, finish", [
    (HELLO, "Hello there!", "think", "stop"),
    ("<|channel|>final<|message|>Hi<|return|>", "Hi", "", "stop"),
    ("<|channel|>analysis<|message|>only this", None, "only this", "length"),
    ("<|channel|>commentary<|message|>pre<|end|><|start|>assistant<|channel|>final<|message|>post<|return|>",
     "pre\npost", "", "stop"),
])
def test_stream_equals_whole(pair, text, content, reasoning, finish):
    r, d, _ = pair
    d.script = says(text)
    status, headers, whole = r.chat()
    assert status == 200 and headers["content-type"].startswith("application/json")
    choice = whole["choices"][0]
    assert choice["message"]["role"] == "assistant" and "content" in choice["message"]
    assert choice["message"]["content"] == content
    assert (choice["message"].get("reasoning") or "") == reasoning
    assert (choice["message"].get("reasoning_content") or "") == reasoning
    assert choice["finish_reason"] == finish
    payloads, _ = events(r.chat(stream=True, stream_options={"include_usage": True})[2])
    got = gather(payloads)[0]
    assert (got["content"], got["reasoning"], got["finish"]) == (content or "", reasoning, finish)
    assert got["role"] == 1
    assert all(c["usage"] is None for c in payloads[:-1])
    assert payloads[-1]["choices"] == [] and payloads[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 68
    assert whole["usage"]["completion_tokens"] == len(ids(text))
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= len(ids(text))
    assert len({c["id"] for c in payloads}) == 1 and payloads[0]["id"] != whole["id"]


def test_no_usage_unless_asked(pair):
    r, _, _ = pair
    payloads, comments = events(r.chat(stream=True)[2])
    assert all("usage" not in c and c["choices"] for c in payloads)
    assert comments == []


def test_tool_calls(pair):
    r, d, _ = pair
    d.script = says(TWO_CALLS)
    _, _, whole = r.chat(tools=TOOLS)
    calls = whole["choices"][0]["message"]["tool_calls"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [("a", '{"i":1}'), ("b", '{"i":2}')]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    payloads, _ = events(r.chat(tools=TOOLS, stream=True)[2])
    got = gather(payloads)[0]
    assert [c[1:] for c in got["calls"]] == [["a", '{"i":1}'], ["b", '{"i":2}']]
    assert got["finish"] == "tool_calls"
    assert len({c["id"] for c in calls} | {c[0] for c in got["calls"]}) == 4
    # The history goes back in: the call's header is rendered again, and its result finds its function.
    status, _, _ = r.chat(tools=TOOLS, messages=[
        {"role": "user", "content": "Hi"}, whole["choices"][0]["message"],
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "2"},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "1"}])
    assert status == 200
    prompt = harmony.decode(list(d.messages("generate")[-1].prompt))
    assert prompt.index("functions.b to=assistant") < prompt.index("functions.a to=assistant")


def test_first_call_only(pair):
    r, d, _ = pair
    d.script, d.token_delay_s = says(TWO_CALLS), 0.01
    _, _, whole = r.chat(tools=TOOLS, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in whole["choices"][0]["message"]["tool_calls"]] == ["a"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    d.wait_for(lambda: d.cancels)
    assert whole["usage"]["completion_tokens"] < len(ids(TWO_CALLS))


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(pair, stream):
    r, d, _ = pair
    d.script = says("<|channel|>analysis<|message|>write a song<|end|><|start|>assistant<|channel|>final<|message|>"
                    "La la song la la la la la la la la la<|return|>")
    d.token_delay_s = 0.01
    _, _, got = r.chat(stop=["so" + "ng", "zzz"], stream=stream)
    if stream:
        got = gather(events(got)[0])[0]
        assert (got["reasoning"], got["content"], got["finish"]) == ("write a song", "La la ", "stop")
    else:
        m = got["choices"][0]["message"]
        assert (m["reasoning"], m["content"]) == ("write a song", "La la ")
        assert got["choices"][0]["finish_reason"] == "stop"
        assert got["usage"]["completion_tokens"] < len(d.script(None, 0))
    d.wait_for(lambda: d.cancels)


def test_stop_string_that_never_comes_is_given_back(pair):
    r, d, _ = pair
    d.script = says("<|channel|>final<|message|>Hello there!<|return|>")
    _, _, got = r.chat(stop=["!!!", "there!?"])
    assert got["choices"][0]["message"]["content"] == "Hello there!"


def test_logprobs(pair):
    r, d, _ = pair
    d.script = lambda g, c: [200005, 17196, 200008, 12194, 31446, 244, 0, 200002]
    _, _, got = r.chat(logprobs=True, top_logprobs=2)
    entries = got["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in entries] == [[72, 105], [240, 159, 146], [150], [33]]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == got["choices"][0]["message"]["content"] == "Hi💖!"
    assert all(e["logprob"] == -0.5 and len(e["top_logprobs"]) == 2 for e in entries)
    text = r.chat(logprobs=True, top_logprobs=2, stream=True)[2]
    assert "�" not in "".join(c["choices"][0]["delta"].get("content", "") for c in events(text)[0])
    assert gather(events(text)[0])[0]["lps"] == entries
    # Held back and cut text takes its tokens along.
    _, _, got = r.chat(logprobs=True, stop=["!"])
    assert len(got["choices"][0]["logprobs"]["content"]) == 3


def test_choices(pair):
    r, d, _ = pair
    d.script = lambda g, c: ids(f"<|channel|>final<|message|>{'x' * (c + 1)} choice {c}<|return|>")
    payloads, _ = events(r.chat(n=3, stream=True, stream_options={"include_usage": True}, seed=7)[2])
    got = gather(payloads)
    assert sorted(got) == [0, 1, 2]
    assert all(got[c]["content"].endswith(f"choice {c}") and got[c]["role"] == 1 and got[c]["finish"] == "stop"
               for c in got)
    assert payloads[-1]["usage"]["prompt_tokens"] == 68
    assert payloads[-1]["usage"]["completion_tokens"] == sum(len(d.script(None, c)) for c in range(3))
    assert [m.n for m in d.messages("generate")] == [3]
    _, _, whole = r.chat(n=2)
    assert [c["index"] for c in whole["choices"]] == [0, 1]


def test_what_the_worker_is_asked(pair):
    r, d, p = pair
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    r.chat({"x-request-id": "my.id-1", "traceparent": trace}, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=42,
           max_tokens=9, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.1, logit_bias={"7": -100},
           stop_token_ids=[11], min_tokens=2, cache_salt="s", priority=-3)
    g, f = d.messages("generate")[0], p.messages("prefill")[0]
    s = g.sampling
    assert (s.temperature, s.top_p, s.top_k, s.seed) == (0, 0.5, 0, 42)
    assert s.repetition_penalty == pytest.approx(1.1) and s.min_p == pytest.approx(0.1)
    assert list(s.bias_ids) == [7] and list(s.bias_values) == [-100]
    assert (g.max_tokens, g.min_tokens, g.n, g.cache_salt, g.priority) == (9, 2, 1, b"s", -3)
    assert {RETURN, CALL, 11} <= set(g.stop_ids)
    assert g.traceparent == f.traceparent == trace and g.request_id == f.request_id == "my.id-1"
    assert g.prompt == f.prompt and len(g.prompt) == 68 and g.id == f.id and g.id.attempt == 1
    assert f.cache_salt == b"s" and f.priority == -3
    # No seed given: the router makes one.
    r.chat()
    r.chat()
    assert len({m.sampling.seed for m in d.messages("generate")}) == 3
    assert d.messages("generate")[-1].max_tokens == 4096 - 68


def test_request_ids_and_timeline(pair):
    r, _, _ = pair
    _, headers, _ = r.chat({"x-request-id": "abc-1", "x-damask-timeline": "1"})
    assert headers["x-request-id"] == "abc-1"
    assert "tokenise_ms=" in headers["x-damask-timeline"] and "transfer_gb_s=" in headers["x-damask-timeline"]
    _, headers, _ = r.chat({"x-request-id": "bad id"})
    assert len(headers["x-request-id"]) == 32 and "x-damask-timeline" not in headers
    _, comments = events(r.chat({"x-damask-timeline": "1"}, stream=True)[2])
    assert len(comments) == 1 and comments[0].startswith("timeline tokenise_ms=")
    assert "req=abc-1" in r.log_text()


def test_an_id_that_can_not_be_logged_is_refused(pair):
    r, _, _ = pair
    for bad, status in (("x" * 129, 400), ("x" * 10240, 400), ("a\x01b", 400), ("x" * 128, 200)):
        c = socket.create_connection(("127.0.0.1", r.port))
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
        c.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {bad}\r\nConnection: close\r\n"
                  f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        got = b""
        while more := c.recv(65536):
            got += more
        assert int(got.split()[1]) == status, (bad[:20], len(bad), got[:300])
        if status == 400:
            assert b'"error"' in got
    stub = grpc_stub(r)
    with pytest.raises(grpc.RpcError) as e:
        list(stub.Chat(grpc_chat(), metadata=[("x-request-id", "x" * 129)]))
    assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "129" in e.value.details()


def test_what_ends_an_answer(pair):
    """End of answer and end of call stop; the end of a message does not, and nothing else is sent along."""
    r, d, _ = pair
    d.script = says("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>")
    assert r.chat()[2]["choices"][0]["message"]["content"] == "b"
    d.script = says('<|channel|>commentary to=functions.a json<|message|>{}<|call|>')
    assert r.chat(tools=TOOLS)[2]["choices"][0]["finish_reason"] == "tool_calls"
    for g in d.messages("generate"):
        assert {RETURN, CALL} <= set(g.stop_ids) <= {RETURN, CALL, 199999}


def test_ends_that_are_ignored(pair):
    """With ignore_eos the model's own ends are no stop ids, and what follows them is an answer too."""
    r, d, _ = pair
    d.script = says("<|channel|>final<|message|>one<|return|><|start|>assistant<|channel|>final<|message|>two<|end|>")
    d.finish = pb.FINISH_LENGTH
    for stream in (False, True):
        _, _, got = r.chat(ignore_eos=True, stop_token_ids=[7], max_tokens=14, stream=stream)
        if stream:
            chunks = [p["choices"][0] for p in events(got)[0] if p["choices"]]
            assert "".join(c["delta"].get("content") or "" for c in chunks) == "one\ntwo"
        else:
            assert got["choices"][0]["message"]["content"] == "one\ntwo"
    d.script = lambda g, c: ids("one") + [199999] + ids(" two") + [RETURN]
    _, _, data = r.request("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "ignore_eos": True, "max_tokens": 4})
    assert json.loads(data)["choices"][0]["text"] == "one two"
    assert [(list(g.stop_ids), g.ignore_eos) for g in d.messages("generate")] == [([7], True)] * 2 + [([], True)]


def test_cached_tokens(pair):
    r, d, p = pair
    d.on_generate = lambda w, session, g: bool(w.pool.submit(w.generate, session, g, 64))
    _, _, got = r.chat()
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_completions(pair):
    r, d, _ = pair
    d.script = lambda g, c: ids(" brown fox") + [199999]
    def ask(**fields):
        status, _, data = r.request("POST", "/v1/completions", {"model": MODEL, **fields})
        assert status == 200, data
        return json.loads(data)
    got = ask(prompt="The quick", max_tokens=5)
    assert got["object"] == "text_completion" and got["choices"][0]["text"] == " brown fox"
    assert got["choices"][0]["finish_reason"] == "stop"
    assert list(d.messages("generate")[-1].prompt) == ids("The quick")
    assert ask(prompt=["The quick"])["choices"] == got["choices"]
    assert ask(prompt=ids("The quick"))["choices"] == got["choices"]
    assert d.messages("generate")[-1].max_tokens == 16
    got = ask(prompt="The quick", echo=True, logprobs=2, n=2)
    for c in got["choices"]:
        assert c["text"] == "The quick brown fox"
        lp = c["logprobs"]
        assert lp["tokens"] == ["The", " quick", " brown", " fox"] and lp["text_offset"] == [0, 3, 9, 15]
        assert lp["token_logprobs"] == [None, -1.0, -0.5, -0.5]
        assert lp["top_logprobs"][0] is None and lp["top_logprobs"][2] == {" brown": -0.5, "!": -3.0}
    assert d.messages("generate")[-1].echo_logprobs
    assert ask(prompt=[976], echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    _, _, data = r.request("POST", "/v1/completions", {"model": MODEL, "prompt": "The quick", "stream": True})
    payloads, _ = events(data.decode())
    assert "".join(c["choices"][0]["text"] for c in payloads) == " brown fox"
    assert [c["choices"][0]["finish_reason"] for c in payloads] == [None, None, "stop"]
    for bad in ({"prompt": ""}, {"prompt": []}, {"prompt": ["a", ""]}, {"prompt": [1, "a"]}, {"prompt": [300000]},
                {"prompt": "a", "suffix": "b"}, {"prompt": "a", "logprobs": True}, {}):
        status, _, data = r.request("POST", "/v1/completions", {"model": MODEL, **bad})
        assert status == 400 and json.loads(data)["error"]["type"] == "invalid_request_error", bad


# ---------------------------------------------------------------- errors


def test_errors(pair):
    r, d, _ = pair
    def check(status, code, method, path, body=None, headers=None):
        got, h, data = r.request(method, path, body, headers)
        error = json.loads(data)["error"]
        assert (got, error["code"]) == (status, code), data
        assert set(error) == {"message", "type", "param", "code"}
        return h, error
    chat = "/v1/chat/completions"
    check(404, "not_found", "GET", "/v1/nothing")
    check(404, "not_found", "POST", "/v2/x", "{}")
    h, _ = check(405, "method_not_allowed", "GET", chat)
    assert h["allow"] == "POST, OPTIONS"
    h, _ = check(405, "method_not_allowed", "DELETE", "/v1/models")
    assert h["allow"].split(", ")[0] == "GET"
    check(404, "model_not_found", "GET", "/v1/models/..%2f..%2fetc%2fpasswd")
    for model in ("../../etc/passwd", "/models/gpt", "x" * 200):
        _, e = check(404, "model_not_found", "POST", chat, {"model": model, "messages": [{"role": "user", "content": "x"}]})
        assert len(e["message"]) < 150
    for body in ("{:", "", "null", "[]", '{"a":"\xff"}'.encode("latin1"), "{}x", "[" * 100000):
        check(400, None, "POST", chat, body)
    h = http.client.HTTPConnection("127.0.0.1", r.port, timeout=10)
    h.putrequest("POST", chat)
    h.putheader("content-length", str(9 << 20))
    h.endheaders()
    answer = h.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    _, e = check(400, None, "POST", chat, {"model": MODEL, "messages": [], "stream": True})
    assert e["param"] == "messages"
    assert not d.messages("generate"), "a refused request reached a worker"
    assert r.chat()[0] == 200


def test_context_length(pair):
    r, d, _ = pair
    status, _, got = r.chat(max_tokens=4090)
    assert status == 400 and got["error"]["code"] == "context_length_exceeded"
    numbers = {"".join(c for c in w if c.isdigit()) for w in got["error"]["message"].split()} - {""}
    assert numbers == {"4096", "68", "4090"}
    assert r.chat(max_tokens=4028)[0] == 200
    assert r.chat()[0] == 200
    assert [g.max_tokens for g in d.messages("generate")] == [4028, 4028]
    status, _, got = r.chat(messages=[{"role": "user", "content": "a " * 5000}])
    assert status == 400 and got["error"]["code"] == "context_length_exceeded"


def test_models_and_health(pair):
    r, _, _ = pair
    status, _, data = r.get("/v1/models")
    model = json.loads(data)["data"][0]
    assert status == 200 and model["id"] == MODEL and model["max_model_len"] == 4096
    assert json.loads(r.get(f"/v1/models/{MODEL}")[2]) == model
    assert r.get("/livez")[0] == 200 and r.get("/readyz")[0] == 200
    assert json.loads(r.get("/health")[2])["workers"] == {"prefill": 1, "decode": 1}


def test_api_keys(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d], args=["--api-keys", "k1,key2"], key="k1") as r:
        r.key = None
        assert r.chat()[0] == 401
        for bad in ("Bearer k2", "Bearer K1", "Bearer key", "Bearer key22", "k1", "Bearer "):
            assert r.chat({"authorization": bad})[0] == 401, bad
        assert r.get("/v1/models")[0] == 401 and r.get("/readyz")[0] == 200
        assert r.chat({"authorization": "Bearer key2"})[0] == 200
        with pytest.raises(grpc.RpcError) as e:
            list(grpc_stub(r).Chat(grpc_chat()))
        assert e.value.code() == grpc.StatusCode.UNAUTHENTICATED
        list(grpc_stub(r).Chat(grpc_chat(), metadata=[("authorization", "Bearer k1")]))


def test_metrics(pair):
    r, _, _ = pair
    before = r.get("/metrics")[2].decode()
    r.chat()
    r.chat(messages=[])
    after = r.get("/metrics")[2].decode()
    for text in (before, after):
        lint = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
        assert lint.returncode in (0, 3) and "error" not in lint.stderr.lower(), lint.stderr
    names = lambda text: {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}
    assert names(before) == names(after), "a series appeared later than at start"
    assert r.metric("vllm:time_to_first_token_seconds_count") == 1
    assert r.metric('vllm:request_success_total{model_name="%s",finished_reason="stop"' % MODEL) == 1
    assert r.metric("vllm:prompt_tokens_total") == 68
    assert r.metric("vllm:generation_tokens_total") == len(ids(HELLO))
    assert r.metric('damask_router_requests_total{api="chat",status="4xx"') == 1
    assert r.metric("vllm:num_requests_running") == 0 and r.metric("damask_router_open_requests") == 0
    assert r.metric("damask_router_tokens_in_flight") == 0
    assert r.metric("process_resident_memory_bytes") > 1e6 and r.metric("process_open_fds") > 3
    assert abs(r.metric("process_start_time_seconds") - time.time()) < 600


# ---------------------------------------------------------------- workers that fail


def test_refused_claim_is_retried_elsewhere(workers):
    d = workers("decode", script=says(HELLO))
    p = [workers("prefill"), workers("prefill")]
    def refuse(w, session, m):
        if m.id.attempt == 1:
            session.send(failed=pb.Failed(id=m.id, code=pb.FAILURE_REFUSED, text="D said no"))
            # What an old attempt still says must change nothing.
            refused.append(w)
            return True
        return False
    refused = []
    p[0].on_prefill = p[1].on_prefill = refuse
    with Router(prefill=p, decode=[d]) as r:
        r.wait_ready({"prefill": 2, "decode": 1})
        status, _, got = r.chat(temperature=1)
        assert status == 200 and got["choices"][0]["message"]["content"] == "Hello there!"
        first, second = d.messages("generate")
        assert (first.id.attempt, second.id.attempt) == (1, 2) and first.id.hi == second.id.hi
        assert first.sampling.seed == second.sampling.seed, "the seed must be kept over attempts"
        other = p[1] if refused[0] is p[0] else p[0]
        assert [m.id.attempt for m in other.messages("prefill")] == [2], "the retry must avoid the P that was refused"
        assert key_of(first.id) in d.cancels and key_of(first.id) in refused[0].cancels
        # Cancel of the old attempt comes before the new reservation on the same stream.
        kinds = [m.WhichOneof("body") for m in d.seen if m.WhichOneof("body") != "hello"]
        assert kinds[:3] == ["generate", "cancel", "generate"]
        assert r.metric('damask_router_retries_total{cause="refused"') == 1


def test_two_failures_are_the_end(workers):
    d, p = workers("decode", script=says(HELLO)), workers("prefill")
    p.on_prefill = lambda w, session, m: session.send(failed=pb.Failed(id=m.id, code=pb.FAILURE_PEER, text="no")) or True
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        for stream in (False, True):
            status, headers, got = r.chat(stream=stream)
            got = json.loads(got) if isinstance(got, str) else got
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert got["error"]["type"] == "server_error"
        assert len(d.messages("generate")) == 4
        p.on_prefill = None
        assert r.chat()[0] == 200


def test_stale_events_change_nothing(workers):
    d, p = workers("decode", script=says(HELLO)), workers("prefill")
    def twice(w, session, g):
        if g.id.attempt == 1:
            session.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_INTERNAL, text="first try"))
            return True
        old = pb.RequestId(hi=g.id.hi, lo=g.id.lo, attempt=1)
        w.pool.submit(lambda: (
            session.send(reserved=pb.Reserved(id=old)),
            session.send(tokens=pb.Tokens(id=old, first_index=0, ids=ids("<|channel|>final<|message|>WRONG"))),
            session.send(finished=pb.Finished(id=old, reason=pb.FINISH_STOP, n_tokens=4)),
            session.send(failed=pb.Failed(id=old, code=pb.FAILURE_INTERNAL)),
            session.send_all([pb.WorkerEvent(failed=pb.Failed(id=g.id, code=pb.FAILURE_INTERNAL))], incarnation=77),
            w.generate(session, g)))
        return True
    d.on_generate = twice
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        status, _, got = r.chat()
        assert status == 200 and got["choices"][0]["message"]["content"] == "Hello there!"
        assert r.metric("damask_router_stale_events_total") >= 5


def test_lost_tokens_are_never_an_answer(workers):
    d = workers("decode")
    def gap(w, session, g):
        session.send(reserved=pb.Reserved(id=g.id))
        session.send(tokens=pb.Tokens(id=g.id, first_index=0, ids=[200005]))
        session.send(tokens=pb.Tokens(id=g.id, first_index=2, ids=[17196]))
        return True
    d.on_generate = gap
    with Router(decode=[d]) as r:
        assert r.chat()[0] == 502
        def short(w, session, g):
            session.send(reserved=pb.Reserved(id=g.id))
            session.send(tokens=pb.Tokens(id=g.id, first_index=0, ids=[200005]))
            session.send(finished=pb.Finished(id=g.id, reason=pb.FINISH_STOP, n_tokens=2))
            return True
        d.on_generate = short
        assert r.chat()[0] == 502


def test_prefill_worker_dies(workers):
    d = workers("decode", script=says(HELLO))
    p = [workers("prefill"), workers("prefill")]
    def die(w, session, m):
        dead.append(w)
        threading.Thread(target=w.kill).start()
        return True
    dead = []
    p[0].on_prefill = p[1].on_prefill = lambda w, session, m: die(w, session, m) if not dead else False
    with Router(prefill=p, decode=[d]) as r:
        r.wait_ready({"prefill": 2, "decode": 1})
        status, _, got = r.chat()
        assert status == 200 and got["choices"][0]["message"]["content"] == "Hello there!"
        reports = d.wait_for(lambda: d.messages("peer_report"))
        assert reports[0].peer_incarnation == dead[0].incarnation


@pytest.mark.parametrize("end", ["fails", "dies"])
def test_what_becomes_of_the_prefill_worker_later_is_nothing(workers, end):
    """The decode worker has the pages and decodes: its state decides."""
    d, p = workers("decode", script=says(HELLO), token_delay_s=0.05), workers("prefill")
    p.silent_end = True
    asked = []
    p.on_prefill = lambda w, session, m: asked.append((session, m.id))
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        got = []
        thread = threading.Thread(target=lambda: got.append(r.chat()))
        thread.start()
        d.wait_for(lambda: answering(r))
        session, id = asked[0]
        if end == "fails":
            session.send(failed=pb.Failed(id=id, code=pb.FAILURE_PEER, text="no answer from D"))
        else:
            p.kill()
        thread.join(10)
        status, _, answer = got[0]
        assert status == 200 and answer["choices"][0]["message"]["content"] == "Hello there!"
        assert len(d.messages("generate")) == 1 and r.metric("damask_router_retries_total") == 0
        assert d.cancels == []


def test_decode_worker_dies_before_the_first_token(workers):
    ds = [workers("decode", script=says(HELLO)), workers("decode", script=says(HELLO))]
    p = workers("prefill")
    dead = []
    def die(w, session, g):
        if dead:
            return False
        dead.append(w)
        threading.Thread(target=w.kill).start()
        return True
    for d in ds:
        d.on_generate = die
    with Router(prefill=[p], decode=ds) as r:
        r.wait_ready({"prefill": 1, "decode": 2})
        assert r.chat()[0] == 200


def answering(r, n=1):
    """The router has had the first tokens of n answers."""
    return r.metric("vllm:time_to_first_token_seconds_count") >= n


def test_decode_worker_dies_after_tokens(workers):
    d, p = workers("decode", script=says(LONG), token_delay_s=0.01), workers("prefill")
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        c = http.client.HTTPConnection("127.0.0.1", r.port, timeout=30)
        c.request("POST", "/v1/chat/completions", json.dumps({
            "model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}))
        answer = c.getresponse()
        assert answer.status == 200
        text = b""
        while text.count(b"data: ") < 10:
            text += answer.read1(4096)
        d.kill()
        start = time.monotonic()
        text += answer.read()
        assert time.monotonic() - start < 15
        payloads, _ = events(text.decode())
        assert payloads[-1]["error"]["type"] == "server_error" and payloads[-1]["error"]["code"]
        assert all(c["choices"][0]["finish_reason"] is None for c in payloads[:-1])
        assert len(d.messages("generate")) == 1, "no silent restart"


def test_whole_answer_of_a_dead_worker_is_an_error(workers):
    d = workers("decode", script=says(LONG), token_delay_s=0.01)
    with Router(decode=[d]) as r:
        threading.Thread(target=lambda: d.wait_for(lambda: answering(r)) and d.kill()).start()
        status, headers, got = r.chat()
        assert status == 503 and "retry-after" in headers and got["error"]["code"]


def test_priority_orders_those_that_wait(workers):
    """Lower is sooner; a request without one, or beyond the bound, keeps its place among its equals."""
    d = workers("decode", script=says(HELLO))
    gate = threading.Event()
    def full(w, session, g):
        if not gate.is_set():
            session.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_FULL, retry_after_ms=100, text="no pages"))
            return True
        return False
    d.on_generate = full
    with Router(decode=[d]) as r:
        asked = [("first", None), ("late", 3), ("next", 0), ("last", 99), ("soon", -2), ("last too", 10), ("soonest", -10)]
        threads = []
        for name, priority in asked:
            threads.append(threading.Thread(target=lambda n=name, p=priority: r.chat(
                messages=[{"role": "user", "content": n}], **({} if p is None else {"priority": p}))))
            threads[-1].start()
            d.wait_for(lambda: r.metric("vllm:num_requests_waiting") + r.metric("vllm:num_requests_running") == len(threads))
        n_before = len(d.messages("generate"))
        gate.set()
        for t in threads:
            t.join(10)
        got = []
        for g in d.messages("generate")[n_before:]:
            text = harmony.decode(list(g.prompt)).rsplit("<|start|>user<|message|>", 1)[1].split("<|end|>")[0]
            if text not in got:
                got.append(text)
        assert got == ["soonest", "soon", "first", "next", "late", "last", "last too"]


def test_full_worker_makes_requests_wait(workers):
    d, p = workers("decode", script=says(HELLO)), workers("prefill")
    def full(w, session, g):
        if len(w.messages("generate")) < 4:
            session.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_FULL, retry_after_ms=50, text="no pages"))
            return True
        return False
    d.on_generate = full
    with Router(prefill=[p], decode=[d], args=["--queue-timeout", "3s"]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        assert r.chat()[0] == 200
        attempts = [g.id.attempt for g in d.messages("generate")]
        assert attempts == [1, 2, 3, 4]
        d.on_generate = lambda w, s, g: s.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_FULL, retry_after_ms=50)) or True
        start = time.monotonic()
        status, headers, got = r.chat()
        assert status == 503 and "retry-after" in headers and 2.5 < time.monotonic() - start < 15
        assert got["error"]["code"] == "no_capacity"


def test_invalid_is_the_clients_fault(workers):
    d = workers("decode")
    d.on_generate = lambda w, s, g: s.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_INVALID, text="bias of a token that is none")) or True
    with Router(decode=[d]) as r:
        status, _, got = r.chat()
        assert status == 400 and got["error"]["message"] == "bias of a token that is none"
        assert len(d.messages("generate")) == 1


def test_hung_workers_have_a_budget(workers):
    d = [workers("decode", script=says(HELLO)), workers("decode", script=says(HELLO))]
    p = [workers("prefill"), workers("prefill")]
    hung = []
    def hang_once(w, *_):
        if not hung:
            hung.append(w)
            return True
        return False
    with Router(prefill=p, decode=d, args=["--reserve-timeout", "1500ms", "--prefill-timeout", "1500ms"]) as r:
        r.wait_ready({"prefill": 2, "decode": 2})
        for w in d:
            w.on_generate = hang_once
        assert r.chat()[0] == 200
        assert hung and [g.id.attempt for w in d if w is not hung[0] for g in w.messages("generate")] == [2]
        hung.clear()
        for w in d:
            w.on_generate = None
        for w in p:
            w.on_prefill = hang_once
        assert r.chat()[0] == 200
        assert hung and hung[0].cancels
        assert r.metric('damask_router_retries_total{cause="timeout"') == 2


def test_no_prefill_worker(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d]) as r:
        assert r.chat()[0] == 200
        assert d.messages("generate")[0].force_local
        assert r.metric("damask_router_prefills_forced_local_total") == 1
    with Router(decode=[d], args=["--local-prefill=false", "--queue-timeout", "300ms"], ready=False) as r:
        r.wait_log("worker=.* is up")
        assert r.get("/readyz")[0] == 503
        assert r.chat()[0] == 503


def test_numerics_must_fit(workers):
    d, p = workers("decode", script=says(HELLO)), workers("prefill", numerics="other")
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        assert r.chat()[0] == 200 and d.messages("generate")[0].force_local
        assert 'computes pages as "other"' in r.wait_log("fits no .* worker.*prompt-experts.*").group()
    with Router(prefill=[p], decode=[d], args=["--local-prefill=false", "--queue-timeout", "300ms"], ready=False) as r:
        r.wait_log("fits no .* worker")
        assert r.get("/readyz")[0] == 503
        status, headers, got = r.chat()
        assert (status, got["error"]["code"]) == (503, "worker_unavailable") and "retry-after" in headers
        assert not p.messages("prefill") and len(d.messages("generate")) == 1


def test_prompts_of_other_numerics_come_from_prefill_workers(workers):
    d = workers("decode", script=says(HELLO), prompt_numerics="fast")
    p = [workers("prefill"), workers("prefill", numerics="fast")]
    with Router(prefill=p, decode=[d]) as r:
        r.wait_ready({"prefill": 2, "decode": 1})
        for _ in range(3):
            assert r.chat()[0] == 200
        assert len(p[1].messages("prefill")) == 3 and not p[0].messages("prefill")
        assert not any(g.force_local for g in d.messages("generate"))
        told = {w["id"]: w.get("prompt_numerics") for w in json.loads(r.get("/health")[2])["fleet"]}
        assert told == {d.name: "fast", p[0].name: None, p[1].name: None}
        # The one that fits hangs: nobody else can do its work.
        p[1].sessions[0].send(load=pb.Load(stuck=True))
        settle(r, [d])
        assert r.chat()[0] == 200 and not d.messages("generate")[-1].force_local
        assert len(p[1].messages("prefill")) == 4 and not p[0].messages("prefill")


def test_prompts_of_other_numerics_wait_for_a_prefill_worker(workers):
    d = workers("decode", script=says(HELLO), prompt_numerics="fast")
    same, later = workers("prefill"), type("Later", (), {"address": f"127.0.0.1:{free_port()}"})
    with Router(prefill=[same], decode=[d], args=["--queue-timeout", "300ms"], ready=False) as r:
        r.wait_log("fits no .* worker")
        assert r.get("/readyz")[0] == 503 and json.loads(r.get("/health")[2])["workers"] == {"prefill": 1, "decode": 1}
        status, headers, got = r.chat()
        assert (status, got["error"]["code"]) == (503, "worker_unavailable") and "retry-after" in headers
        assert "prefill worker that fits" in got["error"]["message"]
        assert not d.messages("generate") and not same.messages("prefill")
        # A prompt that is scored is computed by the decode worker, all of it.
        ask = {"model": MODEL, "prompt": "The quick", "echo": True, "logprobs": 1}
        assert r.request("POST", "/v1/completions", ask)[0] == 200
        g, = d.messages("generate")
        assert g.echo_logprobs and not g.force_local
    with Router(prefill=[same, later], decode=[d], ready=False) as r:
        r.wait_log("fits no .* worker")
        got = []
        t = threading.Thread(target=lambda: got.append(r.chat()[0]))
        t.start()
        d.wait_for(lambda: r.metric("vllm:num_requests_waiting") == 1)
        p = workers("prefill", numerics="fast", port=int(later.address.rsplit(":", 1)[1]))
        t.join(30)
        assert got == [200] and len(p.messages("prefill")) == 1 and not same.messages("prefill")
        assert r.get("/readyz")[0] == 200
        p.kill()
        r.wait_log("its stream ended")
        assert r.get("/readyz")[0] == 503


def test_decode_worker_comes_back_with_other_formats(workers):
    d, p = workers("decode", script=says(HELLO)), workers("prefill")
    with Router(prefill=[p], decode=[d], args=["--queue-timeout", "300ms"]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        assert r.chat()[0] == 200 and len(p.messages("prefill")) == 1
        d.kill()
        r.wait_log("its stream ended")
        d = workers("decode", script=says(HELLO), port=d.port, numerics="steps", prompt_numerics="paper")
        r.wait_ready({"prefill": 1, "decode": 1})
        assert r.chat()[0] == 200 and len(p.messages("prefill")) == 2
        d.kill()
        d = workers("decode", script=says(HELLO), port=d.port, prompt_numerics="fast")
        r.wait_log('prompts as "fast"')
        assert r.get("/readyz")[0] == 503
        assert r.chat()[0] == 503 and not d.messages("generate")
        d.kill()
        d = workers("decode", script=says(HELLO), port=d.port, numerics="fast")
        r.wait_ready({"prefill": 1, "decode": 1})
        assert r.chat()[0] == 200 and d.messages("generate")[0].force_local
        assert len(p.messages("prefill")) == 2


def test_of_two_decode_workers_the_one_that_gets_its_prompts(workers):
    d = [workers("decode", script=says(HELLO), prompt_numerics=n) for n in ("fast", "other")]
    p = workers("prefill", numerics="other")
    with Router(prefill=[p], decode=d) as r:
        r.wait_ready({"prefill": 1, "decode": 2})
        for _ in range(4):
            assert r.chat()[0] == 200
        assert not d[0].messages("generate") and len(d[1].messages("generate")) == len(p.messages("prefill")) == 4


def test_hellos_that_do_not_fit(workers):
    good = workers("decode", script=says(HELLO))
    bad = [workers("decode", version=2), workers("decode", claim_role="prefill")]
    with Router(decode=[good] + bad) as r:
        r.wait_log("it speaks another version")
        r.wait_log("its role is not the one")
        assert json.loads(r.get("/health")[2])["workers"]["decode"] == 1
        assert r.metric("damask_router_hellos_refused_total") >= 2
    other = workers("prefill", model_id=(9, 9))
    with Router(decode=[good], prefill=[other]) as r:
        r.wait_log("its model is not the one")


def test_worker_comes_back(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d]) as r:
        assert r.chat()[0] == 200
        d.kill()
        r.wait_log("its stream ended")
        assert r.get("/readyz")[0] == 503
        again = workers("decode", script=says(HELLO), port=d.port)
        r.wait_ready({"prefill": 0, "decode": 1})
        assert r.chat()[0] == 200
        assert again.messages("generate")


def test_host_names_are_looked_up(workers):
    d = workers("decode", script=says(HELLO))
    name = type("Named", (), {"address": f"localhost:{d.port}"})
    with Router(decode=[name], args=["--resolve-every", "100ms"]) as r:
        fleet = json.loads(r.get("/health")[2])["fleet"]
        assert [w["address"] for w in fleet if w["up"]] == [d.address]
        assert r.chat()[0] == 200
    missing = type("Named", (), {"address": "nowhere.invalid:1"})
    with Router(decode=[d, missing]) as r:
        assert r.chat()[0] == 200
        r.wait_log("nowhere.invalid of workers can not be looked up")


def test_draining_worker_gets_no_new_work(workers):
    d = [workers("decode", script=says(HELLO)), workers("decode", script=says(HELLO))]
    with Router(decode=d) as r:
        r.wait_ready({"prefill": 0, "decode": 2})
        d[0].sessions[0].send(drain=pb.Drain(limit_ms=1000))
        r.wait_ready({"prefill": 0, "decode": 1})
        for _ in range(4):
            assert r.chat()[0] == 200
        assert not d[0].messages("generate") and len(d[1].messages("generate")) == 4


def test_words_between_workers_are_relayed(pair):
    r, d, p = pair
    ask = pb.QuietAsk(cookie_hi=1, cookie_lo=2, p_incarnation=p.incarnation, d_incarnation=d.incarnation)
    d.sessions[0].send(quiet_ask=ask)
    assert p.wait_for(lambda: p.messages("quiet_ask")) == [ask]
    word = pb.ClosedWord(cookie_hi=1, cookie_lo=2, d_incarnation=d.incarnation)
    p.sessions[0].send(closed=word)
    assert d.wait_for(lambda: d.messages("closed")) == [word]
    # To an incarnation that is not there: dropped, and nothing else happens.
    d.sessions[0].send(quiet_ask=pb.QuietAsk(cookie_hi=1, p_incarnation=1, d_incarnation=d.incarnation))
    p.sessions[0].send(closed=pb.ClosedWord(cookie_hi=1, d_incarnation=1))
    assert r.chat()[0] == 200
    assert len(p.messages("quiet_ask")) == 1 and len(d.messages("closed")) == 1


def settle(r, decode):
    """Until the router has taken all that these have sent: behind it comes an event of no request, which it counts."""
    before = r.metric("damask_router_stale_events_total")
    for d in decode:
        d.sessions[0].send(failed=pb.Failed(id=pb.RequestId(hi=1, lo=1, attempt=1), code=pb.FAILURE_INTERNAL))
    decode[0].wait_for(lambda: r.metric("damask_router_stale_events_total") == before + len(decode))


def test_load_and_prefix_decide(workers):
    d = [workers("decode", script=says(HELLO)) for _ in range(2)]
    with Router(decode=d) as r:
        r.wait_ready({"prefill": 0, "decode": 2})
        d[0].sessions[0].send(load=pb.Load(full_pages_free=500, full_pages_total=1000))
        d[1].sessions[0].send(load=pb.Load(full_pages_free=1000, full_pages_total=1000))
        settle(r, d)
        for _ in range(3):
            r.chat()
        assert len(d[1].messages("generate")) == 3
        # 64 tokens held weigh more than nothing at equal load.
        d[0].sessions[0].send(load=pb.Load(full_pages_free=1000, full_pages_total=1000))
        d[0].sessions[0].send(blocks=pb.Blocks(snapshot=True, added=[first_block(d[1].messages("generate")[0].prompt)]))
        settle(r, d)
        for _ in range(3):
            r.chat()
        assert len(d[0].messages("generate")) == 3
        assert r.metric("damask_router_index_blocks") == 1


def test_prefixes_are_of_the_numerics_of_prompts(workers):
    d = [workers("decode", script=says(HELLO), prompt_numerics="fast") for _ in range(2)]
    p = workers("prefill", numerics="fast")
    with Router(prefill=[p], decode=d) as r:
        r.wait_ready({"prefill": 1, "decode": 2})
        r.chat()
        prompt = (d[0].messages("generate") + d[1].messages("generate"))[0].prompt
        for holds in (0, 1):
            for i in (0, 1):
                blocks = [first_block(prompt, "fast" if i == holds else "paper")]
                d[i].sessions[0].send(load=pb.Load(full_pages_free=1000, full_pages_total=1000))
                d[i].sessions[0].send(blocks=pb.Blocks(snapshot=True, added=blocks))
            settle(r, d)
            before = len(d[holds].messages("generate"))
            for _ in range(3):
                r.chat()
            assert len(d[holds].messages("generate")) == before + 3


def test_a_request_needs_the_pages_of_one_group(workers):
    d = [workers("decode", script=says(HELLO)) for _ in range(2)]
    with Router(decode=d) as r:
        r.wait_ready({"prefill": 0, "decode": 2})
        # The first has more room and less load in all, but no group of it has room for the prompt.
        d[0].sessions[0].send(load=pb.Load(full_pages_free=1000, full_pages_most_free=1, full_pages_total=1000))
        d[1].sessions[0].send(load=pb.Load(full_pages_free=500, full_pages_most_free=300, full_pages_total=1000))
        settle(r, d)
        for _ in range(3):
            r.chat()
        assert len(d[1].messages("generate")) == 3
        assert len(d[1].messages("generate")[0].prompt) > 64
        d[0].sessions[0].send(load=pb.Load(full_pages_free=1000, full_pages_most_free=500, full_pages_total=1000))
        settle(r, d)
        for _ in range(3):
            r.chat()
        assert len(d[0].messages("generate")) == 3


def first_block(prompt, numerics="paper"):
    """The hash chain of common/base/blocks.h, by the tool that the C tests use too."""
    out = subprocess.run([str(pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build")) /
                              "tests/unit/router/block_hash"), numerics, *map(str, list(prompt)[:64])],
                         check=True, capture_output=True, text=True).stdout.split()
    return pb.BlockHash(hi=int(out[0]), lo=int(out[1]), n_tokens=64)


# ---------------------------------------------------------------- clients that leave, slow streams, ends


def leave_after(r, n_bytes, **fields):
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    s = socket.create_connection(("127.0.0.1", r.port))
    s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    got = b""
    while len(got) < n_bytes:
        got += s.recv(4096)
    return s


def test_client_leaves_while_decoding(workers):
    d, p = workers("decode", script=says(LONG), token_delay_s=0.01), workers("prefill")
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        for _ in range(3):
            leave_after(r, 2000, stream=True).close()
        d.wait_for(lambda: len(d.cancels) == 3)
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)
        assert r.metric("damask_router_client_gone_total") == 3
        assert r.metric("damask_router_tokens_in_flight") == 0


def test_client_leaves_while_prefilling(workers):
    d, p = workers("decode", script=says(HELLO)), workers("prefill")
    p.on_prefill = lambda *_: True
    with Router(prefill=[p], decode=[d]) as r:
        r.wait_ready({"prefill": 1, "decode": 1})
        s = leave_after(r, 0)
        p.wait_for(lambda: p.messages("prefill"))
        s.close()
        p.wait_for(lambda: p.cancels)
        d.wait_for(lambda: d.cancels)
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)


def test_slow_stream_is_kept_awake(workers):
    d = workers("decode", script=says(HELLO), token_delay_s=0.35)
    d.script = lambda g, c: ids("<|channel|>final<|message|>Hi<|return|>")
    with Router(decode=[d], args=["--keepalive", "200ms"]) as r:
        _, comments = events(r.chat(stream=True)[2])
        assert comments and set(comments) == {"keep-alive"}


def test_no_worker_is_told_as_that(workers):
    absent = type("W", (), {"address": "127.0.0.1:1"})
    with Router(decode=[absent], args=["--queue-timeout", "200ms"], ready=False) as r:
        status, headers, got = r.chat()
        assert (status, got["error"]["code"]) == (503, "worker_unavailable") and "retry-after" in headers
        assert got["error"]["message"] == "no decode worker is up"


def asked(r):
    """How many have come: those that run, wait or were refused."""
    return (r.metric("vllm:num_requests_running") + r.metric("vllm:num_requests_waiting") +
            r.metric('damask_router_rejected_total{cause="queue_full"'))


def test_too_many_wait(workers):
    d = workers("decode", script=says(LONG), token_delay_s=0.01)
    d.on_generate = lambda *_: True
    with Router(decode=[d], args=["--max-tokens-in-flight", "100", "--max-waiting", "2",
                                  "--queue-timeout", "2s", "--reserve-timeout", "3s"]) as r:
        codes = []
        def one():
            codes.append(r.chat()[0])
        threads = [threading.Thread(target=one) for _ in range(6)]
        for i, t in enumerate(threads, 1):
            t.start()
            d.wait_for(lambda: asked(r) == i)
        for t in threads:
            t.join()
        assert codes.count(429) == 3, codes
        assert r.metric('damask_router_rejected_total{cause="queue_full"') == 3


def test_a_crowd_beyond_the_queue_is_refused_at_once(workers):
    """The queue is full: 429 with a time to come back, at once; who was admitted is answered."""
    d = workers("decode", script=says(HELLO))
    held, gate = [], threading.Event()
    d.on_generate = lambda w, session, g: held.append((session, g)) or True if not gate.is_set() else False
    with Router(decode=[d], args=["--max-tokens-in-flight", "20000", "--max-waiting", "32",
                                  "--queue-timeout", "30s", "--reserve-timeout", "30s"]) as r:
        answers = []
        admitted = [threading.Thread(target=lambda: answers.append(r.chat()[0])) for _ in range(60)]
        for t in admitted:
            t.start()
        # All 60 have arrived: at the worker, in the full queue, or refused.
        refused = lambda: int(r.metric('damask_router_rejected_total{cause="queue_full"'))
        d.wait_for(lambda: r.metric("vllm:num_requests_waiting") == 32 and len(held) + 32 + refused() == 60)
        n_refused = refused()
        times, probes = [], []
        for _ in range(140):
            begin = time.monotonic()
            assert r.get("/livez")[0] == 200
            probes.append(time.monotonic() - begin)
            begin = time.monotonic()
            status, headers, got = r.chat()
            times.append(time.monotonic() - begin)
            assert status == 429 and int(headers["retry-after"]) >= 1 and got["error"]["code"]
        # At once: as fast as this machine answers anything.
        assert sorted(times)[133] < 0.1 + 5 * sorted(probes)[133], (sorted(times)[-8:], sorted(probes)[-8:])
        with pytest.raises(grpc.RpcError) as e:
            list(grpc_stub(r).Chat(grpc_chat()))
        assert e.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.set()
        for session, g in held:
            d.pool.submit(d.generate, session, g)
        for t in admitted:
            t.join(30)
        assert answers.count(200) == 60 - n_refused and answers.count(429) == n_refused


def test_sigterm_lets_streams_finish(workers):
    d = workers("decode", script=says("<|channel|>final<|message|>" + " word" * 40 + "<|return|>"), token_delay_s=0.02)
    with Router(decode=[d]) as r:
        got = []
        t = threading.Thread(target=lambda: got.append(r.chat(stream=True)[2]))
        t.start()
        d.wait_for(lambda: d.messages("generate"))
        r.popen.terminate()
        r.wait_log("draining: 1 requests")
        assert r.get("/readyz")[0] == 503 and r.get("/livez")[0] == 200
        status, headers, late = r.chat()
        assert status == 503 and "retry-after" in headers and late["error"]["code"] == "draining"
        assert headers["connection"] == "close", "a kept connection would bring the next try here again"
        t.join()
        assert gather(events(got[0])[0])[0]["finish"] == "stop"
        assert r.popen.wait(30) == 0


def test_sigterm_over_the_limit_ends_with_an_error(workers):
    d = workers("decode", script=says(LONG), token_delay_s=0.02)
    with Router(decode=[d], args=["--drain-limit", "300ms"]) as r:
        got = []
        t = threading.Thread(target=lambda: got.append(r.chat(stream=True)[2]))
        t.start()
        d.wait_for(lambda: answering(r))
        r.popen.terminate()
        t.join()
        assert events(got[0])[0][-1]["error"]["code"] == "draining"
        assert r.popen.wait(30) == 0


# ---------------------------------------------------------------- gRPC


def grpc_modules():
    return fake_worker._generate("damask_frontend")


def grpc_stub(r):
    _, stubs = grpc_modules()
    return stubs.FrontendStub(grpc.insecure_channel(f"unix:{r.grpc_path}"))


def grpc_chat(**fields):
    pb2, _ = grpc_modules()
    fields.setdefault("messages", [pb2.ChatMessage(role=pb2.CHAT_ROLE_USER, content="Hi")])
    return pb2.ChatRequest(model=fields.pop("model", MODEL), **fields)


def test_grpc_chat_says_what_http_says(pair):
    r, d, _ = pair
    pb2, _ = grpc_modules()
    for text, tools in ((HELLO, False), (TWO_CALLS, True)):
        d.script = says(text)
        _, _, whole = r.chat(logprobs=True, top_logprobs=1, **({"tools": TOOLS} if tools else {}))
        message = whole["choices"][0]["message"]
        got = list(grpc_stub(r).Chat(grpc_chat(
            logprobs=True, top_logprobs=1,
            tools=[pb2.ChatTool(name=n, parameters_json='{"type":"object"}') for n in "ab"] if tools else [])))
        deltas = [e.delta for e in got if e.WhichOneof("kind") == "delta"]
        assert got[0].id.startswith("chatcmpl-") and not got[1].id
        assert "".join(x.content for x in deltas) == (message["content"] or "")
        assert "".join(x.reasoning for x in deltas) == message.get("reasoning", "")
        calls = [x.call_begin for x in deltas if x.WhichOneof("kind") == "call_begin"]
        arguments = {}
        for x in deltas:
            if x.WhichOneof("kind") == "call_delta":
                arguments[x.call_delta.index] = arguments.get(x.call_delta.index, "") + x.call_delta.arguments
        assert ([(c.name, arguments[c.index]) for c in calls] ==
                [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])])
        finish = [x.finish for x in deltas if x.WhichOneof("kind") == "finish"]
        assert finish == [pb2.CHAT_FINISH_TOOL_CALLS if tools else pb2.CHAT_FINISH_STOP]
        lps = [lp for x in deltas for lp in x.logprobs]
        assert [list(lp.token) for lp in lps] == [e["bytes"] for e in whole["choices"][0]["logprobs"]["content"]]
        usage = got[-1].ended.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens) == (
            whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"],
            whole["usage"]["prompt_tokens_details"]["cached_tokens"],
            whole["usage"]["completion_tokens_details"]["reasoning_tokens"])
    assert d.messages("generate")[0].prompt == d.messages("generate")[1].prompt


def test_grpc_errors_and_models(pair):
    r, d, _ = pair
    pb2, _ = grpc_modules()
    stub = grpc_stub(r)
    for request, code in ((grpc_chat(model="nothing"), grpc.StatusCode.NOT_FOUND),
                          (grpc_chat(messages=[]), grpc.StatusCode.INVALID_ARGUMENT),
                          (grpc_chat(temperature=9), grpc.StatusCode.INVALID_ARGUMENT),
                          (grpc_chat(n=1000), grpc.StatusCode.INVALID_ARGUMENT),
                          (grpc_chat(max_tokens=5000), grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.RpcError) as e:
            list(stub.Chat(request))
        assert e.value.code() == code and e.value.details()
    models = stub.ListModels(pb2.ListModelsRequest()).models
    assert [(m.id, m.max_context) for m in models] == [(MODEL, 4096)]
    list(stub.Chat(grpc_chat(temperature=0), metadata=[("x-request-id", "from-grpc")]))
    assert d.messages("generate")[-1].request_id == "from-grpc"
    assert d.messages("generate")[-1].sampling.temperature == 0


def test_grpc_calls_move_on_when_a_router_drains(workers):
    """One address, one channel: the running call ends at the old router, the next goes to its successor."""
    d = workers("decode", script=says("<|channel|>final<|message|>" + " word" * 80 + "<|return|>"), token_delay_s=0.3)
    address = f"127.0.0.1:{free_port()}"
    _, stubs = grpc_modules()
    with Router(decode=[d], grpc=False, args=["--grpc-listen", address]) as old, grpc.insecure_channel(address) as channel:
        stub = stubs.FrontendStub(channel)
        running = stub.Chat(grpc_chat())
        next(running)
        old.popen.terminate()
        old.wait_log("draining: 1 requests")
        with Router(decode=[d], grpc=False, args=["--grpc-listen", address]) as new:
            assert list(stub.Chat(grpc_chat(max_tokens=2)))[-1].HasField("ended")
            assert new.metric('damask_router_requests_total{api="grpc",status="2xx"}') == 1
            assert old.popen.poll() is None, "it ended before the call that it had"
            d.token_delay_s = 0
            assert list(running)[-1].HasField("ended")
            assert old.popen.wait(30) == 0


def slow_channel(address):
    """A client that takes no more of a message than its program has asked for."""
    return grpc.insecure_channel(address, options=[("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)])


def test_answers_that_are_not_read_yet_outlast_sigterm(workers):
    """Both ways in: the request has ended, its client reads later than connections may take to close (1 s)."""
    d = workers("decode", script=says("<|channel|>final<|message|>" + " word" * 2000 + "<|return|>"))
    _, stubs = grpc_modules()
    body = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    with Router(decode=[d], args=["--max-write", "8Mi"]) as r, slow_channel(f"unix:{r.grpc_path}") as channel:
        call = stubs.FrontendStub(channel).Chat(grpc_chat(max_tokens=2100))
        next(call)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect(("127.0.0.1", r.port))
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            d.wait_for(lambda: len(d.messages("generate")) == 2 and r.metric("damask_router_open_requests") == 0)
            r.popen.terminate()
            time.sleep(1.5)
            assert r.popen.poll() is None, "it ended before its clients had read"
            assert list(call)[-1].HasField("ended")
            whole = b"".join(iter(lambda: s.recv(65536), b""))
        assert b"data: [DONE]" in whole
        assert r.popen.wait(10) == 0 and "cut off" not in r.log_text()


def test_clients_that_never_read_are_cut_off_at_the_drain_limit(workers):
    d = workers("decode", script=says(LONG))
    _, stubs = grpc_modules()
    with Router(decode=[d], args=["--drain-limit", "300ms"]) as r, slow_channel(f"unix:{r.grpc_path}") as channel:
        call = stubs.FrontendStub(channel).Chat(grpc_chat())
        next(call)
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)
        start = time.monotonic()
        r.popen.terminate()
        assert r.popen.wait(10) == 0 and time.monotonic() - start >= 1.3  # connections have a second to close
        assert "not read: 1" in r.log_text()


def test_grpc_cancel(workers):
    d = workers("decode", script=says(LONG), token_delay_s=0.01)
    with Router(decode=[d]) as r:
        call = grpc_stub(r).Chat(grpc_chat())
        next(call)
        call.cancel()
        d.wait_for(lambda: d.cancels)
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)
