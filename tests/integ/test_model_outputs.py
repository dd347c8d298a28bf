"""What models of this family really write, well formed and broken, and what a client must get for it; what
conversations of clients become as a prompt. The router alone, in front of workers of paper.

Each output is asked for whole and as a stream, and both must say the same.
"""

import datetime
import json
import os

import pytest

from fake_worker import pb
from router_test import MODEL, Router, harmony, ids, says
from test_http_api import chat, same

NEXT = "<|end|><|start|>assistant"


def functions(*names):
    return [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in names]


# name: (output, tools, content, reasoning, calls, finish)
OUTPUTS = {
    "channel said again behind the recipient": (
        '<|channel|>commentary to=functions.run_cmd<|channel|>commentary json<|message|>{"cmd":"ls"}<|call|>',
        ["run_cmd"], None, "", [["run_cmd", '{"cmd":"ls"}']], "tool_calls"),
    "type on a final answer": (
        '<|channel|>final <|constrain|>json<|message|>{"result":true}<|return|>', ["f"],
        '{"result":true}', "", [], "stop"),
    "no blank before the constrain mark": (
        '<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        ["get_weather"], None, "", [["get_weather", '{"city":"Oslo"}']], "tool_calls"),
    "call on the analysis channel": (
        '<|channel|>analysis to=functions.grep code<|message|>{"pattern":"foo"}<|call|>', ["grep"], None, "",
        [["grep", '{"pattern":"foo"}']], "tool_calls"),
    "name without its prefix": (
        '<|channel|>commentary to=get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        ["get_weather"], None, "", [["get_weather", '{"city":"Oslo"}']], "tool_calls"),
    "name without its prefix and no tools": (
        '<|channel|>commentary to=get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>', [],
        '{"city":"Oslo"}', "", [], "stop"),
    "call without tools": (
        '<|channel|>commentary to=functions.ask_user json<|message|>{"question":"Which file?"}<|call|>', [],
        '{"question":"Which file?"}', "", [], "stop"),
    "misspelt channel": (
        "<|channel|>comment to=functions.a json<|message|>{}<|call|>", ["a"], None, "", [["a", "{}"]], "tool_calls"),
    "answer ended and returned": (
        "<|channel|>final<|message|>Answer<|end|><|return|>", [], "Answer", "", [], "stop"),
    "message mark missing": ("<|channel|>final Hello there<|return|>", [], "Hello there", "", [], "stop"),
    "start mark twice": (
        "<|channel|>analysis<|message|>t<|end|><|start|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        [], "Hi", "t", [], "stop"),
    "role said again at the start": ("assistant<|channel|>final<|message|>Hi<|return|>", [], "Hi", "", [], "stop"),
    "role said twice": (
        "<|channel|>analysis<|message|>t<|end|><|start|>assistantassistant<|channel|>final<|message|>Hi<|return|>",
        [], "Hi", "t", [], "stop"),
    "prose behind the channel mark": (
        f"<|channel|>We need to answer.{NEXT}<|channel|>final<|message|>ok<|return|>", [], "ok",
        "We need to answer.", [], "stop"),
    "refusal on no channel, then the usual": (
        f"Not allowed. Must refuse.{NEXT}<|channel|>analysis<|message|>Refuse.{NEXT}<|channel|>final<|message|>"
        "Sorry, no.<|return|>", [], "Sorry, no.", "Not allowed. Must refuse.\nRefuse.", [], "stop"),
    "refusal and nothing else": ("Sorry, no.<|return|>", [], "Sorry, no.", "", [], "stop"),
    "reasoning and a call": (
        f"<|channel|>analysis<|message|>plan{NEXT}<|channel|>commentary to=functions.search <|constrain|>json"
        '<|message|>{"q":"x"}<|call|>', ["search"], None, "plan", [["search", '{"q":"x"}']], "tool_calls"),
    "arguments that are no JSON": (
        "<|channel|>commentary to=functions.shell code<|message|>ls -R\n<|call|>", ["shell"], None, "",
        [["shell", "ls -R\n"]], "tool_calls"),
    "answer at once": (
        '<|channel|>final<|message|>{"issues":[]}<|return|>', [], '{"issues":[]}', "", [], "stop"),
    "several messages of each kind": (
        f"<|channel|>analysis<|message|>a{NEXT}<|channel|>analysis<|message|>b{NEXT}<|channel|>commentary<|message|>c"
        f"{NEXT}<|channel|>final<|message|>d<|return|>", [], "c\nd", "a\nb", [], "stop"),
    "two calls": (
        f'<|channel|>commentary to=functions.a json<|message|>{{"i":1}}{NEXT}'
        '<|channel|>commentary to=functions.b json<|message|>{"i":2}<|call|>', ["a", "b"], None, "",
        [["a", '{"i":1}'], ["b", '{"i":2}']], "tool_calls"),
    "built-in tool that nobody offered": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>", [], None, "print(1)", [], "stop"),
    "function with the name of a built-in tool": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>", ["python"], None, "",
        [["python", "print(1)"]], "tool_calls"),
    "narrow no-break space": ("<|channel|>final<|message|>Use 5\u202fkm<|return|>", [], "Use 5\u202fkm", "", [], "stop"),
    "narrow no-break space in arguments": (
        '<|channel|>commentary to=functions.f json<|message|>{"d":"5\u202fkm"}<|call|>', ["f"], None, "",
        [["f", '{"d":"5\u202fkm"}']], "tool_calls"),
}
# How many tokens are repaired: the metric says so.
REPAIRS = {"call without tools": "call_not_allowed", "name without its prefix and no tools": "unknown_recipient",
           "built-in tool that nobody offered": "unknown_recipient", "message mark missing": "no_message",
           "start mark twice": "stray_token", "answer ended and returned": "stray_token",
           "misspelt channel": "no_channel", "channel said again behind the recipient": "header_noise",
           "role said twice": "header_noise"}


def recovered(r, kind):
    return r.metric(f'damask_router_harmony_recovered_total{{kind="{kind}"}}')


def check(r, tools, content, reasoning, calls, finish, **fields):
    whole, payloads, streamed = chat(r, **({"tools": functions(*tools)} if tools else {}), **fields)
    same(whole, streamed)
    message, got = whole["choices"][0]["message"], streamed[0]
    assert (message["content"], got["reasoning"], [c[1:] for c in got["calls"]]) == (content, reasoning, calls)
    assert whole["choices"][0]["finish_reason"] == finish
    assert len({c[0] for c in got["calls"]}) == len(calls)
    return whole, payloads


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(paper, name):
    r, d, _ = paper
    output, tools, content, reasoning, calls, finish = OUTPUTS[name]
    d.script = says(output)
    before = recovered(r, REPAIRS[name]) if name in REPAIRS else 0
    whole, payloads = check(r, tools, content, reasoning, calls, finish)
    assert whole["usage"]["completion_tokens"] == len(ids(output))
    if name in REPAIRS:
        assert recovered(r, REPAIRS[name]) == before + 2, "once for the whole answer, once for the stream"
    for p in payloads:  # nothing of a header is in what a client sees
        delta = p["choices"][0]["delta"] if p["choices"] else {}
        seen = json.dumps([delta.get("content"), delta.get("reasoning"), delta.get("tool_calls")])
        assert not any(word in seen for word in ("<|", "to=", "functions.", "commentary", "assistant"))


def test_call_without_tools_by_choice(paper):
    """Tools that are declared and may not be called: what the model writes as a call is content."""
    r, d, _ = paper
    output, _, content, reasoning, calls, finish = OUTPUTS["call without tools"]
    d.script = says(output)
    check(r, ["ask_user"], content, reasoning, calls, finish, tool_choice="none")


TOKENS = {
    "answer ended twice": ([200005, 17196, 200008, 17045, 200007, 200007], {}, "Answer", "", [], "length"),
    "answer ended, then returned": ([200005, 17196, 200008, 17045, 200007, 200002], {}, "Answer", "", [], "stop"),
    "message mark missing": ([200005, 17196, 32949, 1354, 200002], {}, "Hello there", "", [], "stop"),
    "end inside a header": ([200005, 17196], {"max_tokens": 2}, None, "", [], "length"),
    "call cut inside its arguments": (
        [200005, 12606, 815, 316, 28, 44580, 2234, 5701, 200008, 10848, 919, 7534, 26682], {"max_tokens": 13}, None, "",
        [["w", '{"text":"abc']], "length"),
    "character in two tokens": ([200005, 17196, 200008, 12194, 31446, 244, 0, 200002], {}, "Hi💖!", "", [], "stop"),
    "bytes of one message left over": (
        [200005, 35644, 200008, 83, 31446, 200007, 200006, 173781, 200005, 17196, 200008, 12194, 200002], {}, "Hi",
        "t\ufffd", [], "stop"),
    "narrow no-break space": ([200005, 17196, 200008, 8470, 220, 20, 35971, 15284, 200002], {}, "Use 5\u202fkm", "", [],
                              "stop"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(paper, name):
    r, d, _ = paper
    output, fields, content, reasoning, calls, finish = TOKENS[name]
    d.script = lambda generate, choice: output
    whole, payloads = check(r, ["w"] if calls else [], content, reasoning, calls, finish, **fields)
    assert whole["usage"]["completion_tokens"] == len(output)
    if name == "character in two tokens":
        said = [p["choices"][0]["delta"].get("content") for p in payloads if p["choices"]]
        assert [s for s in said if s] == ["Hi", "💖", "!"]


def steps(*groups):
    """A worker whose steps deliver several tokens each."""
    def generate(worker, session, g):
        session.send(reserved=pb.Reserved(id=g.id))
        n = 0
        for group in groups:
            session.send(tokens=pb.Tokens(id=g.id, first_index=n, ids=group))
            n += len(group)
        session.send(finished=pb.Finished(id=g.id, reason=pb.FINISH_STOP, n_tokens=n))
        return True
    return generate


def test_text_in_the_step_of_the_stop_token_is_sent(paper):
    r, d, _ = paper
    d.on_generate = steps([200005, 17196, 200008], [24537, 13, 200002])
    check(r, [], "Done.", "", [], "stop")


def test_tokens_behind_a_call_are_nothing(paper):
    """A step may deliver more than the call; it ends the turn, and only its tokens are counted."""
    r, d, _ = paper
    call = ids('<|channel|>commentary to=functions.locate json<|message|>{"city":"Paris"}<|call|>')
    more = ids('commentary<|channel|>commentary to=functions.locate json<|message|>{"lat":1}<|call|>')
    d.on_generate = steps(call[:5], call[5:] + more)
    whole, _ = check(r, ["locate"], None, "", [["locate", '{"city":"Paris"}']], "tool_calls")
    assert whole["usage"]["completion_tokens"] == len(call)


# ---------------------------------------------------------------- conversations to prompts

HI = "<|start|>user<|message|>Hi<|end|>"
SYS = ("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
       "Current date: 2025-06-28\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
       "included for every message.")
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}


def asked(r, d, messages, **fields):
    status, _, got = r.chat(messages=messages, **fields)
    assert status == 200, got
    prompt = list(d.messages("generate")[-1].prompt)
    assert got["usage"]["prompt_tokens"] == len(prompt)
    return prompt, harmony.decode(prompt)


def conversation(rounds=1):
    out = [{"role": "user", "content": "Weather?"}]
    for i in range(rounds):
        out += [{"role": "assistant", "content": "Let me check." if i == 0 else None,
                 "reasoning_content": "Need tool." if i == 0 else "Once more.",
                 "tool_calls": [{"id": f"c{i}", "type": "function",
                                 "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}]},
                {"role": "tool", "tool_call_id": f"c{i}", "content": '{"t":4}'}]
    return out


CALLED = ('<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city":"Oslo"}'
          '<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{"t":4}<|end|>')


def test_prompt_of_one_word(paper):
    r, d, _ = paper
    prompt, text = asked(r, d, [{"role": "user", "content": "Hi"}])
    assert text == f"{SYS}<|end|>{HI}<|start|>assistant" and len(prompt) == 68
    assert prompt[-8:] == [200007, 200006, 1428, 200008, 12194, 200007, 200006, 173781]
    prompt, text = asked(r, d, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert len(prompt) == 78
    assert text == (f"{SYS}<|end|><|start|>developer<|message|># Instructions\n\nBe brief.<|end|>{HI}<|start|>assistant")


def test_every_system_message_arrives(paper):
    r, d, _ = paper
    texts = ["You are a helper.", "The user's name is Sam."]
    _, text = asked(r, d, [{"role": "system", "content": t} for t in texts] + [{"role": "user", "content": "What is my name?"}])
    system, rest = text.split("<|end|>", 1)
    assert system == SYS
    for t in texts:
        assert rest.count(f"<|start|>developer<|message|># Instructions\n\n{t}<|end|>") == 1 == text.count(t)
    assert text.index(texts[0]) < text.index(texts[1])


def test_answer_with_reasoning_text_and_call_comes_back(paper):
    r, d, _ = paper
    _, text = asked(r, d, conversation(), tools=[WEATHER])
    assert text.endswith(
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant<|channel|>analysis<|message|>Need tool.<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>Let me check.<|end|>{CALLED}<|start|>assistant")


def test_reasoning_of_an_open_tool_loop_stays(paper):
    r, d, _ = paper
    _, text = asked(r, d, conversation(2), tools=[WEATHER])
    assert text.endswith(f"{CALLED}<|start|>assistant<|channel|>analysis<|message|>Once more.<|end|>{CALLED}"
                         "<|start|>assistant")
    assert text.count("<|channel|>analysis<|message|>") == 2


def test_result_of_a_tool_finds_its_function(paper):
    r, d, _ = paper
    prompt, _ = asked(r, d, conversation(), tools=[WEATHER])
    header = [200006, 44580, 775, 170154, 316, 28, 173781, 200005, 12606, 815, 200008]
    assert sum(prompt[i:i + len(header)] == header for i in range(len(prompt))) == 1
    messages = conversation()
    messages[2]["tool_call_id"] = "zzz"
    status, _, got = r.chat(messages=messages, tools=[WEATHER])
    assert (status, got["error"]["param"]) == (400, "messages[2].tool_call_id")


def test_result_of_a_tool_in_parts(paper):
    r, d, _ = paper
    messages = conversation()
    messages[2]["content"] = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert "commentary<|message|>AB<|end|>" in asked(r, d, messages, tools=[WEATHER])[1]
    status, _, got = r.chat(messages=[{"role": "user", "content": [{"type": "input_file", "file_id": "f1"}]}])
    assert (status, got["error"]["param"]) == (400, "messages[0].content[0].type")
    assert "input_file" in got["error"]["message"]


def test_broken_arguments_come_back_as_they_were(paper):
    r, d, _ = paper
    messages = conversation()
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    assert "<|constrain|>json<|message|>{<|call|>" in asked(r, d, messages, tools=[WEATHER])[1]
    messages[1]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    status, _, got = r.chat(messages=messages, tools=[WEATHER])
    assert (status, got["error"]["param"]) == (400, "messages[1].tool_calls[0].function.arguments")


def test_empty_answer_is_a_message(paper):
    r, d, _ = paper
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}]
    assert "A<|end|><|start|>assistant<|channel|>final<|message|><|end|><|start|>user" in asked(r, d, messages)[1]
    messages[1]["content"] = None
    status, _, got = r.chat(messages=messages)
    assert (status, got["error"]["param"]) == (400, "messages[1].content")


def test_effort(paper):
    r, d, _ = paper
    for effort, word in ((None, "medium"), ("low", "low"), ("medium", "medium"), ("high", "high")):
        assert f"\n\nReasoning: {word}\n\n" in asked(r, d, [{"role": "user", "content": "Hi"}], reasoning_effort=effort)[1]
    for effort in ("none", "minimal", "xhigh", "HIGH"):
        status, _, got = r.chat(reasoning_effort=effort)
        assert (status, got["error"]["param"]) == (400, "reasoning_effort")
        assert all(f'"{w}"' in got["error"]["message"] for w in ("low", "medium", "high"))


def test_lone_surrogates(paper):
    """Halves of a character in JSON escapes are replaced, whole pairs are characters."""
    r, d, _ = paper
    for escape, text, content in ((r"\ud83d", "\ufffd", [3251]), (r"\ud83d\udc4d", "👍", None),
                                  (r"\udc4d\ud83d", "\ufffd\ufffd", None)):
        body = '{"model":"%s","messages":[{"role":"user","content":"%s"}]}' % (MODEL, escape)
        status, _, _ = r.request("POST", "/v1/chat/completions", body)
        prompt = list(d.messages("generate")[-1].prompt)
        assert status == 200 and f"<|start|>user<|message|>{text}<|end|>" in harmony.decode(prompt)
        if content:
            assert prompt[-4:-3] == content and prompt[-5] == 200008


def test_last_id_of_the_vocabulary(paper):
    r, _, _ = paper
    assert r.chat(logit_bias={"201087": -100})[0] == 200
    for bias in ({"201088": -100}, {"-1": 5}):
        status, _, got = r.chat(logit_bias=bias)
        assert (status, got["error"]["param"]) == (400, "logit_bias")
    status, _, data = r.request("POST", "/detokenize", {"model": MODEL, "tokens": [201088]})
    assert status == 400 and json.loads(data)["error"]["param"] == "tokens"


def test_headers_with_the_recipient_behind_the_channel(workers):
    d = workers("decode", script=says("<|channel|>final<|message|>x<|return|>"))
    with Router(decode=[d], args=["--recipient-in-channel"]) as r:
        assert asked(r, d, conversation(), tools=[WEATHER])[1].endswith(
            '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}'
            '<|call|><|start|>functions.get_weather<|channel|>commentary to=assistant<|message|>{"t":4}<|end|>'
            "<|start|>assistant")


def test_options_of_the_library(workers):
    """Descriptions of several lines, and which old analysis goes, as openai-harmony has it."""
    d = workers("decode", script=says("<|channel|>final<|message|>x<|return|>"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "description": "one\ntwo"}}}}}
    messages = []
    for i in "12":
        messages += [{"role": "user", "content": i}, {"role": "assistant", "content": i, "reasoning": f"think {i}"}]
    messages.append({"role": "user", "content": "3"})
    for args, comment, kept in (([], "// one\n// two\n", []), (["--library-schema-text"], "// one\ntwo\n", []),
                                (["--library-drop-rule"], "// one\n// two\n", ["think 2"])):
        with Router(decode=[d], args=args, grpc=False) as r:
            text = asked(r, d, messages, tools=[tool])[1]
            assert comment in text
            assert [w for w in ("think 1", "think 2") if w in text] == kept


def test_date_is_utc_wherever_the_router_stands(workers, monkeypatch):
    d = workers("decode", script=says("<|channel|>final<|message|>x<|return|>"))
    prompts = []
    before = datetime.datetime.now(datetime.timezone.utc).date()
    for zone in ("America/Los_Angeles", "Asia/Tokyo"):
        monkeypatch.setitem(os.environ, "TZ", zone)
        with Router(decode=[d], args=["--date", "today"], grpc=False) as r:
            prompts.append(asked(r, d, [{"role": "user", "content": "Hi"}]))
    after = datetime.datetime.now(datetime.timezone.utc).date()
    assert all(any(f"Current date: {day}\n" in text for day in (before, after)) for _, text in prompts)
    assert prompts[0] == prompts[1] or before != after
