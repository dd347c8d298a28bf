#!/usr/bin/env bash
# Decode and prefill of a checkpoint of several GB with the 20b geometry (6 layers, random weights), made
# once: bench/engine.sh BUILD [options of bench_engine]. DMK_BENCH_DIR says where the checkpoint is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
shift
dir=${DMK_BENCH_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/damask/bench}
model=$dir/gpt-oss-20b-6-layers
if [ ! -f "$model/config.json" ]; then
  mkdir -p "$dir"
  rm -rf "$model.part"
  "$build/tools/damask" tinymodel --preset gpt-oss-20b --layers 6 --out "$model.part"
  mv "$model.part" "$model"
fi
"$build/bench/bench_engine" --model "$model" --commit "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" "$@"
