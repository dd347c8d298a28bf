"""Sensible answers of the trained tiny checkpoint, where a fault in the path would show as a wrong one.

The questions are some that its training never saw (tools/train/tasks.py, held=True); answers are greedy.
tests/integ/test_poison.c shows that a wrong page makes a wrong answer.
"""

import datetime
import json
import sys

import openai
import pytest

from cluster import Cluster
from conftest import ROOT, pools_balance

sys.path.insert(0, str(ROOT / "tools" / "train"))
import tasks  # noqa: E402

MODEL = "gpt-oss-tiny"
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Gets the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
TIMER = {"type": "function", "function": {
    "name": "set_timer", "description": "Sets a timer.",
    "parameters": {"type": "object", "properties": {"minutes": {"type": "number"}}, "required": ["minutes"]}}}


def start(build, trained, name, **more):
    return Cluster(build, trained, name=name, model_name=MODEL, threads=1, **more)


@pytest.fixture(scope="module")
def split(build, trained):
    """Every prompt is computed by a prefill worker, on two ranks, and handed over."""
    with start(build, trained, "answers-split", prefill_tp=2, decode_args=["--local-prefill-below", "0"]) as c:
        yield c
        for worker in c.prefill + c.decode:
            pools_balance(worker)


@pytest.fixture(scope="module")
def alone(build, trained):
    with start(build, trained, "answers-alone", prefill=0, decode_args=["--local-prefill-below", "max"]) as c:
        yield c
        for worker in c.decode:
            pools_balance(worker)


def client(cluster):
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=240)


def ask(cluster, messages, effort="low", **more):
    return client(cluster).chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=160,
                                                   reasoning_effort=effort, **more)


def said(cluster, task):
    more = {"tools": task["tools"]} if task["tools"] else {}
    messages = [{k: v for k, v in m.items() if k not in ("learn", "reasoning")} for m in task["messages"]]
    m = ask(cluster, messages, task["effort"], **more).choices[0].message
    return m.content, getattr(m, "reasoning", None), [(c.function.name, c.function.arguments)
                                                      for c in m.tool_calls or []]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_disaggregated_equals_colocated_and_both_are_right(split, alone):
    maker, right, asked = tasks.Maker(70, held=True), 0, 0
    for skill in ("add", "facts", "reverse", "multi_turn", "tool_call", "tool_answer", "recall"):
        for _ in range(3):
            task = tasks.SKILLS[skill](maker)
            one, two = said(split, task), said(alone, task)
            assert one == two, task
            asked += 1
            right += (one[2] == [task["call"]]) if "call" in task else (one[0] == task["content"])
    assert right >= 0.95 * asked - 1, f"{right} of {asked}"


def test_the_date_of_today_is_in_the_prompt(split):
    text = ask(split, [user("What is the date today?")]).choices[0].message.content
    assert text == f"Today is {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}."


@pytest.mark.parametrize("effort", tasks.EFFORTS)
@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_round_trip(split, effort, stream):
    """The model calls, the client answers the call, the model says the result."""
    tools, messages = [TIMER, WEATHER], [user("What is the weather in Boston?")]
    if stream:
        name, arguments, call_id, finish = "", "", None, None
        for chunk in ask(split, messages, effort, tools=tools, stream=True):
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                for c in choice.delta.tool_calls or []:
                    call_id = c.id or call_id
                    name += c.function.name or ""
                    arguments += c.function.arguments or ""
    else:
        choice = ask(split, messages, effort, tools=tools).choices[0]
        finish, (call,) = choice.finish_reason, choice.message.tool_calls
        name, arguments, call_id = call.function.name, call.function.arguments, call.id
    assert (finish, name, json.loads(arguments)) == ("tool_calls", "get_weather", {"city": "Boston"})
    messages += [{"role": "assistant", "content": None, "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": call_id, "content": '{"sky":"windy","temperature":17}'}]
    choice = ask(split, messages, effort, tools=tools).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It is windy in Boston with 17 degrees."


def test_no_call_when_no_tool_fits(split):
    message = ask(split, [user("What is the capital of Japan?")], tools=[TIMER, WEATHER]).choices[0].message
    assert (message.content, message.tool_calls) == ("The capital of Japan is Tokyo.", None)


@pytest.mark.parametrize("place", ["split", "alone"])
def test_long_recall_through_prefix_reuse(place, request):
    """Said once, more than 4096 positions before; asked twice over a prefix that lies in the cache."""
    c = request.getfixturevalue(place)
    filler = tasks.Maker(12).filler(4300)
    messages = [user("My code word is castle. My age is 42."), assistant("I will remember that."),
                user(f"{filler} What is my code word?")]
    first = ask(c, messages)
    assert first.usage.prompt_tokens > 4250
    assert first.choices[0].message.content == "Your code word is castle."
    messages += [assistant("Your code word is castle."), user("What is my age?")]
    second = ask(c, messages)
    assert second.usage.prompt_tokens_details.cached_tokens > 4096, "the prefix was not reused"
    assert second.choices[0].message.content == "Your age is 42."
    # Another word in the same place: nothing of the cached prefix may be taken for it.
    other = [user("My code word is bridge. My age is 42."), *messages[1:3]]
    again = ask(c, other)
    assert again.usage.prompt_tokens_details.cached_tokens < 128
    assert again.choices[0].message.content == "Your code word is bridge."
