#!/usr/bin/env bash
# Builds with a sanitizer and runs the C suites.
#
#   tests/sanitized.sh address,undefined      all of them but the long numeric ones below
#   tests/sanitized.sh thread                 those in which threads meet (tests/run.sh names them)
#   tests/sanitized.sh KIND SUITE...          other suites of tests/run.sh: with integ whole clusters
#
# BUILD=DIR: another build folder. Ends with: N passed, N failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:-address,undefined}
case $kind in
  thread) build=${BUILD:-build-tsan} suites=threads ;;
  *) build=${BUILD:-build-asan} suites="unit check conform sim_short" ;;
esac
[ $# -lt 2 ] || suites=${*:2}
# Whole models against the vectors of transformers, and kernels at real sizes: minutes under ASan, and the
# engine's, the loader's and the kernels' own tests walk the same code with small sizes.
export SKIP="vectors-tiny vectors-wide" SLOW=10
[ -f "$build/build.ninja" ] ||
  meson setup "$build" -Ddeps_dir="$PWD/.deps" -Db_sanitize="$kind" -Dcuda=disabled -Db_lundef=false -Dwerror=true >/dev/null
ninja -C "$build" --quiet build.ninja # so that the list below is of today
# What C suites run and no more: neither the servers nor the benchmarks; for threads, a fifth of the programs.
needed=$(meson introspect "$build" --tests | .deps/venv/bin/python -c '
import json, sys
top, suites, threads, skip = sys.argv[1], sys.argv[2].split(), sys.argv[3].split(), sys.argv[4].split()
for t in json.load(sys.stdin):
    wanted = t["name"] in threads if suites == ["threads"] else any("damask:" + s in t["suite"] for s in suites)
    if wanted and t["name"] not in skip:
        print(*[a.removeprefix(top) for a in t["cmd"] if a.startswith(top)])' \
  "$(realpath "$build")/" "$suites" "$(sed -n '/^threads="/,/"$/p' tests/run.sh | tr -d '"' | sed 's/threads=//')" "$SKIP" |
  tr ' ' '\n' | sort -u)
case $suites in *integ* | *python* | *deploy* | *eval*) needed= ;; esac # all
# shellcheck disable=SC2086
ninja -C "$build" --quiet $needed
export ASAN_OPTIONS=abort_on_error=1:detect_leaks=1:verify_asan_link_order=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# gRPC, libuv and UCX are not instrumented; UCX would replace mmap behind the sanitizer's back.
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 UCX_MEM_MMAP_HOOK_MODE=none
exec tests/run.sh "$build" $suites
