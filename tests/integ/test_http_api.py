"""What clients of the HTTP API trip over, each with its right answer; in front of workers of paper.

Every body and every chunk is checked against the official client's own types as well.
"""

import http.client
import json
import socket
import threading
import time

import openai
import pytest

import openai_types
from fake_worker import pb
from router_test import LONG, MODEL, TOOLS, TWO_CALLS, Router, events, gather, harmony, ids, says

CHAT = "/v1/chat/completions"
BAD_NAME = '<|channel|>commentary to=functions.a<|channel|>commentary json<|message|>{"i":1}<|call|>'
SINGLE_CALL = '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"i":1}<|call|>'


def chat(r, **fields):
    """The whole answer and what the chunks of a stream of the same say; both by the client's types."""
    status, _, whole = r.chat(**fields)
    assert status == 200, whole
    openai_types.chat(whole)
    status, _, text = r.chat(stream=True, **fields)
    assert status == 200
    payloads, _ = events(text)
    for p in payloads:
        openai_types.chat_chunk(p)
    return whole, payloads, gather(payloads)


def same(whole, streamed):
    for choice in whole["choices"]:
        message, got = choice["message"], streamed[choice["index"]]
        assert got["content"] == (message["content"] or "")
        assert got["reasoning"] == message.get("reasoning", "") == message.get("reasoning_content", "")
        assert [c[1:] for c in got["calls"]] == [[c["function"]["name"], c["function"]["arguments"]]
                                                 for c in message.get("tool_calls", [])]
        assert got["finish"] == choice["finish_reason"] and got["role"] == 1


def test_usage_stands_in_one_last_chunk(paper):
    r, _, _ = paper
    whole, payloads, got = chat(r, stream_options=None)
    same(whole, got)
    text = r.chat(stream=True, stream_options={"include_usage": True})[2]
    payloads, _ = events(text)
    assert all(p["usage"] is None and len(p["choices"]) == 1 for p in payloads[:-1])
    assert payloads[-1]["choices"] == [] and payloads[-1]["usage"] == whole["usage"]
    assert text.endswith("data: [DONE]\n\n") and text.count("[DONE]") == 1
    assert all("usage" not in p for p in events(r.chat(stream=True)[2])[0])


def test_a_stream_that_breaks_says_so(workers):
    d = workers("decode", script=says(LONG), token_delay_s=0.01)
    with Router(decode=[d]) as r:
        c = http.client.HTTPConnection("127.0.0.1", r.port, timeout=10)
        c.request("POST", CHAT, json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}],
                                            "max_tokens": 200, "stream": True}))
        answer = c.getresponse()
        text = b""
        while text.count(b"data: ") < 10:
            text += answer.read1(4096)
        d.kill()
        text += answer.read()
        blocks = text.decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        error = json.loads(blocks[-3].removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and error["code"]
        assert b'"finish_reason":"stop"' not in text
        start = time.monotonic()
        assert c.sock is None or c.sock.recv(1) == b"", "the connection must be closed"
        assert time.monotonic() - start < 8  # not by its idle timeout


def test_failures_are_no_200(paper):
    r, d, p = paper
    d.script = says("<|channel|>final<|message|>x<|start|><|channel|><|constrain|><|message|>garbage <|channel|>")
    for stream in (False, True):
        assert r.chat(stream=stream)[0] == 200, "what the model writes is never a failure"
    p.on_prefill = lambda w, session, m: session.send(
        failed=pb.Failed(id=m.id, code=pb.FAILURE_PEER, text="the transfer broke")) or True
    for stream in (False, True):
        status, headers, got = r.chat(stream=stream)
        got = json.loads(got) if isinstance(got, str) else got
        assert status in (502, 503) and got["error"]["type"] == "server_error" and "choices" not in got


def test_too_long_names_the_limit(paper):
    r, d, _ = paper
    status, _, got = r.chat(max_tokens=4090)
    assert (status, got["error"]["code"], got["error"]["param"]) == (400, "context_length_exceeded", "max_tokens")
    words = {"".join(c for c in w if c.isdigit()) for w in got["error"]["message"].split()} - {""}
    assert words == {"4096", "68", "4090"}
    assert "maximum context length is 4096 tokens" in got["error"]["message"], "words that clients look for"
    assert r.chat(max_tokens=4028)[0] == r.chat(max_completion_tokens=4028)[0] == r.chat()[0] == 200
    assert [g.max_tokens for g in d.messages("generate")] == [4028] * 3


BAD_BODIES = [
    ({"messages": []}, "messages"), ({"messages": {}}, "messages"), ({"messages": None}, "messages"),
    ({"messages": ["x"]}, "messages[0]"), ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "input_file", "file_id": "f1"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "a", "arguments": {"i": 1}}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"top_k": 0.01}, "top_k"), ({"temperature": 999999.0}, "temperature"), ({"temperature": -1}, "temperature"),
    ({"top_p": -1.0}, "top_p"), ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"temperature": "hot"}, "temperature"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"min_p": 2}, "min_p"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"stop": ""}, "stop"), ({"stop": [""]}, "stop"), ({"stop": ["a", "b", "c", "d", "e"]}, "stop"), ({"stop": [1]}, "stop"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 10**9}, "n"), ({"seed": -2**63 - 1}, "seed"), ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"), ({"seed": -2**64}, "seed"), ({"max_tokens": 10**30}, "max_tokens"), ({"top_k": 2**64}, "top_k"),
    ({"n": 33}, "n"), ({"best_of": 33}, "best_of"), ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": 4096}, "min_tokens"), ({"temperature": 2.0000001}, "temperature"),
    ({"best_of": 2, "n": 3}, "best_of"), ({"best_of": 200}, "best_of"),
    ({"max_tokens": 10**15}, "max_tokens"), ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"reasoning_effort": "none"}, "reasoning_effort"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"modalities": ["audio"]}, "modalities"), ({"audio": {"voice": "x"}}, "audio"), ({"functions": [{}]}, "functions"),
    ({"prediction": {"type": "content"}}, "prediction"), ({"web_search_options": {}}, "web_search_options"),
    ({"verbosity": "low"}, "verbosity"), ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"include_reasoning": False}, "include_reasoning"), ({"separate_reasoning": False}, "separate_reasoning"),
    ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"), ({"moderation": {"x": 1}}, "moderation"),
    ({"kv_transfer_params": {"remote_host": "x"}}, "kv_transfer_params"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tool_choice": {"type": "function", "function": {"name": "zzz"}}, "tools": TOOLS}, "tool_choice"),
]


