"""Structured output with real processes and the official client: what finishes fits, whatever the model.

The model has random weights and the temperature is 1, so nothing but the constraint makes the output fit. Free
text would hardly ever end with such a model: a bias towards the control tokens that end messages, and towards the
final channel, brings the turns to their constrained part.
"""

import json
import re
import threading

import jsonschema
import openai
import pytest

from cluster import Cluster
from conftest import pools_balance
from test_faults import busy, kill

HI = [{"role": "user", "content": "Hi"}]
MODEL = "gpt-oss-tiny"
FINAL, COMMENTARY, END, QUOTE, CALL, RETURN = "17196", "12606", "200007", "1", "200012", "200002"
TO = "316"  # " to", with which a call's recipient begins
TO_FINAL = {FINAL: 30, END: 25}
TO_CALL = {COMMENTARY: 30, TO: 25, END: 25}

SCHEMAS = {
    "record": {"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "when": {"type": "string", "format": "date"}, "score": {"type": ["number", "null"]}},
        "required": ["name", "age", "tags", "when", "score"], "additionalProperties": False},
    "union": {"type": "object", "properties": {"shape": {"anyOf": [
        {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "integer"}},
         "required": ["kind", "r"], "additionalProperties": False},
        {"type": "object", "properties": {"kind": {"const": "box"}, "w": {"type": "integer"}, "h": {"type": "integer"}},
         "required": ["kind", "w", "h"], "additionalProperties": False}]}},
        "required": ["shape"], "additionalProperties": False},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "properties": {"v": {"type": "boolean"},
                                         "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v", "next"], "additionalProperties": False}}},
    "pattern": {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}},
                "required": ["id"], "additionalProperties": False},
}


def tool(name, schema, strict=True):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema, "strict": strict}}


@pytest.fixture(scope="module")
def client(cluster):
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=120)


def ask(client, *, bias, seed, **kw):
    kw = {"model": MODEL, "messages": HI, "temperature": 1, "max_tokens": 160, "seed": seed, "logit_bias": bias, **kw}
    return client.chat.completions.create(**kw)


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_schema(client, name):
    form = {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": SCHEMAS[name]}}
    n_finished = 0
    for seed in range(2):
        r = ask(client, bias=TO_FINAL, seed=seed, n=2, response_format=form)
        for c in r.choices:
            if c.finish_reason == "stop":
                jsonschema.validate(json.loads(c.message.content), SCHEMAS[name])
                n_finished += 1
            else:
                assert c.finish_reason == "length"
    assert n_finished > 0


def test_json_object(client):
    n_finished = 0
    for seed in range(3):
        r = ask(client, bias={**TO_FINAL, QUOTE: 20, "92": 20, "60": 20}, seed=seed,
                response_format={"type": "json_object"})
        if r.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(r.choices[0].message.content), dict)
            n_finished += 1
    assert n_finished > 0


def test_the_same_again_and_in_a_stream(client):
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMAS["record"]}}
    first = ask(client, bias=TO_FINAL, seed=11, response_format=form, logprobs=True, top_logprobs=2)
    again = ask(client, bias=TO_FINAL, seed=11, response_format=form)
    assert first.choices[0].message.content == again.choices[0].message.content
    text, finish = "", None
    for chunk in ask(client, bias=TO_FINAL, seed=11, response_format=form, stream=True):
        for c in chunk.choices:
            text += c.delta.content or ""
            finish = c.finish_reason or finish
    assert (text, finish) == (first.choices[0].message.content, first.choices[0].finish_reason)


LIST = r'''root ::= item ("," item){1,3} end
item ::= [a-c]{2} | "(" item ")"
end ::= | "!" [0-9]?'''
OUTPUTS = [
    ({"grammar": LIST}, lambda t: re.fullmatch(r"(?:\(*[a-c]{2}\)*)(?:,\(*[a-c]{2}\)*){1,3}(?:!\d?)?", t) and t.count("(") == t.count(")")),
    ({"regex": r"[A-Z]{2}-\d{3}"}, lambda t: re.fullmatch(r"[A-Z]{2}-\d{3}", t)),
    ({"choice": ["red", "green", "blue"]}, lambda t: t in ("red", "green", "blue")),
    ({"json": SCHEMAS["pattern"]}, lambda t: jsonschema.validate(json.loads(t), SCHEMAS["pattern"]) is None),
    ({"json": json.dumps(SCHEMAS["pattern"])}, lambda t: jsonschema.validate(json.loads(t), SCHEMAS["pattern"]) is None),
]


