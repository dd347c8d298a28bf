"""What the tiny model learns and is asked: conversations with the one right answer, made from a seed.

A task is a dict in the words of the chat API: "messages", "tools", "effort", and what must come out:
"reasoning" (or ""), and "content" or "call" = (name, arguments text). "skill" names its kind. An answer is
a function of the conversation alone, so exact comparison is a fair judge.

Everything that could be learned by heart is divided by a hash of its key (the pair of numbers, the list of
words, the question with its wording): a tenth is never shown in training and only asked in evaluations.
`held=True` makes tasks of that tenth, `held=False` of the rest. Nothing here needs more than Python.
"""

import json
import random
import zlib

try:
    from . import words as W
except ImportError:
    import words as W

EFFORTS = ["low", "medium", "high"]


def is_held(*key):
    return zlib.crc32(repr(key).encode()) % 10 == 0


class Maker:
    """Makes tasks from one random stream."""

    def __init__(self, seed, held=False):
        self.rng = random.Random(seed)
        self.held = held

    def until(self, draw):
        """Draws (key, value) pairs until the key is of our part."""
        for _ in range(10000):
            key, value = draw()
            if is_held(*key) == self.held:
                return value
        raise RuntimeError("no key of this part")

    # ---- questions: each returns (skill, question, {effort: reasoning}, answer) ----

    def add(self):
        r = self.rng

        def draw():
            if r.random() < 0.7 or self.held:
                a, b = r.randrange(100), r.randrange(100)
            else:
                a, b = r.randrange(100, 400), r.randrange(100)
            return ("add", min(a, b), max(a, b)), (a, b)

        a, b = self.until(draw)
        q = r.choice(["What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b} = ?",
                      "How much is {a} + {b}?", "What is {a}+{b}?", "Compute {a} + {b}.", "{a} + {b}"])
        return self.sum_of(q, a, b)

    def sum_of(self, q, a, b):
        s = a + b
        ta, tb, ua, ub = a - a % 10, b - b % 10, a % 10, b % 10
        tens, ones = ta + tb, ua + ub
        steps = f"{ta} + {tb} = {tens}. {ua} + {ub} = {ones}. {tens} + {ones} = {s}."
        return ("add", q.format(a=a, b=b),
                {"low": f"{tens} + {ones}.", "medium": steps,
                 "high": f"We add {a} and {b}. The tens are {ta} and {tb}. The ones are {ua} and {ub}. " + steps},
                f"{a} + {b} = {s}.")

    def sub(self):
        r = self.rng

        def draw():
            a, b = r.randrange(100), r.randrange(100)
            a, b = max(a, b), min(a, b)
            return ("sub", a, b), (a, b)

        a, b = self.until(draw)
        q = r.choice(["What is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.", "{a} - {b} = ?",
                      "How much is {a} - {b}?", "What is {a}-{b}?", "Compute {a} - {b}.", "{a} - {b}"])
        ta, tb, ua, ub = a - a % 10, b - b % 10, a % 10, b % 10
        tens, ones, d = ta - tb, ua - ub, a - b
        last = f"{tens} {'-' if ones < 0 else '+'} {abs(ones)}"
        steps = f"{ta} - {tb} = {tens}. {ua} - {ub} = {ones}. {last} = {d}."
        return ("sub", q.format(a=a, b=b),
                {"low": f"{last}.", "medium": steps,
                 "high": f"We subtract {b} from {a}. The tens are {ta} and {tb}. The ones are {ua} and {ub}. "
                         + steps},
                f"{a} - {b} = {d}.")

    def mul(self):
        """Half are of the table up to 10, which is learned by heart; held are the larger ones, put together."""
        r = self.rng

        def draw():
            a, b = r.randrange(11, 30), r.randrange(2, 10)
            return ("mul", a, b), (a, b)

        a, b = self.until(draw) if r.random() < 0.5 else (r.randrange(0, 11), r.randrange(0, 11))
        q = r.choice(["What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} and {b}.", "{a} * {b} = ?",
                      "How much is {a} * {b}?", "What is {a}*{b}?", "Compute {a} * {b}.", "{a} * {b}"])
        p = a * b
        if a <= 10:
            steps = f"{a} * {b} = {p}."
            reasoning = {"medium": steps, "high": f"We multiply {a} and {b}. " + steps}
        else:
            tens, ones = (a - a % 10) * b, a % 10 * b
            more, rest = ones - ones % 10, ones % 10
            steps = (f"{a - a % 10} * {b} = {tens}. {a % 10} * {b} = {ones}. {tens} + {more} = {tens + more}. "
                     f"{tens + more} + {rest} = {p}.")
            reasoning = {"low": f"{tens} + {ones}. {tens + more} + {rest}.", "medium": steps,
                         "high": f"We multiply {a} and {b}. The tens are {a - a % 10}. The ones are {a % 10}. " + steps}
        return "mul", q.format(a=a, b=b), reasoning, f"{a} * {b} = {p}."

    def capital(self):
        r = self.rng
        forms = ["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.",
                 "What is the capital city of {}?", "Tell me the capital of {}.", "{}'s capital?"]

        def draw():
            c, q = r.choice(list(W.CAPITALS)), r.choice(forms)
            return ("capital", c, q), (c, q)

        c, q = self.until(draw)
        city = W.CAPITALS[c]
        return ("facts", q.format(c), {"medium": f"The capital of {c} is {city}.",
                                       "high": f"The user asks about {c}. The capital of {c} is {city}. "
                                               f"We answer with the city."},
                f"The capital of {c} is {city}.")

    def fact(self):
        """The wording is not held: with the conversation around it, the prompt is a new one."""
        questions, answer = self.rng.choice(W.FACTS)
        return ("facts", self.rng.choice(questions),
                {"medium": "We know this.", "high": "The user asks something that we know. We answer it shortly."},
                answer)

    def items(self, low=2, high=7):
        r = self.rng

        def draw():
            k = r.random()
            source = W.LETTERS if k < 0.35 else W.THINGS if k < 0.85 else NUMERALS
            value = r.sample(source, r.randint(low, high))
            return ("items", *value), value

        return self.until(draw)

    def repeat(self):
        text = " ".join(self.items(3, 7))
        q = self.rng.choice(["Repeat: {}", "Repeat these words: {}", "Say this again: {}", "Please repeat: {}",
                             "Echo: {}"]).format(text)
        return ("repeat", q, {"medium": "We repeat the words.",
                              "high": f"The user wants the same words again. The words are: {text}."}, text)

    def reverse(self):
        it = self.items(3, 6)
        text, back = " ".join(it), " ".join(it[::-1])
        q = self.rng.choice(["Reverse: {}", "Reverse these words: {}", "Say this backwards: {}",
                             "Please reverse: {}"]).format(text)
        return ("reverse", q, {"medium": "We start with the last word.",
                               "high": f"The words are: {text}. The last word is {it[-1]}. "
                                       f"We start with it and end with {it[0]}."}, back)

    def question(self):
        make = self.rng.choices([self.add, self.sub, self.mul, self.capital, self.fact, self.repeat, self.reverse],
                                [22, 18, 18, 8, 8, 12, 14])[0]
        return make()

    # ---- things told and asked later ----

    def told(self, n):
        """n things as [(statement, question, answer)]."""
        r = self.rng
        kinds = {
            "code word": lambda: r.choice(W.THINGS), "secret number": lambda: str(r.randrange(100, 1000)),
            "name": lambda: r.choice(W.FIRST_NAMES), "city": lambda: r.choice(W.CITIES),
            "favorite color": lambda: r.choice(W.COLORS), "pet": lambda: r.choice(W.PETS),
            "favorite food": lambda: r.choice(W.FOODS), "age": lambda: str(r.randrange(10, 100)),
        }
        out = []
        for kind in r.sample(list(kinds), n):
            value = kinds[kind]()
            out.append((f"My {kind} is {value}.", r.choice(["What is my {}?", "Tell me my {}.",
                        "Do you remember my {}?"]).format(kind), kind, f"Your {kind} is {value}."))
        return out

    @staticmethod
    def recall_reasoning(kind, answer):
        return {"medium": "The user told us.",
                "high": f"The user asks for the {kind}. It was told before. {answer}"}

    def sentence(self):
        r = self.rng
        t, a = W.THINGS, W.ADJECTIVES + W.COLORS
        k = r.random()
        if k < 0.55:
            return f"The {r.choice(a)} {r.choice(t)} {r.choice(W.VERBS)} the {r.choice(a)} {r.choice(t)}."
        if k < 0.75:
            return f"A {r.choice(t)} {r.choice(W.VERBS)} {r.choice(W.FIRST_NAMES)} {r.choice(W.PLACES)} the {r.choice(t)}."
        if k < 0.9:
            return f"In {r.choice(W.CITIES)} there are {r.randrange(2, 1000)} {r.choice(a)} stones."
        return f"{r.choice(W.FIRST_NAMES)} {r.choice(W.VERBS)} the {r.choice(t)}."

    def filler(self, n_tokens):
        """About n_tokens of sentences that say nothing about the user."""
        out, left = [], n_tokens
        while left > 0:
            s = self.sentence()
            left -= len(s.split()) + 1
            out.append(s)
        return " ".join(out)

    def recall(self, n_filler, n_asked=1, skill="recall"):
        """Things told first, then filler, then the questions; the last one is the task's."""
        r = self.rng
        told = self.told(max(n_asked, r.randint(1, 4)))
        statements = " ".join(t[0] for t in told)
        asked = r.sample(told, n_asked)
        text = self.filler(n_filler)
        messages = []
        if r.random() < 0.5:  # one message holds all
            head = f"{statements} {text} "
        else:
            messages += [{"role": "user", "content": statements},
                         {"role": "assistant", "content": "I will remember that."}]
            head = f"{text} "
            if r.random() < 0.5:
                messages += [{"role": "user", "content": f"Read this: {text}"},
                             {"role": "assistant", "content": "I have read it."}]
                head = ""
        for i, (_, question, kind, answer) in enumerate(asked):
            messages.append({"role": "user", "content": (head if i == 0 else "") + question})
            if i + 1 < n_asked:
                messages.append({"role": "assistant", "content": answer})
        _, _, kind, answer = asked[-1]
        return self.task(skill, messages, self.recall_reasoning(kind, answer), content=answer)

    def acknowledge(self):
        """The first half of recall: things are told, or a text is to be read."""
        r = self.rng
        if r.random() < 0.6:
            q, a = " ".join(t[0] for t in self.told(r.randint(1, 4))), "I will remember that."
            reasoning = {"medium": "The user tells us something.",
                         "high": "The user tells us something. We keep it in mind."}
        else:
            q, a = "Read this: " + self.filler(r.randint(20, 150)), "I have read it."
            reasoning = {"medium": "The user gives us a text.",
                         "high": "The user gives us a text to read. We read it."}
        return self.task("chat", [{"role": "user", "content": q}], reasoning, content=a)

    # ---- tools ----

    def tool_family(self, name=None):
        """(tool, question, arguments, results [(text, answer)])"""
        r = self.rng

        def tool(fname, description, **properties):
            return {"type": "function", "function": {
                "name": fname, "description": r.choice(description), "parameters": {
                    "type": "object", "properties": properties, "required": list(properties)}}}

        def dumps(d):
            return json.dumps(d, separators=r.choice([(",", ":"), (", ", ": ")]))

        def text_of(kind, description):
            p = {"type": kind}
            if r.random() < 0.4:
                p["description"] = description
            return p

        name = name or r.choice(TOOL_NAMES)
        city, person, thing = r.choice(W.CITIES), r.choice(W.FIRST_NAMES), r.choice(W.THINGS)
        if name == "get_weather":
            t = tool(name, ["Gets the weather of a city.", "Get the current weather.", "Weather in a city."],
                     city=text_of("string", "Name of the city"))
            sky, deg = r.choice(W.SKIES), r.randrange(0, 40)
            q = r.choice(["What is the weather in {}?", "How is the weather in {}?", "Tell me the weather in {}.",
                          "Weather in {}?"]).format(city)
            return t, q, {"city": city}, (dumps({"sky": sky, "temperature": deg}),
                                          f"It is {sky} in {city} with {deg} degrees.")
        if name == "get_time":
            t = tool(name, ["Gets the time of a city.", "Get the current time.", "Local time of a city."],
                     city=text_of("string", "Name of the city"))
            h, m = r.randrange(24), r.randrange(60)
            q = r.choice(["What time is it in {}?", "Tell me the time in {}.", "Time in {}?"]).format(city)
            return t, q, {"city": city}, (dumps({"time": f"{h:02}:{m:02}"}), f"It is {h:02}:{m:02} in {city}.")
        if name in ("add", "multiply"):
            word, verb = ("plus", "Add") if name == "add" else ("times", "Multiply")
            sign = "+" if name == "add" else "*"
            t = tool(name, [f"{verb} two numbers.", f"{verb}s two numbers exactly."],
                     a=text_of("number", "First number"), b=text_of("number", "Second number"))
            a, b = (r.randrange(1000), r.randrange(1000)) if r.random() < 0.5 else (r.randrange(100), r.randrange(100))
            q = r.choice(["What is {a} {s} {b}?", "What is {a} {w} {b}?", "{v} {a} and {b}.", "Compute {a} {s} {b}."
                          ]).format(a=a, b=b, s=sign, w=word, v=verb)
            res = r.randrange(1000)
            return t, q, {"a": a, "b": b}, (dumps({"result": res}), f"The result is {res}.")
        if name == "set_timer":
            t = tool(name, ["Sets a timer.", "Start a timer of some minutes."],
                     minutes=text_of("number", "Minutes until it rings"))
            m = r.randrange(2, 100)
            q = r.choice(["Set a timer for {} minutes.", "Start a timer of {} minutes.",
                          "Please set a timer for {} minutes."]).format(m)
            return t, q, {"minutes": m}, (dumps({"ok": True}), "Done.")
        if name == "send_message":
            t = tool(name, ["Sends a message to a person.", "Send a message."],
                     to=text_of("string", "Name of the person"), text=text_of("string", "The message"))
            q = r.choice(["Send {p} the message {t}.", "Send the message {t} to {p}.",
                          "Please send {p} the message {t}."]).format(p=person, t=thing)
            return t, q, {"to": person, "text": thing}, (dumps({"ok": True}), "Done.")
        if name == "set_light":
            t = tool(name, ["Turns a light on or off.", "Switch the light of a room."],
                     room=text_of("string", "Name of the room"), state={"type": "string", "enum": ["on", "off"]})
            room, state = r.choice(W.ROOMS), r.choice(["on", "off"])
            q = r.choice(["Turn {s} the light in the {r}.", "Turn the light in the {r} {s}.",
                          "Please turn {s} the light in the {r}."]).format(s=state, r=room)
            return t, q, {"room": room, "state": state}, (dumps({"ok": True}), "Done.")
        t = tool("find_page", ["Finds a page about a thing.", "Search the library."],
                 word=text_of("string", "What to look for"))
        page = r.randrange(1, 1000)
        q = r.choice(["Find a page about the {}.", "On which page is the {}?", "Search for the {}."]).format(thing)
        return t, q, {"word": thing}, (dumps({"page": page}), f"The {thing} is on page {page}.")

    def toolbox(self, *, need=None, forbid=()):
        r = self.rng
        names = [n for n in TOOL_NAMES if n != need and n not in forbid]
        names = r.sample(names, r.randint(0 if need else 1, 3))
        tools = [self.tool_family(n)[0] for n in names]
        return tools

    def tool_call(self):
        """A question that a declared tool answers: the call must come."""
        r = self.rng

        def draw():
            name = r.choice(TOOL_NAMES)
            family = self.tool_family(name)
            return ("tool", family[1]), (name, family)

        name, (tool, question, arguments, _) = self.until(draw)
        tools = self.toolbox(need=name) + [tool]
        r.shuffle(tools)
        reasoning = {"medium": f"We call {name}.", "high": f"The user needs a tool. The tool {name} fits. We call {name}."}
        return self.task("tool_call", self.before(tools) + [{"role": "user", "content": question}], reasoning,
                         call=(name, json.dumps(arguments, separators=(",", ":"))), tools=tools)

    def tool_answer(self):
        """The tool has answered: its result becomes a sentence."""
        r = self.rng
        name = r.choice(TOOL_NAMES)
        tool, question, arguments, (result, answer) = self.tool_family(name)
        tools = self.toolbox(need=name) + [tool]
        r.shuffle(tools)
        call = {"id": "call_1", "type": "function", "function": {
            "name": name, "arguments": json.dumps(arguments, separators=(",", ":"))}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        effort = r.choice(EFFORTS)
        if effort == "medium" and r.random() < 0.7:
            asked["reasoning"] = f"We call {name}."
        if effort == "high" and r.random() < 0.7:
            asked["reasoning"] = f"The user needs a tool. The tool {name} fits. We call {name}."
        messages = self.before(tools) + [{"role": "user", "content": question}, asked,
                                         {"role": "tool", "tool_call_id": "call_1", "content": result}]
        return self.task("tool_answer", messages,
                         {"medium": "The tool has answered.",
                          "high": "The tool has answered. We tell the user the result."},
                         content=answer, tools=tools, effort=effort)

    def tool_unused(self):
        """Tools are declared but the question needs none of them."""
        tools = self.toolbox(forbid=("add", "multiply"))
        skill, question, reasoning, answer = self.question()
        return self.task("tool_unused", [{"role": "user", "content": question}], reasoning, content=answer,
                         tools=tools)

    # ---- conversations ----

    def before(self, tools=(), at_most=2):
        """Earlier exchanges; none that a declared tool should have answered."""
        r, out = self.rng, []
        names = [t["function"]["name"] for t in tools]
        n = r.choice([0, 0, 0, 1, 1, 2])
        for _ in range(min(n, at_most)):
            skill, q, reasoning, a = self.question()
            if (skill == "add" and "add" in names) or (skill == "mul" and "multiply" in names):
                continue
            out += self.exchange(q, reasoning, a)
        return out

    @staticmethod
    def exchange(question, reasoning, answer):
        """An earlier turn; its answer is learned ("learn") where none needs reasoning to find it."""
        return [{"role": "user", "content": question},
                {"role": "assistant", "content": answer, "learn": "low" not in reasoning}]

    def single(self, make=None):
        skill, question, reasoning, answer = (make or self.question)()
        return self.task(skill, [{"role": "user", "content": question}], reasoning, content=answer)

    def multi(self):
        r, messages = self.rng, []
        for _ in range(r.randint(1, 4)):
            _, q, reasoning, a = self.question()
            messages += self.exchange(q, reasoning, a)
        _, question, reasoning, answer = self.question()
        return self.task("multi_turn", messages + [{"role": "user", "content": question}], reasoning, content=answer)

    def follow_up(self):
        """A second question about the first answer."""
        r = self.rng
        _, q, _, a = self.add() if r.random() < 0.5 else self.sub()
        first = int(a.rstrip(".").split()[-1])
        if first > 99:
            return self.follow_up()

        def draw():
            b = r.randrange(0, 100)
            return ("add", min(first, b), max(first, b)), b

        try:
            b = self.until(draw)
        except RuntimeError:
            return self.follow_up()
        q2 = r.choice(["Now add {}.", "Add {} to that.", "And plus {}?"]).format(b)
        _, _, reasoning, answer = self.sum_of("", first, b)
        return self.task("follow_up", [{"role": "user", "content": q}, {"role": "assistant", "content": a},
                                       {"role": "user", "content": q2}], reasoning, content=answer)

    def today(self):
        q = self.rng.choice(["What is the date today?", "What day is it?", "Tell me today's date.",
                             "What is today's date?"])
        t = self.task("date", [{"role": "user", "content": q}], {}, content="")
        t["content"] = f"Today is {t['date']}."
        if t["effort"] != "low":
            t["reasoning"] = ("It is in the system message." if t["effort"] == "medium" else
                              "The user asks for the date. It is in the system message.")
        return t

    def task(self, skill, messages, reasoning, content=None, call=None, tools=(), effort=None):
        r = self.rng
        effort = effort or r.choice(EFFORTS)
        year, month, day = r.randrange(2024, 2033), r.randint(1, 12), r.randint(1, 31)
        task = {"skill": skill, "messages": messages, "tools": list(tools), "effort": effort,
                "date": f"{year}-{month:02}-{day:02}", "reasoning": reasoning.get(effort, "")}
        if content is not None:
            task["content"] = content
        else:
            task["call"] = call
        k = r.random()
        if k < 0.3:
            text = r.choice(INSTRUCTIONS) if k < 0.2 else self.filler(r.randint(5, 40))
            task["messages"] = [{"role": "system", "content": text}] + messages
        return task

    def short(self):
        """A task of training with a short prompt."""
        make = self.rng.choices(
            [self.single, self.multi, self.follow_up, self.today, self.acknowledge, self.tool_call, self.tool_answer,
             self.tool_unused, lambda: self.recall(self.rng.choice([0, 20, 60, 120, 200, 300]), self.rng.randint(1, 3))],
            [32, 17, 5, 6, 3, 18, 9, 7, 9])[0]
        return make()

    def long(self, n_filler):
        return self.recall(n_filler, self.rng.randint(2, 4))


NUMERALS = [str(i) for i in range(W.NUMBERS_TO + 1)]
TOOL_NAMES = ["get_weather", "get_time", "add", "multiply", "set_timer", "send_message", "set_light", "find_page"]
INSTRUCTIONS = ["You are a helpful assistant.", "Answer briefly.", "Be kind and short.", "You help people.",
                "You are a helpful assistant. Answer briefly.", "Use tools when they fit."]

# Skills of an evaluation: name -> function of a Maker.
SKILLS = {
    "add": lambda m: m.single(m.add),
    "sub": lambda m: m.single(m.sub),
    "mul": lambda m: m.single(m.mul),
    "facts": lambda m: m.single(m.capital if m.rng.random() < 0.6 else m.fact),
    "repeat": lambda m: m.single(m.repeat),
    "reverse": lambda m: m.single(m.reverse),
    "multi_turn": lambda m: m.multi(),
    "follow_up": lambda m: m.follow_up(),
    "date": lambda m: m.today(),
    "tool_call": lambda m: m.tool_call(),
    "tool_answer": lambda m: m.tool_answer(),
    "tool_unused": lambda m: m.tool_unused(),
    "recall": lambda m: m.recall(m.rng.randint(150, 700)),
    "recall_long": lambda m: m.recall(m.rng.randint(4150, 4700)),
}
