"""Harmony against openai-harmony: rendering token for token, parsing of good and cut outputs.

Conversations are made here; the library and `damask chat` get the same JSON. The library is the authority
for rendering. For parsing it is one where it follows its own grammar; what it refuses or misreads is left
to the C tests. Each run takes fresh seeds and prints the one that fails; DAMASK_SEED gives it back, DAMASK_ROUNDS
another number of rounds (docs/logs/harmony.txt has longer runs). oss-harmony 0.0.11, a fork with the same module's name,
renders in a process of its own.
"""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
VOCAB = os.environ.get("TIKTOKEN_ENCODINGS_BASE", str(ROOT / ".deps" / "vocab"))
os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", VOCAB)
SEED = int(os.environ.get("DAMASK_SEED", random.SystemRandom().randrange(1 << 40)))
print(f"DAMASK_SEED={SEED}")
ROUNDS = int(os.environ.get("DAMASK_ROUNDS", "700"))

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

DATE = "2025-06-28"
DATE_UNIX_S = 1751068800
START, CHANNEL, MESSAGE, CONSTRAIN = 200006, 200005, 200008, 200003
END, RETURN, CALL = 200007, 200002, 200012


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

WORDS = ["data", "alpha", "naïve", "Oslo", "日本語", "emoji 💖", "a_b", "x/y", "don't", "100%", '"q"', "\\n",
         "<|end|>", "<|channel|>final", "tab\there", "  two", "// no", "Ünï", "null", "мир", "é", "\u200d"]
NAMES = ["city", "unit", "limit", "query", "start_date", "naïve", "x-y", "type", "default", "Größe"]


