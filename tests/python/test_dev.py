"""./dev says what its commands do, without building anything for it; names that nothing has are refused."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def dev(*args):
    run = subprocess.run([ROOT / "dev", *args], capture_output=True, text=True, timeout=60,
                         env={"PATH": "/usr/bin:/bin", "BUILD": "no-such-build"})
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize("command, script", [("test", "tests/run.sh"), ("bench", "bench/run.sh"), ("tidy", "tools/tidy.sh"),
                                             ("fuzz", "tools/fuzz.sh"), ("coverage", "tools/coverage.sh")])
def test_help_of_scripts(command, script):
    status, out, _ = dev(command, "--help")
    assert status == 0 and script in out and "set -" not in out
    assert not (ROOT / "no-such-build").exists()


def test_benches_are_listed():
    scripts = {p.stem for p in (ROOT / "bench").glob("*.sh")} - {"run"}
    programs = {p.stem.removeprefix("bench_") for p in (ROOT / "bench").glob("bench_*.c")}
    listed = {line.split()[0] for line in dev("bench", "--help")[1].splitlines() if line.startswith("  ") and line.strip()}
    assert listed - {"bench/run.sh"} == scripts | programs


def test_unknown_command():
    status, _, err = dev("nonsense")
    assert status == 2 and "no command 'nonsense'" in err and "usage: ./dev" in err


def test_gpu_tests_of_unknown_names():
    run = subprocess.run([sys.executable, ROOT / "tests" / "gpu" / "run.py", "--backend", "cpu", "--only", "equal,none"],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "no test is called 'none'" in run.stderr
