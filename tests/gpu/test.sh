#!/usr/bin/env bash
# All tests that need a GPU: tests/gpu/test.sh BUILD [options of tests/gpu/run.py]. Called by ./dev gpu-test.
#
# The device's operations and engine beside the host's, the cluster with the standard library alone, and then, where the
# test clients are installed, those of tests/integ that compare answers.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=$1
shift
failed=0
case " $* " in *" --help "*) exec python3 tests/gpu/run.py --help ;; esac

step() { # command...
  echo "== $*"
  "$@"
  local rc=$?
  [ $rc = 77 ] && { echo "no GPU here: nothing was tested"; exit 77; }
  [ $rc = 0 ] || failed=1
}

step "$build/tests/check/check_cuda"
step python3 tests/gpu/run.py --build "$build" "$@"
if .deps/venv/bin/python -c "import openai, pytest" 2>/dev/null; then
  export DAMASK_BUILD=$PWD/$build TIKTOKEN_CACHE_DIR=$PWD/.deps/vocab TIKTOKEN_ENCODINGS_BASE=$PWD/.deps/vocab
  case $build in /*) DAMASK_BUILD=$build ;; esac
  step .deps/venv/bin/python -m pytest -q --maxfail=10 --timeout=300 -p no:cacheprovider --backend cuda \
    tests/integ/test_equality.py tests/integ/test_answers.py tests/integ/test_faults.py tests/integ/test_agent.py
fi
[ $failed = 0 ] && echo "gpu-test: all passed"
exit $failed
