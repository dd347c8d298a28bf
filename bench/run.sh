#!/usr/bin/env bash
# Runs the benchmarks that are built; each prints machine, command, commit, spread and a limit or a peer of the same run.
#
#   bench/run.sh BUILD [NAME...]             those, or all but the last two
#   bench/run.sh BUILD NAME --OPTION...      one with its options
#
#   tokenizer   text to ids, beside tiktoken
#   sample      a row of logits to a token, by the sampler's options
#   grammar     masks of constraints
#   xfer        pages between two processes, beside memcpy
#   engine      decode and prefill on the host, beside its memory, its multipliers and llama.cpp
#   router      its CPU time for prompts and streamed tokens, with mock workers behind it
#   load        load on a server that runs, or a trace replayed (load --help)
#   device      steps and prompts of models of full size on a GPU (device --help)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
shift
all=(tokenizer sample grammar xfer engine router)
run() { # name options...
  echo "== $*"
  if [ -x "bench/$1.sh" ]; then "bench/$1.sh" "$build" "${@:2}"; return; fi
  [ -x "$build/bench/bench_$1" ] ||
    { echo "bench: no benchmark is called '$1'; there are ${all[*]}, load, and device (a GPU)" >&2; exit 2; }
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
