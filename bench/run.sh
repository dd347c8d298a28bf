#!/usr/bin/env bash
# Runs the benchmarks that are built: bench/run.sh BUILD [NAME...]. Each prints machine, command, commit, spread
# and a limit or a peer from the same run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
shift
all=(tokenizer sample grammar xfer engine router)
[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do
  echo "== $name"
  if [ -x "bench/$name.sh" ]; then "bench/$name.sh" "$build"; else "$build/bench/bench_$name"; fi
done