def test_bad_requests_name_the_field(paper):
    r, d, _ = paper
    d.script, d.token_delay_s = says(LONG), 0.002
    beside = []
    t = threading.Thread(target=lambda: beside.append(r.chat()))
    t.start()
    d.wait_for(lambda: d.messages("generate"))
    for fields, param in BAD_BODIES:
        streams = (False,) if "stream_options" in fields or "best_of" in fields else (False, True)
        for stream in streams:
            status, headers, got = r.chat(stream=stream, **fields)
            assert status == 400 and headers["content-type"].startswith("application/json"), (fields, got)
            assert got["error"]["param"] == param and got["error"]["type"] == "invalid_request_error", (fields, got)
    t.join()
    assert beside[0][0] == 200 and beside[0][2]["choices"][0]["message"]["content"] == " word" * 400
    assert r.chat(stop=None, temperature=None, tools=None, response_format=None)[0] == 200
    _, _, error = r.chat(reasoning_effort="HIGH")
    assert all(f'"{word}"' in error["error"]["message"] for word in ("low", "medium", "high"))
    assert r.chat(temperature=2.0000001)[2]["error"]["message"].endswith("not 2.0000001")
    assert "32" in r.chat(n=33)[2]["error"]["message"], "as many as the worker has sequences"


def test_json_that_few_types_hold(paper):
    """NUL in a text, and whole numbers beyond 64 bits where a number may stand: valid JSON is no error."""
    r, d, _ = paper
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**64 - 1, "default": 2**64}}}
    status, _, got = r.chat(messages=[{"role": "user", "content": "a\0b"}], foo=2**70,
                            tools=[{"type": "function", "function": {"name": "a", "parameters": parameters}}])
    assert status == 200, got
    prompt = harmony.decode(list(d.messages("generate")[0].prompt))
    assert "<|message|>a\ufffdb<|end|>" in prompt
    assert "a?: number, // default: 1.8446744073709552e19" in prompt


