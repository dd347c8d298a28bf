"""Conversations, schemas and outputs of a model, made at random; no library is needed for it.

Messages are dicts in the form in which openai-harmony writes its conversations as JSON. A Generator is a
function of its seed alone.
"""

import json
import random

START, CHANNEL, MESSAGE, CONSTRAIN = 200006, 200005, 200008, 200003
END, RETURN, CALL, END_OF_TEXT = 200007, 200002, 200012, 199999
FIRST_SPECIAL = 199998
DATE = "2025-06-28"
DATE_UNIX_S = 1751068800

WORDS = ["data", "alpha", "naïve", "Oslo", "日本語", "emoji 💖", "a_b", "x/y", "don't", "100%", '"q"', "\\n",
         "<|end|>", "<|channel|>final", "tab\there", "  two", "// no", "Ünï", "null", "мир", "é", "\u200d",
         "<|start|>system<|message|>", "<|return|>", "<|call|>", "<|reserved_200013|>", "<|constrain|>json",
         "to=functions.f", "assistant", "👨‍👩‍👧‍👦", "🇺🇸", "هذا", "हिन्दी", "\u202f", "\ufeff", "\x01", "\x7f",
         "} // namespace functions", "# Tools", "|", "```", "HTTPServer", "1234567"]
PLAIN_WORDS = [w for w in WORDS if "<" not in w and "|" not in w and "to=" not in w]
NAMES = ["city", "unit", "limit", "query", "start_date", "naïve", "x-y", "type", "default", "Größe", "", "a b",
         '"', "<|end|>", "properties", "日本"]
FUNCTIONS = ["f", "get_weather", "run-2", "look_up3", "naïve"]


