#!/usr/bin/env bash
# Page transfer over tcp and shared memory beside memcpy: bench/xfer.sh BUILD; between GPU memories: bench/xfer.sh
# BUILD --device or --two-devices
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
git diff --quiet HEAD 2>/dev/null || commit="$commit, with changes"
exec "$1/bench/bench_xfer" "${@:2}" "$commit"