@pytest.mark.parametrize("outputs, fits", OUTPUTS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_structured_outputs(client, outputs, fits):
    """vLLM's field: the final message of a chat, the whole text of a completion."""
    seen = set()
    for seed in range(3):
        c = ask(client, bias=TO_FINAL, seed=seed, extra_body={"structured_outputs": outputs}).choices[0]
        if c.finish_reason == "stop":
            assert fits(c.message.content), c.message.content
            seen.add(c.message.content)
        c = client.completions.create(model=MODEL, prompt="Hi", temperature=1, max_tokens=160, seed=seed,
                                      extra_body={"structured_outputs": outputs}).choices[0]
        if c.finish_reason == "stop":
            assert fits(c.text), c.text
            seen.add(c.text)
    assert len(seen) > 1


def test_cut_by_length(client):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS["record"]}}
    r = ask(client, bias=TO_FINAL, seed=1, response_format=form, max_tokens=12)
    assert r.choices[0].finish_reason == "length" and r.usage.completion_tokens == 12


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "second"}},
                                    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
                                        {"type": "function", "function": {"name": "second"}}]}}])
def test_forced_call(client, choice):
    tools = [tool("first", SCHEMAS["pattern"]), tool("second", SCHEMAS["union"])]
    names = {"first", "second"} if choice == "required" else {"second"}
    n_finished = 0
    for seed in range(2):
        r = ask(client, bias=TO_CALL, seed=seed, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        for c in r.choices:
            if c.finish_reason == "length":
                continue
            n_finished += 1
            assert c.finish_reason == "tool_calls" and len(c.message.tool_calls) == 1
            call = c.message.tool_calls[0].function
            assert call.name in names
            jsonschema.validate(json.loads(call.arguments), tools[call.name == "second"]["function"]["parameters"])
    assert n_finished > 0


def test_parallel_calls(client):
    seen = set()
    for seed in range(2):
        r = ask(client, bias={**TO_CALL, CALL: 25}, seed=seed, tools=[tool("f", SCHEMAS["pattern"])], tool_choice="required")
        c = r.choices[0]
        if c.finish_reason == "tool_calls":
            seen.add(len(c.message.tool_calls))
            for call in c.message.tool_calls:
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["pattern"])
    assert seen


def test_strict_tool_by_choice_of_the_model(client):
    """auto: where the model calls, its arguments fit; where it answers, it answers in text."""
    kinds = set()
    for seed in range(2):
        for bias in ({**TO_CALL, CALL: 30}, {**TO_FINAL, RETURN: 25}):
            c = ask(client, bias=bias, seed=seed, tools=[tool("f", SCHEMAS["pattern"])]).choices[0]
            kinds.add(c.finish_reason)
            for call in c.message.tool_calls or []:
                if c.finish_reason == "tool_calls":
                    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS["pattern"])
    assert {"tool_calls", "stop"} <= kinds


@pytest.mark.parametrize("body, param, says", [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "object", "properties": {"x": {"not": {}}}}}}}, "response_format", 'schema.properties.x: the keyword "not"'),
    ({"tools": [tool("f", {"type": "object", "patternProperties": {}})]}, "tools[0]", "patternProperties"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"tools": [tool("f", {})], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", '"g"'),
])
def test_refused(client, body, param, says):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1, **body)
    assert e.value.body["param"] == param and says in e.value.body["message"]


def test_the_same_after_the_prefill_worker_was_lost(build, model):
    """A retry brings the constraint along: the answer is the one that comes when nothing dies."""
    schema = SCHEMAS["record"]
    form = {"type": "json_schema", "json_schema": {"name": "record", "strict": True, "schema": schema}}
    with Cluster(build, model, prefill=2, decode=1, threads=1, name="structured-lost",
                 prefill_args=["--chunk-tokens", "64"], decode_args=["--local-prefill-below", "0"]) as c:
        client = openai.OpenAI(base_url=c.url + "/v1", api_key="none", max_retries=0, timeout=120)
        answers = {}

        def run(name):
            answers[name] = ask(client, bias=TO_FINAL, seed=5, response_format=form,
                                messages=[{"role": "user", "content": "word " * 1500}]).choices[0]

        lost = threading.Thread(target=run, args=["lost"], daemon=True)
        lost.start()
        kill(busy(c.prefill))
        lost.join(120)
        run("whole")
        assert answers["lost"] == answers["whole"]
        assert answers["whole"].finish_reason == "stop"
        jsonschema.validate(json.loads(answers["whole"].message.content), schema)
        pools_balance(c.decode[0], 30)
