"""Many clients at a cluster, some of them ill-behaved, while workers die and come back.

Every client streams completions of random length; some leave early, some stop reading. Whatever finishes must
be the answer of one colocated worker alone (the reference, another cluster), whatever does not must end with an
error that says why, and nothing may hang. Crowd.run gives a Report; its `violations` must be empty.
"""

import asyncio
import collections
import dataclasses
import json
import os
import random
import signal
import socket
import sys
import time

from cluster import get, write_model

FAMILIES = 4  # prompts are beginnings of so many texts at a time, so that prefixes are shared
MAX_PROMPT = 6000
MAX_ANSWER = 24
SERVICE_S = 0.5  # until a service sends nothing more to a router that ends
GRACE_S = 5  # a fault may strike what began shortly after it: connections die a moment later


def speck_model(build):
    """A checkpoint of 2 small layers, written once: real kernels and pages at little cost."""
    return write_model(build, "speck", "tinymodel", "--layers", "2", "--hidden", "64", "--intermediate", "64",
                       "--experts", "8", "--heads", "8")


@dataclasses.dataclass
class Result:
    """How one request ended: answer, error, left, refused, broken or hang."""
    kind: str
    text: str = ""
    error: str = ""


class Ended(Exception):
    """The connection ended where more was due."""


async def read_head(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in head[1:] if line)}
    return int(head[0].split()[1]), headers


async def read_chunks(reader):
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:-2]


async def read_events(reader, headers):
    """The data lines of a stream of server-sent events."""
    if headers.get("transfer-encoding") != "chunked":
        raise Ended("the stream is not chunked")
    rest = b""
    async for data in read_chunks(reader):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].decode()


async def read_answer(reader, leave_after, stall):
    """The rest of a request, from the response's head on. stall: (events, seconds)."""
    status, headers = await read_head(reader)
    if status != 200:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        error = json.loads(body)["error"]
        if not error.get("message"):
            raise Ended(f"status {status} without a sentence")
        return Result("error", error=f"{status}: {error['message']}")
    text, finish, error, n = [], None, None, 0
    async for data in read_events(reader, headers):
        if data == "[DONE]":
            if error:
                return Result("error", "".join(text), error)
            if finish:
                return Result("answer", "".join(text))
            raise Ended("[DONE] came before a finish_reason")
        event = json.loads(data)
        if "error" in event:
            error = event["error"]["message"]
            continue
        for choice in event["choices"]:
            text.append(choice["text"])
            finish = choice["finish_reason"] or finish
        n += 1
        if n == leave_after:
            return Result("left")
        if stall and n == stall[0]:
            await asyncio.sleep(stall[1])
    raise Ended("the stream ended without [DONE]")


