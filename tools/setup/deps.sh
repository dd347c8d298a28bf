#!/usr/bin/env bash
# Brings everything that a build and the tests need; run by ./dev before other commands, and by itself
# again only for what is missing. Network is used for three things: Debian packages, two wheels (UCX and
# the vocabulary, pinned by hash, kept in the download cache), and the Python test clients.
#
#   .deps/ucx/     UCX 1.22.0: include, lib, lib/pkgconfig (prefix rewritten)
#   .deps/vocab/   o200k_base.tiktoken, checked against its SHA-256
#   .deps/venv/    Python with the test clients of tests/requirements.txt
#   .deps/oss-harmony/   oss-harmony 0.0.11, for comparison
#   .deps/bin/     promtool
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
deps=$root/.deps
cache=${XDG_CACHE_HOME:-$HOME/.cache}/damask/downloads

build_packages="build-essential pkg-config git ca-certificates meson ninja-build libuv1-dev libgrpc-dev
  libprotobuf-c-dev protobuf-c-compiler libprotobuf-dev node-llhttp libjansson-dev libxxhash-dev
  libyaml-dev libssl-dev zlib1g-dev python3 python3-venv"
test_packages="libcmocka-dev clang libclang-rt-14-dev clang-format clang-tidy yamllint curl iproute2"

ucx_wheel=libucx_cu13-1.22.0-py3-none-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl
ucx_sha=c6e0aaa82dc6e49dc3ddaac465b530e014f48b6c1c6b5ae74fbdd199d824351b
vocab_wheel=bpe_openai-0.1.4-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl
vocab_wheel_sha=91dde48b7c27a155ec94563ef488d95267bd17e2e8db360aba299ca9819335ba
vocab_sha=446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d

say() { printf '== %s\n' "$*" >&2; }

# One set-up at a time for a checkout.
mkdir -p "$deps" "$cache"
exec 8>"$deps/.lock"
flock 8

apt_missing() {
  local missing=()
  for p in $build_packages $test_packages; do
    dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
  done
  printf '%s ' "${missing[@]}"
}

install_packages() {
  local missing sudo=
  missing=$(apt_missing)
  [ -n "${missing// /}" ] || return 0
  [ "$(id -u)" = 0 ] || sudo=sudo
  say "installing Debian packages: $missing"
  $sudo apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >"$deps/apt.log" 2>&1 ||
    { tail -5 "$deps/apt.log" >&2; say "apt-get failed; the whole log is in $deps/apt.log"; return 1; }
}

python() { # a Python that has venv and pip
  if [ -x /usr/bin/python3 ]; then echo /usr/bin/python3; else command -v python3; fi
}

make_venv() {
  local want
  want=$(sha256sum "$root/tests/requirements.txt" | cut -d' ' -f1)
  [ "$(cat "$deps/venv/.requirements" 2>/dev/null)" != "$want" ] || return 0
  say "installing the Python test clients into .deps/venv"
  rm -rf "$deps/venv"
  "$(python)" -m venv "$deps/venv"
  "$deps/venv/bin/pip" install -q --disable-pip-version-check -r "$root/tests/requirements.txt"
  echo "$want" >"$deps/venv/.requirements"
}

fetch_wheel() { # requirement file sha256
  local requirement=$1 file=$2 sha=$3
  if ! [ -f "$cache/$file" ]; then
    say "fetching $requirement"
    "$deps/venv/bin/pip" download -q --disable-pip-version-check --no-deps -d "$cache" "$requirement"
  fi
  echo "$sha  $cache/$file" | sha256sum -c --quiet - >/dev/null 2>&1 ||
    { rm -f "$cache/$file"; say "$file does not have the pinned SHA-256 $sha; it was removed, run ./dev deps again"; return 1; }
}

unpack_ucx() {
  [ "$(cat "$deps/ucx/.wheel" 2>/dev/null)" != "$ucx_sha" ] || [ ! -d "$deps/libucx_cu13.libs" ] || return 0
  fetch_wheel libucx-cu13==1.22.0 $ucx_wheel $ucx_sha
  rm -rf "$deps/ucx" "$deps/ucx.tmp"
  "$(python)" -m zipfile -e "$cache/$ucx_wheel" "$deps/ucx.tmp"
  mv "$deps/ucx.tmp/libucx" "$deps/ucx"
  # What the CUDA modules of the wheel load, where their run path looks for it.
  rm -rf "$deps/libucx_cu13.libs"
  mv "$deps/ucx.tmp/libucx_cu13.libs" "$deps/"
  rm -rf "$deps/ucx.tmp"
  for pc in "$deps"/ucx/lib/pkgconfig/*.pc; do
    sed -i "s|^prefix *=.*|prefix=$deps/ucx|; s|^exec_prefix *=.*|exec_prefix=\${prefix}|" "$pc"
  done
  echo $ucx_sha >"$deps/ucx/.wheel"
}

unpack_vocab() {
  [ "$(cat "$deps/vocab/.sha" 2>/dev/null)" != "$vocab_sha" ] || return 0
  fetch_wheel bpe-openai==0.1.4 $vocab_wheel $vocab_wheel_sha
  rm -rf "$deps/vocab" "$deps/vocab.tmp"
  "$(python)" -m zipfile -e "$cache/$vocab_wheel" "$deps/vocab.tmp"
  mkdir -p "$deps/vocab"
  gunzip -c "$deps/vocab.tmp/bpe_openai/data/o200k_base.tiktoken.gz" >"$deps/vocab/o200k_base.tiktoken"
  rm -rf "$deps/vocab.tmp"
  echo "$vocab_sha  $deps/vocab/o200k_base.tiktoken" | sha256sum -c --quiet -
  # The name under which tiktoken's own cache looks for the file.
  ln -sf o200k_base.tiktoken "$deps/vocab/fb374d419588a4632f3f557e76b4b70aebbca790"
  echo $vocab_sha >"$deps/vocab/.sha"
}

# A fork of openai-harmony with the same module's name: beside the venv, for a process of its own.
install_oss_harmony() {
  [ "$(cat "$deps/oss-harmony/.version" 2>/dev/null)" != 0.0.11 ] || return 0
  say "installing oss-harmony into .deps/oss-harmony"
  rm -rf "$deps/oss-harmony"
  "$deps/venv/bin/pip" install -q --disable-pip-version-check --no-deps --target "$deps/oss-harmony" oss-harmony==0.0.11
  echo 0.0.11 >"$deps/oss-harmony/.version"
}

unpack_promtool() {
  [ ! -x "$deps/bin/promtool" ] || return 0
  if command -v promtool >/dev/null; then
    mkdir -p "$deps/bin" && ln -sf "$(command -v promtool)" "$deps/bin/promtool"
    return 0
  fi
  say "fetching promtool"
  mkdir -p "$deps/bin" "$deps/promtool.tmp"
  (cd "$deps/promtool.tmp" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . )
  mv "$deps/promtool.tmp/usr/bin/promtool" "$deps/bin/promtool"
  rm -rf "$deps/promtool.tmp"
}

install_packages
make_venv
unpack_ucx
unpack_vocab
install_oss_harmony
unpack_promtool
