"""The promise: prefill in one process and decode in another give, token for token, what one worker alone
gives.

The same requests go to a disaggregated cluster (the local-prefill threshold is 0, so that every prompt is
computed by a prefill worker) and to a decode worker alone (colocated). Answers are compared with their log-probabilities, which are
equal only when the logits are equal bit for bit. Prompts are token ids, so their lengths are exact.
"""

import random

import openai
import pytest

from cluster import Cluster
from conftest import TRANSPORTS, pools_balance

LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 200, 513]
LONG = [4095, 4096, 4097, 9000]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def alone(build, model):
    c = Cluster(build, model, prefill=0, decode=1, name="alone", decode_args=["--local-prefill-below", "max"])
    with c:
        yield c


@pytest.fixture(scope="module", params=TRANSPORTS)
def split(request, build, model):
    c = Cluster(build, model, prefill=1, decode=1, transport=request.param, name=f"split-{request.param}",
                threads=1, decode_args=["--local-prefill-below", "0"])
    with c:
        yield c


def client(cluster):
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=240)


def ids(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(0, 199998) for _ in range(length)]


def answer(cluster, prompt, n_new=NEW_TOKENS, **extra):
    r = client(cluster).completions.create(model="gpt-oss-tiny", prompt=prompt, max_tokens=n_new, logprobs=5,
                                           extra_body={"ignore_eos": True}, **extra)
    choice = r.choices[0]
    return (choice.text, choice.logprobs.tokens, choice.logprobs.token_logprobs,
            choice.logprobs.top_logprobs, choice.finish_reason), r.usage


KINDS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "top_p": 0.95, "seed": 77}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS + LONG)
def test_split_equals_alone(alone, split, length, kind):
    prompt = ids(length, length)
    want, usage = answer(alone, prompt, **KINDS[kind])
    got, got_usage = answer(split, prompt, **KINDS[kind])
    assert usage.prompt_tokens == got_usage.prompt_tokens == length
    assert usage.completion_tokens == got_usage.completion_tokens == NEW_TOKENS
    assert got == want
    # Once more: the second time both have the prefix in their caches.
    again, again_usage = answer(split, prompt, **KINDS[kind])
    assert again == want
    if length >= 129:
        assert again_usage.prompt_tokens_details.cached_tokens >= 64, "the prefix was not reused"


@pytest.mark.parametrize("shared", [64, 128, 192, 500, 2100])
def test_prefix_reuse_changes_nothing(alone, split, shared):
    """Prompts that share a beginning, in an order that makes each worker reuse another's prefix."""
    head = ids(shared, 1000 + shared)
    tails = [ids(n, 2000 + n) for n in (1, 70, 130)]
    for tail in tails + tails[::-1]:
        prompt = head + tail
        assert answer(split, prompt, temperature=0)[0] == answer(alone, prompt, temperature=0)[0]


def test_pages_balance_after_all(alone, split):
    for worker in alone.decode + split.prefill + split.decode:
        pools_balance(worker)
