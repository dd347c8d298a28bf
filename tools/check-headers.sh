#!/usr/bin/env bash
# Every header compiles alone: it includes what it uses. tools/check-headers.sh BUILD
#
# Left out: kernels/cpu and kernels/cuda, whose headers are templates over the vectors or the device of the
# file that includes them, and headers of tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build}
git ls-files -co --exclude-standard '*.h' | grep -Ev '^(kernels/cpu|kernels/cuda|tests)/' |
  xargs -P "$(nproc)" -I{} gcc -std=c17 -D_GNU_SOURCE -w -fsyntax-only -I. -I"$build" -I"$build/proto" \
    -isystem /usr/share/include/llhttp -isystem .deps/ucx/include -include {} -x c /dev/null ||
  { echo "headers: the ones above do not compile alone"; exit 1; }
echo "headers: each compiles alone"
