"""An agent's loop through the official client: question, call, result, answer, and on; the trained checkpoint plays
the model.

Turns go to two routers in turn, which share no state. What a turn has to compute follows from the tokens of the turn
before: where the prompt's rest is short, the decode worker computes only what is new; where it goes to a prefill
worker, that one computes the prompt less what it computed before, the answer between included. And the answers are
those of the same loop without any reuse.
"""

import openai
import pytest

from cluster import Cluster, get
from conftest import pools_balance
from test_answers import MODEL, TIMER, WEATHER

CITIES = ("Boston", "Paris", "Rome")
PAGE = 64
RESULT = '{"sky":"windy","temperature":17}'


@pytest.fixture(scope="module", params=["256", "0"])
def two_routers(request, build, trained):
    with Cluster(build, trained, name=f"agent-{request.param}", model_name=MODEL, routers=2, threads=1,
                 decode_args=["--local-prefill-below", request.param]) as c:
        c.below = int(request.param)
        yield c
        for worker in c.prefill + c.decode:
            pools_balance(worker)


def computed(worker):
    """Prompt tokens that a worker has computed since it started."""
    _, text = get(worker.admin + "/metrics")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total"))


class Loop:
    """Asks about each city; each of the model's turns is noted: (what it said, prompt, output, cached, by D, by P)."""

    def __init__(self, cluster, salt):
        self.cluster, self.salt = cluster, salt
        self.clients = [openai.OpenAI(base_url=f"http://127.0.0.1:{r.argv[r.argv.index('--http-port') + 1]}/v1",
                                      api_key="none", max_retries=0, timeout=120) for r in cluster.routers]
        self.turns = []
        for city in CITIES:
            self.ask(f"What is the weather in {city}?")
            while self.turn():
                pass

    def turn(self):
        extra = {"cache_salt": self.salt(len(self.turns))}
        before = [computed(w) for w in (self.cluster.decode[0], self.cluster.prefill[0])]
        said, n_prompt, n_output, n_cached, calls = self.say(self.clients[len(self.turns) % 2], extra)
        by = [computed(w) - b for w, b in zip((self.cluster.decode[0], self.cluster.prefill[0]), before)]
        self.turns.append((said, n_prompt, n_output, n_cached, *by))
        return calls


class ChatLoop(Loop):
    def ask(self, text):
        self.messages = [*getattr(self, "messages", []), {"role": "user", "content": text}]

    def say(self, client, extra):
        got = client.chat.completions.create(model=MODEL, messages=self.messages, tools=[TIMER, WEATHER], temperature=0,
                                             max_tokens=160, reasoning_effort="low", extra_body=extra)
        message, usage = got.choices[0].message, got.usage
        self.messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls or []
        self.messages += [{"role": "tool", "tool_call_id": c.id, "content": RESULT} for c in calls]
        return ((message.content, [(c.function.name, c.function.arguments) for c in calls]), usage.prompt_tokens,
                usage.completion_tokens, usage.prompt_tokens_details.cached_tokens, len(calls))


class ResponsesLoop(Loop):
    def ask(self, text):
        self.items = [*getattr(self, "items", []), {"role": "user", "content": text}]

    def say(self, client, extra):
        tools = [{"type": "function", **t["function"]} for t in (TIMER, WEATHER)]
        with client.responses.stream(model=MODEL, input=self.items, tools=tools, temperature=0, max_output_tokens=160,
                                     reasoning={"effort": "low"}, extra_body=extra) as stream:
            stream.until_done()
            got = stream.get_final_response()
        self.items += [item.model_dump(exclude={"parsed", "parsed_arguments"}, exclude_none=True) for item in got.output]
        calls = [i for i in got.output if i.type == "function_call"]
        self.items += [{"type": "function_call_output", "call_id": c.call_id, "output": RESULT} for c in calls]
        return ((got.output_text or None, [(c.name, c.arguments) for c in calls]), got.usage.input_tokens,
                got.usage.output_tokens, got.usage.input_tokens_details.cached_tokens, len(calls))


@pytest.mark.parametrize("loop", [ChatLoop, ResponsesLoop])
def test_agent_loop(two_routers, loop):
    c = two_routers
    fresh = loop(c, lambda turn: loop.__name__)  # what other loops have left does not matter
    assert [bool(said[1]) for said, *_ in fresh.turns] == [True, False] * len(CITIES), "call, answer, call, answer"
    assert fresh.turns[0][0] == (None, [("get_weather", '{"city":"Boston"}')])
    assert fresh.turns[1][0] == ("It is windy in Boston with 17 degrees.", [])
    for before, now in zip(fresh.turns, fresh.turns[1:]):
        _, n_before, n_said, *_ = before
        _, n_prompt, _, n_cached, by_d, by_p = now
        held = (n_before + n_said - 1) // PAGE * PAGE  # the last token that is sampled is never computed
        assert n_cached == held, "the turn before must be found again, by whichever router"
        if c.below:
            assert (by_d, by_p) == (n_prompt - 1 - held, 0)
        else:
            assert (by_d, by_p) == (0, n_prompt - 1 - (n_before - 1) // PAGE * PAGE)
    alone = loop(c, lambda turn: f"{loop.__name__} {turn}")
    assert all(n_cached == 0 for _, _, _, n_cached, *_ in alone.turns), "a turn with a salt of its own finds nothing"
    assert [t[:3] for t in alone.turns] == [t[:3] for t in fresh.turns]
