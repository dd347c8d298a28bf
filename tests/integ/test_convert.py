"""damask convert: cut folders answer as the checkpoint does, bit for bit; a run that is killed goes on to the same
bytes; damage, a full disk and another layout are told in a sentence; memory does not grow with the checkpoint."""

import fcntl
import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import time

import numpy
import pytest

from cluster import Cluster
from conftest import get, metric, pools_balance
from test_equality import KINDS, answer, ids

ALIGN = 4096
LENGTHS = [2, 65, 513]


def convert(build, src, dst, *argv, **more):
    return subprocess.run([build / "tools" / "damask", "convert", src, dst, *map(str, argv)], capture_output=True,
                          text=True, timeout=120, **more)


def make(build, src, dst, *argv):
    r = convert(build, src, dst, *argv)
    assert r.returncode == 0, r.stderr
    return r.stdout


def folders(build, src, root):
    """Converted folders of a checkpoint, made when asked for."""
    made = {}

    def get(tp, dp=1, experts="mxfp4"):
        name = f"tp{tp}-dp{dp}-{experts}"
        if name not in made:
            make(build, src, root / name, "--tp", tp, "--dp", dp, "--experts", experts)
            made[name] = root / name
        return made[name]

    return get


@pytest.fixture(scope="module")
def spoken(build, trained, tmp_path_factory):
    """Of the trained checkpoint."""
    root = tmp_path_factory.mktemp("spoken")
    yield folders(build, trained, root)
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def small(build, tmp_path_factory):
    """A checkpoint of few tokens, for tests that look at files."""
    root = tmp_path_factory.mktemp("small")
    subprocess.run([build / "tools" / "damask", "tinymodel", "--out", root / "src", "--vocab-size", "8000"], check=True,
                   stdout=subprocess.DEVNULL)
    yield root / "src"
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def folder(build, small):
    return folders(build, small, small.parent)


