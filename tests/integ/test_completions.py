"""Completions and tokens over HTTP, in front of workers of paper: several prompts, the best of several
choices, prompts that fail together, text to ids and back.
"""

import http.client
import json
import threading

import pytest

from fake_worker import pb
from router_test import MODEL, TOOLS, Router, events, harmony, ids, says


def post(r, path, **fields):
    status, _, data = r.request("POST", path, fields)
    return status, (data.decode() if fields.get("stream") and status == 200 else json.loads(data))


def complete(r, **fields):
    status, got = post(r, "/v1/completions", model=MODEL, **fields)
    assert status == 200, got
    return got


def says_its_prompt(generate, choice):
    """An answer by which one sees whose it is."""
    return ids(f" to {harmony.decode(list(generate.prompt))} {choice}") + [199999]


PROMPTS = ["one", "two two", "three"]


def test_several_prompts(paper):
    r, d, _ = paper
    d.script = says_its_prompt
    got = complete(r, prompt=PROMPTS, n=2)
    assert [c["index"] for c in got["choices"]] == list(range(6))
    assert [c["text"] for c in got["choices"]] == [f" to {p} {i}" for p in PROMPTS for i in range(2)]
    assert got["usage"]["prompt_tokens"] == sum(len(ids(p)) for p in PROMPTS)
    assert got["usage"]["completion_tokens"] == sum(len(ids(c["text"])) + 1 for c in got["choices"])
    assert len(d.messages("generate")) == 3, "one reservation for each prompt, whatever n"
    by_ids = complete(r, prompt=[ids(p) for p in PROMPTS], n=2)
    assert by_ids["choices"] == got["choices"]
    text = complete(r, prompt=PROMPTS, n=2, stream=True, stream_options={"include_usage": True})
    payloads, _ = events(text)
    texts, finishes = [""] * 6, [0] * 6
    for chunk in payloads[:-1]:
        (c,) = chunk["choices"]
        assert not finishes[c["index"]] and chunk["usage"] is None
        texts[c["index"]] += c["text"]
        finishes[c["index"]] += c["finish_reason"] is not None
    assert texts == [c["text"] for c in got["choices"]] and finishes == [1] * 6
    assert payloads[-1]["choices"] == [] and payloads[-1]["usage"] == got["usage"]
    echoed = complete(r, prompt=PROMPTS, echo=True, logprobs=0)
    for prompt, c in zip(PROMPTS, echoed["choices"]):
        assert c["text"].startswith(prompt + " to ") and c["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("sampled", (" to", "<|endoftext|>"))
def test_the_prompt_alone(paper, sampled):
    """max_tokens 0 with echo: the one token that a worker must sample is part of nothing, whatever it is."""
    r, d, _ = paper
    d.script = lambda g, choice: ids(sampled + " more")
    got = complete(r, prompt="The quick", echo=True, max_tokens=0)
    assert got["choices"] == [{"index": 0, "text": "The quick", "logprobs": None, "finish_reason": "length"}]
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"], got["usage"]["total_tokens"]) == (2, 0, 2)
    assert d.messages("generate")[-1].max_tokens == 1
    scored = complete(r, prompt="The quick", echo=True, max_tokens=0, logprobs=1)["choices"][0]
    assert scored["text"] == "The quick" and scored["finish_reason"] == "length"
    assert scored["logprobs"] == {"tokens": ["The", " quick"], "token_logprobs": [None, -1.0], "text_offset": [0, 3],
                                  "top_logprobs": [None, {" quick": -1.0}]}
    many = complete(r, prompt=["The quick", ids("The quick")], n=2, echo=True, max_tokens=0, logprobs=1)
    assert many["choices"] == [{**scored, "index": i} for i in range(4)] and many["usage"]["completion_tokens"] == 0
    best = complete(r, prompt="The quick", n=1, best_of=3, echo=True, max_tokens=0, logprobs=1)
    assert best["choices"] == [scored] and best["usage"]["completion_tokens"] == 0
    payloads, _ = events(complete(r, prompt=["The quick", "x"], echo=True, max_tokens=0, logprobs=1, stream=True,
                                  stream_options={"include_usage": True}))
    chunks = [p["choices"][0] for p in payloads[:-1]]
    assert [(c["text"], c["finish_reason"]) for c in chunks if c["index"] == 0] == [("The quick", None), ("", "length")]
    assert [c["logprobs"]["tokens"] for c in chunks if c["index"] == 1] == [["x"], []]
    assert payloads[-1]["usage"]["completion_tokens"] == 0
    for bad, param in (({}, "max_tokens"), ({"echo": False, "stream": True}, "max_tokens"), ({"echo": True, "min_tokens": 1}, "min_tokens")):
        status, got = post(r, "/v1/completions", model=MODEL, prompt="The quick", max_tokens=0, **bad)
        assert status == 400 and got["error"]["param"] == param, got


def test_the_prompt_alone_is_tried_again(paper):
    """Nothing of an answer has gone out when a worker fails behind the token that nobody wants."""
    r, d, _ = paper
    failed = []

    def fail_once(w, session, g):
        if not failed:
            session.send(reserved=pb.Reserved(id=g.id))
            session.send(prompt_logprobs=pb.PromptLogprobs(id=g.id, logprobs=[-1.0]))
            session.send(tokens=pb.Tokens(id=g.id, ids=ids("x")))
            session.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_INTERNAL, text="no"))
        failed.append(g.id.attempt)
        return len(failed) == 1

    d.on_generate = fail_once
    payloads, _ = events(complete(r, prompt="The quick", echo=True, max_tokens=0, logprobs=0, stream=True))
    assert [(p["choices"][0]["text"], p["choices"][0]["finish_reason"]) for p in payloads] == [("The quick", None), ("", "length")]
    assert failed == [1, 2]


