#!/usr/bin/env bash
# Decode and prefill beside memory, multipliers and llama.cpp: bench/engine.sh BUILD [options of engine.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .deps/venv/bin/python bench/engine.py "$@"
