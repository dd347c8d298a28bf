"""A local cluster of real processes: prefill and decode workers and routers on this machine.

    tools/cluster.py up --prefill 2 --decode 2     start, wait until ready, print the URLs
    tools/cluster.py down                          stop everything in order
    tools/cluster.py demo                          up, one streamed answer with its timeline, down

`./dev up`, `./dev down` and `./dev demo` call this after building. Tests use the class Cluster.
State lies in BUILD/cluster/NAME: state.json (pids, ports) and one log per process.
"""

import argparse
import collections
import contextlib
import fcntl
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"  # the trained checkpoint in compact form
VOCAB = ROOT / ".deps" / "vocab" / "o200k_base.tiktoken"


class ClusterError(Exception):
    """Something did not start or stop; the text says what and where its log is."""


_claims = collections.deque()  # the ports given last, each held by a name


def free_port():
    """A free port below the range that outgoing connections take theirs from, so that none of those can
    take it before the program that is started with it. No other caller is given it meanwhile, in this process or
    another one of this machine: an abstract socket has its number as name."""
    while True:
        port = random.randrange(10000, 32000)
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0damask-port-{port}")
            with socket.socket() as s:
                s.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        if len(_claims) > 256:  # by now its program listens, or has ended
            _claims.popleft().close()
        return port


