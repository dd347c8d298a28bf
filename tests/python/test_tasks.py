"""The tiny model's tasks: the ids that it was trained on are those that the router renders, answers are what they
say, and what is held back never comes in training."""

import calendar
import json
import operator
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
sys.path.insert(0, str(ROOT / "tools" / "train"))
import harmony  # noqa: E402
import tasks  # noqa: E402


def conversation(task):
    """A task as `damask chat render` reads it."""
    messages = []
    for m in task["messages"]:
        m = {k: v for k, v in m.items() if v is not None and k != "learn"}
        if "tool_calls" in m:
            m["tool_calls"] = [{"id": c["id"], **c["function"]} for c in m["tool_calls"]]
        messages.append(m)
    year, month, day = map(int, task["date"].split("-"))
    return json.dumps({"messages": messages, "tools": [t["function"] for t in task["tools"]], "effort": task["effort"],
                       "date_unix_s": calendar.timegm((year, month, day, 5, 0, 0))})


def test_rendered_as_by_the_router():
    maker, made = tasks.Maker(31), []
    while len(made) < 400:
        task = maker.short()
        if int(task["date"][-2:]) <= 28:
            made.append(task)
    out = subprocess.run([BUILD / "tools" / "damask", "chat", "render", "--vocab", ROOT / ".deps" / "vocab"],
                         input="\n".join(map(conversation, made)) + "\n", capture_output=True, text=True, check=True)
    renderer = harmony.Renderer()
    lines = out.stdout.splitlines()
    assert len(lines) == len(made)
    for task, line in zip(made, lines):
        assert json.loads(line)["ids"] == renderer.render(task), task
        ids, targets = renderer.sample({**task, "late": False})
        assert ids == renderer.render(task) + renderer.completion(task)
        first = renderer.answer_start(targets)
        assert targets[first:-1] == renderer.completion(task) == ids[first + 1:]


SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize("held", [False, True])
def test_sums_are_right(held):
    maker, seen = tasks.Maker(5, held), 0
    for _ in range(2000):
        _, _, reasoning, answer = maker.rng.choice([maker.add, maker.sub, maker.mul])()
        for text in [answer, *reasoning.values()]:
            for a, sign, b, c in re.findall(r"(-?\d+) ([-+*]) (\d+) = (-?\d+)\.", text):
                assert SIGNS[sign](int(a), int(b)) == int(c), text
                seen += 1
    assert seen > 5000


def test_held_back():
    """Pairs, lists and tool questions of an evaluation are in no training task."""
    def numbers(question):
        return tuple(sorted(map(int, re.findall(r"\d+", question))))

    train, held = tasks.Maker(1), tasks.Maker(2, held=True)
    for make in ("add", "sub"):
        asked = {numbers(getattr(held, make)()[1]) for _ in range(400)}
        assert len(asked) > 100
        assert not asked & {numbers(getattr(train, make)()[1]) for _ in range(20000)}
    asked = {held.tool_call()["messages"][-1]["content"] for _ in range(300)}
    assert len(asked) > 100
    assert not asked & {train.tool_call()["messages"][-1]["content"] for _ in range(3000)}
    assert not {held.reverse()[3] for _ in range(400)} & {train.reverse()[3] for _ in range(20000)}


def test_tools_are_json_schemas():
    maker = tasks.Maker(9)
    for _ in range(300):
        task = maker.tool_call()
        name, arguments = task["call"]
        tool = next(t["function"] for t in task["tools"] if t["function"]["name"] == name)
        assert set(json.loads(arguments)) == set(tool["parameters"]["required"])
