#!/usr/bin/env bash
# Fuzzes every target for some seconds, as many at once as there are cores; called by ./dev fuzz.
#
#   tools/fuzz.sh [SECONDS] [TARGET...]       default: 30 seconds, all targets of tests/fuzz
#
# Builds with clang into build-fuzz (FUZZ_BUILD=DIR: another folder), with ASan and UBSan. New inputs that reach
# new code stay in build-fuzz/corpus/TARGET; what fails goes to build-fuzz/crashes, and the command that
# shows it again is printed. An input that has not ended after a minute is a fault, and so is one that computes for ten
# seconds: a machine that is busy with something else is none. Ends with: N passed, N failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${FUZZ_BUILD:-build-fuzz}
seconds=30
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
  seconds=$1
  shift
fi

[ -f "$build/build.ninja" ] ||
  CC=clang meson setup "$build" -Ddeps_dir="$PWD/.deps" -Dfuzz=true -Dcuda=disabled -Db_lundef=false -Dwerror=true >/dev/null
ninja -C "$build" --quiet fuzzers
all=$(cd "$build/tests/fuzz" && find . -maxdepth 1 -name 'fuzz_*' -type f -perm -u+x | sed 's,./fuzz_,,' | sort)
targets=${*:-$all}
mkdir -p "$build/crashes" "$build/logs"

run_target() { # build seconds target
  local build=$1 seconds=$2 name=$3 rc=0
  local log=$build/logs/fuzz-$name.log own=$build/corpus/$name
  mkdir -p "$own"
  # Memory is bounded so that a bad bound shows.
  "$build/tests/fuzz/fuzz_$name" -max_total_time="$seconds" -timeout=60 -report_slow_units=10 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="$build/crashes/$name-" "$own" "tests/fuzz/corpus/$name" \
    >"$log" 2>&1 || rc=$?
  local runs cov
  runs=$(awk '/^stat::number_of_executed_units:/{print $2}' "$log")
  cov=$(grep -aoE 'cov: [0-9]+ ft: [0-9]+' "$log" | tail -1 || true)
  printf '%-12s %9s executions  %s\n' "$name" "${runs:-0}" "$cov"
  local find took TIMEFORMAT=%U
  for find in "$build/crashes/$name"-slow-unit-*; do
    [ -f "$find" ] || continue
    took=$( (time "$build/tests/fuzz/fuzz_$name" -timeout=60 "$find" >>"$log" 2>&1) 2>&1) || rc=1
    if [ "${took%%.*}" -ge 10 ]; then
      echo "$name: one input takes $took s; again: $build/tests/fuzz/fuzz_$name $find"
      rc=1
    else
      rm "$find" # the machine was slow, not the input
    fi
  done
  [ "$rc" != 0 ] || return 0
  tail -40 "$log"
  for find in $(grep -aoE 'Test unit written to .*' "$log" | sed 's/.* to //'); do
    echo "again: $build/tests/fuzz/fuzz_$name $find"
  done
  return 1
}
export -f run_target

for name in $targets; do
  [ -x "$build/tests/fuzz/fuzz_$name" ] || { echo "fuzz: no target '$name'; there are:" $all >&2; exit 2; }
done
failed=$(mktemp)
trap 'rm -f "$failed"' EXIT
# shellcheck disable=SC2086
printf '%s\n' $targets |
  xargs -P "$(nproc)" -I{} bash -c "run_target '$build' '$seconds' '{}' || echo {} >>'$failed'"
n=$(wc -w <<<"$targets")
bad=$(wc -l <"$failed")
echo "$((n - bad)) passed, $bad failed"
[ "$bad" = 0 ]