def get(url, timeout=2.0):
    """(status, text) of a GET; status 0 when nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as r:
            return r.status, r.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()
    except OSError:
        return 0, ""


class Process:
    """One running program with its log."""

    def __init__(self, name, argv, log, admin=None, devices=None):
        self.name, self.argv, self.log, self.admin = name, [str(a) for a in argv], log, admin
        self.devices = devices  # "1,0": the GPUs that it sees, and in which order; None: all
        self.popen = None

    def start(self, env=None):
        if self.devices is not None:
            env = {**(os.environ if env is None else env), "CUDA_VISIBLE_DEVICES": str(self.devices)}
        with open(self.log, "ab") as out:
            self.popen = subprocess.Popen(
                self.argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                start_new_session=True, env=env)

    @property
    def pid(self):
        return self.popen.pid

    def alive(self):
        return self.popen is not None and self.popen.poll() is None

    def log_tail(self, n=15):
        try:
            return "".join(open(self.log, errors="replace").readlines()[-n:])
        except OSError:
            return ""

    def wait_ready(self, deadline):
        while time.monotonic() < deadline:
            if not self.alive():
                raise ClusterError(f"{self.name} ended with status {self.popen.returncode}; "
                                   f"end of {self.log}:\n{self.log_tail()}")
            if self.admin and get(self.admin + "/readyz")[0] == 200:
                return
            time.sleep(0.05)
        raise ClusterError(f"{self.name} was not ready in time; end of {self.log}:\n{self.log_tail()}")

    def signal(self, signo):
        if self.alive():
            os.kill(self.pid, signo)

    def stop(self, limit_s=15):
        """SIGTERM, then SIGKILL after the limit. Returns the exit status."""
        self.signal(signal.SIGTERM)
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            return self.popen.wait(5)


class Cluster:
    """Prefill and decode workers and routers; a context manager for tests."""

    backend = "cpu"  # of every cluster whose workers have a model; tests change it as a whole
    folder = "cluster"  # below BUILD; test processes that run beside each other have one each

    def __init__(self, build, model, *, prefill=1, decode=1, routers=1, prefill_tp=1, decode_tp=1,
                 decode_dp=1, transport="tcp", model_name="gpt-oss-tiny", http_port=0, grpc_port=0,
                 name="default", threads=0, prefill_args=(), decode_args=(), router_args=(),
                 prefill_devices=None, decode_devices=None, env=None, mock=False, backend=None):
        self.build = pathlib.Path(build).resolve()
        self.dir = self.build / Cluster.folder / name
        self.dir.mkdir(parents=True, exist_ok=True)
        self.model, self.model_name, self.env = pathlib.Path(model), model_name, env
        self.mock = mock  # workers without a model; model is then only a name
        self.backend = backend or Cluster.backend
        self.prefill = [self._worker("prefill", i, prefill_tp, 1, transport, threads, prefill_args, prefill_devices)
                        for i in range(prefill)]
        self.decode = [self._worker("decode", i, decode_tp, decode_dp, transport, threads, decode_args, decode_devices)
                       for i in range(decode)]
        self.routers = [self._router(i, http_port if i == 0 else 0, grpc_port if i == 0 else 0,
                                     router_args) for i in range(routers)]

    def _log(self, name):
        path = self.dir / f"{name}.log"
        path.unlink(missing_ok=True)
        return path

    def _worker(self, role, i, tp, dp, transport, threads, extra, devices):
        name = f"{role}-{i}"
        rpc, admin = free_port(), free_port()
        argv = [self.build / role / f"damask-{role}"]
        if self.mock:
            argv = [self.build / "tools" / "damask", "mock", role]
        argv += ["--worker-id", name, "--model", self.model, "--model-name", self.model_name, "--listen", f"127.0.0.1:{rpc}",
                "--admin-host", "127.0.0.1", "--admin-port", admin, "--tp", tp,
                "--xfer-transport", transport]
        argv += [] if self.mock else ["--backend", self.backend]
        argv += ["--dp", dp] if role == "decode" else []
        argv += ["--threads", threads] if threads else []
        p = Process(name, argv + list(extra), self._log(name), f"http://127.0.0.1:{admin}", devices)
        p.address = f"127.0.0.1:{rpc}"
        return p

    def _router(self, i, http_port, grpc_port, extra):
        name = f"router-{i}"
        http_port, grpc_port = http_port or free_port(), grpc_port or free_port()
        argv = [self.build / "router" / "damask-router", "--http-host", "127.0.0.1",
                "--http-port", http_port, "--grpc-listen", f"127.0.0.1:{grpc_port}",
                "--vocab", VOCAB, "--model-name", self.model_name,
                "--decode", ",".join(p.address for p in self.decode)]
        if self.prefill:
            argv += ["--prefill", ",".join(p.address for p in self.prefill)]
        p = Process(name, argv + list(extra), self._log(name), f"http://127.0.0.1:{http_port}")
        p.grpc = f"127.0.0.1:{grpc_port}"
        return p

    @property
    def processes(self):
        return self.prefill + self.decode + self.routers

    @property
    def url(self):
        return self.routers[0].admin

    @property
    def grpc(self):
        return self.routers[0].grpc

    def start(self, limit_s=60):
        deadline = time.monotonic() + limit_s
        try:
            for p in self.processes:
                p.start(self.env)
            for p in self.processes:
                p.wait_ready(deadline)
            self.wait_connected(deadline)
        except BaseException:
            self.stop(kill=True)
            raise
        return self

    def wait_connected(self, deadline):
        """Until every router sees every worker."""
        want = {"prefill": len(self.prefill), "decode": len(self.decode)}
        for r in self.routers:
            while True:
                status, text = get(r.admin + "/health")
                try:
                    seen = json.loads(text).get("workers", {})
                except ValueError:
                    seen = {}
                if status == 200 and all(seen.get(k, 0) >= n for k, n in want.items()):
                    break
                if time.monotonic() > deadline:
                    raise ClusterError(f"{r.name} sees {seen}, not {want}; end of {r.log}:\n{r.log_tail()}")
                time.sleep(0.05)

    def stop(self, kill=False):
        """Routers first, then workers. Returns {name: exit status} of those that were running."""
        status = {}
        for p in self.routers + self.prefill + self.decode:
            if p.popen is None:
                continue
            if kill:
                p.signal(signal.SIGKILL)
            status[p.name] = p.stop() if p.alive() else p.popen.returncode
        return status

    __enter__ = start

    def __exit__(self, *exc):
        self.stop(kill=exc[0] is not None)

    def save(self):
        state = {"url": self.url, "grpc": self.grpc, "model": str(self.model),
                 "processes": [{"name": p.name, "pid": p.pid, "log": str(p.log), "admin": p.admin}
                               for p in self.processes]}
        (self.dir / "state.json").write_text(json.dumps(state, indent=1))


@contextlib.contextmanager
def only_one(folder):
    """In a folder, which is made; other processes wait here for the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_model(build, name, *argv):
    """BUILD/models/NAME by a subcommand of the tool, made once (again when its source is newer)."""
    path, source = pathlib.Path(build) / "models" / name, TINY / "model.json"
    config = path / "config.json"

    def is_there():
        return config.exists() and config.stat().st_mtime >= source.stat().st_mtime

    if not is_there():
        with only_one(path.parent):
            if not is_there():
                subprocess.run([pathlib.Path(build) / "tools" / "damask", *argv, "--out", path, "--force"],
                               check=True, stdout=subprocess.DEVNULL)
    return path


