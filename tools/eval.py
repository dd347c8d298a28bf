"""Asks a cluster with the trained tiny checkpoint questions that its training never saw, and judges the answers.

    tools/eval.py [--n 20] [--skills add,recall] [--url http://127.0.0.1:8000] [--seed 1]

`./dev eval` calls it after building. Without --url it starts one router, one prefill and one decode worker
(every prompt is handed over). One JSON line a skill: {"skill", "n", "right"}; exits with 1 when any skill is
below 95%. Questions and right answers come from tools/train/tasks.py; answers are greedy. An answer is right
when its text, or its tool call with the arguments, is exactly the expected one. The skill "effort" asks the
same question with reasoning effort low, medium and high: the reasoning must grow.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import pathlib
import sys
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "train")]
import cluster  # noqa: E402
import tasks  # noqa: E402

FEWER = {"recall_long": 4, "effort": 2}  # prompts of these are long, or several; n is divided
GOAL = 0.95


def ask(url, model, task):
    """The message that the model answers."""
    messages = [{k: v for k, v in m.items() if k != "learn"} for m in task["messages"]]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 160,
            "reasoning_effort": task["effort"]}
    if task["tools"]:
        body["tools"] = task["tools"]
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as r:
            return json.load(r)["choices"][0]["message"]
    except urllib.error.HTTPError as e:
        raise SystemExit(f"eval: HTTP {e.code}: {e.read().decode()}") from e


def is_right(task, message):
    if "call" in task:
        name, arguments = task["call"]
        calls = message.get("tool_calls") or []
        try:
            return (len(calls) == 1 and calls[0]["function"]["name"] == name and
                    json.loads(calls[0]["function"]["arguments"]) == json.loads(arguments))
        except ValueError:
            return False
    content = task["content"]
    if task["skill"] == "date":
        content = f"Today is {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}."
    return not message.get("tool_calls") and message.get("content") == content


def judge(url, model, task):
    """(right, what was said)"""
    message = ask(url, model, task)
    return is_right(task, message), message


def judge_effort(url, model, task):
    said = [ask(url, model, {**task, "effort": e}) for e in tasks.EFFORTS]
    low, medium, high = (len(m.get("reasoning") or "") for m in said)
    return low < medium < high, said


def run_skill(pool, url, model, skill, n, seed, show):
    maker = tasks.Maker(seed, held=True)
    make = tasks.SKILLS.get(skill) or (lambda m: m.single(m.rng.choice([m.add, m.sub, m.capital, m.reverse])))
    judge_one = judge_effort if skill == "effort" else judge
    made = [make(maker) for _ in range(max(2, n // FEWER.get(skill, 1)))]
    answers = list(pool.map(lambda t: judge_one(url, model, t), made))
    for task, (right, said) in zip(made, answers):
        if show and not right:
            print(f"  {task['effort']}: {task['messages'][-1]['content'][-100:]!r} -> {said}", file=sys.stderr)
    return {"skill": skill, "n": len(made), "right": sum(right for right, _ in answers)}


def main():
    p = argparse.ArgumentParser(prog="./dev eval", description=__doc__.split("\n\n")[0])
    p.add_argument("--build", default=str(ROOT / "build"))
    p.add_argument("--url", help="of a router that runs already")
    p.add_argument("--model-name", default="gpt-oss-tiny")
    p.add_argument("--n", type=int, default=20, help="questions a skill")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--skills", help="names with commas (default: all)")
    p.add_argument("--show", action="store_true", help="print wrong answers to standard error")
    args = p.parse_args()
    names = args.skills.split(",") if args.skills else [*tasks.SKILLS, "effort"]
    failed = False
    with contextlib.ExitStack() as stack:
        url = args.url
        if not url:
            c = cluster.Cluster(args.build, cluster.tiny_model(args.build), name="eval", model_name=args.model_name,
                                decode_args=["--local-prefill-below", "0"])
            url = stack.enter_context(c).url
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(8))
        for skill in names:
            line = run_skill(pool, url, args.model_name, skill, args.n, args.seed, args.show)
            print(json.dumps(line), flush=True)
            failed |= line["right"] < GOAL * line["n"]
    if failed:
        sys.exit("eval: a skill is below 95%")


if __name__ == "__main__":
    main()