class Generator:
    def __init__(self, seed, exponents=True):
        self.r = random.Random(seed)
        self.exponents = exponents  # the two libraries write 1e30 and 1e+30

    def some(self, chance):
        return self.r.random() < chance

    def words(self, most=8, newline=0.1):
        parts = []
        for _ in range(self.r.randint(0, most)):
            parts.append(self.r.choice(WORDS))
            parts.append("\n" if self.some(newline) else self.r.choice([" ", " ", " ", "", "\r\n"]))
        return "".join(parts)

    def value(self, depth=0):
        kinds = ["text", "int", "float", "bool", "none"] + (["list", "map"] if depth < 3 else [])
        kind = self.r.choice(kinds)
        if kind == "text":
            return self.words(3)
        if kind == "int":
            return self.r.choice([0, 1, -1, 20, 2**31, -(2**53), self.r.randint(-10**9, 10**9)])
        if kind == "float" and not self.exponents:
            return self.r.choice([0.5, 1.5, -0.25, 1.0, -0.0, 100000.0, 1e15, 1e-4, self.r.randint(-10**6, 10**6) / 1000])
        if kind == "float":
            return self.r.choice([0.5, 1.5, -0.25, 1.0, -0.0, 100000.0, 1e15, 1e16, 1e21, 1e-4, 1e-5, 1e-7,
                                  1.25e30, self.r.randint(-10**6, 10**6) / 1000])
        if kind == "bool":
            return self.some(0.5)
        if kind == "list":
            return [self.value(depth + 1) for _ in range(self.r.randint(0, 3))]
        if kind == "map":
            return {self.r.choice(NAMES): self.value(depth + 1) for _ in range(self.r.randint(0, 3))}
        return None

    def schema(self, depth=0):
        if self.some(0.03):
            return self.r.choice([True, {}, {"$ref": "#/$defs/A"}, {"anyOf": [{"type": "string"}]},
                                  {"const": 1}, {"allOf": []}, {"oneOf": []}, {"type": []},
                                  {"oneOf": "no list"}, {"type": ["string", 3]}, {"enum": ["a"]}])
        kinds = ["string", "number", "integer", "boolean", "null", "enum", "list"]
        kinds += ["object", "object", "array", "oneOf"] if depth < 4 else []
        kind = self.r.choice(kinds) if depth else "object"
        out = {}
        for key, chance in [("title", 0.1), ("description", 0.5)]:
            if self.some(chance):
                out[key] = self.words(6)
        if kind == "enum":
            out["type"] = self.r.choice(["string", "string", "integer"])
            out["enum"] = self.r.choice([["a", "b"], ["only"], [], ["x", 1, None], [1, 2]])
        elif kind == "list":
            out["type"] = self.r.sample(["string", "integer", "number", "null", "array", "object"],
                                        self.r.randint(1, 3))
        elif kind == "oneOf":
            out["oneOf"] = [self.schema(depth + 1) for _ in range(self.r.randint(1, 3))]
            if self.some(0.3) and isinstance(out["oneOf"][0], dict):
                out["description"] = out["oneOf"][0].setdefault("description", "the same")
        else:
            out["type"] = kind
        if kind == "object":
            keys = [self.r.choice(NAMES) + self.r.choice(["", "2", "_z"]) for _ in
                    range(self.r.randint(0, 5))]
            if self.some(0.9):
                out["properties"] = {k: self.schema(depth + 1) for k in keys}
            if self.some(0.6):
                out["required"] = [k for k in keys if self.some(0.5)] + ["missing"]
            if self.some(0.2):
                out["additionalProperties"] = False
        if kind == "array" and self.some(0.8):
            out["items"] = self.schema(depth + 1)
        if self.some(0.25):
            out["default"] = self.value()
        if self.some(0.15):
            out["nullable"] = self.r.choice([True, True, False, "yes"])
        if self.some(0.1):
            out["examples"] = self.r.choice([["one", "two"], [], [1, "two"], "none"])
        if self.some(0.1):
            out["minimum"] = 3
        return dict(self.r.sample(list(out.items()), len(out))) if self.some(0.3) else out

    def tool(self):
        schema = self.schema()
        return ToolDescription.new(
            self.r.choice(["get_weather", "search", "run_cmd", "f", "lookup2"]), self.words(10),
            parameters=schema if isinstance(schema, dict) and self.some(0.8) else None)

    def tools(self):
        return [self.tool() for _ in range(self.r.randint(0, 5))]

    def system_content(self):
        content = SystemContent.new().with_reasoning_effort(self.r.choice(list(ReasoningEffort)))
        if self.some(0.7):
            content = content.with_conversation_start_date(DATE)
        if self.some(0.1):
            content = content.with_browser_tool()
        if self.some(0.1):
            content = content.with_python_tool()
        if self.some(0.1):
            content = content.with_model_identity(self.words())
        if self.some(0.1):
            content = content.with_required_channels(["analysis", "final"])
        return content

    def developer_content(self):
        content = DeveloperContent.new()
        if self.some(0.7):
            content = content.with_instructions(self.words(20, 0.2))
        if self.some(0.6):
            content = content.with_function_tools(self.tools())
        if self.some(0.1):
            content = content.with_tools(oh.ToolNamespaceConfig(
                name="aaa", description=self.words(6, 0.4), tools=self.tools()))
        return content

    def message(self):
        kind = self.r.choice(["user", "user", "analysis", "final", "commentary", "call", "tool", "dev",
                              "odd"])
        if kind == "user":
            message = text(Role.USER, self.words(30))
            if self.some(0.1):
                message.author.name = "sam"
            return message
        if kind == "tool":
            return tool_reply(self.r.choice(["functions.f", "browser.search", "python"]), self.words(10),
                              self.r.choice(["assistant", None]), self.r.choice(["commentary", None]))
        if kind == "call":
            return text(Role.ASSISTANT, json.dumps(self.value()),
                        self.r.choice(["commentary", "analysis"]),
                        self.r.choice(["functions.get_weather", "functions.f", "python"]),
                        self.r.choice(["<|constrain|>json", "json", "code", "<|constrain|>", None]))
        if kind == "dev":
            return developer(self.developer_content())
        if kind == "odd":
            return text(self.r.choice([Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.DEVELOPER]),
                        self.words(5), self.r.choice([None, "analysis", "final", "other channel"]),
                        self.r.choice([None, "all", "assistant", "x y"]),
                        self.r.choice([None, "text", "a b"]))
        return text(Role.ASSISTANT, self.words(30), kind)

    def conversation(self):
        messages = [system(self.system_content())] if self.some(0.9) else []
        if self.some(0.8):
            messages.append(developer(self.developer_content()))
        longest = 40 if self.some(0.05) else 8
        return messages + [self.message() for _ in range(self.r.randint(0, longest))]


