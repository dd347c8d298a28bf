"""The engine service that gateways speak (vllm.grpc.engine.VllmEngine), served by the router."""

import hashlib
import io
import json
import pathlib
import sys
import threading
import time
import zipfile

import grpc
import pytest

import fake_worker
from fake_worker import CALL, RETURN, pb
from router_test import BUILD, MODEL, ROOT, Router
from test_router import HELLO, LONG, ids, says

sys.path.insert(0, str(ROOT / "tools"))


def modules():
    fake_worker._generate("smg_common")
    return fake_worker._generate("vllm_engine")


class Engine:
    """A client of one router; requests are made of the fields that a test cares for."""

    def __init__(self, r, metadata=()):
        self.pb, stubs = modules()
        self.channel = grpc.insecure_channel(f"unix:{r.grpc_path}")
        self.stub = stubs.VllmEngineStub(self.channel)
        self.metadata = metadata

    def request(self, prompt=(1, 2, 3), stream=True, request_id="r1", sampling=None, **fields):
        prompt = {"text": prompt} if isinstance(prompt, str) else \
            {"tokenized": self.pb.TokenizedInput(original_text="[harmony]", input_ids=prompt)}
        return self.pb.GenerateRequest(request_id=request_id, stream=stream, **prompt, **fields,
                                       sampling_params=self.pb.SamplingParams(**(sampling or {})))

    def generate(self, *args, **kw):
        return list(self.stub.Generate(self.request(*args, **kw)))

    def code(self, *args, **kw):
        with pytest.raises(grpc.RpcError) as e:
            self.generate(*args, **kw)
        assert e.value.details()
        return e.value.code()


def test_seeds_by_any_api(workers):
    """Any 64 bits are a seed, and the same ones whichever API they come by."""
    d = workers("decode", script=says(HELLO))
    chat_pb, chat_stubs = fake_worker._generate("damask_frontend")
    with Router(decode=[d]) as r:
        e = Engine(r)
        chat = chat_stubs.FrontendStub(e.channel).Chat
        user = chat_pb.ChatMessage(role=chat_pb.CHAT_ROLE_USER, content="Hi")
        bodies = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]}, "/v1/completions": {"prompt": "Hi"},
                  "/v1/responses": {"input": "Hi"}}
        for seed in (-1, -2**31, -2**63, 2**63 - 1, 0):
            before = len(d.messages("generate"))
            for path, body in bodies.items():
                status, _, data = r.request("POST", path, {"model": MODEL, "seed": seed, **body})
                assert status == 200, data
            list(chat(chat_pb.ChatRequest(model=MODEL, messages=[user], seed=seed % 2**64)))
            if -2**31 <= seed < 2**31:
                e.generate(sampling=dict(seed=seed))
            got = d.messages("generate")[before:]
            assert {g.sampling.seed for g in got} == {seed % 2**64} and len(got) >= 4


def test_tokens_in_tokens_out(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d]) as r:
        e = Engine(r)
        got = e.generate(list(range(100, 180)))
        assert [m.WhichOneof("response") for m in got[:-1]] == ["chunk"] * (len(got) - 1)
        assert sum((list(m.chunk.token_ids) for m in got[:-1]), []) == ids(HELLO)
        assert [m.chunk.completion_tokens for m in got[:-1]][-1] == len(ids(HELLO))
        done = got[-1].complete
        assert (list(done.output_ids), done.finish_reason, done.prompt_tokens, done.completion_tokens,
                done.matched_token_id) == ([], "stop", 80, len(ids(HELLO)), RETURN)
        whole, = e.generate(list(range(100, 180)), stream=False)
        assert list(whole.complete.output_ids) == ids(HELLO)
        g = d.messages("generate")[0]
        assert list(g.prompt) == list(range(100, 180)) and RETURN in g.stop_ids and CALL in g.stop_ids
        assert g.request_id == "r1"
        # Control ids pass: the gateway has rendered the prompt. Text is ordinary text.
        e.generate([200006, 1428, 200008])
        e.generate("<|start|>user")
        assert [list(m.prompt) for m in d.messages("generate")[-2:]] == \
            [[200006, 1428, 200008], [27, 91, 5236, 91, 29, 1428]]


