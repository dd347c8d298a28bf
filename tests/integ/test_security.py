"""Who may call, over what, and how much: keys, TLS, limits, slow clients, text that looks like control tokens.

The router stands in front of workers made of paper, so that what reaches a worker can be seen. Certificates
are made here by openssl and go with the test.
"""

import contextlib
import http.client
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import grpc
import pytest
import tiktoken

import fake_worker
from fake_worker import RETURN, FakeWorker, pb
from router_test import BUILD, MODEL, ROOT, VOCAB, Router, events
from test_router import HELLO, LONG, grpc_chat, grpc_modules, ids, says

harmony = tiktoken.get_encoding("o200k_harmony")
START, MESSAGE, END, CHANNEL = 200006, 200008, 200007, 200005
KEYS = ["first-key", "second-key-0123456789"]


# ---------------------------------------------------------------- certificates


class Certs:
    """A CA and what it has signed, as files of a folder."""

    def __init__(self, folder, name="ca"):
        self.dir, self.name = pathlib.Path(folder), name
        self._run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                  "-keyout", self.path(f"{name}.key"), "-out", self.ca, "-days", "2", "-subj", f"/CN={name}")

    def path(self, name):
        return str(self.dir / name)

    @property
    def ca(self):
        return self.path(f"{self.name}.pem")

    def _run(self, *args):
        subprocess.run(["openssl", *args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def sign(self, name, san):
        """(certificate, key) for the names in san ("DNS:localhost,IP:127.0.0.1")."""
        cert, key = self.path(f"{name}.pem"), self.path(f"{name}.key")
        self._run("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                  "-keyout", key, "-out", self.path("csr"), "-subj", f"/CN={name}")
        pathlib.Path(self.path("ext")).write_text(f"subjectAltName={san}\n")
        self._run("x509", "-req", "-in", self.path("csr"), "-CA", self.ca, "-CAkey", self.path(f"{self.name}.key"),
                  "-CAcreateserial", "-days", "2", "-extfile", self.path("ext"), "-out", cert)
        return cert, key


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    c = Certs(tmp_path_factory.mktemp("certs"))
    c.server = c.sign("server", "DNS:localhost,IP:127.0.0.1")
    c.client = c.sign("client", "DNS:some-client")
    c.router = c.sign("router", "DNS:router.damask")
    c.other = Certs(tmp_path_factory.mktemp("other"), "other")
    c.stranger = c.other.sign("stranger", "DNS:router.damask,IP:127.0.0.1")
    return c


def client_context(ca, cert=None):
    context = ssl.create_default_context(cafile=ca)
    if cert:
        context.load_cert_chain(*cert)
    return context


class SafeRouter(Router):
    """A router that speaks TLS; readiness is asked over it."""

    def __init__(self, certs, *, context=None, args=(), **kw):
        self.context = context or client_context(certs.ca)
        super().__init__(args=["--tls-cert", certs.server[0], "--tls-key", certs.server[1], *args], **kw)

    def wait_log(self, pattern, limit_s=20):
        return super().wait_log(pattern.replace("http://", "https://"), limit_s)

    def request(self, method, path, body=None, headers=None):
        c = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=self.context)
        c.request(method, path, body=json.dumps(body) if isinstance(body, dict) else body, headers=headers or {})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, dict((k.lower(), v) for k, v in r.getheaders()), data


def raw(r):
    return socket.create_connection(("127.0.0.1", r.port), timeout=30)


def read_all(s):
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while data := s.recv(65536):
            got += data
    return got


# ---------------------------------------------------------------- TLS


def test_https_speaks_as_http_does(workers, certs):
    d = workers("decode", script=says(HELLO))
    with SafeRouter(certs, decode=[d]) as r:
        status, _, got = r.chat()
        assert status == 200 and got["choices"][0]["message"]["content"] == "Hello there!"
        assert gathered(r.chat(stream=True)[2]) == "Hello there!"
        # ALPN: HTTP/1.1 where it is offered, no connection for those who offer HTTP/2 alone.
        for offered, chosen in ((["h2", "http/1.1"], "http/1.1"), ([], None)):
            context = client_context(certs.ca)
            if offered:
                context.set_alpn_protocols(offered)
            with context.wrap_socket(raw(r), server_hostname="localhost") as s:
                assert s.selected_alpn_protocol() == chosen and s.version() == "TLSv1.3"
        context = client_context(certs.ca)
        context.set_alpn_protocols(["h2"])
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(raw(r), server_hostname="localhost")
        # Old protocols are refused; a certificate of another CA is not this server's.
        context = client_context(certs.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(raw(r), server_hostname="localhost")
        with pytest.raises(ssl.SSLCertVerificationError):
            client_context(certs.other.ca).wrap_socket(raw(r), server_hostname="localhost")


def gathered(text):
    return "".join(c["delta"].get("content") or "" for e in events(text)[0] for c in e["choices"])


def test_https_takes_any_cut_and_keeps_alive(workers, certs):
    """Bodies larger than a TLS record, requests in one piece behind each other, an orderly end."""
    d = workers("decode", script=says(HELLO))
    with SafeRouter(certs, decode=[d]) as r:
        big = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 400}] * 8}
        body = json.dumps(big).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
        two = head + b"\r\n" + body + head + b"Connection: close\r\n\r\n" + body
        with client_context(certs.ca).wrap_socket(raw(r), server_hostname="localhost") as s:
            for i in range(0, len(two), 7000):
                s.sendall(two[i:i + 7000])
            got = read_all(s)  # close_notify comes: no ragged end
        assert got.count(b"HTTP/1.1 200 OK") + got.count(b"HTTP/1.1 400") == 2


