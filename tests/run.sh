#!/usr/bin/env bash
# Runs the suites and ends with one line: N passed, N failed. Called by ./dev test.
#
#   tests/run.sh BUILD [SUITE...]      suites: layers unit check conform sim sim_short python integ deploy eval threads
#
# "sim_short" is a part of sim for builds with sanitizers; "threads" are the C tests in which threads meet, for a build
# with ThreadSanitizer.
# SKIP="NAME..." in front leaves C tests out. SLOW=N gives them N times their time (default 3): the times written in the
# build files suit a quiet machine, and end what hangs.
# meson runs the C tests (each program is one test, as is each cmocka case inside its log); pytest runs the
# Python ones, several files at a time. Everything is on loopback; no network is used.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
shift
suites=${*:-layers unit check conform sim deploy python integ eval}
passed=0
failed=0
slowest=()
export TIKTOKEN_CACHE_DIR=$PWD/.deps/vocab TIKTOKEN_ENCODINGS_BASE=$PWD/.deps/vocab
export DAMASK_BUILD=$PWD/$build
case $build in /*) export DAMASK_BUILD=$build ;; esac

count() { # passed failed suite seconds
  passed=$((passed + $1))
  failed=$((failed + $2))
  slowest+=("$3: $1 passed, $2 failed, $4 s")
}

run_script() { # name command...
  local name=$1 start=$SECONDS
  shift
  if "$@"; then count 1 0 "$name" $((SECONDS - start)); else count 0 1 "$name" $((SECONDS - start)); fi
}

# C tests with more than one thread in them.
threads="mailbox loop obs http rpc worker xferloop backend_team coll_local model_engine_copies
  model_engine_cancel xfer-loopback-emulated xfer-loopback-direct xfer-ucx-tcp"

tests_of() { # suite: its tests without those in SKIP, one a line: priority, name
  meson introspect "$build" --tests | .deps/venv/bin/python -c '
import json, sys
suite, skip = sys.argv[1], sys.argv[2].split()
for t in json.load(sys.stdin):
    if "damask:" + suite in t["suite"] and t["name"] not in skip:
        print(t["priority"], t["name"])' "$1" "${SKIP:-}"
}

run_meson() { # name test...
  local name=$1 start=$SECONDS log
  shift
  echo "== $name"
  log=$(mktemp)
  meson test -C "$build" --no-rebuild --print-errorlogs --timeout-multiplier "${SLOW:-3}" "$@" 2>&1 | tee "$log"
  local ok bad
  ok=$(awk '/^(Ok|Expected Fail): /{n += $NF; any = 1} END {if (any) print n}' "$log")
  bad=$(awk '/^(Fail|Timeout|Unexpected Pass): /{n += $NF} END {print n + 0}' "$log")
  rm -f "$log"
  if [ -z "$ok" ]; then
    echo "$name: no test ran"
    bad=1
  fi
  count "${ok:-0}" "$bad" "$name" $((SECONDS - start))
}

# Files are shared among as many processes as there are cores, four at most: most tests wait for timers of the
# programs that they have started, and each process has clusters of its own.
run_pytest() { # name path...
  local name=$1 start=$SECONDS log processes
  shift
  echo "== $name"
  log=$(mktemp)
  processes=$(($(nproc) < 4 ? $(nproc) : 4))
  .deps/venv/bin/python -m pytest -q --maxfail=10 --timeout=300 -p no:cacheprovider \
    -n $((processes > 1 ? processes : 0)) --dist loadfile --no-loadscope-reorder "$@" 2>&1 | tee "$log"
  local rc=${PIPESTATUS[0]} last ok bad
  last=$(grep -E '(passed|failed|error)' "$log" | tail -1)
  ok=$(grep -oE '[0-9]+ passed' <<<"$last" | cut -d' ' -f1)
  bad=$(grep -oE '[0-9]+ (failed|error)' <<<"$last" | awk '{n += $1} END {print n + 0}')
  rm -f "$log"
  [ "$rc" = 0 ] || [ "${bad:-0}" -gt 0 ] || bad=1
  count "${ok:-0}" "${bad:-0}" "$name" $((SECONDS - start))
}

# All C tests are one run and all Python files another one, so that no core waits for the end of each suite.
c_suites=() c_tests='' py_suites=() py_paths=() scripts=()
for suite in $suites; do
  case $suite in
    layers | eval) scripts+=("$suite") ;;
    unit | check | conform | sim | sim_short | integ | threads)
      found=$(if [ "$suite" = threads ]; then printf '0 %s\n' $threads; else tests_of "$suite"; fi)
      [ -n "$found" ] || { echo "tests: the suite '$suite' has none" >&2; exit 2; }
      c_suites+=("$suite") c_tests+=$found$'\n' ;;
    python | deploy) ;;
    *) echo "tests: no suite '$suite'" >&2; exit 2 ;;
  esac
  case $suite in
    python | deploy | integ) py_suites+=("$suite") py_paths+=("tests/$suite") ;;
  esac
done

case " ${scripts[*]} " in *" layers "*)
  echo "== layers"
  run_script layers tools/check-layers.sh
  run_script headers tools/check-headers.sh "$build" ;;
esac
# Given names, meson begins them in the order of the names.
[ -z "$c_tests" ] || run_meson "C: ${c_suites[*]}" $(sort -s -k1,1nr <<<"$c_tests" | awk 'NF && !seen[$2]++ {print $2}')
[ ${#py_paths[@]} = 0 ] || run_pytest "Python: ${py_suites[*]}" "${py_paths[@]}"
case " ${scripts[*]} " in *" eval "*)
  echo "== eval"
  run_script eval .deps/venv/bin/python tools/eval.py --build "$build" --show ;;
esac

echo
printf '%s\n' "${slowest[@]}"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
