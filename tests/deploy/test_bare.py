"""A machine with a GPU and little else: no gRPC, libuv, UCX, llhttp or protobuf. `-Dcluster=false` must configure there,
and the tool, the checks of kernels and the benches must link.

What both kinds of build compile alike lies in the build under test already: the links of the bare build are made from
its objects, and only what the bare build has of its own is compiled here.
"""

import os
import pathlib
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
ABSENT = ["grpc", "uv", "ucx", "ucp", "uct", "llhttp", "protobuf"]
PROGRAMS = ["tools/damask", "tests/check/check", "tests/check/check_cuda", "bench/bench_device", "bench/bench_engine"]


def ninja(build, *args):
    return subprocess.run(["ninja", "-C", build, *args], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    top = tmp_path_factory.mktemp("bare")
    tool = top / "pkg-config"
    tool.write_text("#!/bin/sh\ncase \"$*\" in " + "|".join(f"*{name}*" for name in ABSENT) +
                    ") exit 1 ;; esac\nexec /usr/bin/pkg-config \"$@\"\n")
    tool.chmod(0o755)
    cuda = "disabled" if not (BUILD / "tests/check/check_cuda").exists() else "enabled"
    run = subprocess.run(["meson", "setup", top / "build", ROOT, "-Dcluster=false", f"-Dcuda={cuda}"],
                         env={**os.environ, "PKG_CONFIG": str(tool)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return top / "build"


def names_absent(command):
    """Words of a command that name one of the libraries that are not there."""
    return [w for w in shlex.split(command) for name in ABSENT
            if w == f"-l{name}" or f"/lib{name}" in w or w.endswith(f"/{name}.h")]


def test_nothing_that_is_absent_is_used(bare):
    commands = ninja(bare, "-t", "commands").splitlines()
    assert len(commands) > 100
    assert [found for c in commands for found in names_absent(c)] == []
    # And the search would find them: the whole build has them.
    assert any(names_absent(c) for c in ninja(BUILD, "-t", "commands", "router/damask-router").splitlines())


@pytest.mark.parametrize("program", PROGRAMS)
def test_links_without_the_cluster_s_libraries(bare, program, tmp_path):
    if not (BUILD / program).exists():
        pytest.skip(f"{program} is not part of this build")
    *compiles, link = ninja(bare, "-t", "commands", program).splitlines()
    args = shlex.split(link)
    for i, arg in enumerate(args):
        if arg.endswith(".o") and not (BUILD / arg).exists():
            command, = [c for c in compiles if arg in shlex.split(c) and " -c " in c]
            subprocess.run(command, shell=True, cwd=bare, check=True)
            args[i] = str(bare / arg)
    args[args.index("-o") + 1] = str(tmp_path / "program")
    run = subprocess.run(args, cwd=BUILD, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    needed = subprocess.run(["ldd", tmp_path / "program"], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed and [n for n in ABSENT if f"lib{n}." in needed] == []