def tiny_model(build):
    """The default checkpoint: small, trained, in the repository in compact form."""
    return write_model(build, "damask-tiny", "expand", "--from", TINY)


def random_model(build):
    """A checkpoint with random weights, for tests of equality: it never stops and never repeats itself."""
    return write_model(build, "tiny", "tinymodel")


def from_args(args):
    model = args.model or ("mock" if args.mock else tiny_model(args.build))
    return Cluster(args.build, model, mock=args.mock, prefill=args.prefill,
                   decode=args.decode, routers=args.routers, prefill_tp=args.prefill_tp,
                   decode_tp=args.decode_tp, decode_dp=args.decode_ep // args.decode_tp,
                   transport=args.transport, http_port=args.http_port, grpc_port=args.grpc_port,
                   name=args.name, threads=args.threads, model_name=args.model_name, backend=args.backend,
                   prefill_devices=args.prefill_devices, decode_devices=args.decode_devices,
                   decode_args=[] if args.local_prefill_below is None
                   else ["--local-prefill-below", args.local_prefill_below])


def cmd_up(args):
    state = pathlib.Path(args.build) / "cluster" / args.name / "state.json"
    if state.exists() and any(running(p["pid"]) for p in json.loads(state.read_text())["processes"]):
        raise ClusterError(f"cluster '{args.name}' runs already; stop it with: ./dev down --name {args.name}")
    cluster = from_args(args).start(args.limit)
    cluster.save()
    print(f"OpenAI API   {cluster.url}/v1")
    print(f"gRPC         {cluster.grpc}")
    for p in cluster.processes:
        print(f"{p.name:12} {p.admin}/metrics   log {os.path.relpath(p.log)}")
    print(f"try: curl -N {cluster.url}/v1/chat/completions -H 'content-type: application/json' "
          "-d '{\"model\":\"%s\",\"stream\":true,\"max_tokens\":200,\"messages\":"
          "[{\"role\":\"user\",\"content\":\"What is 47 + 35?\"}]}'" % args.model_name)
    print(f"stop: ./dev down --name {args.name}")


