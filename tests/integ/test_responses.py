"""The Responses API in front of workers of paper: every event in its order, by the official client's types."""

import http.client
import json

import openai
import pytest

import openai_types
from fake_worker import pb
from router_test import HELLO, LONG, MODEL, TOOLS, TWO_CALLS, Router, harmony, ids, says

FUNCTIONS = [{"type": "function", **t["function"]} for t in TOOLS]
MIXED = ("<|channel|>analysis<|message|>first<|end|><|start|>assistant<|channel|>analysis<|message|>second<|end|>"
         "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis"
         "<|message|>third<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>")


def ask(r, headers=None, **fields):
    status, got, data = r.request("POST", "/v1/responses", {"model": MODEL, "input": "Hi", **fields}, headers)
    return status, got, (data.decode() if fields.get("stream") and status == 200 else json.loads(data))


def stream_events(text):
    """Events of a stream by their names; a stream of this API has no [DONE]."""
    out = []
    for block in text.split("\n\n"):
        if not block or block.startswith(": "):
            continue
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: "), block
        out.append(json.loads(data[6:]))
        assert out[-1]["type"] == name[7:]
        openai_types.response_event(out[-1])
    return out


def without_names(response):
    """A response without what differs from one request to the next."""
    text = json.dumps({k: v for k, v in response.items() if k not in ("created_at", "completed_at")})
    text = text.replace(response["id"].removeprefix("resp_"), "X")
    for item in response["output"]:
        text = text.replace(item.get("call_id", "call_"), "call_")
    return json.loads(text)


def both(r, **fields):
    status, _, whole = ask(r, **fields)
    assert status == 200, whole
    openai_types.response(whole)
    status, headers, text = ask(r, stream=True, **fields)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    streamed = openai_types.follow(stream_events(text))
    assert without_names(streamed) == without_names(whole)
    return whole