def test_render_generated_messages(encoding, renderer):
    for i in range(ROUNDS * 3):
        g = Generator(SEED + i)
        try:
            check_messages(encoding, renderer, g.conversation(), g.r.choice(["library", "keep"]),
                           g.some(0.5))
        except AssertionError:
            print(f"seed {SEED + i}")
            raise


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


def generate_conversation(g):
    conversation = {"messages": [], "date_unix_s": DATE_UNIX_S, "library_schema_text": True,
                    "library_drop_rule": True, "effort": g.r.choice(["low", "medium", "high"])}
    if g.some(0.6):
        conversation["tools"] = [
            {k: v for k, v in t.model_dump().items() if v is not None} for t in g.tools()]
        if g.some(0.2):
            conversation["tool_choice"] = g.r.choice(["none", "auto", "required"])
    add = conversation["messages"].append
    for _ in range(g.r.randint(0, 2)):
        add({"role": g.r.choice(["system", "developer"]), "content": g.words(10)})
    for turn in range(g.r.randint(1, 5)):
        add({"role": "user", "content": g.words(20), **({"name": "sam"} if g.some(0.1) else {})})
        for loop in range(g.r.randint(0, 3)):
            calls = [{"id": f"c{g.r.randint(0, 5)}", "name": g.r.choice(["f", "get_weather"]),
                      "arguments": json.dumps(g.value())} for _ in range(g.r.randint(1, 2))]
            add({"role": "assistant", "content": g.r.choice([None, "", g.words(5)]),
                 "reasoning": g.words(10), "tool_calls": calls})
            for call in calls:
                add({"role": "tool", "tool_call_id": call["id"], "content": g.words(10)})
        if g.some(0.1):
            add({"role": "developer", "content": g.words(5)})
        if g.some(0.8):
            add({"role": "assistant", "content": g.words(20), "reasoning": g.words(10)})
    return conversation


def test_render_generated_conversations(encoding, renderer):
    print(f"DAMASK_SEED={SEED}")
    for i in range(ROUNDS):
        conversation = generate_conversation(Generator(SEED + i))
        want = encoding.render_conversation_for_completion(
            Conversation.from_messages(as_library_messages(conversation)), Role.ASSISTANT,
            RenderConversationConfig(auto_drop_analysis=True))
        got = renderer.ask(conversation)
        assert got.get("ids") == want, f"seed {SEED + i}: {got.get('error')}"


# ---- parsing ----


def client_view(messages, declared=()):
    """What a client gets for the library's messages: reasoning, content, calls."""
    reasoning, content, calls = [], [], []
    for m in messages:
        body = "".join(c.text for c in m.content)
        if m.recipient in declared or (m.recipient and m.recipient.startswith("functions.")):
            calls.append((m.recipient.removeprefix("functions."), body))
        elif body:
            (reasoning if m.channel == "analysis" else content).append(body)
    return "\n".join(reasoning) or None, "\n".join(content) or None, calls


