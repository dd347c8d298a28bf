"""Mixed pools with real weights: prefill workers with FP8 dense weights, a decode worker with the checkpoint's.

What one such pair gives for a request alone, without any reuse, is what it gives in company, with reuse on both sides,
over another transport, with several prefill workers of which one is lost, and when the pages do not suffice. It is not
what either format alone gives. Log-probabilities are compared with the answers.
"""

import concurrent.futures

import pytest

from cluster import Cluster, get
from conftest import metric, pools_balance
from test_equality import KINDS, answer, client, ids
from test_faults import Ask, kill, state, wait_for

P = ["--dense", "fp8"]
D = ["--prompt-dense", "fp8"]
LENGTHS = [1, 2, 64, 65, 129, 700]


@pytest.fixture(scope="module")
def start(build, model):
    def make(name, prefill=1, *, decode_args=(), prefill_args=P, **more):
        return Cluster(build, model, prefill=prefill, decode=1, name=f"mixed-{name}", threads=1,
                       decode_args=[*D, *decode_args], prefill_args=prefill_args, **more)
    return make


@pytest.fixture(scope="module")
def pair(start):
    """Each request is computed afresh."""
    with start("pair", decode_args=["--no-reuse"], prefill_args=[*P, "--no-reuse"]) as c:
        yield c


@pytest.fixture(scope="module")
def alone(build, model):
    with Cluster(build, model, prefill=0, decode=1, name="mixed-alone", decode_args=["--local-prefill-below", "max"]) as c:
        yield c


@pytest.fixture(scope="module", params=["tcp", "shm"])
def mixed(request, start):
    with start(request.param, prefill=2, transport=request.param) as c:
        c.kind = KINDS["greedy" if request.param == "tcp" else "seeded"]
        yield c


def balanced(c):
    for w in c.prefill + c.decode:
        pools_balance(w)


def test_what_a_pair_says_is_neither_formats(pair, alone, build, model):
    with Cluster(build, model, prefill=0, decode=1, name="mixed-fp8", decode_args=[*P, "--local-prefill-below", "max"]) as fp8:
        prompt = ids(200, 4)
        got, own, theirs = (answer(c, prompt, temperature=0)[0] for c in (pair, alone, fp8))
        assert got[2] != own[2] and got[2] != theirs[2]
        # Without pages of a prompt there is only one format.
        assert answer(pair, ids(1, 5), temperature=0)[0] == answer(alone, ids(1, 5), temperature=0)[0]


def test_company_and_reuse_change_nothing(pair, mixed):
    prompts = [ids(n, n) for n in LENGTHS]
    want = [answer(pair, p, **mixed.kind)[0] for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(2):  # the second time from caches
            assert list(pool.map(lambda p: answer(mixed, p, **mixed.kind)[0], prompts)) == want
    assert metric(mixed.url, "damask_router_prefills_forced_local_total") == 0
    balanced(mixed)


def test_a_conversation_goes_on(pair, mixed):
    """A prompt that holds an earlier one and its answer: the earlier one is reused, the answer's pages are not."""
    prompt = ids(300, 9)
    for turn in range(2):
        got, usage = answer(mixed, prompt, n_new=20, **mixed.kind)
        assert got == answer(pair, prompt, n_new=20, **mixed.kind)[0]
        assert usage.prompt_tokens_details.cached_tokens == 256 * turn
        prompt += [ord(c) for c in "an answer"] + ids(90, 100)
    balanced(mixed)


def test_scored_prompts_are_the_decode_workers(mixed, alone):
    for _ in range(2):
        got, want = (client(c).completions.create(model="gpt-oss-tiny", prompt=ids(150, 3), max_tokens=4, logprobs=2, echo=True,
                                                  temperature=0, extra_body={"ignore_eos": True}).choices[0].logprobs
                     for c in (mixed, alone))
        assert got.token_logprobs == want.token_logprobs


def test_more_answers_than_pages(pair, start):
    """Both outgrow what was reserved for them, 17 pages and one for a copy of the prompt's: who gives way goes on from
    the prompt as it came.
    """
    with start("small", decode_args=["--full-pages", "36", "--max-context", "2048", "--max-sequences", "4"]) as c:
        asks = [(ids(64, 40 + i), {"seed": i, "temperature": 1}) for i in range(2)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda a: answer(a[0], a[1], n_new=1040, **a[2])[0], [(x, *a) for x in (c, pair) for a in asks]))
        assert got[:2] == got[2:]
        assert metric(c.decode[0].admin, "vllm:num_preemptions_total") > 0
        balanced(c)


def test_a_prefill_worker_is_lost(pair, start):
    with start("lost", prefill=2, prefill_args=[*P, "--chunk-tokens", "64"]) as c:
        ask = Ask(c, 3000, seed=2)
        found = []
        wait_for(lambda: found.extend(w for w in c.prefill if state(w).get("running")) or found)
        kill(found[0])
        assert ask.text() == Ask(pair, 3000, seed=2).text()
        # Nobody else: the decode worker does not step in, in other numbers.
        for w in c.prefill:
            if w.alive():
                kill(w)
        wait_for(lambda: get(c.url + "/readyz")[0] == 503)
        for w in c.prefill:
            w.start()
        wait_for(lambda: get(c.url + "/readyz")[0] == 200)
        assert Ask(c, 500, seed=3).text() == Ask(pair, 500, seed=3).text()