def outline(response):
    out = []
    for item in response["output"]:
        if item["type"] == "function_call":
            out.append(("call", item["name"], item["arguments"]))
        else:
            (part,) = item["content"]
            assert part["type"] == {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
            out.append((item["type"], part["text"]))
    return out


def test_an_answer(paper):
    r, _, _ = paper
    whole = both(r)
    assert outline(whole) == [("reasoning", "think"), ("message", "Hello there!")]
    assert whole["status"] == "completed" and whole["error"] is None and whole["incomplete_details"] is None
    assert [i["status"] for i in whole["output"]] == ["completed"] * 2
    assert [i["id"].split("_")[0] for i in whole["output"]] == ["rs", "msg"] and whole["id"].startswith("resp_")
    usage = whole["usage"]
    assert usage["input_tokens"] == 68 and usage["output_tokens"] == len(ids(HELLO))
    assert usage["output_tokens_details"]["reasoning_tokens"] == 1


def test_items_of_one_turn(paper):
    r, d, _ = paper
    d.script = says(MIXED)
    assert outline(both(r)) == [("reasoning", "first\nsecond"), ("message", "I look."), ("reasoning", "third"),
                                ("message", "Done.")]


def test_function_calls(paper):
    r, d, _ = paper
    d.script = says("<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + TWO_CALLS)
    whole = both(r, tools=FUNCTIONS)
    assert outline(whole) == [("reasoning", "hm"), ("call", "a", '{"i":1}'), ("call", "b", '{"i":2}')]
    calls = whole["output"][1:]
    assert all(c["call_id"].startswith("call_") and c["id"].startswith("fc_") for c in calls)
    assert calls[0]["call_id"] != calls[1]["call_id"]
    # The whole output goes back in as it came, with the results: the model's own tokens stand in the prompt.
    status, _, _ = ask(r, tools=FUNCTIONS, input=[
        {"role": "user", "content": "Hi"}, *whole["output"],
        {"type": "function_call_output", "call_id": calls[1]["call_id"], "output": "two"},
        {"type": "function_call_output", "call_id": calls[0]["call_id"],
         "output": [{"type": "input_text", "text": "o"}, {"type": "input_text", "text": "ne"}]}])
    assert status == 200
    first, second = d.messages("generate")[0], d.messages("generate")[-1]
    sampled = d.script(None, 0)
    assert list(second.prompt)[:len(first.prompt) + len(sampled)] == list(first.prompt) + sampled
    assert harmony.decode(list(second.prompt)[len(first.prompt) + len(sampled):]) == (
        "<|start|>functions.b to=assistant<|channel|>commentary<|message|>two<|end|>"
        "<|start|>functions.a to=assistant<|channel|>commentary<|message|>one<|end|><|start|>assistant")
    one = both(r, tools=FUNCTIONS, parallel_tool_calls=False)
    assert outline(one)[1:] == [("call", "a", '{"i":1}')] and one["parallel_tool_calls"] is False


def test_cut_answers(paper):
    r, d, _ = paper
    for text, last in (("<|channel|>analysis<|message|>only this goes", "reasoning"),
                       ("<|channel|>final<|message|>only this goes", "message"),
                       ('<|channel|>commentary to=functions.a json<|message|>{"i":', "function_call")):
        d.script = says(text)
        got = both(r, tools=FUNCTIONS)
        assert got["status"] == "incomplete" and got["incomplete_details"] == {"reason": "max_output_tokens"}
        assert got["output"][-1]["status"] == "incomplete" and got["output"][-1]["type"] == last
    d.script = says(HELLO)
    got = both(r, max_output_tokens=2)
    assert got["output"] == [] and got["status"] == "incomplete" and got["max_output_tokens"] == 2


def test_input_items(paper):
    r, d, _ = paper
    said = [
        {"type": "message", "role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "input_text", "text": "Say "}, {"type": "input_text", "text": "yes."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "One?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "old"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
        {"role": "user", "content": "Two?"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": None,
         "content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_3", "summary": [{"type": "summary_text", "text": "never seen"}]},
        {"role": "assistant", "content": "I look.", "phase": "commentary"},
        {"type": "function_call", "call_id": "c1", "name": "a", "arguments": '{"i": 1', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "broken"},
    ]
    status, _, got = ask(r, input=said, instructions="You count.", tools=FUNCTIONS)
    assert status == 200, got
    prompt = harmony.decode(list(d.messages("generate")[-1].prompt))
    assert prompt[prompt.index("<|start|>developer"):] == (
        "<|start|>developer<|message|># Instructions\n\nYou count.\n\n# Tools\n\n## functions\n\nnamespace functions "
        "{\n\ntype a = (_: any) => any;\n\ntype b = (_: any) => any;\n\n} // namespace functions<|end|>"
        .replace("(_: any)", "(_: {\n})") +
        "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nSay yes.<|end|>"
        "<|start|>user<|message|>One?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
        "<|start|>user<|message|>Two?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>a\nb<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.a<|channel|>commentary <|constrain|>json<|message|>{\"i\": 1<|call|>"
        "<|start|>functions.a to=assistant<|channel|>commentary<|message|>broken<|end|><|start|>assistant")


def test_what_comes_back(paper):
    r, d, _ = paper
    fields = {"instructions": "Be \"brief\".", "temperature": 0.5, "top_p": 0.25, "metadata": {"a": "b"}, "user": "u",
              "max_output_tokens": 100, "tools": FUNCTIONS[:1], "tool_choice": "none", "reasoning": {"effort": "high", "summary": "auto"},
              "include": ["reasoning.encrypted_content"], "store": True, "truncation": "disabled", "background": False,
              "text": {"format": {"type": "text"}, "verbosity": "medium"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    whole = both(r, **fields)
    for key in ("instructions", "temperature", "top_p", "metadata", "user", "max_output_tokens", "tool_choice", "text",
                "safety_identifier", "prompt_cache_key", "truncation", "background"):
        assert whole[key] == fields[key], key
    assert whole["store"] is False and whole["previous_response_id"] is None
    assert whole["reasoning"] == {"effort": "high", "summary": None}
    assert whole["tools"] == [{**FUNCTIONS[0], "description": "", "strict": False}]
    g = d.messages("generate")[-1]
    assert (g.sampling.temperature, g.sampling.top_p, g.max_tokens) == (0.5, 0.25, 100)
    assert "Reasoning: high" in harmony.decode(list(g.prompt))
    plain = both(r)
    assert plain["tools"] == [] and plain["tool_choice"] == "auto" and plain["metadata"] == {}
    assert plain["text"]["format"] == {"type": "text"} and plain["temperature"] == 1


def test_logprobs(paper):
    r, d, _ = paper
    d.script = lambda g, c: [200005, 17196, 200008, 12194, 31446, 244, 0, 200002]
    whole = both(r, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert [e["bytes"] for e in entries] == [[72, 105], [240, 159, 146], [150], [33]]
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    assert both(r)["output"][0]["content"][0]["logprobs"] == []


BAD = [
    ({"input": []}, "input"), ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "abc"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": {"i": 1}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": ""}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": ""},
                {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"), ({"truncation": "auto"}, "truncation"), ({"prompt": {"id": "p"}}, "prompt"),
    ({"n": 2}, "n"), ({"stop": ["x"]}, "stop"), ({"include": ["everything"]}, "include"), ({"include": "x"}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"reasoning": {"effort": "minimal"}}, "reasoning.effort"), ({"reasoning": {"summary": "x"}}, "reasoning.summary"),
    ({"reasoning": "high"}, "reasoning"), ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"text": "x"}, "text"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{}]}, "tools[0].type"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "zzz"}, "tools": FUNCTIONS}, "tool_choice"),
    ({"temperature": 9}, "temperature"), ({"metadata": {"a": 1}}, "metadata"), ({"instructions": 5}, "instructions"),
]