def tensors(path):
    """{name: (dtype, shape, bytes, offset in the file)} of a safetensors file, read as its format says."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header, out, end = json.loads(data[8:8 + n]), {}, 0
    header.pop("__metadata__")
    for name, t in sorted(header.items(), key=lambda e: e[1]["data_offsets"]):
        begin, stop = t["data_offsets"]
        assert begin == end, f"{path}: a hole before {name}"
        end = stop
        out[name] = (t["dtype"], t["shape"], data[8 + n + begin:8 + n + stop], 8 + n + begin)
    assert 8 + n + end == len(data)
    return out


def bits(path):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.iterdir())}


# ---- what is in a folder ----


def test_files_are_aligned_listed_and_cover_the_checkpoint(folder, small):
    whole = {}
    for f in small.glob("*.safetensors"):
        whole.update(tensors(f))
    path = folder(4, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["layout"], manifest["experts"]) == ({"tp": 4, "dp": 2, "ep": 8}, "mxfp4")
    seen = {}
    for f in manifest["files"]:
        inside = tensors(path / f["name"])
        assert (path / f["name"]).stat().st_size == f["size"]
        for name, (dtype, shape, data, offset) in inside.items():
            if name.startswith("_pad."):
                assert set(data) <= {0}
                continue
            listed = next(t for t in f["tensors"] if t["name"] == name)
            assert (listed["dtype"], listed["shape"], listed["offset"]) == (dtype, shape, offset)
            assert offset % ALIGN == 0, f"{f['name']}: {name} is not aligned"
            s = listed["slice"]
            of = numpy.frombuffer(whole[name][2], numpy.uint8).reshape(*whole[name][1], -1)
            assert of.shape[s["axis"]] == s["of"]
            cut = of.take(range(s["begin"], s["end"]), axis=s["axis"])
            assert cut.tobytes() == data, f"{f['name']}: {name}"
            seen.setdefault(name, set()).add((s["begin"], s["end"]))
        assert {t["name"] for t in f["tensors"]} == {n for n in inside if not n.startswith("_pad.")}
    assert set(seen) == set(whole)
    for name, ranges in seen.items():  # pieces, side by side
        at = 0
        for begin, end in sorted(ranges):
            assert begin == at, f"{name}: {sorted(ranges)}"
            at = end
    for f in manifest["copied"]:
        assert (path / f["name"]).read_bytes() == (small / f["name"]).read_bytes()


E2M1 = numpy.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], numpy.float32)
E4M3 = numpy.array([(-1 if c & 128 else 1) * (((8 + (c & 7)) * 2.0**((c >> 3 & 15) - 10)) if c >> 3 & 15 else
                                             (c & 7) * 2.0**-9) for c in range(256)], numpy.float32)


def from_mxfp4(inside, name):
    blocks = numpy.frombuffer(inside[name + "_blocks"][2], numpy.uint8).reshape(inside[name + "_blocks"][1])
    scales = numpy.frombuffer(inside[name + "_scales"][2], numpy.uint8).reshape(inside[name + "_scales"][1])
    codes = numpy.stack([blocks & 15, blocks >> 4], -1)
    values = E2M1[codes.reshape(*scales.shape, 32)] * numpy.exp2(scales.astype(numpy.float32) - 127)[..., None]
    return values.reshape(*values.shape[:2], -1)


def from_fp8(inside, name):
    shape = inside[name][1]
    codes = numpy.frombuffer(inside[name][2], numpy.uint8).reshape(shape)
    scales = numpy.frombuffer(inside[name + "_scale"][2], numpy.float32).reshape(inside[name + "_scale"][1])
    assert numpy.array_equal(numpy.frexp(scales)[0], numpy.full_like(scales, .5)), "a scale is no power of two"
    grown = scales.repeat(128, 1)[:, :shape[1]].repeat(128, 2)[:, :, :shape[2]]
    return E4M3[codes] * grown


@pytest.mark.parametrize("tp", [1, 4])
def test_fp8_holds_the_same_numbers(folder, tp):
    """Bit for bit: the random checkpoint's scales lie within 14 octaves everywhere."""
    a, b = folder(tp), folder(tp, experts="fp8")
    exactness = json.loads((b / "manifest.json").read_text())["exactness"]
    assert exactness["blocks"] > 0 and exactness["inexact_blocks"] == 0
    for path in b.glob("experts-*"):
        x, y = tensors(a / path.name), tensors(path)
        layer = next(n for n in y if n.endswith("gate_up_proj")).removesuffix("gate_up_proj")
        for name in ("gate_up_proj", "down_proj"):
            assert from_mxfp4(x, layer + name).tobytes() == from_fp8(y, layer + name).tobytes(), f"{path}: {name}"
            assert x[layer + name + "_bias"][2] == y[layer + name + "_bias"][2]


def copy_with(model, dst, tensor, edit):
    """A copy of a checkpoint in which edit(bytes, shape) has changed one tensor."""
    shutil.copytree(model, dst)
    for f in dst.glob("*.safetensors"):
        inside = tensors(f)
        if tensor in inside:
            _, shape, data, offset = inside[tensor]
            changed = bytearray(data)
            edit(changed, shape)
            with open(f, "r+b") as out:
                out.seek(offset)
                out.write(changed)
            return dst
    raise AssertionError(tensor)


def test_blocks_that_fp8_can_not_hold_are_counted(build, small, tmp_path):
    """One scale far below its block's others: 15 octaves are reported, with place and error; the rest is exact."""
    name, expert, row = "model.layers.1.mlp.experts.down_proj_scales", 5, 200

    def edit(data, shape):
        per_row = shape[2]
        for r in range(128, 256):
            for g in range(4):
                data[(expert * shape[1] + r) * per_row + g] = 120
        data[(expert * shape[1] + row) * per_row] = 105  # 15 octaves below

    src = copy_with(small, tmp_path / "src", name, edit)
    out = make(build, src, tmp_path / "dst", "--tp", 2, "--experts", "fp8")
    exactness = json.loads((tmp_path / "dst" / "manifest.json").read_text())["exactness"]
    assert exactness["inexact_blocks"] == 1
    (m,) = exactness["matrices"]
    assert (m["layer"], m["expert"], m["matrix"], m["blocks"]) == (1, expert, "down_proj", 1)
    make(build, src, tmp_path / "same", "--tp", 2)
    for path in (tmp_path / "dst").glob("experts-*"):
        a, b = tensors(tmp_path / "same" / path.name), tensors(path)
        layer = next(n for n in b if n.endswith(".down_proj")).removesuffix("down_proj")
        error = numpy.abs(from_mxfp4(a, layer + "down_proj") - from_fp8(b, layer + "down_proj")).max()
        there = path.name.endswith("rank0-layer01.safetensors")
        assert (error > 0) == there, path.name
        if there:
            assert float(error) == pytest.approx(m["largest_error"], rel=1e-6)
    assert "1 of" in out and "layer 1, expert 5, down_proj: 1 blocks" in out


