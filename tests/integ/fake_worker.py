"""Workers made of paper: they speak the real protocol and answer from a script.

For tests of the router. A FakeWorker serves damask.v1.Worker on a free port. What a decode
worker "samples" comes from `script(generate, choice)`, a list of token ids; prefill workers hand over to
decode workers through a table in this process. Each can be told to refuse, to hang, to die, to delay, to
send events of older attempts. What came in is kept in `seen`.
"""

import concurrent.futures
import importlib
import pathlib
import queue
import sys
import tempfile
import threading
import time

import grpc
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from cluster import free_port  # noqa: E402

_generated = tempfile.TemporaryDirectory(prefix="damask-proto-")


def _generate(name):
    rc = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={_generated.name}",
                      f"--grpc_python_out={_generated.name}", f"{name}.proto"])
    assert rc == 0, f"protoc failed on {name}.proto"
    if _generated.name not in sys.path:
        sys.path.insert(0, _generated.name)
    return importlib.import_module(f"{name}_pb2"), importlib.import_module(f"{name}_pb2_grpc")


pb, pb_grpc = _generate("damask_worker")

RETURN, CALL, END, START, CHANNEL, MESSAGE = 200002, 200012, 200007, 200006, 200005, 200008

# ticket -> (decode worker, session, key of the request)
_tickets = {}
_tickets_lock = threading.Lock()
_next_port_lock = threading.Lock()
_incarnations = iter(range(int(time.time() * 1000), 1 << 62))


def key_of(request_id):
    return (request_id.hi, request_id.lo, request_id.attempt)


class Session:
    """One router's stream."""

    def __init__(self, worker):
        self.worker = worker
        self.out = queue.Queue()
        self.cancelled = set()
        self.router_id = None

    def send(self, **event):
        self.send_all([pb.WorkerEvent(**event)])

    def send_all(self, events, incarnation=None):
        self.out.put(pb.WorkerMessage(incarnation=incarnation or self.worker.incarnation, events=events))

    def end(self):
        self.out.put(None)