def test_bad_requests(paper):
    r, d, _ = paper
    for fields, param in BAD:
        for stream in (False, True):
            status, headers, got = ask(r, stream=stream, **fields)
            assert status == 400 and headers["content-type"].startswith("application/json"), (fields, got)
            assert got["error"]["param"] == param and got["error"]["type"] == "invalid_request_error", (fields, got)
    assert not d.messages("generate")


def test_failures(workers):
    d = workers("decode", script=says(LONG), token_delay_s=0.01)
    with Router(decode=[d], args=["--queue-timeout", "500ms"]) as r:
        c = http.client.HTTPConnection("127.0.0.1", r.port, timeout=30)
        c.request("POST", "/v1/responses", json.dumps({"model": MODEL, "input": "Hi", "stream": True}))
        answer, text = c.getresponse(), b""
        while b"response.output_text.delta" not in text and (part := answer.read1(4096)):
            text += part
        d.kill()
        events = stream_events((text + answer.read()).decode())
        response = openai_types.follow(events)
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert response["output"][-1]["status"] == "incomplete" and events[-1]["type"] == "response.failed"
        # Nothing was said yet: then the failure is the status.
        for stream in (False, True):
            status, headers, got = ask(r, stream=stream)
            assert status == 503 and int(headers["retry-after"]) >= 1 and got["error"]["type"] == "server_error"


def test_a_worker_that_fails_before_its_first_word(paper):
    r, d, _ = paper
    d.on_generate = lambda w, session, g: session.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_INTERNAL)) or True
    for stream in (False, True):
        assert ask(r, stream=stream)[0] == 502


def test_forms_and_choices_reach_the_worker(paper):
    """What is enforced is the worker's business; here it must only be asked for it, and told back."""
    r, d, _ = paper
    schema = {"type": "object", "properties": {"i": {"type": "integer"}}, "required": ["i"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "answer", "strict": True, "schema": schema}
    d.script = says('<|channel|>final <|constrain|>json<|message|>{"i":1}<|return|>')
    whole = both(r, text={"format": form})
    assert whole["text"]["format"] == form and outline(whole) == [("message", '{"i":1}')]
    g = d.messages("generate")[-1]
    assert g.constraint and "# Response Formats\n\n## answer" in harmony.decode(list(g.prompt))
    d.script = says(TWO_CALLS)
    for choice in ("required", {"type": "function", "name": "a"},
                   {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "a"}]}):
        whole = both(r, tools=FUNCTIONS, tool_choice=choice)
        assert whole["tool_choice"] == choice and d.messages("generate")[-1].constraint
    both(r, tools=FUNCTIONS, tool_choice="auto")
    assert not d.messages("generate")[-1].constraint


def test_official_client(paper):
    r, d, _ = paper
    client = openai.OpenAI(base_url=r.url + "/v1", api_key="none", max_retries=0, timeout=30)
    whole = client.responses.create(model=MODEL, input="Hi")
    assert whole.output_text == "Hello there!" and whole.status == "completed"
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == "Hello there!" and len(deltas) > 1
    d.script = says(TWO_CALLS)
    called = client.responses.create(model=MODEL, input="Hi", tools=FUNCTIONS)
    answers = [{"type": "function_call_output", "call_id": c.call_id, "output": c.arguments} for c in called.output]
    d.script = says(HELLO)
    back = client.responses.create(model=MODEL, tools=FUNCTIONS,
                                   input=[{"role": "user", "content": "Hi"}, *called.output, *answers])
    assert back.output_text == "Hello there!"
    with pytest.raises(openai.BadRequestError) as e:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert e.value.body["param"] == "previous_response_id"