def test_https_wants_a_certificate_where_asked(workers, certs):
    d = workers("decode", script=says(HELLO))
    context = client_context(certs.ca, certs.client)
    with SafeRouter(certs, decode=[d], context=context, args=["--tls-client-ca", certs.ca]) as r:
        assert r.chat()[0] == 200
        for cert in (None, certs.stranger):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                with client_context(certs.ca, cert).wrap_socket(raw(r), server_hostname="localhost") as s:
                    s.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
                    if not s.recv(1):
                        raise ConnectionError
        assert r.chat()[0] == 200


def test_certificate_is_read_again(workers, certs, tmp_path):
    """On a change of the files and on SIGHUP; a broken file leaves the old one in use. Open connections stay."""
    d = workers("decode", script=says(HELLO))
    own = tmp_path / "tls"
    own.mkdir()
    shutil.copy(certs.server[0], own / "tls.crt")
    shutil.copy(certs.server[1], own / "tls.key")
    names = type("C", (), {"server": (str(own / "tls.crt"), str(own / "tls.key")), "ca": certs.ca})

    def serial(r):
        with client_context(certs.ca).wrap_socket(raw(r), server_hostname="localhost") as s:
            return s.getpeercert()["serialNumber"]

    with SafeRouter(names, decode=[d]) as r:
        first = serial(r)
        old = client_context(certs.ca).wrap_socket(raw(r), server_hostname="localhost")
        second = certs.sign("again", "DNS:localhost,IP:127.0.0.1")
        os.replace(shutil.copy(second[0], own / "new"), own / "tls.crt")
        os.replace(shutil.copy(second[1], own / "new"), own / "tls.key")
        d.wait_for(lambda: serial(r) != first)
        good = serial(r)
        (own / "tls.crt").write_text("no certificate")
        r.popen.send_signal(signal.SIGHUP)
        r.wait_log("the certificate from before stays")
        assert serial(r) == good and r.popen.poll() is None
        old.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(old).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("cert, key, says_what", [
    ("missing", None, "can not be opened"), (None, "missing", "can not be opened"),
    (None, "other", "can not be used with"), (None, "", "needs a certificate and its private key")])
