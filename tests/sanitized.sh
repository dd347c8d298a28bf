#!/usr/bin/env bash
# Builds with a sanitizer and runs the C suites: tests/sanitized.sh address,undefined | thread
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:-address,undefined}
build=${BUILD:-build-asan}
[ -f "$build/build.ninja" ] ||
  meson setup "$build" -Ddeps_dir="$PWD/.deps" -Db_sanitize="$kind" -Db_lundef=false -Dwerror=true >/dev/null
ninja -C "$build" --quiet
export ASAN_OPTIONS=abort_on_error=1:detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1
exec tests/run.sh "$build" unit check conform
