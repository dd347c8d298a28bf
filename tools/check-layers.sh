#!/usr/bin/env bash
# The layer rule: every #include "..." from the root must be allowed by layers.txt, and external headers
# stay in their home folders. Prints each offence as file:line and exits 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | xargs grep -n '^#include' /dev/null | awk '
  function module_of(path,   best, m) { # longest listed prefix
    best = ""
    for (m in known) if (index(path, m "/") == 1 && length(m) > length(best)) best = m
    return best
  }
  BEGIN {
    while ((getline line < "layers.txt") > 0) {
      if (line ~ /^#/ || line == "") continue
      n = split(line, f, /[ \t]+/)
      known[f[1]] = 1
      for (i = 2; i <= n; i++) allowed[f[1], f[i]] = 1
    }
    # external header: the folders (space-separated prefixes) it may appear in
    home["<uv.h>"] = "common/loop common/http"
    home["<grpc/"] = "common/rpc"
    home["<protobuf-c/"] = "common/rpc"
    home["<ucp/"] = "common/xfer"
    home["<uct/"] = "common/xfer"
    home["<ucs/"] = "common/xfer"
    home["<yaml.h>"] = "common/conf"
    home["<xxhash.h>"] = "common/base"
    home["<llhttp.h>"] = "common/http"
    home["<openssl/ssl.h>"] = "common/http"
    home["<cuda"] = "common/backend kernels/cuda"
    home["<nccl.h>"] = "common/coll"
  }
  {
    split($0, p, ":")
    file = p[1]; where = p[1] ":" p[2]
    mod = module_of(file)
    if (mod == "") { print where ": no line in layers.txt for this folder"; bad = 1; next }
    if (match($0, /"[^"]+"/)) {
      inc = substr($0, RSTART + 1, RLENGTH - 2)
      target = module_of(inc)
      if (inc ~ /\.pb-c\.h$/) target = "proto"
      if (target == "" || target == mod || allowed[mod, "*"] || allowed[mod, target] || allowed[mod, inc]) next
      print where ": " mod " may not include " target " (layers.txt)"; bad = 1
    } else {
      for (h in home) if (index($0, h)) {
        ok = allowed[mod, "*"]
        n = split(home[h], hs, " ")
        for (i = 1; i <= n; i++) if (index(file, hs[i] "/") == 1) ok = 1
        if (!ok) { print where ": " h " has its home in " home[h]; bad = 1 }
      }
    }
  }
  END { exit bad }'
echo "layers: every include is allowed"
