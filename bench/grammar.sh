#!/usr/bin/env bash
# The cost of constraints for each token: bench/grammar.sh BUILD.
set -euo pipefail
echo "commit $(git rev-parse --short HEAD)"
"$1/bench/bench_grammar" "${DAMASK_VOCAB:-.deps/vocab}"