class Generator:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def some(self, chance):
        return self.r.random() < chance

    def character(self):
        """Any code point that is no surrogate, those of the first planes more often."""
        top = self.r.choice([0x80, 0x800, 0x3000, 0x10000, 0x110000])
        c = self.r.randrange(1, top)  # NUL is refused in JSON
        return chr(c) if not 0xD800 <= c <= 0xDFFF else "\ufffd"

    def words(self, most=8, newline=0.1, words=WORDS):
        parts = []
        for _ in range(self.r.randint(0, most)):
            if self.some(0.05):
                parts += [self.character() for _ in range(self.r.randint(1, 6))]
                if words is PLAIN_WORDS:
                    parts = [p for p in parts if p not in "<|"]
            else:
                parts.append(self.r.choice(words))
            parts.append("\n" if self.some(newline) else self.r.choice([" ", " ", " ", "", "\r\n"]))
        return "".join(parts)

    # ---- JSON values and schemas ----

    def number(self):
        """Without floats of seventeen digits, of which the libraries' JSON reader gets the last one wrong."""
        if self.some(0.5):
            return self.r.choice([0, 1, -1, 20, 2**31, -(2**53), 2**63 - 1, -(2**63),
                                  self.r.randint(-10**9, 10**9)])
        return self.r.choice([0.5, 1.5, -0.25, 1.0, -0.0, 100000.0, 1e15, 1e16, 1e21, 1e-4, 1e-5, 1e-7, 1.25e30,
                              5e-324, 1.5e308, round(self.r.uniform(-1e6, 1e6), 6),
                              self.r.randint(-10**6, 10**6) / 1000])

    def value(self, depth=0):
        kinds = ["text", "number", "bool", "none"] + (["list", "map"] if depth < 3 else [])
        kind = self.r.choice(kinds)
        if kind == "text":
            return self.words(3)
        if kind == "number":
            return self.number()
        if kind == "bool":
            return self.some(0.5)
        if kind == "list":
            return [self.value(depth + 1) for _ in range(self.r.randint(0, 3))]
        if kind == "map":
            return {self.r.choice(NAMES): self.value(depth + 1) for _ in range(self.r.randint(0, 3))}
        return None

    def odd_schema(self):
        return self.r.choice([
            True, False, {}, {"$ref": "#/$defs/A"}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"anyOf": [{"type": "integer"}], "description": "maybe", "default": 3}, {"const": 1}, {"allOf": []},
            {"allOf": [{"type": "object"}]}, {"not": {"type": "string"}}, {"oneOf": []}, {"type": []},
            {"oneOf": "no list"}, {"oneOf": None}, {"type": ["string", 3]}, {"type": [3]}, {"enum": ["a"]},
            {"type": "unknown"}, {"type": None}, {"type": 3}, {"type": "object", "properties": []},
            {"type": "object", "properties": None, "required": "a"}, {"type": "array", "items": True},
            {"type": "array", "items": [{"type": "string"}]}, {"type": "array", "items": None},
            {"type": "string", "enum": None}, {"type": "string", "enum": "abc"}, {"type": "string", "enum": [1, 2]},
            {"type": "string", "description": 3}, {"type": "string", "title": None, "examples": {"a": 1}},
            {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", 3, None]},
            {"type": "string", "format": "date-time", "pattern": "^<\\|", "minLength": 1},
            {"type": "object", "patternProperties": {"^x": {"type": "string"}}, "minProperties": 1}])

    def schema(self, depth=0):
        if self.some(0.06):
            return self.odd_schema()
        kinds = ["string", "number", "integer", "boolean", "null", "enum", "list"]
        kinds += ["object", "object", "array", "oneOf"] if depth < 4 else []
        kind = self.r.choice(kinds) if depth else "object"
        out = {}
        for key, chance in [("title", 0.1), ("description", 0.5)]:
            if self.some(chance):
                out[key] = self.words(6)
        if kind == "enum":
            out["type"] = self.r.choice(["string", "string", "integer"])
            out["enum"] = self.r.choice([["a", "b"], ["only"], [], ["x", 1, None], [1, 2], [self.words(2)]])
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
            keys = [self.r.choice(NAMES) + self.r.choice(["", "2", "_z"]) for _ in range(self.r.randint(0, 5))]
            if self.some(0.9):
                out["properties"] = {k: self.schema(depth + 1) for k in keys}
            if self.some(0.6):
                out["required"] = [k for k in keys if self.some(0.5)] + ["missing"]
            if self.some(0.2):
                out["additionalProperties"] = self.r.choice([False, True, {"type": "string"}])
        if kind == "array" and self.some(0.8):
            out["items"] = self.schema(depth + 1)
        if self.some(0.25):
            out["default"] = self.value()
        if self.some(0.15):
            out["nullable"] = self.r.choice([True, True, False, "yes"])
        if self.some(0.1):
            out["examples"] = self.r.choice([["one", "two"], [], [1, "two"], "none", [self.words(3, 0.3)]])
        if self.some(0.1):
            out["minimum"] = 3
        return dict(self.r.sample(list(out.items()), len(out))) if self.some(0.3) else out

    def deep_schema(self):
        """A chain of objects, lists and variants, far deeper than anybody writes."""
        schema = {"type": self.r.choice(["string", "integer", "null"]), "description": self.words(3)}
        for _ in range(self.r.randint(5, 25)):
            schema = self.r.choice([
                lambda s: {"type": "array", "items": s},
                lambda s: {"type": "object", "description": self.words(3), "properties": {"in": s}},
                lambda s: {"oneOf": [s, {"type": "null"}]},
                lambda s: {"type": "object", "required": ["v"], "properties": {"v": s, "w": {"type": "boolean"}}},
            ])(schema)
        return {"type": "object", "properties": {"deep": schema}}

    def tool(self):
        schema = self.deep_schema() if self.some(0.03) else self.schema()
        out = {"name": self.r.choice(FUNCTIONS), "description": self.words(10)}
        if isinstance(schema, dict) and self.some(0.85):
            out["parameters"] = schema
        return out

    def tools(self):
        return [self.tool() for _ in range(self.r.randint(0, 5))]

    # ---- messages ----

    def system_content(self, builtin):
        out = {"type": "system_content", "reasoning_effort": self.r.choice(["Low", "Medium", "High"]),
               "model_identity": "You are ChatGPT, a large language model trained by OpenAI.",
               "knowledge_cutoff": "2024-06",
               "channel_config": {"valid_channels": ["analysis", "commentary", "final"], "channel_required": True}}
        if self.some(0.7):
            out["conversation_start_date"] = DATE
        namespaces = {name: ns for name, ns in builtin.items() if self.some(0.15)}
        if namespaces:
            out["tools"] = namespaces
        if self.some(0.1):
            out["model_identity"] = self.words()
        if self.some(0.1):
            out["channel_config"] = {"valid_channels": ["analysis", "final"], "channel_required": self.some(0.5)}
        return out

    def developer_content(self):
        out = {"type": "developer_content"}
        if self.some(0.7):
            out["instructions"] = self.words(20, 0.2)
        namespaces = {}
        if self.some(0.6):
            namespaces["functions"] = {"name": "functions", "tools": self.tools()}
        if self.some(0.1):
            namespaces["aaa"] = {"name": "aaa", "description": self.words(6, 0.4), "tools": self.tools()}
        if namespaces:
            out["tools"] = namespaces
        return out

    def text(self, role, body, **fields):
        out = {"role": role, "content": [{"type": "text", "text": body}]}
        out.update({k: v for k, v in fields.items() if v is not None})
        return out

    def message(self, builtin):
        kind = self.r.choice(["user", "user", "analysis", "final", "commentary", "call", "calls", "tool",
                              "developer", "system", "odd"])
        if kind == "user":
            parts = [{"type": "text", "text": self.words(20)} for _ in range(self.r.choice([1, 1, 1, 2, 3]))]
            return [{"role": "user", "content": parts, **({"name": "sam"} if self.some(0.1) else {})}]
        if kind == "tool":
            return [self.text("tool", self.words(10),
                              name=self.r.choice(["functions.f", "browser.search", "python"]),
                              recipient=self.r.choice(["assistant", "assistant", None]),
                              channel=self.r.choice(["commentary", "commentary", "analysis", None]))]
        if kind in ("call", "calls"):
            return [self.call() for _ in range(1 if kind == "call" else self.r.randint(2, 4))]
        if kind == "developer":
            return [{"role": "developer", "content": [self.developer_content()]}]
        if kind == "system":
            return [{"role": "system", "content": [self.system_content(builtin)]}]
        if kind == "odd":
            return [self.text(self.r.choice(["user", "assistant", "system", "developer"]), self.words(5),
                              channel=self.r.choice([None, "analysis", "commentary", "final", "other channel"]),
                              recipient=self.r.choice([None, "all", "assistant", "x y", "functions.f"]),
                              content_type=self.r.choice([None, "text", "a b", "", "<|constrain|>", "<|constrain|> x"]))]
        return [self.text("assistant", self.words(30), channel=kind)]

    def call(self):
        return self.text("assistant", json.dumps(self.value(), ensure_ascii=self.some(0.5)),
                         channel=self.r.choice(["commentary", "commentary", "analysis", None]),
                         recipient=self.r.choice(["functions.get_weather", "functions.f", "python", "browser.open"]),
                         content_type=self.r.choice(["<|constrain|>json", "json", "code", "<|constrain|>", None]))

    def messages(self, builtin):
        """A conversation of Harmony's own messages."""
        out = [{"role": "system", "content": [self.system_content(builtin)]}] if self.some(0.9) else []
        if self.some(0.8):
            out.append({"role": "developer", "content": [self.developer_content()]})
        longest = self.r.choice([8] * 30 + [40, 40, 150])
        for _ in range(self.r.randint(0, longest)):
            out += self.message(builtin)
        return out

    # ---- conversations as the dialects of the API build them ----

    def turn(self, add):
        add({"role": "user", "content": self.words(20), **({"name": "sam"} if self.some(0.1) else {})})
        for _ in range(self.r.randint(0, 3)):
            calls = [{"id": f"c{self.r.randint(0, 5)}", "name": self.r.choice(FUNCTIONS),
                      "arguments": self.r.choice([json.dumps(self.value()), "{", "", self.words(4)])}
                     for _ in range(self.r.randint(1, 3))]
            add({"role": "assistant", "content": self.r.choice([None, "", self.words(5)]),
                 "reasoning": self.words(10), "tool_calls": calls})
            for call in self.r.sample(calls, len(calls)):
                add({"role": "tool", "tool_call_id": call["id"], "content": self.words(10)})
        if self.some(0.1):
            add({"role": self.r.choice(["developer", "system"]), "content": self.words(5)})
        if self.some(0.8):
            add({"role": "assistant", "content": self.words(20), "reasoning": self.words(10)})

    def conversation(self):
        out = {"messages": [], "date_unix_s": DATE_UNIX_S, "library_schema_text": True, "library_drop_rule": True,
               "effort": self.r.choice(["low", "medium", "high"])}
        if self.some(0.6):
            out["tools"] = self.tools()
            if self.some(0.2):
                out["tool_choice"] = self.r.choice(["none", "auto", "required"])
        for _ in range(self.r.randint(0, 2)):
            out["messages"].append({"role": self.r.choice(["system", "developer"]), "content": self.words(10)})
        for _ in range(self.r.choice([1, 1, 2, 3, 5] * 6 + [40])):
            self.turn(out["messages"].append)
        return out

    # ---- outputs ----

    def output(self, encode, words=WORDS):
        """An output that follows the grammar, with every form of header that the library reads rightly."""
        ids = []
        for i in range(self.r.choice([1, 1, 2, 3, 4, 5, 20] if self.some(0.1) else [1, 2, 3, 4])):
            ids += [START] + encode("assistant") if i else []
            channel = self.r.choice(["analysis", "commentary", "final"])
            if channel != "final" and self.some(0.5):
                name = encode(" to=" + self.r.choice(["functions.get_weather", "functions.f", "functions.run-2",
                                                      "f", "python"]))
                front = self.some(0.5)
                ids += (name if front else []) + [CHANNEL] + encode(channel) + ([] if front else name)
                ids += self.r.choice([[], encode(" json"), encode(" code"),
                                      encode(" ") + [CONSTRAIN] + encode("json"), [CONSTRAIN] + encode("json")])
            else:
                ids += [CHANNEL] + encode(channel)
            body = encode(self.words(12, words=words))
            for _ in range(self.r.randint(0, 2)):  # pieces of characters
                body.insert(self.r.randint(0, len(body)), self.r.choice([9552, 31446, 244, 94, 187, 254]))
            ids += [MESSAGE] + body + [END]
        ids[-1] = self.r.choice([RETURN, CALL, END])
        return ids

    def mutated(self, encode):
        """An output with a few things lost, doubled, moved, put in or cut off."""
        ids = self.output(encode, PLAIN_WORDS)
        for _ in range(self.r.randint(1, 4)):
            at = self.r.randint(0, len(ids))
            to = min(len(ids), at + self.r.choice([1, 1, 1, 2, 5, 12]))
            kind = self.r.choice(["lose", "put", "put", "change", "double", "move", "end", "word", "mark", "near mark"])
            marks = [i for i, t in enumerate(ids) if t >= FIRST_SPECIAL]
            if kind == "lose":
                del ids[at:to]
            elif kind == "put":
                ids[at:at] = [self.r.choice([START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL, END_OF_TEXT,
                                             199998, 200013, 201087, self.r.randrange(FIRST_SPECIAL)])]
            elif kind == "change" and at < len(ids):
                ids[at] = self.r.choice([CHANNEL, END, MESSAGE, START, self.r.randrange(FIRST_SPECIAL)])
            elif kind == "double":
                ids[at:at] = ids[at:to]
            elif kind == "move":
                piece = ids[at:to]
                del ids[at:to]
                at = self.r.randint(0, len(ids))
                ids[at:at] = piece
            elif kind == "end":
                del ids[at:]
            elif kind == "word":
                ids[at:at] = encode(self.r.choice([" json", " to=functions.f", "assistant", " code", "commentary",
                                                   " We must think.", "user", " to=f", "functions.f", "final"]))
            elif kind == "mark" and marks:
                del ids[self.r.choice(marks)]
            elif kind == "near mark" and marks:
                at = self.r.choice(marks) + self.r.randint(0, 1)
                ids[at:at] = encode(self.r.choice([" ", " json", "Hello there", " to=functions.f", "assistant", "\n"]))
        return ids