def running(pid):
    try:
        os.kill(pid, 0)
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def cmd_down(args):
    state = pathlib.Path(args.build) / "cluster" / args.name / "state.json"
    if not state.exists():
        print(f"no cluster '{args.name}' in {args.build}")
        return
    processes = json.loads(state.read_text())["processes"]
    order = [p for p in processes if p["name"].startswith("router")]
    order += [p for p in processes if p not in order]
    for p in order:
        if running(p["pid"]):
            os.kill(p["pid"], signal.SIGTERM)
    deadline = time.monotonic() + args.limit
    for p in order:
        while running(p["pid"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if running(p["pid"]):
            print(f"{p['name']} did not stop in time and is killed")
            os.kill(p["pid"], signal.SIGKILL)
    state.unlink()
    print(f"cluster '{args.name}' is down")


def stream_chat(url, body, headers=None, on_line=None, timeout=120):
    """POST a chat request and hand each SSE data line (parsed, or '[DONE]') to on_line."""
    host = url.split("//", 1)[1].split("/", 1)[0]
    conn = http.client.HTTPConnection(host, timeout=timeout)
    conn.request("POST", "/v1/chat/completions", json.dumps(body),
                 {"content-type": "application/json", **(headers or {})})
    response = conn.getresponse()
    if response.status != 200:
        raise ClusterError(f"HTTP {response.status}: {response.read().decode()}")
    for raw in response:
        line = raw.decode().rstrip("\n")
        if line:
            on_line(line)
    conn.close()


def cmd_demo(args):
    args.name, args.prefill, args.decode, args.routers = "demo", 1, 1, 1
    args.local_prefill_below = 0  # show the hand-over even for a short prompt
    args.http_port = args.grpc_port = 0
    question = args.prompt
    print("starting one router, one prefill worker and one decode worker on a tiny checkpoint ...")
    with from_args(args) as cluster:
        for p in cluster.processes:
            print(f"  {p.name:10} pid {p.pid}")
        print()
        print(f"user: {question}", end="", flush=True)
        timeline, part = [], [""]

        def on_line(line):
            if line.startswith(":"):
                timeline.append(line[1:].strip())
                return
            if not line.startswith("data: ") or line == "data: [DONE]":
                return
            for choice in json.loads(line[6:]).get("choices", []):
                delta = choice.get("delta", {})
                for name in ("reasoning", "content"):
                    if delta.get(name):
                        print("" if part[0] == name else f"\n{name}: ", delta[name], sep="", end="", flush=True)
                        part[0] = name

        stream_chat(cluster.url, {"model": args.model_name, "stream": True, "max_tokens": 200,
                                  "temperature": 0, "messages": [{"role": "user", "content": question}]},
                    {"x-damask-timeline": "1"}, on_line)
        print("\n\ntimeline of this request:")
        for line in timeline:
            print("  " + line)
        if not timeline:
            raise ClusterError("the router sent no timeline")


def main():
    parser = argparse.ArgumentParser(prog="./dev", description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=["up", "down", "demo"])
    parser.add_argument("--build", default=str(ROOT / "build"), help="build folder")
    parser.add_argument("--name", default="default", help="name of the cluster, for several at a time")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers; 0: decode computes prompts")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--prefill-tp", type=int, default=1, help="tensor-parallel ranks of a prefill worker")
    parser.add_argument("--decode-tp", type=int, default=1, help="tensor-parallel ranks of a decode worker")
    parser.add_argument("--decode-ep", type=int, default=0, help="expert-parallel ranks of a decode worker "
                        "(tp x dp, 8 at most; default: tp; above tp it has data-parallel groups)")
    parser.add_argument("--transport", default="tcp", choices=["tcp", "shm", "cuda"], help="how pages travel (cuda: "
                        "between GPUs of this machine, or within one)")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "ref", "cuda"], help="where the model runs; with cuda "
                        "a worker takes the first GPUs that it sees, one for each rank")
    parser.add_argument("--prefill-devices", metavar="LIST", help="GPUs that prefill workers see, as CUDA_VISIBLE_DEVICES "
                        "names them (default: all)")
    parser.add_argument("--decode-devices", metavar="LIST", help="the same for decode workers")
    parser.add_argument("--model", help="checkpoint folder (default: the trained tiny one)")
    parser.add_argument("--mock", action="store_true", help="workers without a model, at the speed of a small "
                        "GPU (damask mock)")
    parser.add_argument("--model-name", default="gpt-oss-tiny", help="name that clients use")
    parser.add_argument("--http-port", type=int, default=8000, help="of the first router; 0: any free one")
    parser.add_argument("--grpc-port", type=int, default=8001, help="of the first router; 0: any free one")
    parser.add_argument("--threads", type=int, default=0, help="of each worker (default: one a core)")
    parser.add_argument("--local-prefill-below", help="decode workers compute prompts with fewer new tokens "
                        "themselves (default: the program's; max: all)")
    parser.add_argument("--limit", type=float, default=60, help="seconds to wait for start or stop")
    parser.add_argument("--prompt", default="What is 47 + 35?", help="for demo")
    args = parser.parse_args()
    args.decode_ep = args.decode_ep or args.decode_tp
    if args.decode_ep % args.decode_tp:
        parser.error("--decode-ep must be a multiple of --decode-tp (ep = tp x dp)")
    try:
        {"up": cmd_up, "down": cmd_down, "demo": cmd_demo}[args.command](args)
    except ClusterError as e:
        sys.exit(f"dev: {e}")


if __name__ == "__main__":
    main()