def test_sampling_is_carried_and_zeros_mean_defaults(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d]) as r:
        e = Engine(r)
        e.generate()
        s = d.messages("generate")[-1].sampling
        assert (s.temperature, s.top_p, s.top_k, s.repetition_penalty, s.logprobs) == (1, 1, 0, 1, False)
        e.generate(sampling=dict(temperature=0.0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5,
                                 presence_penalty=-0.5, repetition_penalty=1.5, max_tokens=9, min_tokens=2,
                                 stop_token_ids=[5, 200012], ignore_eos=True, n=2, seed=42, logprobs=3,
                                 logit_bias={7: -1.5}))
        g = d.messages("generate")[-1]
        s = g.sampling
        assert (s.temperature, s.top_p, s.top_k, s.min_p, s.frequency_penalty, s.presence_penalty, s.repetition_penalty,
                s.seed, s.logprobs, s.top_logprobs) == (0, 0.5, 7, 0.25, 0.5, -0.5, 1.5, 42, True, 3)
        assert (g.max_tokens, g.min_tokens, g.ignore_eos, g.n) == (9, 2, True, 2)
        assert set(g.stop_ids) >= {5, 200012} and list(s.bias_ids) == [7] and list(s.bias_values) == [-1.5]


def test_logprobs_of_answer_and_prompt(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d]) as r:
        e = Engine(r)
        for stream in (True, False):
            got = e.generate([11, 12, 13, 14], stream=stream, sampling=dict(logprobs=2, prompt_logprobs=1))
            parts = [m.chunk for m in got[:-1]] if stream else [got[-1].complete]
            out = [p.output_logprobs for p in parts]
            assert sum((list(o.token_ids) for o in out), []) == ids(HELLO)
            assert set(sum((list(o.token_logprobs) for o in out), [])) == {-0.5}
            tops = sum((list(o.top_logprobs) for o in out), [])
            assert [list(t.token_ids) for t in tops] == [[i, 0] for i in ids(HELLO)]
            assert list(tops[0].values) == [-0.5, -3.0]
            prompt = parts[0].input_logprobs
            assert list(prompt.token_ids) == [11, 12, 13, 14]
            assert [v.WhichOneof("opt_value") for v in prompt.token_logprobs] == [None] + ["value"] * 3
            assert {v.value for v in prompt.token_logprobs[1:]} == {-1.0}
            assert all(not p.HasField("input_logprobs") for p in parts[1:])


def test_choices_stops_and_lengths(workers):
    d = workers("decode", script=lambda g, c: ids(HELLO) if c else [24912] * 50)
    with Router(decode=[d]) as r:
        e = Engine(r)
        done = {m.complete.index: m.complete for m in e.generate(sampling=dict(n=2, max_tokens=20)) if m.HasField("complete")}
        assert done[0].finish_reason == "length" and done[0].WhichOneof("matched_stop") is None
        assert done[0].completion_tokens == 20 and done[1].finish_reason == "stop"
        # A stop string may end within a token and span several; the token that ends it is still told.
        d.script = says("<|channel|>final<|message|>La la song la la<|return|>")
        whole, = e.generate(stream=False, sampling=dict(stop=["nothing", "a so"]))
        assert whole.complete.matched_stop_str == "a so" and whole.complete.finish_reason == "stop"
        assert list(whole.complete.output_ids) == ids("<|channel|>final<|message|>La la song")
        d.wait_for(lambda: d.cancels)


