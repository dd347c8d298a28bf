"""A gateway of somebody else's in front of a whole cluster: SMG (PyPI smg) drives damask as one vLLM engine over gRPC.

It fetches the tokenizer, renders Harmony by itself, sends token ids, parses what comes back, and aborts what
its clients leave. The model is the trained tiny one, every prompt goes through the prefill worker.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import time

import openai
import pytest

from cluster import Cluster, free_port, get
from conftest import ROOT, metric, pools_balance
from test_answers import TIMER, WEATHER

MODEL = "gpt-oss-tiny"
ASK = [{"role": "user", "content": "What is 47 + 35?"}]
ANSWER, THOUGHT = "47 + 35 = 82.", "40 + 30 = 70. 7 + 5 = 12. 70 + 12 = 82."


@pytest.fixture(scope="module")
def cluster(build, trained):
    port = free_port()
    with Cluster(build, trained, name="gateway", model_name=MODEL, threads=1, grpc_port=port,
                 decode_args=["--local-prefill-below", "0"]) as c:
        yield c


@pytest.fixture(scope="module")
def gateway(cluster):
    port, metrics = free_port(), free_port()
    log = pathlib.Path(tempfile.mkstemp(prefix="damask-gateway-", suffix=".log")[1])
    with open(log, "wb") as out:
        popen = subprocess.Popen(
            [str(ROOT / ".deps" / "venv" / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port),
             "--worker-urls", f"grpc://{cluster.grpc}", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)],
            stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=log.parent,
            env={**os.environ, "TIKTOKEN_ENCODINGS_BASE": str(ROOT / ".deps" / "vocab")})
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 60
        while MODEL not in get(url + "/models")[1]:
            assert popen.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=180)
    finally:
        popen.terminate()
        popen.wait(20)
        log.unlink()


def test_chat(gateway, cluster):
    got = gateway.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=200)
    choice = got.choices[0]
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == (ANSWER, THOUGHT, "stop")
    direct = openai.OpenAI(base_url=cluster.url + "/v1", api_key="none").chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=200)
    assert direct.choices[0].message.content == ANSWER
    assert got.usage.completion_tokens == direct.usage.completion_tokens
    many = gateway.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=200, n=2)
    assert [c.message.content for c in many.choices] == [ANSWER, ANSWER]


def test_stream(gateway):
    content, thought, finish, usage = "", "", None, None
    for chunk in gateway.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=200, stream=True,
                                                 stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    assert (content, thought, finish) == (ANSWER, THOUGHT, "stop")
    assert usage.completion_tokens == 44


def test_logprobs(gateway):
    got = gateway.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=200, logprobs=True,
                                          top_logprobs=2)
    entries = got.choices[0].logprobs.content
    assert entries and all(e.logprob <= 0 and len(e.top_logprobs) == 2 for e in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(gateway, stream):
    """The model calls, the client answers, the model says the result."""
    tools, messages = [TIMER, WEATHER], [{"role": "user", "content": "What is the weather in Boston?"}]
    more = dict(model=MODEL, temperature=0, max_tokens=200, reasoning_effort="low", tools=tools)
    name, arguments, call_id = "", "", None
    if stream:
        for chunk in gateway.chat.completions.create(messages=messages, stream=True, **more):
            for choice in chunk.choices:
                for c in choice.delta.tool_calls or []:
                    call_id = c.id or call_id
                    name += c.function.name or ""
                    arguments += c.function.arguments or ""
    else:
        choice = gateway.chat.completions.create(messages=messages, **more).choices[0]
        assert choice.finish_reason == "tool_calls"
        call, = choice.message.tool_calls
        name, arguments, call_id = call.function.name, call.function.arguments, call.id
    assert (name, arguments) == ("get_weather", '{"city":"Boston"}')
    messages += [{"role": "assistant", "content": None, "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": call_id, "content": '{"sky":"windy","temperature":17}'}]
    last = gateway.chat.completions.create(messages=messages, **more).choices[0]
    assert last.message.content == "It is windy in Boston with 17 degrees."


def test_responses(gateway):
    got = gateway.responses.create(model=MODEL, input="What is 47 + 35?", temperature=0, max_output_tokens=200)
    assert got.status == "completed" and got.output_text == ANSWER
    kinds, text = [], ""
    for event in gateway.responses.create(model=MODEL, input="What is 47 + 35?", temperature=0, max_output_tokens=200,
                                          stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed" and text == ANSWER


def test_refusals_reach_the_client(gateway):
    with pytest.raises(openai.BadRequestError) as e:
        gateway.chat.completions.create(model=MODEL, messages=ASK, max_tokens=999999)
    assert "131072" in str(e.value)


def test_a_client_that_leaves_frees_its_pages(gateway, cluster):
    before = metric(cluster.url, "damask_router_client_gone_total")
    for _ in range(3):
        stream = gateway.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=60000, stream=True,
                                                 extra_body={"min_tokens": 60000})
        next(iter(stream))
        assert metric(cluster.url, "damask_router_open_requests") == 1
        stream.close()
        deadline = time.monotonic() + 30
        while metric(cluster.url, "damask_router_open_requests"):
            assert time.monotonic() < deadline, "the request goes on without its client"
            time.sleep(0.02)
        for worker in cluster.prefill + cluster.decode:
            pools_balance(worker)
    assert metric(cluster.url, "damask_router_client_gone_total") == before + 3


def test_structured_output_by_structural_tag(gateway):
    """The gateway sends schemas as structural tags; the answer holds to them whatever the model would have said."""
    schema = {"type": "object", "properties": {"country": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
              "required": ["country", "n"], "additionalProperties": False}
    got = gateway.chat.completions.create(
        model=MODEL, temperature=0, max_tokens=400, messages=[{"role": "user", "content": "What is the capital of France?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}})
    assert got.choices[0].finish_reason == "stop", got
    value = json.loads(got.choices[0].message.content)
    assert set(value) == {"country", "n"} and isinstance(value["n"], int) and isinstance(value["country"], str)
    got = gateway.chat.completions.create(model=MODEL, temperature=0, max_tokens=400, tools=[TIMER, WEATHER], tool_choice="required",
                                          messages=[{"role": "user", "content": "What is the weather in Boston?"}]).choices[0]
    assert got.message.tool_calls, got
    call = got.message.tool_calls[0].function
    assert (got.finish_reason, call.name, json.loads(call.arguments)) == ("tool_calls", "get_weather", {"city": "Boston"})
