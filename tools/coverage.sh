#!/usr/bin/env bash
# Line coverage of the C suites, a line per folder; called by ./dev coverage.
#
#   tools/coverage.sh [SUITE...]      default: unit check conform sim integ (the C tests of it)
#
# Builds with gcov's counters into build-cov, runs the tests, and counts the lines of every .c file outside of
# tests/ and tools/ that was compiled. A test that fails is told and does not hide the table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build-cov
suites=${*:-unit check conform sim integ}

[ -f "$build/build.ninja" ] || meson setup "$build" -Ddeps_dir="$PWD/.deps" -Db_coverage=true -Dcuda=disabled >/dev/null
ninja -C "$build" --quiet
find "$build" -name '*.gcda' -delete
args=()
for suite in $suites; do args+=(--suite "$suite"); done
meson test -C "$build" --no-rebuild --timeout-multiplier 3 "${args[@]}" | grep -E 'FAIL|TIMEOUT|^Ok:|^Fail:' || true

# gcov says for each file:  File '../common/x.c' / Lines executed:93.33% of 30
cd "$build"
find . -name '*.gcno' -path '*lib*' -print0 | xargs -0 gcov -n 2>/dev/null | awk -F"'" '
  /^File / { file = $2; sub(/^\.\.\//, "", file); next }
  /^Lines executed:/ {
    if (file ~ /^(common|router|prefill|decode|kernels)\/.*\.c$/) {
      split($0, part, /[:% ]+/)
      folder = file
      sub(/\/[^\/]*$/, "", folder)
      n = part[length(part)]
      lines[folder] += n; hit[folder] += n * part[3] / 100
      all += n; all_hit += n * part[3] / 100
    }
    file = ""
  }
  END {
    for (f in lines) printf "%-20s %6d lines  %5.1f %%\n", f, lines[f], 100 * hit[f] / lines[f] | "sort"
    close("sort")
    if (all > 0) printf "%-20s %6d lines  %5.1f %%\n", "all", all, 100 * all_hit / all
    exit all == 0
  }'