# ---- workers on such folders ----


@pytest.fixture(scope="module")
def wanted(build, trained):
    c = Cluster(build, trained, prefill=0, decode=1, name="convert-alone", decode_args=["--local-prefill-below", "max"])
    with c:
        return {(n, kind): answer(c, ids(n, n), **KINDS[kind])[0] for n in LENGTHS for kind in KINDS}


def check_answers(c, wanted):
    for (n, kind), want in wanted.items():
        assert answer(c, ids(n, n), **KINDS[kind])[0] == want, f"{n} {kind}"
    for worker in c.prefill + c.decode:
        pools_balance(worker)


# prefill tp, decode tp, decode dp; None: the checkpoint itself
@pytest.mark.parametrize("prefill, decode", [((1, 1), (1, 1)), ((4, 1), (2, 1)), ((2, 1), (2, 2)), (None, (4, 1))])
def test_workers_answer_the_same(build, trained, spoken, wanted, prefill, decode):
    """Answers and log-probabilities of converted folders, of unequal layouts, and beside the checkpoint itself."""
    p, d = prefill or (1, 1), decode
    c = Cluster(build, trained, prefill_tp=p[0], decode_tp=d[0], decode_dp=d[1], threads=1, name="convert",
                decode_args=["--local-prefill-below", "60", "--model", spoken(*d)],
                prefill_args=["--model", spoken(*p)] if prefill else [])
    with c:
        check_answers(c, wanted)


def test_fp8_answers_the_same_where_it_is_exact(build, spoken, wanted):
    """A host multiplies by the same numbers in the same order."""
    c = Cluster(build, spoken(2, experts="fp8"), prefill=0, decode_tp=2, threads=1, name="convert-fp8",
                decode_args=["--local-prefill-below", "max"])
    with c:
        check_answers(c, wanted)


def test_prompts_of_fp8_and_steps_of_mxfp4(build, trained, spoken, wanted):
    """Pools of two formats. On a host their numbers are the same, so whatever goes wrong with pages shows in the answers."""
    c = Cluster(build, trained, prefill_tp=1, decode_tp=2, decode_dp=2, threads=1, name="convert-mixed",
                prefill_args=["--model", spoken(1, experts="fp8")], decode_args=["--prompt-experts", "fp8"])
    with c:
        for _ in range(2):  # the second time from the prefix caches
            check_answers(c, wanted)
        assert metric(c.url, "damask_router_prefills_forced_local_total") == 0
        told = {w["role"]: (w["numerics"], w.get("prompt_numerics")) for w in json.loads(get(c.url + "/health")[1])["fleet"]}
        assert told == {"prefill": ("fp8-bf16-k1-cpu", None), "decode": ("mxfp4-bf16-k1-cpu", "fp8-bf16-k1-cpu")}


def refused(build, path, *argv, role="decode"):
    r = subprocess.run([build / role / f"damask-{role}", "--model", path, "--listen", "127.0.0.1:0", "--admin-host",
                        "127.0.0.1", "--admin-port", "0", *map(str, argv)], capture_output=True, text=True, timeout=60)
    assert r.returncode != 0
    return r.stderr


def test_another_layout_is_refused_with_the_command(build, small, folder):
    said = refused(build, folder(2), "--tp", 4)
    assert (f"was converted for tp 2, dp 1 but the worker has tp 4, dp 1: run `damask convert {small} NEW --tp 4 --dp 1 "
            "--experts mxfp4` and use NEW") in said
    assert "was converted for tp 2, dp 2 but" in refused(build, folder(2, 2), "--tp", 2, role="prefill")