def generate_output(encoding, g):
    """An output that follows the grammar, with every form of header that the library reads rightly."""
    def encode(s):
        return encoding.encode(s, allowed_special=set(), disallowed_special=())

    ids = []
    for i in range(g.r.randint(1, 5)):
        ids += [START] + encode("assistant") if i else []
        channel = g.r.choice(["analysis", "commentary", "final"])
        if channel != "final" and g.some(0.5):
            name = encode(" to=functions." + g.r.choice(["get_weather", "f", "run-2"]))
            front = g.some(0.5)
            ids += (name if front else []) + [CHANNEL] + encode(channel) + ([] if front else name)
            ids += g.r.choice([[], encode(" json"), encode(" code"), encode(" ") + [CONSTRAIN] +
                               encode("json"), [CONSTRAIN] + encode("json")])
        else:
            ids += [CHANNEL] + encode(channel)
        body = encode(g.words(12))
        for _ in range(g.r.randint(0, 2)):
            body.insert(g.r.randint(0, len(body)), g.r.choice([9552, 31446, 244, 94, 187, 254]))
        ids += [MESSAGE] + body + [END]
    ids[-1] = g.r.choice([RETURN, CALL, END])
    return ids


def library_view(encoding, ids, cut, declared=()):
    p = StreamableParser(encoding, role=Role.ASSISTANT)
    for token in ids:
        p.process(token)
    n_done = len(p.messages)
    try:
        p.process_eos()
    except oh.HarmonyError:
        assert cut
    return client_view(p.messages, declared), len([m for m in p.messages[:n_done] if (m.recipient or "").startswith(
        "functions.")])


def library_reads_all(encoding, ids):
    """Whether the library's messages, rendered again, are the ids (but for which mark ends a message)."""
    p = StreamableParser(encoding, role=Role.ASSISTANT)
    for token in ids:
        p.process(token)
    p.process_eos()
    again = [t for m in p.messages for t in encoding.render(m)]
    ends = {RETURN: END, CALL: END}
    whole = [START] + encoding.encode("assistant") + ids
    return [ends.get(t, t) for t in again] == [ends.get(t, t) for t in whole]


def check_output(encoding, parser, ids, cut):
    (reasoning, content, calls), n_finished = library_view(encoding, ids, cut)
    got = parser.ask({"ids": ids, "tools": ["f"], "cut": cut, "events": True})
    assert got["reasoning"] == reasoning
    assert got["content"] == content
    assert [(c["name"], c["arguments"]) for c in got["calls"]] == calls
    assert sum(c["finished"] for c in got["calls"]) == (n_finished if cut else len(calls))
    for field in ("reasoning", "content"):
        deltas = "".join(t for kind, _, t in got["events"] if kind == field)
        assert deltas == (got[field] or "")
    assert got["repairs"] == {}


