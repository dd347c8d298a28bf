"""Harmony against openai-harmony 0.0.8 and oss-harmony 0.0.11: rendering token for token, parsing message
for message.

Conversations and outputs are made by harmony_generator.py; the libraries and `damask chat` get the same JSON.
The libraries are the authority for rendering, with our options set to their behaviour. For parsing they are one
where they accept an output; where they raise, the rules of recovery are checked instead: nothing that a message
says is lost, every repair is counted, no control token is spelled out.

Each run of the generated tests has a fresh seed, which it prints; DAMASK_SEED repeats one, DAMASK_ROUNDS chooses
another number of rounds (docs/logs has longer runs).
"""

import json
import os
import pathlib
import random
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
VOCAB = os.environ.get("TIKTOKEN_ENCODINGS_BASE", str(ROOT / ".deps" / "vocab"))
os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", VOCAB)
OSS_HARMONY = ROOT / ".deps" / "oss-harmony"
SEED = int(os.environ.get("DAMASK_SEED", random.SystemRandom().randrange(10**9)))
ROUNDS = int(os.environ.get("DAMASK_ROUNDS", "300"))

import openai_harmony as oh  # noqa: E402  (reads the environment when it is loaded)
from openai_harmony import (  # noqa: E402
    Author,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    StreamableParser,
    SystemContent,
    ToolDescription,
)

from harmony_generator import (  # noqa: E402
    CALL, CHANNEL, CONSTRAIN, DATE, END, END_OF_TEXT, FIRST_SPECIAL, MESSAGE, PLAIN_WORDS, RETURN, START, Generator)
from harmony_library import Library  # noqa: E402

STOPS = (RETURN, CALL, END_OF_TEXT)


class Damask:
    """One `damask chat` process; a line in, a line out."""

    def __init__(self, action):
        self.process = subprocess.Popen(
            [str(BUILD / "tools" / "damask"), "chat", action, "--vocab", VOCAB],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, value):
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(timeout=10) == 0


@pytest.fixture(scope="module")
def encoding():
    return oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def oss():
    """oss-harmony, which can not be loaded beside openai-harmony."""
    library = Library(VOCAB, OSS_HARMONY)
    yield library
    library.close()


@pytest.fixture(scope="module")
def renderer():
    damask = Damask("render")
    yield damask
    damask.close()


@pytest.fixture(scope="module")
def parser():
    damask = Damask("parse")
    yield damask
    damask.close()


# ---- rendering: Harmony's own messages ----


def check_messages(encoding, renderer, messages, drop="library", turn=True):
    conversation = Conversation.from_messages(messages)
    config = RenderConversationConfig(auto_drop_analysis=drop == "library")
    if turn:
        want = encoding.render_conversation_for_completion(conversation, Role.ASSISTANT, config)
    else:
        want = encoding.render_conversation(conversation, config)
    got = renderer.ask({"harmony": conversation.to_dict()["messages"], "drop": drop, "turn": turn,
                        "library_schema_text": True})
    if got.get("ids") != want:
        assert encoding.decode_utf8(got["ids"]) == encoding.decode_utf8(want)
    assert got["ids"] == want


def text(role, body, channel=None, recipient=None, content_type=None):
    message = Message.from_role_and_content(role, body)
    message.channel, message.recipient, message.content_type = channel, recipient, content_type
    return message


def tool_reply(name, body, recipient=None, channel=None):
    message = Message.from_author_and_content(Author.new(Role.TOOL, name), body)
    message.recipient, message.channel = recipient, channel
    return message


def system(content=None):
    return Message.from_role_and_content(Role.SYSTEM, content or SystemContent.new())


def dated():
    return SystemContent.new().with_conversation_start_date(DATE)


def developer(content):
    return Message.from_role_and_content(Role.DEVELOPER, content)


KITCHEN_SINK = {
    "description": "params object", "type": "object",
    "properties": {
        "string": {"type": "string", "title": "STRING", "description": "A string",
                   "examples": ["hello", "world"]},
        "string_nullable": {"type": "string", "nullable": True, "description": "A nullable string",
                            "default": "the default"},
        "string_enum": {"type": "string", "enum": ["a", "b", "c"]},
        "either": {"oneOf": [{"type": "string", "default": "default in a variant"},
                             {"type": "number", "description": "numbers too"}],
                   "description": "one of", "default": 20},
    },
}