async def ask(url, body, *, name="reference", leave_after=0, leave_s=0, stall=None, limit_s=240):
    """One streamed completion. leave_after: events; leave_s: seconds; then the client goes away."""
    host, port = url.split("//", 1)[1].split(":")
    sock = socket.socket()
    sock.setblocking(False)
    if stall:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer, at = None, "connecting"

    async def converse():
        nonlocal writer, at
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096 if stall else 1 << 16)
        at = "waiting for its answer"
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                     b"content-type: application/json\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n"
                     % (name.encode(), len(data)) + data)
        return await read_answer(reader, leave_after, stall)

    try:
        return await asyncio.wait_for(converse(), leave_s or limit_s)
    except asyncio.TimeoutError:
        return Result("left") if leave_s else Result("hang", error=f"no end within {limit_s} s, while it was {at}")
    except ConnectionRefusedError as e:
        return Result("refused", error=str(e))
    except (OSError, Ended, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as e:
        return Result("broken", error=f"{type(e).__name__}: {e}")
    finally:
        if writer:
            writer.transport.abort()  # closes the socket too
        else:
            sock.close()


class Prompts:
    """Requests whose answers can be compared: a key says all of a request."""

    def __init__(self, model_name, seed, max_prompt=MAX_PROMPT, max_answer=MAX_ANSWER):
        self.model_name, self.rng = model_name, random.Random(seed)
        self.max_prompt, self.max_answer = max_prompt, max_answer
        self.families = [self.rng.getrandbits(32) for _ in range(FAMILIES)]

    def draw(self):
        if self.rng.random() < 0.01:  # the oldest text makes place for a new one
            self.families = self.families[1:] + [self.rng.getrandbits(32)]
        return (self.rng.choice(self.families), self.rng.randint(1, self.max_prompt),
                self.rng.randint(1, self.max_answer), self.rng.random() < 0.5)

    def body(self, key):
        family, n, n_new, greedy = key
        rng = random.Random(family)
        sampling = {"temperature": 0} if greedy else {"temperature": 1, "top_p": 0.95, "seed": n}
        return {"model": self.model_name, "prompt": [rng.randrange(199998) for _ in range(n)], "stream": True,
                "max_tokens": n_new, "ignore_eos": True, **sampling}


class Reference:
    """What one worker alone answers; asked once for each key, one after the other."""

    def __init__(self, cluster, prompts):
        self.url, self.prompts = cluster.url, prompts
        self.texts, self.wanted = {}, collections.deque()

    def want(self, key):
        if key not in self.texts:
            self.texts[key] = None
            self.wanted.append(key)

    async def run(self, keep_on):
        """Until keep_on() is false and all that was wanted is there."""
        while self.wanted or keep_on():
            if not self.wanted:
                await asyncio.sleep(0.1)
                continue
            key = self.wanted.popleft()
            r = await ask(self.url, self.prompts.body(key))
            if r.kind != "answer":
                raise RuntimeError(f"the reference gave no answer: {r}")
            self.texts[key] = r.text


@dataclasses.dataclass
class Report:
    counts: collections.Counter
    violations: list
    errors: collections.Counter
    faults: list  # (seconds, text)
    samples: list  # of Crowd.sample
    n_compared: int = 0


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_kib(pid):
    """ProcessLookupError for one that has ended and whose status nobody has asked for yet: it has no memory any more."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmRSS"):
                return int(line.split()[1])
    raise ProcessLookupError(pid, "has ended")


class Crowd:
    def __init__(self, cluster, alone, *, seconds, seed, clients=64, faults=(), sample_every_s=2.0,
                 max_prompt=MAX_PROMPT, ill_behaved=True, limit_s=240):
        """faults: (seconds from the start, "kill" or "start" or "term", process)."""
        self.cluster, self.seconds, self.clients, self.ill_behaved = cluster, seconds, clients, ill_behaved
        self.limit_s = limit_s
        self.rng = random.Random(seed)
        self.prompts = Prompts(cluster.model_name, seed, max_prompt)
        self.reference = Reference(alone, self.prompts)
        self.plan = sorted(faults, key=lambda f: f[0])
        self.sample_every_s = sample_every_s
        self.got = collections.defaultdict(dict)  # key: {request id: text}
        self.n_asked = 0
        self.report = Report(collections.Counter(), [], collections.Counter(), [], [])
        self.fault_times, self.down = [], set()

    def now(self):
        return time.monotonic() - self.start

    def on(self):
        return self.now() < self.seconds

    def behave(self):
        x = self.rng.random() if self.ill_behaved else 1.0
        if x < 0.08:
            return {"leave_after": self.rng.randint(1, 10)}
        if x < 0.16:
            return {"leave_s": self.rng.uniform(0.01, 5.0)}
        if x < 0.26:
            return {"stall": (self.rng.randint(1, 5), self.rng.uniform(1.0, 5.0)),
                    "leave_after": self.rng.choice([0, 6])}
        return {}

    def struck(self, begin, end):
        return any(begin - GRACE_S <= t <= end for t in self.fault_times)

    async def ask_somewhere(self, name, body, behaviour):
        """As a service in front of the routers does: a refused connection is tried at the next one."""
        up = [r for r in self.cluster.routers if r.name not in self.down] or self.cluster.routers
        routers = self.rng.sample(up, len(up))
        for router in routers:
            result = await ask(router.admin, body, name=name, limit_s=self.limit_s, **behaviour)
            if result.kind != "refused":
                break
        return result

    async def client(self):
        r = self.report
        while self.on():
            key, behaviour, begin = self.prompts.draw(), self.behave(), self.now()
            self.n_asked += 1
            name = f"crowd-{self.n_asked}"
            result = await self.ask_somewhere(name, self.prompts.body(key), behaviour)
            r.counts[result.kind] += 1
            what = f"{name}, prompt {key[1]} {behaviour} from {begin:.1f} s to {self.now():.1f} s"
            if result.kind == "answer":
                self.got[key][name] = result.text
                self.reference.want(key)
            elif result.kind == "error":
                r.errors[result.error] += 1
                if not self.struck(begin, self.now()):
                    r.violations.append(f"{what}: error without a fault: {result.error}")
            elif result.kind != "left":
                r.violations.append(f"{what}: {result.kind}: {result.error}")

    async def strike(self):
        for at, action, process in self.plan:
            await asyncio.sleep(max(0, at - self.now()))
            if action == "start":
                process.start(self.cluster.env)
                await asyncio.to_thread(process.wait_ready, time.monotonic() + 60)
                self.down.discard(process.name)
            else:
                if action == "kill":
                    self.down.add(process.name)
                    self.fault_times.append(self.now())
                process.signal(signal.SIGKILL if action == "kill" else signal.SIGTERM)
                await asyncio.sleep(0 if action == "kill" else SERVICE_S)
                self.down.add(process.name)
                await asyncio.to_thread(process.popen.wait, 120)
            self.report.faults.append((self.now(), f"{action} {process.name}"))

    def sample(self):
        """(seconds, {process: {rss KiB, files, pages}})."""
        found = {}
        for p in self.cluster.processes:
            if not p.alive() or p.name in self.down:
                continue
            try:
                found[p.name] = {"rss": resident_kib(p.pid), "files": open_files(p.pid)}
            except OSError:
                continue
            if p not in self.cluster.routers:
                status, text = get(p.admin + "/state")
                found[p.name]["pools"] = json.loads(text)["pools"] if status == 200 else None
        self.report.samples.append((self.now(), found))

    async def watch(self, done):
        while not done.is_set():
            await asyncio.to_thread(self.sample)
            try:
                await asyncio.wait_for(done.wait(), self.sample_every_s)
            except asyncio.TimeoutError:
                pass

    def check_samples(self):
        for at, found in self.report.samples:
            for name, s in found.items():
                for pool, p in (s.get("pools") or {}).items():
                    if p["free"] + p["cached"] + p["leased"] + p["draining"] != p["total"]:
                        self.report.violations.append(f"{at:.1f} s: {name}: pages of {pool} do not add up: {p}")

    def compare(self):
        for key, texts in self.got.items():
            want = self.reference.texts[key]
            for name, text in texts.items():
                self.report.n_compared += 1
                if text != want:
                    self.report.violations.append(f"{name}, {key}: {text!r} instead of {want!r}")

    async def go(self):
        done = asyncio.Event()
        watcher = asyncio.create_task(self.watch(done))
        clients = [asyncio.create_task(self.client()) for _ in range(self.clients)]
        strikes = asyncio.create_task(self.strike())
        reference = asyncio.create_task(self.reference.run(lambda: not all(c.done() for c in clients)))
        await asyncio.gather(*clients, strikes, reference)
        done.set()
        await watcher
        self.sample()

    async def go_in_time(self):
        """What has no end of its own is told by where it waits."""
        limit_s = 2 * self.seconds + self.limit_s + 60  # the reference may lag by as long as it all took
        task = asyncio.create_task(self.go())
        done, _ = await asyncio.wait({task}, timeout=limit_s)
        if not done:
            for t in asyncio.all_tasks() - {asyncio.current_task()}:
                t.print_stack(file=sys.stdout)
            task.cancel()
            raise RuntimeError(f"the crowd did not end within {limit_s} s")
        await task

    def run(self):
        self.start = time.monotonic()
        asyncio.run(self.go_in_time())
        self.check_samples()
        self.compare()
        return self.report