def test_what_is_refused(workers):
    d = workers("decode", script=says(HELLO))
    bad = grpc.StatusCode.INVALID_ARGUMENT
    with Router(decode=[d]) as r:
        e = Engine(r)
        p = e.pb
        for kw in (dict(prompt=[]), dict(prompt=[201088]), dict(prompt=list(range(5000))),
                   dict(sampling=dict(temperature=-1.0)), dict(sampling=dict(top_p=1.5)), dict(sampling=dict(n=129)),
                   dict(sampling=dict(logprobs=21)), dict(sampling=dict(max_tokens=0)), dict(sampling=dict(max_tokens=5000)),
                   dict(sampling=dict(logit_bias={201088: 1.0})), dict(sampling=dict(logit_bias={-1: 1.0})),
                   dict(sampling=dict(stop=[""])), dict(sampling=dict(stop=["a"] * 5)),
                   dict(sampling=dict(stop_token_ids=[201088])), dict(sampling=dict(grammar="root ::= x")), dict(sampling=dict(grammar="root ::= \"a\0\"")),
                   dict(sampling=dict(truncate_prompt_tokens=5)), dict(mm_inputs=p.MultimodalInputs()),
                   dict(media_refs=p.MediaRefs()), dict(request_id="x" * 129), dict(request_id="a\nb"),
                   dict(kv_transfer_params=p.KvTransferParams(remote_host="169.254.169.254", remote_port=80)),
                   dict(kv_transfer_params_json='{"remote_host":"169.254.169.254"}')):
            assert e.code(**kw) == bad, kw
        with pytest.raises(grpc.RpcError) as raised:
            list(e.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff"))
        assert raised.value.code() == bad
        assert not d.messages("generate")
        for name, request in (("Embed", p.EmbedRequest()), ("FlushCache", None), ("StartProfile", None),
                              ("StopProfile", None)):
            with pytest.raises(grpc.RpcError) as raised:
                e.channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{name}")(b"")
            assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED and len(raised.value.details()) > 20
        with pytest.raises(grpc.RpcError) as raised:
            list(e.channel.unary_stream("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents")(b""))
        assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_info_and_loads(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d]) as r:
        e = Engine(r)
        health = e.stub.HealthCheck(e.pb.HealthCheckRequest())
        assert health.healthy and health.message == "ok"
        info = e.stub.GetModelInfo(e.pb.GetModelInfoRequest())
        assert (info.served_model_name, info.model_type, list(info.architectures), info.max_context_length, info.vocab_size,
                info.is_generation) == (MODEL, "gpt_oss", ["GptOssForCausalLM"], 4096, 201088, True)
        assert set(info.eos_token_ids) == {200002, 199999, 200012} and not pathlib.Path(info.model_path).exists()
        server = e.stub.GetServerInfo(e.pb.GetServerInfoRequest())
        assert server.server_type == "vllm-grpc" and server.active_requests == 0 and not server.is_paused
        d.sessions[0].send(load=pb.Load(n_running=3, n_waiting=2, full_pages_free=600, full_pages_total=1000))
        def load():
            found = e.stub.GetLoads(e.pb.GetLoadsRequest()).loads
            return found[0] if found and found[0].num_running_reqs else None
        load = d.wait_for(load)
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens, load.max_total_num_tokens) == (
            3, 2, 400 * 64, 64000) and abs(load.token_usage - 0.4) < 1e-9