def test_damage_is_refused_by_name(build, small, folder, tmp_path):
    path = tmp_path / "damaged"

    def fresh():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder(2), path)

    fresh()
    name = "experts-rank1-layer02.safetensors"
    data = bytearray((path / name).read_bytes())
    data[ALIGN * 3 + 77] ^= 4
    (path / name).write_bytes(data)
    said = refused(build, path, "--tp", 2)
    assert f"{path}/{name}: its contents have checksum" in said and "the file is damaged" in said
    r = convert(build, json.loads((path / "manifest.json").read_text())["source"]["path"], path, "--tp", 2, "--verify")
    assert r.returncode == 1 and f"{name}: does not have the size and checksum" in r.stderr
    fresh()
    (path / name).write_bytes(data[:-1])
    assert f"{path}/{name}: has {len(data) - 1} bytes but the manifest says {len(data)}" in refused(build, path, "--tp", 2)
    fresh()
    (path / name).unlink()
    assert f"{path}/{name}: can not be opened" in refused(build, path, "--tp", 2)
    fresh()
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    assert f"{path}/config.json: is not what was converted" in refused(build, path, "--tp", 2)
    again = ["--tp", 2]
    for argv in again, [*again, "--verify"]:
        r = convert(build, small, path, *argv)
        assert r.returncode == 1 and f"{path}/config.json: is not what was converted" in r.stderr
    fresh()
    (path / "config.json").unlink()
    r = convert(build, small, path, *again)
    assert r.returncode == 1 and r.stderr.startswith("damask convert: --force makes the folder anew: ")
    make(build, small, path, *again, "--force")
    assert bits(path) == bits(folder(2))
    fresh()
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"begin":8', '"begin":9', 1))
    assert "manifest.json: its text has checksum" in refused(build, path, "--tp", 2)
    (path / "manifest.json").unlink()
    assert "holds no checkpoint" in refused(build, path, "--tp", 2)


# ---- stopping and going on ----


