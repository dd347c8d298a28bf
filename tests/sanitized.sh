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
export SKIP="vectors-tiny vectors-wide" SLOW=4
[ -f "$build/build.ninja" ] ||
  meson setup "$build" -Ddeps_dir="$PWD/.deps" -Db_sanitize="$kind" -Dcuda=disabled -Db_lundef=false -Dwerror=true >/dev/null
needed=
ninja -C "$build" --quiet build.ninja # so that the list below is of today
if [ "$kind" = thread ]; then # a fifth of the programs
  needed=$(meson introspect "$build" --tests | .deps/venv/bin/python -c '
import json, sys
for t in json.load(sys.stdin):
    if t["name"] in sys.argv[2].split():
        print(*[a for a in t["cmd"] if a.startswith(sys.argv[1])])' \
    "$(realpath "$build")/" "$(sed -n '/^threads="/,/"$/p' tests/run.sh | tr -d '"' | sed 's/threads=//')" |
    sed "s,$(realpath "$build")/,,g")
fi
# shellcheck disable=SC2086
ninja -C "$build" --quiet $needed
export ASAN_OPTIONS=abort_on_error=1:detect_leaks=1:verify_asan_link_order=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# gRPC, libuv and UCX are not instrumented; UCX would replace mmap behind the sanitizer's back.
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 UCX_MEM_MMAP_HOOK_MODE=none
exec tests/run.sh "$build" $suites