def test_bad_files_stop_the_start(certs, cert, key, says_what):
    paths = {"missing": "/nowhere/x.pem", None: None, "other": certs.client[1], "": ""}
    out = subprocess.run([str(BUILD / "router" / "damask-router"), "--http-port", "0", "--vocab", str(VOCAB),
                          "--decode", "127.0.0.1:1", "--tls-cert", paths[cert] or certs.server[0],
                          "--tls-key", certs.server[1] if key is None else paths[key]],
                         capture_output=True, text=True, timeout=20)
    assert out.returncode == 1 and says_what in out.stderr, out.stderr


def grpc_channel(r, certs=None, cert=None, ca=None):
    if not certs:
        return grpc.insecure_channel(f"unix:{r.grpc_path}")
    key, chain = (None, None) if not cert else (pathlib.Path(cert[1]).read_bytes(), pathlib.Path(cert[0]).read_bytes())
    creds = grpc.ssl_channel_credentials(pathlib.Path(ca or certs.ca).read_bytes(), key, chain)
    return grpc.secure_channel(f"unix:{r.grpc_path}", creds, options=[("grpc.ssl_target_name_override", "localhost")])


def code_of(call):
    with pytest.raises(grpc.RpcError) as e:
        call()
    return e.value.code()


def test_grpc_over_tls(workers, certs):
    d = workers("decode", script=says(HELLO))
    _, stubs = grpc_modules()
    context = client_context(certs.ca, certs.client)
    with SafeRouter(certs, decode=[d], context=context, args=["--tls-client-ca", certs.ca]) as r:
        with grpc_channel(r, certs, certs.client) as channel:
            got = list(stubs.FrontendStub(channel).Chat(grpc_chat()))
            assert "".join(e.delta.content for e in got) == "Hello there!"
        for cert, ca in ((None, None), (certs.stranger, None), (certs.client, certs.other.ca)):
            with grpc_channel(r, certs, cert, ca) as channel:
                assert code_of(lambda: list(stubs.FrontendStub(channel).Chat(grpc_chat()))) == \
                    grpc.StatusCode.UNAVAILABLE
        with grpc_channel(r) as channel:
            assert code_of(lambda: list(stubs.FrontendStub(channel).Chat(grpc_chat()))) == \
                grpc.StatusCode.UNAVAILABLE


# ---------------------------------------------------------------- TLS between router and workers


@contextlib.contextmanager
def mock_worker(role, port, *args):
    """damask mock: a worker's whole shell without a model."""
    log = open(BUILD / f"mock-{role}-{port}.log", "w+")
    popen = subprocess.Popen([str(BUILD / "tools" / "damask"), "mock", role, "--model", "mock", "--model-name", MODEL,
                              "--listen", f"127.0.0.1:{port}", "--admin-host", "127.0.0.1", "--admin-port", "0",
                              "--xfer-transport", "none", *args], stderr=log, stdin=subprocess.DEVNULL)
    popen.address = f"127.0.0.1:{port}"
    popen.log_text = lambda: pathlib.Path(log.name).read_text()
    try:
        yield popen
    finally:
        popen.terminate()
        popen.wait(20)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_router_and_workers_check_each_other(certs):
    """mTLS: only the right router reaches a worker, and only the right worker is taken by a router."""
    port = free_port()
    with mock_worker("decode", port, "--tls-cert", certs.server[0], "--tls-key", certs.server[1],
                     "--tls-router-ca", certs.ca, "--tls-router-name", "router.damask") as w:
        good = ["--worker-tls-ca", certs.ca, "--worker-tls-cert", certs.router[0], "--worker-tls-key", certs.router[1]]
        with Router(decode=[w], args=good) as r:
            assert r.chat(max_tokens=5)[0] == 200
        named = type("W", (), {"address": f"localhost:{port}"})
        with Router(decode=[named], args=good + ["--resolve-every", "100ms"]) as r:  # the name stands in the certificate
            assert r.chat(max_tokens=5)[0] == 200
        for args, why in (
                ([], "can not be reached"),                                                        # plain
                (["--worker-tls-ca", certs.ca], "can not be reached"),                             # shows none
                (["--worker-tls-ca", certs.ca, "--worker-tls-cert", certs.client[0],
                  "--worker-tls-key", certs.client[1]], "can not be reached"),                     # another name
                (["--worker-tls-ca", certs.ca, "--worker-tls-cert", certs.stranger[0],
                  "--worker-tls-key", certs.stranger[1]], "can not be reached"),                   # another CA
                (["--worker-tls-ca", certs.other.ca] + good[2:], "can not be reached"),            # not my worker
                (good + ["--worker-tls-name", "another.damask"], "can not be reached")):           # not this one
            with Router(decode=[w], args=args, ready=False) as r:
                r.wait_log(why)
                assert r.get("/readyz")[0] == 503


