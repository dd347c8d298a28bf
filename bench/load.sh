#!/usr/bin/env bash
# The load generator with the commit in its report: bench/load.sh BUILD [options of bench_load]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
shift
exec "$build/bench/load/bench_load" --commit "$(git describe --always --dirty 2>/dev/null || echo unknown)" "$@"