class FakeWorker(pb_grpc.WorkerServicer):
    def __init__(self, role, *, script=None, model_id=(1, 2), model_name="fake", numerics="paper", prompt_numerics="",
                 context=4096, port=0, token_delay_s=0.0, prefill_delay_s=0.0, threshold=0, version=1,
                 claim_role=None, name=None, grammar=0):
        self.role, self.script = role, script or (lambda generate, choice: [RETURN])
        self.model_id, self.model_name = model_id, model_name
        self.numerics, self.prompt_numerics = numerics, prompt_numerics
        self.context, self.threshold, self.version = context, threshold, version
        self.claim_role = claim_role or role
        self.grammar = grammar  # version of constraints that it takes; it says what its script says all the same
        self.token_delay_s, self.prefill_delay_s = token_delay_s, prefill_delay_s
        self.name = name or f"{role}-{id(self) & 0xffff:x}"
        self.incarnation = next(_incarnations)
        self.seen = []          # every RouterMessage
        self.sessions = []
        self.cancels = []       # keys
        self.on_generate = None  # (worker, session, generate) -> True when it handled the message
        self.on_prefill = None
        self.silent_end = False  # a prefill worker that does not say when it is done
        self.lock = threading.Lock()
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=64)
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=32),
                                  options=[("grpc.so_reuseport", 0),
                                           ("grpc.max_receive_message_length", 64 << 20)])
        pb_grpc.add_WorkerServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port or free_port()}")
        assert self.port, f"port {port} is taken"
        self.server.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def kill(self):
        """As if the process died: every stream breaks."""
        self.server.stop(0).wait()
        for s in self.sessions:
            s.end()

    def messages(self, kind):
        with self.lock:
            return [getattr(m, kind) for m in self.seen if m.WhichOneof("body") == kind]

    def wait_for(self, what, limit_s=30):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            value = what()
            if value:
                return value
            time.sleep(0.01)
        raise AssertionError(f"{self.name}: it did not come within {limit_s} s")

    # ------------------------------------------------------------ the protocol

    def hello(self):
        role = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}[self.claim_role]
        return pb.WorkerHello(version=self.version, role=role, worker_id=self.name,
                              model_name=self.model_name, model_id_hi=self.model_id[0],
                              model_id_lo=self.model_id[1], numerics=self.numerics,
                              prompt_numerics=self.prompt_numerics, tp=1, dp=1,
                              page_tokens=64, n_full_pages=1000, n_window_pages=100,
                              max_sequences=32, max_context=self.context,
                              local_prefill_threshold=self.threshold, eos_ids=[RETURN, CALL],
                              grammar_version=self.grammar)

    def Connect(self, requests, context):
        session = Session(self)
        self.sessions.append(session)

        def read():
            try:
                for m in requests:
                    with self.lock:
                        self.seen.append(m)
                    self._take(session, m)
            except grpc.RpcError:
                pass
            session.end()

        first = next(requests)
        assert first.WhichOneof("body") == "hello"
        session.router_id = first.hello.router_id
        with self.lock:
            self.seen.append(first)
        session.send(hello=self.hello())
        threading.Thread(target=read, daemon=True).start()
        while True:
            m = session.out.get()
            if m is None:
                return
            yield m

    def _take(self, session, m):
        kind = m.WhichOneof("body")
        assert m.worker_incarnation == self.incarnation, "a message for another incarnation"
        if kind == "generate":
            if not (self.on_generate and self.on_generate(self, session, m.generate)):
                self.pool.submit(self.generate, session, m.generate)
        elif kind == "prefill":
            if not (self.on_prefill and self.on_prefill(self, session, m.prefill)):
                self.pool.submit(self.prefill, session, m.prefill)
        elif kind == "cancel":
            session.cancelled.add(key_of(m.cancel.id))
            self.cancels.append(key_of(m.cancel.id))

    # ------------------------------------------------------------ decode

    def generate(self, session, g, have=0):
        if g.force_local or g.echo_logprobs or len(g.prompt) - have <= self.threshold:
            session.send(reserved=pb.Reserved(id=g.id, needs_prefill=False, have=have))
            self.decode(session, g, have)
            return
        ticket = f"{self.name}/{key_of(g.id)}".encode()
        with _tickets_lock:
            _tickets[ticket] = (self, session, g, have)
        session.send(reserved=pb.Reserved(id=g.id, needs_prefill=True, ticket=ticket, have=have))

    def decode(self, session, g, have=0, transferred=0):
        scripts = [self.script(g, c)[:g.max_tokens] for c in range(max(g.n, 1))]
        if g.echo_logprobs:
            for i in range(1, len(g.prompt)):  # in pieces, as they are computed
                session.send(prompt_logprobs=pb.PromptLogprobs(
                    id=g.id, logprobs=[-1.0],
                    top=[pb.TopLogprobs(entries=[pb.TopLogprob(token=g.prompt[i], logprob=-1.0)])]))
        for step in range(max(len(s) for s in scripts)):
            if key_of(g.id) in session.cancelled:
                return
            if self.token_delay_s:
                time.sleep(self.token_delay_s)
            events = []
            for c, ids in enumerate(scripts):
                if step >= len(ids):
                    continue
                top = [pb.TopLogprobs(entries=[pb.TopLogprob(token=ids[step], logprob=-0.5),
                                               pb.TopLogprob(token=0, logprob=-3.0)]
                                      [:g.sampling.top_logprobs])]
                events.append(pb.WorkerEvent(tokens=pb.Tokens(
                    id=g.id, choice=c, first_index=step, ids=[ids[step]],
                    logprobs=[-0.5] if g.sampling.logprobs else [],
                    top=top if g.sampling.logprobs else [])))
                if step == len(ids) - 1:
                    stopped = ids[step] in g.stop_ids
                    events.append(pb.WorkerEvent(finished=pb.Finished(
                        id=g.id, choice=c, n_tokens=len(ids), n_cached=have,
                        reason=pb.FINISH_STOP if stopped else pb.FINISH_LENGTH,
                        transfer_bytes=transferred, transfer_us=100 if transferred else 0)))
            session.send_all(events)

    # ------------------------------------------------------------ prefill

    def prefill(self, session, p):
        if self.prefill_delay_s:
            time.sleep(self.prefill_delay_s)
        if key_of(p.id) in session.cancelled:
            return
        with _tickets_lock:
            entry = _tickets.pop(p.ticket, None)
        if entry is None:
            session.send(failed=pb.Failed(id=p.id, code=pb.FAILURE_REFUSED, text="no such ticket"))
            return
        d, d_session, g, have = entry
        n = len(p.prompt) - 1 - have
        n_bytes = n * 49152
        if not self.silent_end:
            session.send(prefill_done=pb.PrefillDone(id=p.id, n_computed=n, compute_us=1000 + n,
                                                     queue_us=5, transfer_us=100, transfer_bytes=n_bytes))
        d_session.send(transferred=pb.Transferred(id=g.id, bytes=n_bytes, us=100))
        d.pool.submit(d.decode, d_session, g, have, n_bytes)