def test_workers_refuse_half_a_tls(certs):
    for args, what in ((["--tls-cert", certs.server[0], "--tls-key", certs.server[1]], "without tls-router-ca"),
                       (["--tls-cert", certs.server[0], "--tls-router-ca", certs.ca], "needs the certificate and its key")):
        with mock_worker("decode", free_port(), *args) as w:
            assert w.wait(20) == 1 and what in w.log_text()


def test_admin_port_of_workers_with_keys_and_tls(certs, tmp_path):
    key_file = tmp_path / "keys"
    key_file.write_text("# of the operators\nworker-admin\n")
    with mock_worker("decode", free_port(), "--tls-cert", certs.server[0], "--tls-key", certs.server[1],
                     "--tls-router-ca", certs.ca, "--admin-tls", "--admin-keys-file", str(key_file)) as w:
        for _ in range(400):
            if found := re.search(r"admin port (\d+)", w.log_text()):
                break
            time.sleep(0.05)
        port = int(found.group(1))

        def ask(path, key=None):
            c = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=client_context(certs.ca))
            c.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            r = c.getresponse()
            r.read()
            return r.status, r.getheader("WWW-Authenticate")

        source = (ROOT / "common" / "worker" / "admin.c").read_text()
        paths = set(re.findall(r'dmk_str_is\(path, "(/\w+)"\)', source))
        assert {"/livez", "/readyz", "/health", "/metrics", "/state"} <= paths
        for path in sorted(paths | {"/nothing"}):
            if path in ("/livez", "/readyz"):
                assert ask(path)[0] == 200
            else:
                assert ask(path) == (401, "Bearer") and ask(path, "worker-admi") == (401, "Bearer")
                assert ask(path, "worker-admin")[0] == (404 if path == "/nothing" else 200)


# ---------------------------------------------------------------- keys


def routes():
    """Every path that the router's code names, so that a new one is not forgotten here."""
    text = "".join(p.read_text() for p in (ROOT / "router").glob("*.c"))
    return sorted(set(re.findall(r'"(/(?:v1/[a-z_/]+|[a-z_]+(?:\.json)?))"', text)))


def test_no_route_without_a_key(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d], args=["--api-keys", ",".join(KEYS)], ready=False) as r:
        d.wait_for(lambda: r.get("/readyz")[0] == 200)
        paths = routes()
        assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
        for path in paths + ["/v1/models/x", "/nowhere"]:
            for method in ("GET", "POST"):
                if path in ("/livez", "/readyz"):
                    continue
                for key in (None, "wrong", KEYS[0].upper(), KEYS[0] + "x", KEYS[0][:-1], " " + KEYS[0], ""):
                    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                    status, got, body = r.request(method, path, b"{}", headers)
                    assert status == 401 and got["www-authenticate"] == "Bearer", (method, path, key, status)
                    assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert r.get("/livez")[0] == 200 and r.get("/readyz")[0] == 200
        assert r.chat(headers={"Authorization": KEYS[0]})[0] == 401  # without the word
        for key in KEYS:
            assert r.chat(headers={"Authorization": f"Bearer {key}"})[0] == 200
            assert r.request("GET", "/metrics", headers={"Authorization": f"bearer {key}"})[0] == 200
        assert not [k for k in KEYS if k in r.log_text()]


