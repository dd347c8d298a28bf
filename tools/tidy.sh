#!/usr/bin/env bash
# Style is a test: layers, format, size limits, banned calls, documents that name files which exist, and
# clang-tidy on the sources of the last build.
#
#   tools/tidy.sh BUILD [--fast]      --fast leaves clang-tidy out
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build}
fast=${2:-}
bad=0

fail() {
  printf 'tidy: %s\n' "$*"
  bad=1
}

files() { git ls-files -co --exclude-standard "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }

tools/check-layers.sh || bad=1

unformatted=$(files '*.c' '*.h' | xargs clang-format --dry-run -Werror 2>&1 | grep -E '^[^ ]+:[0-9]+' | cut -d: -f1 | sort -u)
[ -z "$unformatted" ] || fail "not formatted (run ./dev fmt): $(tr '\n' ' ' <<<"$unformatted")"

# Size limits; generated tables are exempt.
while read -r n f; do
  [ "$f" = total ] && continue
  case $f in *_tables.c | *_table.h) continue ;; esac
  case $f in
    tests/*) limit=1000 ;;
    *.h) limit=300 ;;
    *) limit=700 ;;
  esac
  [ "$n" -le "$limit" ] || fail "$f has $n lines, the limit is $limit: it holds two things"
done < <(files '*.c' '*.h' | xargs wc -l)

banned='\b(strcpy|strcat|sprintf|gets|atoi|atol|atof|rand|srand|alloca|strtok)\('
grep -nE "$banned" $(files '*.c' '*.h') && fail "banned calls (above): use the bounded or checked form"
grep -nE '\bgetenv\(' $(files '*.c' '*.h' | grep -Ev '^(common/conf|tests)/') && fail "getenv belongs to common/conf"
grep -nE '^#\s*if(def|ndef)? ' $(files 'router/*.c' 'prefill/*.c' 'decode/*.c' 'common/worker/*.c') &&
  fail "conditional compilation at a call site: use a stub file"

# Every path that a document names in backquotes, with a slash and an ending, exists.
while IFS=: read -r doc path; do
  [ -e "$path" ] || fail "$doc names $path, which does not exist"
done < <(grep -oE '`[a-z_]+(/[A-Za-z0-9_.-]+)+\.(c|h|md|py|sh|txt|proto|yaml|build)`' $(files '*.md') | sed 's/`//g' | sort -u)

for p in $(files '*.md'); do
  grep -nE '\bTODO\b|\bFIXME\b|\bXXX\b' "$p" && fail "$p has notes to self"
done

if [ "$fast" != --fast ] && [ -f "$build/compile_commands.json" ]; then
  sources=$(files 'common/*.c' 'router/*.c' 'prefill/*.c' 'decode/*.c' 'tools/*.c' |
    grep -Ev '_tables\.c$|_stub\.c$')
  present=$(for f in $sources; do grep -q "$f\"" "$build/compile_commands.json" && echo "$f"; done)
  out=$(printf '%s\n' $present | xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p "$build" 2>/dev/null | grep -E '(warning|error):' | sort -u)
  [ -z "$out" ] || { printf '%s\n' "$out" | head -40; fail "clang-tidy has $(wc -l <<<"$out") complaints"; }
fi

[ "$bad" = 0 ] && echo "tidy: clean"
exit $bad