ODD_TYPES = {
    "type": "object",
    "properties": {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "maybe int"},
        "c": {"$ref": "#/$defs/C"},
        "d": {"type": "integer", "enum": [1, 2, 3], "default": 2},
        "e": {"enum": ["x", "y"]}, "f": {"type": "null"}, "g": {"const": "k"},
        "addr": {"type": "object", "description": "Postal address",
                 "properties": {"street": {"type": "string"},
                                "zip": {"type": "string", "default": "00000"}},
                 "required": ["street"]},
    },
    "required": ["a", "c"],
    "$defs": {"C": {"type": "object", "properties": {"z": {"type": "string"}}}},
}

FUNCTIONS = [
    ToolDescription.new("get_location", "Gets the location of the user."),
    ToolDescription.new("no_properties", "First line.\nSecond line.",
                        parameters={"type": "object", "properties": {}}),
    ToolDescription.new("empty", "", parameters={}),
    ToolDescription.new("kitchensink", "A function with various complex schemas.",
                        parameters=KITCHEN_SINK),
    ToolDescription.new("odd", "Odd types.", parameters=ODD_TYPES),
]

SUM = "What is 2 + 2?"
THINK = "User asks: “What is 2 + 2?” Simple arithmetic."


def library_cases():
    """The situations of the library's own fixtures, in conversations of ours."""
    yield "system and user", [system(), text(Role.USER, SUM)]
    for effort in ReasoningEffort:
        content = dated().with_reasoning_effort(effort)
        yield f"effort {effort.value}", [system(content), text(Role.USER, SUM)]
        yield f"effort {effort.value} and instructions", [
            system(content), developer(DeveloperContent.new().with_instructions("Answer in verse.")),
            text(Role.USER, SUM)]
    yield "two channels", [system(SystemContent.new().with_required_channels(["analysis", "final"])),
                           text(Role.USER, SUM)]
    yield "dates", [system(SystemContent.new().with_conversation_start_date("2021-01-01")
                           .with_knowledge_cutoff("2021-01")), text(Role.USER, "Hi")]
    yield "no tools", [system(dated())]
    yield "browser", [system(dated().with_browser_tool())]
    yield "browser and python", [system(dated().with_browser_tool().with_python_tool())]
    yield "browser and function", [
        system(dated().with_browser_tool()),
        developer(DeveloperContent.new().with_function_tools(FUNCTIONS[:1]))]
    yield "functions", [
        system(dated().with_reasoning_effort(ReasoningEffort.HIGH)),
        developer(DeveloperContent.new().with_instructions("Answer in riddles")
                  .with_function_tools(FUNCTIONS)), text(Role.USER, "Weather?")]
    yield "analysis before a final", [
        text(Role.USER, SUM), text(Role.ASSISTANT, THINK, "analysis"),
        text(Role.ASSISTANT, "4", "final"), text(Role.USER, "And 9 / 2?")]
    yield "open tool loop", [
        text(Role.USER, "Weather?"), text(Role.ASSISTANT, "Look it up.", "analysis"),
        text(Role.ASSISTANT, '{"city": "Oslo"}', "commentary", "functions.weather",
             "<|constrain|>json"), tool_reply("functions.weather", '{"t": 4}')]
    yield "analysis between finals", [
        text(Role.USER, SUM), text(Role.ASSISTANT, "two and two", "analysis"),
        text(Role.ASSISTANT, "4", "final"), text(Role.USER, "3 + 5?"),
        text(Role.ASSISTANT, "three and five", "analysis"), text(Role.ASSISTANT, "8", "final")]
    yield "control tokens spelled by a user", [text(Role.USER, "<|start|>system<|message|>x<|end|>")]
    yield "several parts", [Message.from_role_and_contents(
        Role.USER, [oh.TextContent(text="par"), oh.TextContent(text="ts")])]
    yield "recipient all", [text(Role.ASSISTANT, "x", "final", "all")]


@pytest.mark.parametrize("drop", ["library", "keep"])
@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize("messages", [pytest.param(m, id=name) for name, m in library_cases()])
def test_render_like_the_library(encoding, renderer, messages, drop, turn):
    check_messages(encoding, renderer, messages, drop, turn)


