"""Strict use of the official client's types: raw JSON must be what they say, with no field missing.

The client itself builds its objects without checking; here pydantic checks.
"""

import functools

import pydantic
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent


@functools.lru_cache
def _adapter(kind):
    return pydantic.TypeAdapter(kind)


def chat(data):
    got = _adapter(ChatCompletion).validate_python(data)
    assert got.usage is not None and got.choices
    usage(data["usage"])
    return got


def chat_chunk(data):
    got = _adapter(ChatCompletionChunk).validate_python(data)
    if data.get("usage"):
        usage(data["usage"])
    return got


def usage(data):
    got = _adapter(CompletionUsage).validate_python(data)
    assert got.total_tokens == got.prompt_tokens + got.completion_tokens
    assert got.completion_tokens_details.reasoning_tokens <= got.completion_tokens
    assert got.prompt_tokens_details.cached_tokens <= got.prompt_tokens
    return got


def completion(data):
    return _adapter(Completion).validate_python(data)


def model(data):
    return _adapter(Model).validate_python(data)


def response(data):
    got = _adapter(Response).validate_python(data)
    if got.status in ("completed", "incomplete"):
        assert got.usage.total_tokens == got.usage.input_tokens + got.usage.output_tokens
        assert got.usage.output_tokens_details.reasoning_tokens <= got.usage.output_tokens
    for item in got.output:
        assert item.id and item.status
    return got


def response_event(data):
    got = _adapter(ResponseStreamEvent).validate_python(data)
    assert got.type == data["type"], "validated as another event"
    if hasattr(got, "response"):
        response(data["response"])
    return got


def follow(events):
    """Replays a Responses stream: checks the order of its events and returns the last response as JSON.

    Every delta must add up to the text of its done event, every item to that of the last response.
    """
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete", "response.failed")
    items, open_item, text, part_open = [], None, None, False
    for e in events[2:-1]:
        kind = e["type"]
        if kind == "response.output_item.added":
            assert open_item is None and e["output_index"] == len(items)
            open_item, text = e["item"], ""
            assert open_item["status"] == "in_progress"
            continue
        assert open_item is not None and e["output_index"] == len(items), e
        if kind == "response.output_item.done":
            assert not part_open and e["item"]["id"] == open_item["id"]
            assert e["item"]["type"] == open_item["type"]
            said = e["item"]["arguments"] if open_item["type"] == "function_call" else e["item"]["content"][0]["text"]
            assert said == text
            items.append(e["item"])
            open_item = None
            continue
        assert e["item_id"] == open_item["id"]
        if open_item["type"] != "function_call":
            assert e["content_index"] == 0
        if kind == "response.content_part.added":
            assert e["part"]["text"] == "" and not part_open
            part_open = True
        elif kind == "response.content_part.done":
            assert e["part"]["text"] == text and part_open
            part_open = False
        elif kind.endswith(".delta"):
            assert e["delta"] and (part_open or open_item["type"] == "function_call")
            text += e["delta"]
        elif kind.endswith(".done"):
            assert e.get("text", e.get("arguments")) == text
        else:
            raise AssertionError(f"unexpected event {kind}")
    assert open_item is None
    assert last["response"]["output"] == items
    return last["response"]
