"""A router process for tests, in front of whatever workers the test has made."""

import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

import tiktoken

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
VOCAB = ROOT / ".deps" / "vocab" / "o200k_base.tiktoken"
MODEL = "gpt-oss-test"

os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(ROOT / ".deps" / "vocab"))
harmony = tiktoken.get_encoding("o200k_harmony")


def ids(text):
    return harmony.encode(text, allowed_special="all")


def says(text):
    return lambda generate, choice: ids(text)


HELLO = "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>Hello there!<|return|>"
LONG = "<|channel|>final<|message|>" + " word" * 400 + "<|return|>"
TWO_CALLS = ('<|channel|>commentary to=functions.a json<|message|>{"i":1}<|end|><|start|>assistant'
             '<|channel|>commentary to=functions.b json<|message|>{"i":2}<|call|>')
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in "ab"]


class Router:
    def __init__(self, *, prefill=(), decode=(), args=(), ready=True, grpc=True, key=None):
        self.key = key  # sent with every request that has no Authorization of its own
        self.log = tempfile.NamedTemporaryFile(prefix="damask-router-", suffix=".log", mode="w+")
        argv = [str(BUILD / "router" / "damask-router"), "--http-host", "127.0.0.1", "--http-port", "0",
                "--vocab", str(VOCAB), "--model-name", MODEL, "--date", "2025-06-28",
                "--decode", ",".join(w.address for w in decode)]
        if prefill:
            argv += ["--prefill", ",".join(w.address for w in prefill)]
        if grpc:
            self.grpc_path = tempfile.mktemp(prefix="damask-grpc-", suffix=".sock")
            argv += ["--grpc-listen", f"unix:{self.grpc_path}"]
        self.popen = subprocess.Popen(argv + list(args), stderr=self.log, stdin=subprocess.DEVNULL)
        try:
            line = self.wait_log(r"serves model .* on http://127\.0\.0\.1:(\d+)")
            self.port = int(line.group(1))
            if ready:
                self.wait_ready()
        except BaseException:
            self.popen.kill()
            raise

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def log_text(self):
        return pathlib.Path(self.log.name).read_text()

    def wait_log(self, pattern, limit_s=20):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            m = re.search(pattern, self.log_text())
            if m:
                return m
            assert self.popen.poll() is None, f"the router ended: {self.log_text()}"
            time.sleep(0.01)
        raise AssertionError(f"no line /{pattern}/ in the router's log:\n{self.log_text()}")

    def wait_ready(self, workers=None, limit_s=30):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            status, _, body = self.get("/health")
            if status == 200 and (workers is None or json.loads(body)["workers"] == workers):
                return
            time.sleep(0.01)
        raise AssertionError(f"not ready: {body}\n{self.log_text()}")

    def request(self, method, path, body=None, headers=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        if isinstance(body, dict):
            body = json.dumps(body)
        headers = dict(headers or {})
        if self.key:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        c.request(method, path, body=body, headers=headers)
        r = c.getresponse()
        data = r.read()
        c.close()
        assert r.getheader("x-request-id"), f"{method} {path}: {r.status} without an id"
        return r.status, dict((k.lower(), v) for k, v in r.getheaders()), data

    def get(self, path):
        return self.request("GET", path)

    def chat(self, headers=None, **fields):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        status, got, data = self.request("POST", "/v1/chat/completions", body, headers)
        return status, got, (json.loads(data) if not fields.get("stream") or status != 200 else data.decode())

    def metric(self, name):
        """Sum of a series over its labels; name may hold a label: foo{a="b"}."""
        _, _, text = self.get("/metrics")
        total, found = 0.0, False
        for line in text.decode().splitlines():
            if line.startswith(name) and line[len(name)] in " {,}":
                total += float(line.rsplit(" ", 1)[1])
                found = True
        assert found, f"no metric {name}"
        return total

    def stop(self, sig=signal.SIGTERM):
        if self.popen.poll() is None:
            self.popen.send_signal(sig)
        return self.popen.wait(20)

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        rc = self.stop()
        if kind is None:
            assert rc == 0, f"the router ended with {rc}:\n{self.log_text()}"
        else:
            print(self.log_text())


def events(text):
    """The payloads of a stream of server-sent events, the comments and whether [DONE] was last."""
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    payloads, comments = [], []
    for block in text.split("\n\n"):
        if block.startswith(": "):
            comments.append(block[2:])
        elif block and block != "data: [DONE]":
            assert block.startswith("data: "), block
            payloads.append(json.loads(block[6:]))
    return payloads, comments


def gather(payloads):
    """What the chunks of a stream say, by choice."""
    out = {}
    for chunk in payloads:
        for c in chunk["choices"]:
            o = out.setdefault(c["index"], {"role": 0, "content": "", "reasoning": "", "calls": [], "finish": None,
                                            "lps": []})
            assert o["finish"] is None, "a chunk after its choice had finished"
            delta = c["delta"]
            o["role"] += "role" in delta
            o["content"] += delta.get("content") or ""
            o["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(o["calls"]) and call["type"] == "function"
                    o["calls"].append([call["id"], call["function"]["name"], ""])
                o["calls"][call["index"]][2] += call["function"]["arguments"]
            o["finish"] = c["finish_reason"]
            o["lps"] += (c["logprobs"] or {"content": []})["content"]
    return out
