#!/usr/bin/env bash
# Runs the suites and ends with one line: N passed, N failed. Called by ./dev test.
#
#   tests/run.sh BUILD [SUITE...]      suites: layers unit check conform sim sim_short python integ deploy eval threads
#
# "sim_short" is a part of sim for builds with sanitizers; "threads" are the C tests in which threads meet, for a build
# with ThreadSanitizer.
# SKIP="NAME..." in front leaves C tests out, SLOW=N gives them N times their time.
# meson runs the C tests (each program is one test, as is each cmocka case inside its log); pytest runs the
# Python ones. Everything is on loopback; no network is used.
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

tests_of() { # suite: the names of its tests without those in SKIP
  meson introspect "$build" --tests | .deps/venv/bin/python -c '
import json, sys
suite, skip = sys.argv[1], sys.argv[2].split()
for t in json.load(sys.stdin):
    if "damask:" + suite in t["suite"] and t["name"] not in skip:
        print(t["name"])' "$1" "${SKIP:-}"
}

run_meson() { # suite test...
  local suite=$1 start=$SECONDS log
  shift
  log=$(mktemp)
  meson test -C "$build" --no-rebuild --print-errorlogs --timeout-multiplier "${SLOW:-1}" "$@" 2>&1 | tee "$log"
  local ok bad
  ok=$(awk '/^Ok: /{print $2}' "$log")
  bad=$(awk '/^(Fail|Timeout|Unexpected Pass): /{n += $NF} END {print n + 0}' "$log")
  rm -f "$log"
  if [ -z "$ok" ]; then
    echo "suite $suite ran no test"
    bad=1
  fi
  count "${ok:-0}" "$bad" "$suite" $((SECONDS - start))
}

run_pytest() { # suite path...
  local suite=$1 start=$SECONDS log
  shift
  log=$(mktemp)
  .deps/venv/bin/python -m pytest -q --maxfail=10 --timeout=300 -p no:cacheprovider "$@" 2>&1 | tee "$log"
  local rc=${PIPESTATUS[0]} last ok bad
  last=$(grep -E '(passed|failed|error)' "$log" | tail -1)
  ok=$(grep -oE '[0-9]+ passed' <<<"$last" | cut -d' ' -f1)
  bad=$(grep -oE '[0-9]+ (failed|error)' <<<"$last" | awk '{n += $1} END {print n + 0}')
  rm -f "$log"
  [ "$rc" = 0 ] || [ "${bad:-0}" -gt 0 ] || bad=1
  count "${ok:-0}" "${bad:-0}" "$suite" $((SECONDS - start))
}

for suite in $suites; do
  echo "== $suite"
  case $suite in
    layers) run_script layers tools/check-layers.sh
      run_script headers tools/check-headers.sh "$build" ;;
    unit | check | conform | sim | sim_short) run_meson "$suite" $(tests_of "$suite") ;;
    threads) run_meson threads $threads ;;
    python) run_pytest python tests/python ;;
    integ) run_meson integ $(tests_of integ)
      run_pytest integ tests/integ ;;
    eval) run_script eval .deps/venv/bin/python tools/eval.py --build "$build" --show ;;
    deploy) run_pytest deploy tests/deploy ;;
    *) echo "tests: no suite '$suite'" >&2; exit 2 ;;
  esac
done

echo
printf '%s\n' "${slowest[@]}"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
