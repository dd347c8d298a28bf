#!/usr/bin/env bash
# Runs the benchmarks that are built: bench/run.sh BUILD [NAME...], or one with its options: bench/run.sh BUILD NAME
# --OPTION... Each prints machine, command, commit, spread and a limit or a peer from the same run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
shift
all=(tokenizer sample grammar xfer engine router)
run() { # name options...
  echo "== $*"
  if [ -x "bench/$1.sh" ]; then "bench/$1.sh" "$build" "${@:2}"; return; fi
  [ -x "$build/bench/bench_$1" ] ||
    { echo "bench: no benchmark is called '$1'; there are ${all[*]}, and load" >&2; exit 2; }
  "$build/bench/bench_$1" "${@:2}"
}

[ $# -gt 0 ] || set -- "${all[@]}"
echo "machine: $(sed -n '/^model name/{s/.*: //p;q}' /proc/cpuinfo), $(nproc) CPUs, $(uname -sr), load $(cut -d' ' -f1 /proc/loadavg)"
echo "commit: $(git describe --always --dirty 2>/dev/null || echo unknown)"
echo "command: ./dev bench $*"
case " $* " in
  *" -"*) run "$@" ;;
  *) for name in "$@"; do run "$name"; done ;;
esac
