"""Tasks to token ids, exactly as the router renders them, with the ids that the model should write.

`Renderer.render(task)` gives the prompt up to and with "<|start|>assistant"; `Renderer.sample(task)` gives
(ids, targets): targets[i] is the id to be predicted at position i, or -1 where nothing is learned. Answers
of earlier turns are learned too (as if the turn ended there); a header is learned only where the model
really writes one.
"""

import os
import pathlib

os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(pathlib.Path(__file__).resolve().parents[2] / ".deps" / "vocab"))
import tiktoken  # noqa: E402

START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN = 200006, 200007, 200008, 200005, 200003, 200012, 200002
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: "


def schema_text(schema):
    """The types that the tools of tasks.py use."""
    lines = ["{"]
    for name, p in schema["properties"].items():
        if "description" in p:
            lines.append(f"// {p['description']}")
        kind = " | ".join(f'"{v}"' for v in p["enum"]) if "enum" in p else p["type"]
        lines.append(f"{name}: {kind},")
    return "\n".join(lines + ["}"])


def tools_text(tools):
    out = ["# Tools\n\n## functions\n\nnamespace functions {\n"]
    for t in tools:
        f = t["function"]
        out.append(f"// {f['description']}\ntype {f['name']} = (_: {schema_text(f['parameters'])}) => any;\n")
    return "\n".join(out + ["} // namespace functions"])


class Renderer:
    def __init__(self):
        self.encoder = tiktoken.get_encoding("o200k_base")
        self.cache = {}

    def encode(self, text):
        if len(text) > 60:
            return self.encoder.encode_ordinary(text)
        ids = self.cache.get(text)
        if ids is None:
            ids = self.encoder.encode_ordinary(text)
            if len(self.cache) < 200000:
                self.cache[text] = ids
        return ids

    def message(self, author, body, *, recipient="", channel="", kind=None, end=END, late=False):
        e = self.encode
        ids = [START] + e(author)
        if recipient and not late:
            ids += e(" to=" + recipient)
        if channel:
            ids += [CHANNEL] + e(channel)
        if recipient and late:
            ids += e(" to=" + recipient)
        if kind:
            ids += e(" ") + [CONSTRAIN] + e(kind)
        return ids + [MESSAGE] + e(body) + [end]

    def system(self, task):
        tail = (f"\n\nReasoning: {task['effort']}\n\n# Valid channels: analysis, commentary, final. "
                "Channel must be included for every message.")
        if task["tools"]:
            tail += "\nCalls to these tools must go to the commentary channel: 'functions'."
        # The encoder cuts between the date and the blank line anyhow, and the pieces repeat.
        body = self.encode(IDENTITY) + self.encode(task["date"]) + self.encode(tail)
        return [START] + self.encode("system") + [MESSAGE] + body + [END]

    def parts(self, task):
        """[(ids, kind)] of the prompt; kind "answer" marks an earlier final answer."""
        messages = task["messages"]
        out = [(self.system(task), "")]
        instructions = messages[0]["content"] if messages[0]["role"] == "system" else ""
        if instructions or task["tools"]:
            sections = ["# Instructions\n\n" + instructions] if instructions else []
            sections += [tools_text(task["tools"])] if task["tools"] else []
            out.append((self.message("developer", "\n\n".join(sections)), ""))
        last_final = max((i for i, m in enumerate(messages)
                          if m["role"] == "assistant" and not m.get("tool_calls")), default=-1)
        for i, m in enumerate(messages):
            if m["role"] == "user":
                out.append((self.message("user", m["content"]), ""))
            elif m["role"] == "tool":
                name = next(c["function"]["name"] for n in messages[:i] for c in n.get("tool_calls") or []
                            if c["id"] == m["tool_call_id"])
                out.append((self.message("functions." + name, m["content"], recipient="assistant",
                                         channel="commentary"), ""))
            elif m["role"] == "assistant":
                if m.get("reasoning") and i > last_final:
                    out.append((self.message("assistant", m["reasoning"], channel="analysis"), ""))
                if m.get("tool_calls"):
                    for c in m["tool_calls"]:
                        out.append((self.message(
                            "assistant", c["function"]["arguments"], recipient="functions." + c["function"]["name"],
                            channel="commentary", kind="json", end=CALL, late=task.get("late", False)), ""))
                else:
                    out.append((self.message("assistant", m["content"], channel="final"),
                                "answer" if m.get("learn", True) else ""))
        return out

    def render(self, task):
        ids = [i for part, _ in self.parts(task) for i in part]
        return ids + [START] + self.encode("assistant")

    def completion(self, task):
        """What the model writes after "<|start|>assistant"."""
        e, out = self.encode, []
        if task["reasoning"]:
            out += [CHANNEL] + e("analysis") + [MESSAGE] + e(task["reasoning"]) + [END, START] + e("assistant")
        if "call" in task:
            name, arguments = task["call"]
            return (out + [CHANNEL] + e("commentary") + e(" to=functions." + name) + e(" ") + [CONSTRAIN] + e("json") +
                    [MESSAGE] + e(arguments) + [CALL])
        return out + [CHANNEL] + e("final") + [MESSAGE] + e(task["content"]) + [RETURN]

    def sample(self, task):
        ids, targets = [], []
        for part, kind in self.parts(task):
            marks = [-1] * len(part)
            if kind == "answer":
                at = part.index(MESSAGE)
                for i in range(at, len(part) - 1):
                    marks[i] = RETURN if i == len(part) - 2 else part[i + 1]
            ids += part
            targets += marks
        head = [START] + self.encode("assistant")
        body = self.completion(task)
        ids += head + body
        targets += [-1] * (len(head) - 1) + body + [-1]
        return ids, targets

    @staticmethod
    def answer_start(targets):
        """Index of the first target of the task's own answer (behind the last gap)."""
        i = len(targets) - 2
        while i >= 0 and targets[i] != -1:
            i -= 1
        return i + 1

