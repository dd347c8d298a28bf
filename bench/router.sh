#!/usr/bin/env bash
# What the router costs, with mock workers: bench/router.sh BUILD [options of router.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .deps/venv/bin/python bench/router.py "$@"