def test_killed_at_any_time_it_goes_on_to_the_same_bytes(build, small, folder, tmp_path):
    """Killed once after any number of files, and once more somewhere in what was left."""
    want, dst, rng = bits(folder(4, 2)), tmp_path / "dst", random.Random(7)
    n_files = len(list(folder(4, 2).glob("*.safetensors")))
    argv = [build / "tools" / "damask", "convert", small, dst, "--tp", "4", "--dp", "2", "--jobs", "2", "--quiet"]
    journal = dst / "convert.journal"
    killed = kept = rounds = 0
    # Four rounds; more where strokes came after the end, as they may on a busy machine.
    while rounds < 4 or (rounds < 20 and (killed < 4 or kept < n_files // 2)):
        rounds += 1
        shutil.rmtree(dst, ignore_errors=True)
        for after in (rng.randrange(n_files // 2), rng.randrange(n_files // 2, n_files)):
            p = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while p.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > after):
                pass
            time.sleep(rng.uniform(0, 0.005))
            p.kill()
            killed += p.wait() == -signal.SIGKILL
            if journal.exists():
                assert not (dst / "manifest.json").exists()
        if journal.exists():
            assert "a conversion into it has not ended" in refused(build, dst, "--tp", 4, "--dp", 2)
        out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        kept += int(out.split("of which ")[1].split()[0]) if "of which" in out else 0
        assert bits(dst) == want
    assert killed >= 4 and kept >= n_files // 2, f"{killed} runs were killed, {kept} files were kept"


def test_one_at_a_time_also_by_force(build, small, folder, tmp_path):
    """While another process has the journal nothing in the folder is touched, whatever the options."""
    dst = tmp_path / "dst"
    shutil.copytree(folder(2), dst)
    before = bits(dst)
    with open(dst / "convert.journal", "w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        r = convert(build, small, dst, "--tp", 1, "--force")
        assert (r.returncode, r.stderr) == (1, f"damask convert: {dst}: another process is converting into it\n")
        assert bits(dst).items() >= before.items()
        (dst / "manifest.json").unlink()  # as long as it is at work there is none
        assert "another process is converting into it" in convert(build, small, dst, "--tp", 2).stderr
    make(build, small, dst, "--tp", 1, "--force")
    assert bits(dst) == bits(folder(1))


def test_files_that_were_damaged_meanwhile_are_made_again(build, small, folder, tmp_path):
    want, dst = bits(folder(2)), tmp_path / "dst"
    argv = [build / "tools" / "damask", "convert", small, dst, "--tp", "2", "--jobs", "1"]
    journal = dst / "convert.journal"
    p = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while p.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 2):
        pass
    p.kill()
    assert p.wait() == -signal.SIGKILL, "it was too fast to be killed"
    r = convert(build, small, dst, "--tp", 2, "--experts", "fp8")
    assert r.returncode == 1 and "holds an unfinished conversion with other options" in r.stderr
    done = [json.loads(line)["file"] for line in journal.read_text().splitlines()[1:]]
    first = dst / done[0]
    first.write_bytes(first.read_bytes()[:-1] + b"\1")
    with open(journal, "a") as f:
        f.write('{"file":"half a li')  # as a crash leaves it
    assert f"of which {len(done) - 1} were there" in make(build, small, dst, "--tp", 2)
    assert bits(dst) == want


def test_a_limit_on_files_is_told(build, small, tmp_path):
    size, dst = 1 << 20, tmp_path / "dst"
    r = convert(build, small, dst, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    assert r.returncode == 1 and ".part: can not be written: File too large" in r.stderr
    assert not (dst / "manifest.json").exists() and not list(dst.glob("*.part"))


def test_full_disk_leaves_no_manifest_and_goes_on(build, small, folder, tmp_path):
    want, dst = bits(folder(2)), tmp_path / "small"
    dst.mkdir()
    size = json.loads((folder(2) / "manifest.json").read_text())["files"]
    need = sum(f["size"] for f in size)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={need // 2}", "none", dst]).returncode != 0:
        pytest.skip("this needs the right to mount a small tmpfs")
    try:
        r = convert(build, small, dst, "--tp", 2)
        assert r.returncode == 1 and "GB are needed but" in r.stderr
        assert not (dst / "manifest.json").exists()
        # As if others took the room while it ran.
        subprocess.run(["mount", "-o", f"remount,size={need + (8 << 20)}", dst], check=True)
        with open(dst / "hog", "wb") as hog:
            os.posix_fallocate(hog.fileno(), 0, 1)
            p = subprocess.Popen([build / "tools" / "damask", "convert", small, dst, "--tp", "2", "--jobs", "1"],
                                 stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            deadline = time.monotonic() + 30
            while not list(dst.glob("*.part")) and time.monotonic() < deadline and p.poll() is None:
                pass
            at = 1 << 20
            try:
                while p.poll() is None:
                    os.posix_fallocate(hog.fileno(), at, 1 << 20)
                    at += 1 << 20
            except OSError:
                pass
            said = p.communicate(timeout=60)[1]
        assert p.returncode == 1 and "no room is left on the disk" in said, said
        assert not (dst / "manifest.json").exists() and not list(dst.glob("*.part"))
        (dst / "hog").unlink()
        make(build, small, dst, "--tp", 2)
        assert bits(dst) == want
    finally:
        subprocess.run(["umount", dst], check=True)


# ---- sources, options, bounds ----


@pytest.mark.parametrize("value, why", [(255, "stands for no number (254 at most)"),
                                        (200, "is above what the device's MXFP4 product can hold (128 at most)")])
def test_scales_that_nobody_can_multiply_by(build, small, tmp_path, value, why):
    name, place = "model.layers.2.mlp.experts.gate_up_proj_scales", "expert 9, row 33"

    def edit(data, shape):
        data[(9 * shape[1] + 33) * shape[2] + 1] = value

    src = copy_with(small, tmp_path / "src", name, edit)
    sentence = f'tensor "{name}": {place} has the scale {value}, which {why}'
    for experts in ("mxfp4", "fp8"):
        r = convert(build, src, tmp_path / experts, "--tp", 2, "--experts", experts)
        if value == 200 and experts == "fp8":  # FP8 has room for it
            assert r.returncode == 0
        else:
            assert r.returncode == 1 and sentence in r.stderr, r.stderr
            assert not (tmp_path / experts / "manifest.json").exists()
    if value == 255:
        assert sentence in refused(build, src)


def test_bf16_experts_are_refused(build, tmp_path):
    subprocess.run([build / "tools" / "damask", "tinymodel", "--out", tmp_path / "bf16", "--expert-format", "bf16",
                    "--layers", "2", "--vocab-size", "300"], check=True, stdout=subprocess.DEVNULL)
    r = convert(build, tmp_path / "bf16", tmp_path / "dst")
    assert r.returncode == 1 and "its experts are BF16, and only MXFP4 ones are converted" in r.stderr


@pytest.mark.parametrize("argv, sentence", [
    (["--tp", 3], "tp is 3 but must be 1, 2, 4 or 8"),
    (["--tp", 4, "--dp", 4], "tp 4 x dp 4 makes 16 ranks but a node has 8 at most"),
    (["--tp", 4, "--ep", 6], "ep is 6 but must be tp x dp, with tp 4"),
    (["--tp", 2, "--dp", 2, "--ep", 8], "ep is 8 but must be tp x dp, with tp 2 and the dp given"),
])
def test_layouts_are_refused_as_by_workers(build, small, tmp_path, argv, sentence):
    r = convert(build, small, tmp_path / "dst", *argv)
    assert (r.returncode, r.stderr) == (1, f"damask convert: {sentence}\n")
    assert not (tmp_path / "dst").exists()


def test_a_folder_of_others_is_left_alone(build, small, folder, tmp_path):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "thesis.txt").write_text("mine")
    for force in ([], ["--force"]):
        r = convert(build, small, tmp_path / "dst", *force)
        assert r.returncode == 1 and "is not empty and holds no conversion" in r.stderr
        (tmp_path / "dst" / "manifest.json").write_text('{"format": "another program\'s"}')
    assert (tmp_path / "dst" / "thesis.txt").exists()
    assert "holds a conversion of" in convert(build, small, folder(2), "--tp", 1).stderr
    assert "is complete already" in make(build, small, folder(2), "--ep", 2, "--tp", 2)
    assert "was converted already" in convert(build, folder(2), tmp_path / "again").stderr


def peak_of(*argv):
    """Runs a program: the most memory that it had, in bytes, and what it wrote."""
    code = ("import os, resource, subprocess, sys\n"
            "r = subprocess.run(sys.argv[1:], stdout=sys.stderr)\n"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, r.returncode)")
    out = subprocess.run(["python3", "-c", code, *map(str, argv)], capture_output=True, text=True, timeout=300)
    peak, status = map(int, out.stdout.split())
    assert status == 0, out.stderr
    return peak * 1024, out.stderr


def test_memory_does_not_grow_with_the_checkpoint(build, tmp_path):
    """The bounds of --help, on a checkpoint that is larger: full width, but fewer layers, experts and tokens."""
    tool, src = build / "tools" / "damask", tmp_path / "src"
    peak, said = peak_of(tool, "tinymodel", "--out", src, "--preset", "gpt-oss-120b", "--layers", 2, "--experts", 8,
                         "--vocab-size", 4000)
    size, bound = sum(f.stat().st_size for f in src.iterdir()), (64 + 2 * 16) << 20
    assert size > 3 * bound and peak < 64 << 20, f"tinymodel: {peak >> 20} MiB"
    assert "hidden 2880, 8 experts, mxfp4" in said
    for argv in (["--tp", 8], ["--experts", "fp8"]):
        peak, _ = peak_of(tool, "convert", src, tmp_path / "dst", "--jobs", 2, "--force", *argv)
        assert peak < bound, f"{argv}: {peak >> 20} MiB of {bound >> 20}"


def test_prompts_of_a_format_that_no_prefill_worker_has_are_refused(build, small):
    assert "prompt-experts is bf16, but this checkpoint's experts are mxfp4" in refused(build, small, "--prompt-experts", "bf16")
    for args, why in ((["--local-prefill-below", "max"], "local-prefill-below is max"), (["--xfer-transport", "none"], "xfer-transport is none")):
        said = refused(build, small, "--prompt-experts", "fp8", *args)
        assert 'prompts are to come as "fp8-bf16-k1-cpu" from prefill workers, but ' + why in said