def test_tokenizer_archive(workers):
    """The archive is whole, and its tokenizer.json is one that damask itself takes: the same vocabulary."""
    import subprocess
    import tempfile
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d]) as r:
        e = Engine(r)
        got = []
        fetch = lambda: got.append(list(e.stub.GetTokenizer(e.pb.GetTokenizerRequest() if hasattr(e.pb, "GetTokenizerRequest")
                                                            else fake_worker._generate("smg_common")[0].GetTokenizerRequest())))
        threads = [threading.Thread(target=fetch) for _ in range(3)]  # two of them wait for the first one's
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(got) == 3 and got[0] == got[1] == got[2]
        chunks = got[0]
        data = b"".join(c.data for c in chunks)
        assert all(len(c.data) == 65536 for c in chunks[:-1]) and not any(c.sha256 for c in chunks[:-1])
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        archive = zipfile.ZipFile(io.BytesIO(data))
        assert archive.testzip() is None
        assert set(archive.namelist()) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
        assert json.loads(archive.read("config.json"))["model_type"] == "gpt_oss"
        assert json.loads(archive.read("tokenizer_config.json"))["eos_token"] == "<|return|>"
        with tempfile.TemporaryDirectory() as folder:
            archive.extract("tokenizer.json", folder)
            out = subprocess.run([str(BUILD / "tools" / "damask"), "tokenize", "--vocab", f"{folder}/tokenizer.json"],
                                 input="Hello there, camelCase 12345678", capture_output=True, text=True, timeout=60)
            assert out.returncode == 0, out.stderr


def test_abort_and_leaving(workers):
    d = workers("decode", script=says(LONG), token_delay_s=0.01)
    with Router(decode=[d]) as r:
        e = Engine(r)
        calls = [e.stub.Generate(e.request(request_id=name)) for name in ("a", "b", "b")]
        for c in calls:
            next(c)
        e.stub.Abort(e.pb.AbortRequest(request_ids=["b", "not-there"]))
        for c in calls[1:]:
            with pytest.raises(grpc.RpcError) as raised:
                list(c)
            assert raised.value.code() == grpc.StatusCode.CANCELLED and "abort" in raised.value.details()
        d.wait_for(lambda: len(d.cancels) == 2)
        next(calls[0])  # the other one goes on
        calls[0].cancel()
        d.wait_for(lambda: len(d.cancels) == 3)
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0)


def test_clients_that_close_the_channel(workers):
    """A hundred streams whose channel goes after five messages: all are cancelled at the worker, none is left."""
    d = workers("decode", script=says(LONG), token_delay_s=0.005)
    with Router(decode=[d]) as r:
        def one():
            for _ in range(10):
                e = Engine(r)
                call = e.stub.Generate(e.request(sampling=dict(max_tokens=500)))
                for _ in range(5):
                    next(call)
                e.channel.close()
        threads = [threading.Thread(target=one) for _ in range(10)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        d.wait_for(lambda: len(d.cancels) == 100, 10)
        d.wait_for(lambda: r.metric("damask_router_open_requests") == 0 and r.metric("damask_router_tokens_in_flight") == 0, 1)
        assert r.metric("damask_router_client_gone_total") == 100
        assert Engine(r).generate(sampling=dict(max_tokens=3))


def test_constraints_reach_the_worker(workers):
    d = workers("decode", script=says(HELLO), grammar=1)
    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})
    with Router(decode=[d]) as r:
        e = Engine(r)
        seen = set()
        for sampling in (dict(json_object=True), dict(json_schema='{"type":"integer"}'), dict(regex="a+"),
                         dict(json_schema='{"type":"integer"}', grammar_from_first_token=True),
                         dict(choice=e.pb.ChoiceConstraint(choices=["yes", "no"])), dict(structural_tag=tag),
                         dict(grammar='root ::= "a" | "b" root'), dict(grammar='root ::= "a"', grammar_from_first_token=True)):
            e.generate(sampling=sampling)
            constraint = bytes(d.messages("generate")[-1].constraint)
            assert constraint and constraint not in seen
            seen.add(constraint)
        e.generate()
        assert not d.messages("generate")[-1].constraint
        for sampling in (dict(json_schema="{"), dict(json_schema='{"type":"integer","multipleOf":7,"unevaluatedItems":[]}'), dict(regex="(a"),
                         dict(structural_tag='{"format":{"type":"nothing"}}'), dict(choice=e.pb.ChoiceConstraint())):
            assert e.code(sampling=sampling) == grpc.StatusCode.INVALID_ARGUMENT, sampling