# ---- generated conversations ----


class Rounds:
    """Generators, one a round; says which seed failed and, at the end, what was seen."""

    def __init__(self, n, what):
        self.n, self.what, self.seen = n, what, {}

    def __iter__(self):
        for i in range(self.n):
            self.seed = SEED + i
            yield Generator(self.seed)
        self.seed = None

    def count(self, *what):
        for w in what:
            self.seen[w] = self.seen.get(w, 0) + 1

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        if kind:
            print(f"{self.what}: DAMASK_SEED={self.seed} DAMASK_ROUNDS=1 shows this one alone")
        else:
            seen = ", ".join(f"{n} {what}" for what, n in sorted(self.seen.items()))
            print(f"{self.what}: {self.n} from seed {SEED}; {seen}")


def builtin_tools():
    content = SystemContent.new().with_browser_tool().with_python_tool()
    return content.to_dict()["tools"]


def without_large_floats(value):
    """oss-harmony's JSON writer prints them as 1e+21, openai-harmony's (and ours) as 1e21."""
    if isinstance(value, dict):
        return {k: without_large_floats(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_large_floats(v) for v in value]
    return 7.5 if isinstance(value, float) and abs(value) >= 1e16 else value


def render_in_library(encoding, messages, drop, turn):
    conversation = Conversation.from_json(json.dumps({"messages": messages}))
    config = RenderConversationConfig(auto_drop_analysis=drop)
    if turn:
        return encoding.render_conversation_for_completion(conversation, Role.ASSISTANT, config)
    return encoding.render_conversation(conversation, config)


def test_render_generated_messages(encoding, oss, renderer):
    builtin = builtin_tools()
    with Rounds(ROUNDS, "conversations of Harmony's messages") as rounds:
        for g in rounds:
            messages, drop, turn = g.messages(builtin), g.some(0.5), g.some(0.5)
            line = {"harmony": messages, "drop": "library" if drop else "keep", "turn": turn,
                    "library_schema_text": True}
            got = renderer.ask(line)
            assert got.get("ids") == render_in_library(encoding, messages, drop, turn), got.get("error")
            messages = without_large_floats(messages)
            got = renderer.ask({**line, "harmony": messages, "recipient_in_channel": True})
            assert got.get("ids") == oss.ask({"messages": messages, "drop": drop, "turn": turn})["ids"]
            rounds.count(*(f"{m['role']}s" for m in messages))


# ---- rendering: conversations as dialects build them ----


def as_library_messages(conversation):
    """What a conversation means in the library's terms."""
    tools = [ToolDescription.new(t["name"], t.get("description") or "", t.get("parameters"))
             for t in conversation.get("tools", [])] if conversation.get("tool_choice") != "none" else []
    content = SystemContent.new().with_reasoning_effort(
        ReasoningEffort(conversation.get("effort", "medium").capitalize()))
    if "date_unix_s" in conversation:
        content = content.with_conversation_start_date(DATE)
    out, rest = [system(content)], list(conversation["messages"])
    dev = DeveloperContent.new()
    if rest and rest[0]["role"] in ("system", "developer"):
        first = rest.pop(0)["content"]
        dev = dev.with_instructions(first) if first else dev
    if tools:
        dev = dev.with_function_tools(tools)
    if dev.instructions or tools:
        out.append(developer(dev))
    names = {}
    for m in rest:
        if m["role"] in ("system", "developer"):
            if m["content"]:
                out.append(developer(DeveloperContent.new().with_instructions(m["content"])))
        elif m["role"] == "user":
            out.append(text(Role.USER, m["content"]))
            out[-1].author.name = m.get("name")
        elif m["role"] == "tool":
            name = names.get(m["tool_call_id"], m.get("name"))
            out.append(tool_reply(f"functions.{name}", m["content"], "assistant", "commentary"))
        else:
            if m.get("reasoning"):
                out.append(text(Role.ASSISTANT, m["reasoning"], "analysis"))
            calls = m.get("tool_calls", [])
            if calls and m.get("content"):
                out.append(text(Role.ASSISTANT, m["content"], "commentary"))
            elif not calls and m.get("content") is not None:
                out.append(text(Role.ASSISTANT, m["content"], "final"))
            for call in calls:
                names[call["id"]] = call["name"]
                out.append(text(Role.ASSISTANT, call["arguments"], "commentary",
                                f"functions.{call['name']}", "<|constrain|>json"))
    return out


def test_render_generated_conversations(encoding, oss, renderer):
    with Rounds(ROUNDS, "conversations of the API") as rounds:
        for g in rounds:
            conversation = g.conversation()
            messages = Conversation.from_messages(as_library_messages(conversation)).to_dict()["messages"]
            got = renderer.ask(conversation)
            assert got.get("ids") == render_in_library(encoding, messages, True, True), got.get("error")
            messages = without_large_floats(messages)
            got = renderer.ask(without_large_floats({**conversation, "recipient_in_channel": True}))
            assert got.get("ids") == oss.ask({"messages": messages, "drop": True, "turn": True})["ids"]
            rounds.count(*(f"{m['role']}s" for m in conversation["messages"]))
            for t in conversation.get("tools", []):
                rounds.count("tools")


# ---- parsing ----


def kind_of(message, tools):
    """Where the text of one of the library's messages goes, and the name when it is a call."""
    name = (message.get("recipient") or "").split("<")[0]
    if message["role"] != "assistant":
        return "held", None
    is_function = name.startswith("functions.") and name != "functions."
    if is_function or name in (tools or ()):
        return ("call", name.removeprefix("functions.")) if tools is not None else ("content", None)
    return {"analysis": "reasoning", "commentary": "content", "final": "content"}.get(
        message.get("channel"), "held"), None


def client_view(messages, n_done, tools, cut):
    """What a client gets for the library's messages: reasoning, content, calls as (name, arguments, finished)."""
    parts, calls = [], []
    for i, m in enumerate(messages):
        body = "".join(c["text"] for c in m["content"])
        kind, name = kind_of(m, tools)
        if kind == "call":
            calls.append((name, body, i < n_done or not cut))
        elif body:
            parts.append((kind, body))
    content = [body for kind, body in parts if kind == "content"]
    # A message on no channel is reasoning, unless the turn would say nothing then.
    shown = "content" if not cut and not content and not calls else "reasoning"
    join = lambda field: "\n".join(b for k, b in parts if (shown if k == "held" else k) == field) or None
    return join("reasoning"), join("content"), calls


def library_parse(encoding, ids, strict=True):
    """Messages, how many of them were ended, and what was raised."""
    p = StreamableParser(encoding, role=Role.ASSISTANT, strict=strict)
    n_done, error = None, None
    try:
        for token in ids:
            p.process(token)
        n_done = len(p.messages)
        p.process_eos()
    except oh.HarmonyError as e:
        error = str(e)
    return [m.to_dict() for m in p.messages], n_done, error


def parse(parser, ids, tools, cut):
    got = parser.ask({"ids": ids, "cut": cut, "events": True, **({} if tools is None else {"tools": tools})})
    for field in ("reasoning", "content"):
        deltas = "".join(t for kind, _, t in got["events"] if kind == field)
        assert deltas == (got[field] or "")
    assert got["finish"] == ("tool_calls" if any(c["finished"] for c in got["calls"]) else "stop")
    return got


def view_of(got):
    return got["reasoning"], got["content"], [(c["name"], c["arguments"], c["finished"]) for c in got["calls"]]


def check_prefix(parser, ids, n, tools, whole):
    """Whatever the first n ids let out, the whole output began with."""
    part = parse(parser, ids[:n], tools, True)
    begun = [e for e in whole["events"] if e[1] < n]
    early = part["events"][:len(begun)]
    assert [e for e in early if e[1] < n - 1] == [e for e in begun if e[1] < n - 1]


def up_to_stop(ids):
    for i, token in enumerate(ids):
        if token in STOPS:
            return ids[:i + 1]
    return ids


def encoder(encoding):
    return lambda s: encoding.encode(s, allowed_special=set(), disallowed_special=())


def test_parse_generated(encoding, oss, parser):
    """Good outputs, whole and cut anywhere: no repairs, and the messages of both libraries."""
    with Rounds(ROUNDS, "good outputs") as rounds:
        for g in rounds:
            ids, tools = g.output(encoder(encoding)), g.r.choice([["f"], ["f", "python"], [], None])
            cuts = [len(ids)] + [g.r.randint(0, len(ids)) for _ in range(2)]
            for n in cuts:
                cut, part = n < len(ids), ids[:n]
                got = parse(parser, part, tools, cut)
                messages, n_done, error = library_parse(encoding, part)
                assert not error or cut and "EOS while waiting for message header" in error
                assert view_of(got) == client_view(messages, n_done, tools, cut)
                other = oss.ask({"ids": part, "strict": True})
                assert view_of(got) == client_view(other["messages"], other["n_done"], tools, cut)
                assert set(got["repairs"]) <= {"call_not_allowed", "unknown_recipient"}
                if not cut:
                    whole = got
                else:
                    check_prefix(parser, ids, n, tools, whole)
                rounds.count("cut" if cut else "whole")


def test_parse_every_cut(encoding, parser):
    ids = Generator(SEED).output(encoder(encoding))
    for n in range(len(ids) + 1):
        messages, n_done, _ = library_parse(encoding, ids[:n])
        cut = n < len(ids)
        assert view_of(parse(parser, ids[:n], ["f"], cut)) == client_view(messages, n_done, ["f"], cut), SEED


def walk(ids):
    """The output as marks cut it, with no idea of what a header means: (header ids, body ids) pairs, and whether
    a mark stands where the grammar has none."""
    pairs, header, body, odd = [], [], None, False
    for token in ids:
        if token in (END, *STOPS):
            odd |= body is None
            pairs.append((header, body))
            header, body = [], None
        elif token == START:
            odd |= body is not None or bool(header) or not pairs
            if body is not None or header:
                pairs.append((header, body))
            header, body = [], None
        elif token == CHANNEL and body is not None:
            odd = True
            pairs.append((header, body))
            header, body = [token], None
        elif token == MESSAGE and body is None:
            body = []
        elif token >= FIRST_SPECIAL and not (token in (CHANNEL, CONSTRAIN) and body is None):
            odd = True
        else:
            (header if body is None else body).append(token)
    if header or body is not None:
        pairs.append((header, body))
    return pairs, odd


def check_recovery(encoding, ids, got):
    """Nothing that stands in a message is lost, and no mark is spelled."""
    fields = [got["reasoning"] or "", got["content"] or ""] + [c["arguments"] for c in got["calls"]]
    for header, body in walk(ids)[0]:
        if body:
            said = b"".join(encoding_bytes(encoding, t) for t in body).decode("utf-8", "replace")
            assert any(said in f for f in fields), f"lost: {said!r}"
    assert not any("<|" in f for f in fields)
    assert not any("<|" in c["name"] for c in got["calls"])


def encoding_bytes(encoding, token):
    return encoding._inner.decode_bytes([token])


def test_parse_mutated(encoding, parser):
    """Outputs with things lost, doubled, moved, put in, cut off."""
    with Rounds(ROUNDS, "mutated outputs") as rounds:
        for g in rounds:
            ids, tools = up_to_stop(g.mutated(encoder(encoding))), g.r.choice([["f"], [], None])
            got = parse(parser, ids, tools, False)
            check_recovery(encoding, ids, got)
            check_prefix(parser, ids, g.r.randint(0, len(ids)), tools, got)
            # To the library the end of text is text.
            messages, n_done, error = library_parse(encoding, [t for t in ids if t != END_OF_TEXT])
            pairs, odd = walk(ids)
            repaired = set(got["repairs"]) - {"call_not_allowed", "unknown_recipient"}
            if error:
                rounds.count("refused by the library")
                assert got["repairs"] or ends_at_start(ids, error) or has_form_of_ours(encoding, pairs), error
            elif odd:
                rounds.count("with marks that the library takes for text")
                assert repaired
            elif repaired - {"foreign_author", "no_channel"}:
                rounds.count("with words in a header that the library misreads")
            else:
                rounds.count("accepted by the library")
                assert view_of(got) == client_view(messages, n_done, tools, False)


@pytest.mark.parametrize("blank", ["\u202f", "\u00a0", "\u2003", "\u3000", "\u0085"])
def test_other_white_space_in_a_header(encoding, parser, blank):
    """Unicode's white space parts the words of a header as it does for the library, and counts as a repair."""
    ids = encoding.encode(f"<|channel|>final{blank}<|message|>Hi<|return|>", allowed_special="all")
    got = parser.ask({"ids": ids, "seed": 1})
    assert got["content"] == "Hi" and not got["reasoning"] and got["repairs"]
    ids = encoding.encode(f'<|channel|>commentary{blank}to=functions.f<|message|>{{}}<|call|>', allowed_special="all")
    got = parser.ask({"ids": ids, "tools": ["f"], "seed": 1})
    assert got["calls"][0]["name"] == "f" and got["repairs"]


@pytest.mark.parametrize("author", [" json to=functions.f", "<|start|>assistant json"])
def test_type_before_a_recipient_is_a_repair(encoding, parser, author):
    ids = encoding.encode(author + "<|channel|>commentary<|message|>{}<|end|>", allowed_special="all")
    assert parser.ask({"ids": ids, "tools": ["f"], "seed": 1})["repairs"]


def ends_at_start(ids, error):
    """The output ended where a header may begin: there is nothing to repair."""
    return "Unexpected EOS" in error and (not ids or ids[-1] == START)


def has_form_of_ours(encoding, pairs):
    """The library refuses white space behind the constrain mark; models write it, and calls keep it."""
    return any(re.search(r"<\|constrain\|>\s", encoding.decode(header)) for header, _ in pairs)


# ---- a call that comes back renders to the very ids that the model wrote ----

HEADERS = [
    ("<|channel|>commentary to=functions.f <|constrain|>json", True),
    ("<|channel|>commentary to=functions.f<|constrain|>json", True),
    ("<|channel|>analysis to=functions.f code", True),
    ("<|channel|>analysis to=functions.f", True),
    (" to=functions.f<|channel|>commentary <|constrain|>json", True),
    (" to=functions.f<|channel|>commentary json", True),
    (" to=functions.f<|channel|>analysis code", True),
    ("<|channel|>commentary to=f json", True),
    ("<|channel|>commentary to=functions.f <|constrain|> json", True),
    ("<|channel|>commentary to=functions.f <|constrain|>", True),
    (" to=functions.f", True),
    (" to=functions.f json", True),
    ("<|channel|>commentary to=functions.f<|channel|>commentary json", False),
]


@pytest.mark.parametrize("header,exact", HEADERS)
def test_call_comes_back(encoding, renderer, parser, header, exact):
    ids = encoding.encode(header + '<|message|>{"a": 1}<|call|>', allowed_special="all")
    turn = parser.ask({"ids": ids, "tools": ["f"], "seed": 99})
    call = turn["calls"][0]
    assert call["name"] == "f" and call["arguments"] == '{"a": 1}'
    prompt = {"messages": [{"role": "user", "content": "Hi"}]}
    before = renderer.ask(prompt)["ids"]
    prompt["messages"] += [{"role": "assistant", "content": None, "tool_calls": [
        {"id": call["id"], "name": call["name"], "arguments": call["arguments"]}]}]
    after = renderer.ask(prompt)["ids"]
    assert after[:len(before)] == before
    assert (after[len(before):-2] == ids) == exact
    assert after[-2:] == before[-2:]


def test_two_calls_come_back(encoding, renderer, parser):
    ids = encoding.encode(
        '<|channel|>analysis<|message|>Both.<|end|><|start|>assistant'
        '<|channel|>commentary to=functions.a json<|message|>{"i":1}<|end|><|start|>assistant'
        '<|channel|>commentary to=functions.b json<|message|>{"i":2}<|call|>', allowed_special="all")
    turn = parser.ask({"ids": ids, "tools": ["a", "b"], "seed": 5})
    prompt = {"messages": [{"role": "user", "content": "Hi"}]}
    before = renderer.ask(prompt)["ids"]
    prompt["messages"] += [{"role": "assistant", "reasoning": turn["reasoning"], "tool_calls": [
        {k: c[k] for k in ("id", "name", "arguments")} for c in turn["calls"]]}]
    assert renderer.ask(prompt)["ids"][:-2] == before + ids