def test_one_prompt_fails_and_all_do(paper):
    r, d, _ = paper
    d.script = says_its_prompt

    def refuse(w, session, g):
        if harmony.decode(list(g.prompt)) == "two two":
            session.send(failed=pb.Failed(id=g.id, code=pb.FAILURE_INTERNAL, text="no"))
            return True
        return False

    d.on_generate = refuse
    status, got = post(r, "/v1/completions", model=MODEL, prompt=PROMPTS)
    assert status == 502 and got["error"]["code"] == "worker_failed"
    status, got = post(r, "/v1/completions", model=MODEL, prompt=["a", "b " * 5000])
    assert status == 400 and got["error"]["code"] == "context_length_exceeded"
    d.on_generate = None
    assert [c["text"] for c in complete(r, prompt=PROMPTS)["choices"]] == [f" to {p} 0" for p in PROMPTS]
    d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)
    assert r.metric("damask_router_tokens_in_flight") == 0 and r.metric("vllm:num_requests_waiting") == 0


def test_prompts_end_with_their_client_and_with_their_worker(workers):
    d = workers("decode", script=says_its_prompt, token_delay_s=0.1)
    with Router(decode=[d], args=["--queue-timeout", "500ms"]) as r:
        c = http.client.HTTPConnection("127.0.0.1", r.port, timeout=10)
        c.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": PROMPTS, "stream": True}))
        c.getresponse().read(1)
        c.close()
        d.wait_for(lambda: len(d.cancels) >= 3)
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)
        got = []
        t = threading.Thread(target=lambda: got.append(post(r, "/v1/completions", model=MODEL, prompt=PROMPTS)))
        t.start()
        d.wait_for(lambda: len(d.messages("generate")) == 6)
        d.kill()
        t.join()
        assert got[0][0] in (502, 503)


def test_best_of(paper):
    r, d, _ = paper

    def decode(w, session, g):
        """Choice c says its number; choice 2 is likeliest for each token, then 0, 3, 1."""
        session.send(reserved=pb.Reserved(id=g.id))
        for c, logprob in zip(range(g.n), (-1.0, -3.0, -0.5, -2.0)):
            out = ids(" answer" * (c + 1)) + [199999]
            assert g.sampling.logprobs
            session.send(tokens=pb.Tokens(id=g.id, choice=c, ids=out, logprobs=[logprob] * len(out)))
            session.send(finished=pb.Finished(id=g.id, choice=c, n_tokens=len(out), reason=pb.FINISH_STOP))
        return True

    d.on_generate = decode
    got = complete(r, prompt="x", best_of=4, n=2)
    assert [(c["index"], c["text"]) for c in got["choices"]] == [(0, " answer" * 3), (1, " answer")]
    assert got["usage"]["completion_tokens"] == 2 + 3 + 4 + 5, "all that was sampled counts"
    assert got["choices"][0]["logprobs"] is None
    got = complete(r, prompt=["x", "y"], best_of=4)
    assert [c["text"] for c in got["choices"]] == [" answer" * 3] * 2
    status, whole = post(r, "/v1/chat/completions", model=MODEL, n=1, best_of=4,
                         messages=[{"role": "user", "content": "x"}])
    assert status == 200 and len(whole["choices"]) == 1
    assert [m.n for m in d.messages("generate")] == [4, 4, 4, 4]


def test_tokenize(paper):
    r, d, _ = paper
    status, got = post(r, "/tokenize", model=MODEL, prompt="Grüße 💖<|end|>", return_token_strs=True)
    assert status == 200 and got["tokens"] == harmony.encode("Grüße 💖<|end|>", disallowed_special=())
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"]) and got["max_model_len"] == 4096
    assert got["token_strs"][0] == "Gr"
    status, got = post(r, "/tokenize", prompt="")
    assert (status, got) == (200, {"count": 0, "max_model_len": 4096, "tokens": [], "token_strs": None})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    for more in ({}, {"tools": TOOLS, "reasoning_effort": "low"}):
        status, got = post(r, "/tokenize", model=MODEL, messages=messages, **more)
        assert r.chat(messages=messages, **more)[0] == 200
        assert got["tokens"] == list(d.messages("generate")[-1].prompt)
    text = harmony.decode(got["tokens"])
    status, back = post(r, "/detokenize", model=MODEL, tokens=got["tokens"])
    assert status == 200 and back["prompt"] == text and text.startswith("<|start|>system<|message|>You are")
    assert post(r, "/detokenize", tokens=[]) == (200, {"prompt": ""})
    assert post(r, "/detokenize", tokens=[31446, 0])[1]["prompt"] == "\ufffd!"


@pytest.mark.parametrize("path, fields, param", [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"), ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
    ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
    ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "x"}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [201088]}, "tokens"), ("/detokenize", {"tokens": [True]}, "tokens"),
])
def test_bad_tokens(paper, path, fields, param):
    status, got = post(paper[0], path, **fields)
    assert status == 400 and got["error"]["param"] == param


def test_tokenize_knows_its_models(paper):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        status, got = post(paper[0], path, model="other", **body)
        assert status == 404 and got["error"]["code"] == "model_not_found"
    assert paper[0].chat()[2]["choices"][0]["message"]["content"] == "Hello there!"