def test_bodies_that_are_no_json(paper):
    r, _, _ = paper
    start = '{"model":"gpt-oss-20b","messages":[{"role":"user","content":"'
    for body in ("{:", "", "null", "[]", start, (start + '你好"}]}').encode("gbk"), start.encode() + b'\xff"}]}', "{}x",
                 "\ufeff{}".encode(), "{} {}", "[" * 100000, '{"a":' * 5000, "NaN", '{"n":1e999}'):
        status, headers, data = r.request("POST", CHAT, body)
        got = json.loads(data.decode("utf-8"))
        assert status == 400 and got["error"]["type"] == "invalid_request_error", body
        assert "你" not in got["error"]["message"] and len(got["error"]["message"]) < 300
    assert r.chat()[0] == 200


def test_stop_strings_leave_reasoning_alone(paper):
    r, d, _ = paper
    d.script = says("<|channel|>analysis<|message|>write a song<|end|><|start|>assistant<|channel|>final<|message|>"
                    "La la song la<|return|>")
    whole, _, got = chat(r, stop=["song"])
    same(whole, got)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], whole["choices"][0]["finish_reason"]) == (
        "write a song", "La la ", "stop")


def test_logprobs_of_a_split_character(paper):
    r, d, _ = paper
    d.script = lambda g, c: [200005, 17196, 200008, 12194, 31446, 244, 0, 200002]
    whole, _, got = chat(r, logprobs=True, top_logprobs=2)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in entries] == [[72, 105], [240, 159, 146], [150], [33]] and got[0]["lps"] == entries
    assert bytes(b for e in entries for b in e["bytes"]).decode() == whole["choices"][0]["message"]["content"]


def test_deltas_of_tool_calls(paper):
    r, d, _ = paper
    seen = set()
    for _ in range(2):
        d.script = says(TWO_CALLS)
        whole, payloads, got = chat(r, tools=TOOLS)
        same(whole, got)
        heads = [c for p in payloads for c in p["choices"][0]["delta"].get("tool_calls", []) if "id" in c]
        assert [(h["index"], h["type"], h["function"]["name"], h["function"]["arguments"]) for h in heads] == [
            (0, "function", "a", ""), (1, "function", "b", "")]
        rest = [c for p in payloads for c in p["choices"][0]["delta"].get("tool_calls", []) if "id" not in c]
        assert all(set(c) == {"index", "function"} and set(c["function"]) == {"arguments"} for c in rest)
        seen |= {h["id"] for h in heads} | {c["id"] for c in whole["choices"][0]["message"]["tool_calls"]}
    assert len(seen) == 8


