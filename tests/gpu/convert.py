#!/usr/bin/env python3
"""`damask convert` on a checkpoint as large as the machine holds: time, memory, a kill in the midst, and that what is loaded
from the result computes the bits of what is loaded from the source.

    tests/gpu/convert.py --work DIR [--preset gpt-oss-20b] [--layers N] [--formats mxfp4,fp8] [--backend cuda]

DIR takes source and results, which are removed at the end: some 14 + 25 GB for the 20b, 65 + 65 for the 120b in MXFP4.
Needs the programs and the standard library. Exits with 77 where --backend is cuda and no GPU is.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from cluster import Cluster  # noqa: E402
from run import complete  # noqa: E402


def run(argv, stdin=""):
    """(seconds, output) of a program that ends well."""
    started = time.monotonic()
    p = subprocess.run([str(a) for a in argv], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if p.returncode:
        sys.exit(f"{' '.join(map(str, argv))}\n{p.stdout}\nended with {p.returncode}")
    return time.monotonic() - started, p.stdout


def measured(argv):
    """(seconds, MiB that were resident at most, output): the program is the only child of a process of its own."""
    code = ("import resource,subprocess,sys; r=subprocess.run(sys.argv[1:]).returncode; "
            "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r)")
    seconds, text = run([sys.executable, "-c", code, *argv])
    return seconds, int(re.search(r"^peak (\d+)$", text, re.M)[1]) / 1024, re.sub(r"^peak .*\n", "", text, flags=re.M)


def size(folder):
    return sum(f.stat().st_size for f in folder.iterdir())


def sums(folder):
    """What the manifest says of every file; the path of the source is not in it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return {k: v for k, v in manifest.items() if k != "source"}


class Runs:
    def __init__(self, args):
        self.args, self.failed = args, 0
        self.tool, self.logits = pathlib.Path(args.build) / "tools/damask", pathlib.Path(args.build) / "tests/check/check_logits"
        self.work = pathlib.Path(args.work) / "convert"
        self.source = self.work / "source"
        rng = random.Random(3)
        self.ids = "\n".join(str(rng.randrange(199998)) for _ in range(96))

    def expect(self, good, text):
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)

    def make(self):
        argv = [self.tool, "tinymodel", "--preset", self.args.preset, "--layers", self.args.layers, "--out", self.source]
        seconds, mib, _ = measured(argv)
        gb = size(self.source) / 1e9
        print(f"     source {self.args.preset}, {gb:.2f} GB: {seconds:.1f} s, {gb / seconds:.2f} GB/s, {mib:.0f} MiB at most",
              flush=True)

    def convert(self, experts):
        folder = self.work / experts
        seconds, mib, text = measured([self.tool, "convert", "--quiet", "--experts", experts, self.source, folder])
        gb = size(folder) / 1e9
        print("     " + text.strip().replace("\n", "\n     "))
        self.expect(mib < 64 + 16 * 8, f"{experts}: {gb:.2f} GB in {seconds:.1f} s, {gb / seconds:.2f} GB/s, {mib:.0f} MiB at most")
        return folder

    def interrupt(self, experts, folder):
        """Once more, with a kill -9 in the midst: what is there is kept, and the files are those of the run before."""
        want, n_files = sums(folder), len(list(folder.glob("*.safetensors")))
        shutil.rmtree(folder)
        argv = [self.tool, "convert", "--quiet", "--experts", experts, self.source, folder]
        started = time.monotonic()
        p = subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL)
        while p.poll() is None and len(list(folder.glob("*.safetensors"))) < n_files // 2:
            time.sleep(0.005)
        p.kill()
        killed = p.wait() == -signal.SIGKILL and not (folder / "manifest.json").exists()
        after = time.monotonic() - started
        again, text = run(argv)
        kept = re.search(r"of which (\d+) were there", text)
        self.expect(killed and kept and 0 < int(kept[1]) < n_files and sums(folder) == want,
                    f"{experts}: killed after {after:.1f} s, went on for {again:.1f} s to the same checksums; "
                    f"{kept[1] if kept else 'no'} of {n_files} files were there")

    def load(self, folder, backend):
        out = self.work / "logits"
        _, text = run([self.logits, folder, backend, 96, out], self.ids)
        return out.read_bytes(), text.strip().split("\n")[-1]

    def compare(self, experts, folder):
        """The source with experts in this format, and the converted folder: the bits of 96 rows of logits."""
        fp8 = experts == "fp8" and self.args.backend == "cuda"
        want, said = self.load(self.source, "cuda-fp8" if fp8 else self.args.backend)
        got, also = self.load(folder, self.args.backend)
        self.expect(got == want, f"{experts}: the same logits of 96 rows from source and result ({said}; {also})")

    def serve(self, folder):
        """A worker loads it under its checksums and answers; with one byte changed it refuses, and says where."""
        c = Cluster(self.args.build, folder, prefill=0, transport="none", name="convert", backend=self.args.backend,
                    model_name="m", decode_args=["--local-prefill-below", "max", *self.args.worker_args.split()])
        started = time.monotonic()
        with c:
            ready = time.monotonic() - started
            answer, _ = complete(c, list(range(100, 400)), 8)
            said = re.search(r"weights are loaded after [\d.]+ s", c.decode[0].log_tail(400))[0]
            self.expect(len(answer[1]) == 8, f"a worker is ready after {ready:.1f} s ({said}) and answers")
        victim = sorted(folder.glob("experts-*"))[-1]
        with open(victim, "r+b") as f:
            f.seek(victim.stat().st_size // 2)
            byte = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte[0] ^ 1]))
        p = c.decode[0]
        p.start()
        status = p.popen.wait(120)
        last = p.log_tail(1).strip()
        self.expect(status != 0 and victim.name in last, f"with one byte changed: {last}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", default=str(ROOT / "build"), help="build folder")
    parser.add_argument("--work", required=True, help="folder for source and results")
    parser.add_argument("--preset", default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=0, help="0: the preset's")
    parser.add_argument("--formats", default="mxfp4,fp8")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--worker-args", default="", help="further arguments of the worker that loads the result")
    args = parser.parse_args()
    if args.backend == "cuda" and not os.path.exists("/dev/nvidiactl"):
        print("convert: skipped, this machine has no NVIDIA device")
        return 77
    runs = Runs(args)
    shutil.rmtree(runs.work, ignore_errors=True)
    try:
        runs.work.mkdir(parents=True)
        runs.make()
        for experts in args.formats.split(","):
            folder = runs.convert(experts)
            runs.interrupt(experts, folder)
            runs.compare(experts, folder)
            runs.serve(folder)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(runs.work, ignore_errors=True)
    print(f"convert: {runs.failed} failed")
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(main())