class OssHarmony:
    """oss-harmony in a process of its own: messages of the library in, ids out."""

    CODE = """
import json, sys
from openai_harmony import *
from openai_harmony import RenderConversationConfig
e = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
for line in sys.stdin:
    c = Conversation.from_json(line)
    print(json.dumps(e.render_conversation_for_completion(c, Role.ASSISTANT, RenderConversationConfig(auto_drop_analysis=True))), flush=True)
"""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", self.CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, "PYTHONPATH": str(ROOT / ".deps" / "oss-harmony")})

    def render(self, messages):
        self.process.stdin.write(Conversation.from_messages(messages).to_json().encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(timeout=10) == 0


def test_render_like_oss_harmony(renderer):
    """With its option: the recipient of a foreign call stands behind the channel."""
    print(f"DAMASK_SEED={SEED}")
    oss, with_calls = OssHarmony(), 0
    for i in range(ROUNDS // 3 if ROUNDS < 3000 else ROUNDS):
        conversation = {**generate_conversation(Generator(SEED + i, exponents=False)), "recipient_in_channel": True}
        want = oss.render(as_library_messages(conversation))
        got = renderer.ask(conversation)
        assert got.get("ids") == want, f"seed {SEED + i}: {got.get('error')}"
        with_calls += any(m.get("tool_calls") for m in conversation["messages"])
    assert with_calls > ROUNDS // 10
    oss.close()


MARKS = [START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL]


def mutate(encoding, g, ids):
    """The same output with one to four faults of the kinds that models make."""
    ids = list(ids)
    for _ in range(g.r.randint(1, 4)):
        at = g.r.randint(0, len(ids)) if ids else 0
        kind = g.r.choice(["drop", "twice", "swap", "mark", "mark", "word", "id", "cut"])
        if kind == "mark":
            ids.insert(at, g.r.choice(MARKS))
        elif kind == "word":
            ids[at:at] = encoding.encode(g.r.choice(["assistant", " to=functions.f", " json", "final", "analysis", "x"]))
        elif kind == "id":
            ids.insert(at, g.r.randrange(200000))
        elif at >= len(ids):
            continue
        elif kind == "drop":
            del ids[at]
        elif kind == "twice":
            ids.insert(at, ids[at])
        elif kind == "swap":
            other = g.r.randrange(len(ids))
            ids[at], ids[other] = ids[other], ids[at]
        else:
            del ids[at:at + g.r.randint(1, 5)]
    return ids


def check_mutated(encoding, parser, ids):
    """Whether both read it without a repair; then they read the same. What the library refuses is read too."""
    got = parser.ask({"ids": ids, "tools": ["f"], "cut": False, "events": True})
    for field in ("reasoning", "content"):
        assert "".join(t for kind, _, t in got["events"] if kind == field) == (got[field] or ""), field
    arguments = {}
    for kind, index, t in got["events"]:
        if kind == "arguments":
            arguments[index] = arguments.get(index, "") + t
    for k, call in enumerate(got["calls"]):
        assert call["name"] and not set(call["name"]) & set(" <\n"), call
    stop = next((i for i, t in enumerate(ids) if t in (RETURN, CALL, 199999)), len(ids))
    shown = (got["reasoning"] or "") + (got["content"] or "") + "".join(c["arguments"] for c in got["calls"])
    spelled = encoding.decode([t for t in ids[:stop] if t < 199998])
    for mark in ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"):
        assert shown.count(mark) <= spelled.count(mark), f"{mark} came from its id"
    if got["repairs"]:
        return False
    try:
        view, _ = library_view(encoding, ids[:stop + 1], False, ("f",))
    except (oh.HarmonyError, AssertionError):
        return False
    if (got["reasoning"], got["content"], [(c["name"], c["arguments"]) for c in got["calls"]]) == view:
        return True
    # The library may drop what it does not understand, a recipient without its role, say; then what it has read
    # is not what stands there.
    assert not library_reads_all(encoding, ids[:stop + 1]), (got, view)
    return False


def test_parse_mutated(encoding, parser):
    print(f"DAMASK_SEED={SEED}")
    n_same = 0
    for i in range(ROUNDS):
        g = Generator(SEED + i)
        ids = mutate(encoding, g, generate_output(encoding, g))
        try:
            n_same += check_mutated(encoding, parser, ids)
        except AssertionError:
            print(f"seed {SEED + i}: {ids}")
            raise
    print(f"{n_same} of {ROUNDS} were read by both without a repair")
    assert n_same > ROUNDS // 20


def test_parse_generated(encoding, parser):
    print(f"DAMASK_SEED={SEED}")
    for i in range(ROUNDS):
        g = Generator(SEED + i)
        ids = generate_output(encoding, g)
        try:
            check_output(encoding, parser, ids, False)
            for _ in range(3):
                check_output(encoding, parser, ids[:g.r.randint(0, len(ids))], True)
        except AssertionError:
            print(f"seed {SEED + i}: {ids}")
            raise


def test_parse_every_cut(encoding, parser):
    ids = generate_output(encoding, Generator(SEED))
    for n in range(len(ids) + 1):
        check_output(encoding, parser, ids[:n], True)


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