def test_finish_is_the_same_both_ways_and_comes_once(paper):
    r, d, _ = paper
    for text in (BAD_NAME, SINGLE_CALL, TWO_CALLS):
        d.script = says(text)
        whole, payloads, got = chat(r, tools=TOOLS)
        same(whole, got)
        assert whole["choices"][0]["finish_reason"] == "tool_calls"
        assert [p["choices"][0]["finish_reason"] for p in payloads if p["choices"][0]["finish_reason"]] == ["tool_calls"]
        assert payloads[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_reasoning_tokens(paper):
    r, d, _ = paper
    d.script = lambda g, c: [200005, 35644, 200008, 83, 200007, 200006, 173781, 200005, 17196, 200008, 12194, 200002]
    usage = chat(r)[0]["usage"]
    assert usage["completion_tokens"] == 12 and usage["completion_tokens_details"]["reasoning_tokens"] == 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    # The same when a step brings several tokens.
    def steps(w, session, g):
        session.send(reserved=pb.Reserved(id=g.id))
        out = d.script(g, 0)
        for i in range(0, len(out), 5):
            session.send(tokens=pb.Tokens(id=g.id, first_index=i, ids=out[i:i + 5]))
        session.send(finished=pb.Finished(id=g.id, reason=pb.FINISH_STOP, n_tokens=len(out)))
        return True
    d.on_generate = steps
    assert chat(r)[0]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1


def test_budget_gone_while_reasoning(paper):
    r, d, _ = paper
    d.script = says("<|channel|>analysis<|message|>one two three four five six<|end|>")
    whole, payloads, got = chat(r, max_tokens=6)
    same(whole, got)
    message = whole["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] == message["reasoning"] == "one two three"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert [p["choices"][0]["delta"]["reasoning_content"] for p in payloads
            if "reasoning_content" in p["choices"][0]["delta"]] == ["one", " two", " three"]


def test_choices(paper):
    r, d, _ = paper
    d.script = lambda g, c: ids(f"<|channel|>final<|message|>choice {c}" + " and" * c + "<|return|>")
    whole, payloads, got = chat(r, n=2, temperature=1, seed=7)
    same(whole, got)
    assert {c["index"] for p in payloads for c in p["choices"]} == {0, 1}
    assert whole["usage"]["prompt_tokens"] == 68
    assert whole["usage"]["completion_tokens"] == sum(len(d.script(None, c)) for c in (0, 1))
    assert [g.n for g in d.messages("generate")] == [2, 2], "one prefill for all choices"


# What servers of this API take beside it and what would change the answer, and what says the same as nothing.
OTHER_SERVERS = {
    "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "a", "regex": "a", "ebnf": "a",
    "json_schema": "{}", "grammar": "a", "structural_tag": {}, "stop_regex": "a", "no_stop_trim": True, "bad_words": ["a"],
    "allowed_token_ids": [1], "logits_processors": ["a"], "custom_logit_processor": "a", "use_beam_search": True,
    "length_penalty": 2, "typical_p": 0.5, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True, "return_hidden_states": True,
    "truncate_prompt_tokens": 5, "thinking_token_budget": 5, "lora_path": "a", "kv_transfer_params": {}, "bootstrap_host": "a",
}
SAME_AS_NOTHING = {
    "use_beam_search": False, "length_penalty": 1.0, "typical_p": 1, "bad_words": [], "allowed_token_ids": [], "stop_regex": [],
    "no_stop_trim": False, "include_stop_str_in_output": False, "skip_special_tokens": True, "return_token_ids": False,
    "return_tokens_as_token_ids": False, "return_hidden_states": False, "guided_json": None, "regex": None, "lora_path": None,
}


def test_fields_of_other_servers_are_refused_by_name(paper):
    r, _, _ = paper
    bodies = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, "/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
    for path, body in bodies.items():
        for field, value in OTHER_SERVERS.items():
            status, _, data = r.request("POST", path, {"model": MODEL, **body, field: value})
            error = json.loads(data)["error"]
            assert (status, error["param"], error["code"]) == (400, field, "unsupported_parameter"), (path, field)
        assert r.request("POST", path, {"model": MODEL, **body, **SAME_AS_NOTHING})[0] == 200, path
    status, _, data = r.request("POST", "/v1/completions", {"model": MODEL, "prompt": "Hi", "response_format": {"type": "json_object"}})
    assert (status, json.loads(data)["error"]["param"]) == (400, "response_format")


def test_every_answer_has_an_id(paper):
    """The client's where it was read and may be one, else one that is made; the request itself has the same."""
    r, d, _ = paper
    mine = {"x-request-id": "mine-1"}
    for method, path, status in (("GET", "/v1/models", 200), ("GET", f"/v1/models/{MODEL}", 200), ("GET", "/v1/models/x", 404),
                                 ("GET", "/nowhere", 404), ("GET", CHAT, 405), ("OPTIONS", CHAT, 204), ("POST", CHAT, 400),
                                 ("GET", "/health", 200), ("GET", "/readyz", 200), ("GET", "/metrics", 200)):
        got, headers, data = r.request(method, path, headers=mine)
        assert (got, headers.get("x-request-id")) == (status, "mine-1"), (method, path)
        assert len(r.request(method, path, headers={"x-request-id": "a b"})[1]["x-request-id"]) == 32, (method, path)
    for text, status, want in (
            ("POST %s HTTP/1.1\r\n%sHost: x\r\nContent-Length: 999999999\r\n\r\n", 413, "mine-1"),
            ("POST %s HTTP/1.1\r\n%sHost: x\r\nContent-Encoding: gzip\r\n\r\n", 415, "mine-1"),
            ("POST %s HTTP/1.1\r\n%sHost: x\r\nExpect: much\r\n\r\n", 417, "mine-1"),
            ("POST %s HTTP/1.1\r\n%sX: " + "x" * 20000 + "\r\n\r\n", 431, "mine-1"),
            ("GET /" + "x" * 20000 + " HTTP/1.1\r\n\r\n", 414, None), ("BREW / HTTP/1.1\r\n\r\n", 405, None),
            ("POST %s HTTP/1.1\r\n%s\r\n", 400, "mine-1"), ("what is this\r\n\r\n", 400, None)):
        with socket.create_connection(("127.0.0.1", r.port), timeout=10) as s:
            s.sendall((text % (CHAT, "x-request-id: mine-1\r\n") if want else text).encode())
            answer = http.client.HTTPResponse(s)
            answer.begin()
            got = answer.getheader("x-request-id")
            assert answer.status == status and (got == want if want else len(got) == 32), (answer.status, status, got)
    status, headers, _ = r.chat(stream=True)
    assert status == 200 and headers["x-request-id"] == d.messages("generate")[-1].request_id
    refused = lambda status: r.metric('damask_router_refused_total{entry="http",status="%s"' % status)
    before = [refused(s) for s in (404, 405, 415)]
    r.get("/nowhere"), r.get(CHAT), r.request("POST", CHAT, "x", {"Content-Encoding": "gzip"})
    assert [refused(s) for s in (404, 405, 415)] == [n + 1 for n in before], "who runs this sees what is refused"
    assert json.loads(r.request("POST", CHAT)[2])["error"]["message"] == "the request has no body; it must be a JSON object"


def test_unknown_and_unused_fields(paper):
    r, d, _ = paper
    whole, _, _ = chat(r, store=False, metadata={"a": "b"}, parallel_tool_calls=True, user="u1", foo=1, service_tier="auto",
                       safety_identifier="s", prompt_cache_key="k", prompt_cache_retention="24h", logit_bias={},
                       verbosity="medium", modalities=["text"], response_format={"type": "text"})
    assert whole["choices"][0]["message"]["content"] == "Hello there!"
    d.script = says(TWO_CALLS)
    whole, _, got = chat(r, tools=TOOLS, parallel_tool_calls=False)
    same(whole, got)
    assert [c["function"]["name"] for c in whole["choices"][0]["message"]["tool_calls"]] == ["a"]


def test_reasoning_goes_back_by_any_name(paper):
    r, d, _ = paper
    call = {"id": "c1", "type": "function", "function": {"name": "a", "arguments": "{"}}
    prompts = []
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert r.chat(tools=TOOLS, messages=[
            {"role": "user", "content": "x"}, {"role": "assistant", "content": None, key: "why", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}])[0] == 200
        prompts.append(harmony.decode(list(d.messages("generate")[-1].prompt)))
    assert prompts[0] == prompts[1] == prompts[2]
    assert "<|channel|>analysis<|message|>why<|end|>" in prompts[0] and "<|message|>AB<|end|>" in prompts[0]
    assert "json<|message|>{<|call|>" in prompts[0], "broken arguments are rendered as they are"


def test_methods_and_paths(paper):
    r, _, _ = paper
    posts = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
    gets = ("/v1/models", f"/v1/models/{MODEL}", "/openapi.json", "/livez", "/readyz", "/health", "/metrics")
    for path, allow in [(p, "POST, OPTIONS") for p in posts] + [(g, "GET, HEAD, OPTIONS") for g in gets]:
        status, headers, data = r.request("OPTIONS", path)
        assert (status, headers["allow"], data) == (204, allow, b"")
        for method in ("PUT", "DELETE", "PATCH", "TRACE", "GET" if path in posts else "POST"):
            status, headers, data = r.request(method, path, headers={"content-length": "0"})
            assert (status, headers["allow"]) == (405, allow) and json.loads(data)["error"]["code"] == "method_not_allowed"
        if path in gets:
            whole, head = r.request("GET", path), r.request("HEAD", path)
            assert head[0] == whole[0] == 200 and head[2] == b"" and head[1]["content-type"] == whole[1]["content-type"]
    for method, path in (("GET", "/"), ("POST", "/v1/embeddings"), ("POST", "/v1/chat/completions/x"), ("GET", "/v1"),
                         ("GET", "/v1/responses/resp_1/x"), ("DELETE", "/v1/models_")):
        status, _, data = r.request(method, path)
        assert status == 404 and json.loads(data)["error"]["code"] == "not_found", path
    status, headers, data = r.request("QUERY", "/v1/models")
    assert status == 405 and "GET" in headers["allow"] and json.loads(data)["error"]["type"] == "invalid_request_error"


def test_names_of_models(workers):
    d = workers("decode")
    with Router(decode=[d], args=["--model-aliases", "openai/gpt-oss-20b,a b"]) as r:
        client = openai.OpenAI(base_url=r.url + "/v1", api_key="none", max_retries=0)
        for name in (MODEL, "openai/gpt-oss-20b", "a b"):
            assert client.models.retrieve(name).id == name
            openai_types.model(json.loads(r.get("/v1/models/" + name.replace(" ", "%20"))[2]))
        for path in ("..%2f..%2fetc%2fpasswd", "../../etc/passwd", MODEL + "%20", "%2b1", MODEL.upper()):
            status, _, data = r.get("/v1/models/" + path)
            assert status == 404 and json.loads(data)["error"]["code"] == "model_not_found", path
        for path in ("%", "%4", "%zz", "a%00b", "x" * 400):
            status, _, data = r.get("/v1/models/" + path)
            assert status == 400 and json.loads(data)["error"]["param"] == "model", path
        assert r.chat(model="openai/gpt-oss-20b")[2]["model"] == "openai/gpt-oss-20b"


def test_first_byte_before_the_end(paper):
    r, d, _ = paper
    d.script, d.token_delay_s = says(LONG), 0.01
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), ("/v1/responses", {"input": "x"}),
                       ("/v1/completions", {"prompt": "x"})):
        c = http.client.HTTPConnection("127.0.0.1", r.port, timeout=10)
        c.request("POST", path, json.dumps({"model": MODEL, "stream": True, "max_tokens": 150, "max_output_tokens": 150, **body}))
        answer = c.getresponse()
        start = time.monotonic()
        first = answer.read1(64)
        first_s = time.monotonic() - start
        rest = answer.read()
        assert first and len(rest) > 10 * len(first) and first_s < 0.5 * (time.monotonic() - start), path
        c.close()


