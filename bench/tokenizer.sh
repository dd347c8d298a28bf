#!/usr/bin/env bash
# The tokenizer beside tiktoken: bench/tokenizer.sh BUILD [options of tokenizer.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .deps/venv/bin/python bench/tokenizer.py "$@"