def test_admin_has_keys_of_its_own(workers, tmp_path):
    """And keys of files, which are read again; a file that lost all its keys opens nothing."""
    d = workers("decode", script=says(HELLO))
    file = tmp_path / "keys"
    file.write_text("# clients\nfrom-file\n\n")
    with Router(decode=[d], args=["--api-keys", KEYS[0], "--api-keys-file", str(file), "--admin-keys", "boss"],
                ready=False) as r:
        d.wait_for(lambda: r.get("/readyz")[0] == 200)

        def ask(path, key):
            return r.request("GET", path, headers={"Authorization": f"Bearer {key}"})[0]

        assert [ask("/v1/models", k) for k in (KEYS[0], "from-file", "boss")] == [200, 200, 401]
        assert [ask("/metrics", k) for k in (KEYS[0], "from-file", "boss")] == [401, 401, 200]
        file.write_text("new-one\n")
        d.wait_for(lambda: ask("/v1/models", "new-one") == 200)
        assert ask("/v1/models", "from-file") == 401 and ask("/v1/models", KEYS[0]) == 200
        file.write_text("# none left\n")
        d.wait_for(lambda: ask("/v1/models", "x") == 401 and "holds no key" in r.log_text())
        assert ask("/v1/models", "new-one") == 200


def test_keys_are_not_printed():
    out = subprocess.run([str(BUILD / "router" / "damask-router"), "--vocab", "x", "--decode", "a:1", "--dump-config"],
                         capture_output=True, text=True, env={**os.environ, "DAMASK_ROUTER_API_KEYS": "hush,hush2"})
    assert out.returncode == 0 and "hush" not in out.stdout + out.stderr and "api-keys" in out.stdout
    out = subprocess.run([str(BUILD / "router" / "damask-router"), "--vocab", "x", "--decode", "a:1", "--api-keys", "hush hush"],
                         capture_output=True, text=True)
    assert out.returncode != 0 and "printable characters" in out.stderr and "hush hush" not in out.stderr


def all_grpc_methods(r, metadata=()):
    """Every method that reflection tells, by reflection: (path, is it health's)."""
    reflection, stubs = fake_worker._generate("grpc_reflection")
    with grpc_channel(r) as channel:
        ask = stubs.ServerReflectionStub(channel).ServerReflectionInfo
        names = [s.name for a in ask(iter([reflection.ServerReflectionRequest(list_services="")]), metadata=metadata)
                 for s in a.list_services_response.service]
        from google.protobuf import descriptor_pb2
        for name in names:
            request = reflection.ServerReflectionRequest(file_containing_symbol=name)
            answer = next(iter(ask(iter([request]), metadata=metadata)))
            for data in answer.file_descriptor_response.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(data)
                for service in file.service:
                    if f"{file.package}.{service.name}" == name:
                        for method in service.method:
                            yield f"/{name}/{method.name}", name == "grpc.health.v1.Health"


def test_no_grpc_method_without_a_key(workers):
    d = workers("decode", script=says(HELLO))
    with Router(decode=[d], args=["--api-keys", ",".join(KEYS)], ready=False) as r:
        d.wait_for(lambda: r.get("/readyz")[0] == 200)
        good = [("authorization", f"Bearer {KEYS[1]}")]
        methods = list(all_grpc_methods(r, good))
        assert ("/damask.v1.Frontend/Chat", False) in methods and len(methods) >= 6, methods
        with grpc_channel(r) as channel:
            for path, is_health in methods:
                call = channel.stream_stream(path)
                for metadata in ([], [("authorization", "Bearer x")], [("authorization", KEYS[1])]):
                    answer = call(iter([b""]), metadata=metadata, timeout=5)
                    if is_health:
                        next(answer)
                        answer.cancel()
                    else:
                        assert code_of(lambda: list(answer)) == grpc.StatusCode.UNAUTHENTICATED, path
            _, stubs = grpc_modules()
            assert list(stubs.FrontendStub(channel).Chat(grpc_chat(), metadata=good))