def test_any_cut_of_the_tokens_streams_the_same(paper):
    """However the worker packs its tokens into messages, the deltas joined are the whole message."""
    r, d, _ = paper
    text = ("<|channel|>analysis<|message|>Grüße 💖 think<|end|><|start|>assistant<|channel|>commentary<|message|>pre<|end|>"
            "<|start|>assistant" + TWO_CALLS)
    out = ids(text)
    whole = r.chat(tools=TOOLS)
    for size in (1, 2, 3, 7, len(out)):
        def steps(w, session, g, size=size):
            session.send(reserved=pb.Reserved(id=g.id))
            for i in range(0, len(out), size):
                session.send(tokens=pb.Tokens(id=g.id, first_index=i, ids=out[i:i + size]))
            session.send(finished=pb.Finished(id=g.id, reason=pb.FINISH_STOP, n_tokens=len(out)))
            return True
        d.on_generate = steps
        whole, _, got = chat(r, tools=TOOLS)
        same(whole, got)
        assert got[0]["reasoning"] == "Grüße 💖 think" and got[0]["content"] == "pre" and len(got[0]["calls"]) == 2


def test_a_client_that_does_not_read(workers):
    """It costs bounded memory, is left in the end, and slows nobody."""
    wide = ids("-" * 128)[:1]  # its entry takes some 1.5 KB, so that no socket buffer holds the answer
    d = workers("decode", script=lambda g, c: [200005, 17196, 200008] + wide * 4000)
    with Router(decode=[d], args=["--max-write", "64Ki", "--idle-timeout", "3s"]) as r:
        def rss():
            return int(open(f"/proc/{r.popen.pid}/statm").read().split()[1]) * 4096
        r.chat(max_tokens=50)
        before = rss()
        body = json.dumps({"model": MODEL, "stream": True, "logprobs": True, "top_logprobs": 2,
                           "messages": [{"role": "user", "content": "x"}]}).encode()
        stuck = []
        for _ in range(5):
            s = socket.socket()
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect(("127.0.0.1", r.port))
            s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
            stuck.append(s)
        start = time.monotonic()
        status, _, got = r.chat(max_tokens=50)
        assert status == 200 and time.monotonic() - start < 5
        d.wait_for(lambda: len(d.cancels) >= 5, limit_s=20)
        assert rss() - before < 40 << 20
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)
        for s in stuck:
            s.close()


def test_official_client_chat(paper):
    r, d, _ = paper
    client = openai.OpenAI(base_url=r.url + "/v1", api_key="none", max_retries=0, timeout=30)
    with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "Hi"}]) as stream:
        content = "".join(e.delta for e in stream if e.type == "content.delta")
        assert content == stream.get_final_completion().choices[0].message.content == "Hello there!"
    d.script = says(TWO_CALLS)
    tools = [{"type": "function", "function": {"name": n, "strict": True, "parameters": {
        "type": "object", "properties": {"i": {"type": "integer"}}, "required": ["i"], "additionalProperties": False}}} for n in "ab"]
    parsed = client.chat.completions.parse(model=MODEL, messages=[{"role": "user", "content": "Hi"}], tools=tools)
    assert [c.function.parsed_arguments for c in parsed.choices[0].message.tool_calls] == [{"i": 1}, {"i": 2}]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
