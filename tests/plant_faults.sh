#!/usr/bin/env bash
# Plants one fault at a time in a copy of the tree and shows that the test named beside it then fails.
#
#   tests/plant_faults.sh [NAME...]      all faults, or those whose name contains one of the words
#
# The copy lies in a temporary folder (KEEP=1 leaves it there); the tree itself is not touched. Only what a
# test needs is built. First each test must pass without a fault. Ends with a table; exit 1 when a fault
# was not found. Not part of the suites: it builds a lot.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
work=$(mktemp -d "${TMPDIR:-/tmp}/damask-plant.XXXXXX")
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
limit=${LIMIT:-300}

# name ~ files ~ perl substitution, which must change each file ~ test's program ~ its arguments
faults() {
  cat <<'END'
quiet rule, table: a deadline frees~common/xfer/receive_state.c~s/(EVENT\(DEADLINE\), STATE\(CLAIMED\),\s+ANY, )STATE\(DRAINING\),(\s+)DO\(TELL_FAILED\)/${1}STATE(FORGOTTEN),${2}DO(TELL_FAILED) | DO(FREE)/~tests/sim/explore~lane=direct
quiet rule, table: the break frees (direct)~common/xfer/receive_state.c~s/\{EVENT\(EP_GONE\), STATE\((CLAIMED|DRAINING)\),\s+ALL_OF\(IF\(DIRECT\)\).*\n//g~tests/sim/explore~lane=direct cut=1
quiet rule, driver: the word frees before the endpoint is closed~common/xfer/receiver.c~s/feed\(rx, t, DMK_RECEIVE_EV_CLOSED_WORD, 0,/feed(rx, t, DMK_RECEIVE_EV_CLOSED_WORD, DMK_RECEIVE_IF_DIRECT,/~tests/sim/sim~--schedules 8000
quiet rule, sender: terminal before the puts have ended~common/xfer/sender_io.c~s/job->n_in_flight > 0 \|\| job->flushing\)/false)/; s/if \(job->retired\) \{/if (job->state == DMK_SEND_FAILING) {/~tests/sim/sim~--schedules 8000
incarnation check, D: a claim for an older start~common/xfer/receiver_drive.c~s/m->to_incarnation == rx->conf.incarnation \? DMK_RECEIVE_IF_D_EQUAL : 0/DMK_RECEIVE_IF_D_EQUAL/~tests/unit/xfer/test_sides~
incarnation check, table: a claim of an older P~common/xfer/receive_state.c~s/IF\(P_CURRENT\) \| IF\(WATCHED\)/IF(WATCHED)/~tests/unit/xfer/test_receive_state~
incarnation check, D: a terminal of another P~common/xfer/receiver_drive.c~s/current = m->from_incarnation == t->p_incarnation;/current = true;/~tests/unit/xfer/test_sides~
page equation: a returned page counts as draining~common/kv/pool.c~s/    p->leases--;\n    p->draining = false;/    p->leases--;/~tests/unit/kv/test_kv_pool~
page equation: drained pages are never released~decode/tickets.c~s/(seq->state == SEQ_DRAINING\) \{\n\s+)dmk_decode_seq_release\(core, seq\);/${1}seq->quiet = true;/~tests/sim/sim~--schedules 500
sink once: the plain kernel leaves it out~kernels/ref/attn.c~s/l = 1\.0f/l = 0.0f/~tests/check/check~
sink once: both kernels count it twice~kernels/ref/attn.c kernels/cpu/attn_tmpl.h~s/l = 1\.0f/l = 2.0f/; s/s->l\[t\]\[h\] = 1\.0f/s->l[t][h] = 2.0f/~tests/vectors/test_vectors~tiny
window edge: the fast kernel sees one key more~kernels/cpu/attn_tmpl.h~s/p \+ 1 > a->window \? p \+ 1 - a->window : 0/p > a->window ? p - a->window : 0/~tests/check/check~
window edge: both kernels see one key more~kernels/ref/attn.c kernels/cpu/attn_tmpl.h~s/p \+ 1 > a->window \? p \+ 1 - a->window : 0/p > a->window ? p - a->window : 0/~tests/vectors/test_vectors~wide
reduction order: ranks are added in another tree~common/coll/local.c~s/leaf\[2 \* r\]\[i\] \+ leaf\[2 \* r \+ 1\]\[i\]/leaf[r][i] + leaf[r + width \/ 2][i]/~tests/unit/coll/test_coll_local~
reduction order: a rank that got no row leaves out its +0~common/coll/local.c~s/src\[r\]\[i\] : 0\.0f/src[r][i] : -0.0f/~tests/unit/coll/test_coll_local~
reduction order: partial sums of groups in another order~common/coll/local.c~s/src\[r\] = place == /src[(r + 1) % coll->n_ranks] = place == /~tests/unit/coll/test_coll_local~
reduction order: a row of another group is answered~common/coll/local.c~s/places\[r\] = places_of\(coll, r, group\)/places[r] = places_of(coll, r, 0)/~tests/unit/model/test_model_engine~test_groups
reduction order: slices are added in another tree~kernels/cpu/dot_tmpl.h~s/out\[2 \* s\]\[i\] \+ out\[2 \* s \+ 1\]\[i\]/out[s][i] + out[s + width \/ 2][i]/~tests/check/check~
device ranks: sums are read without a meeting~common/model/device_step.c~s/meet_groups\(engine\);\n/\n/~tests/unit/model/test_model_device~
device ranks: rows are read without a meeting~common/model/device_step.c~s/(layout\.dp > 1\) \{\n\s+)meet\(engine->ranks, engine->n_ranks\);/$1/~tests/unit/model/test_model_device~
device ranks: both sums of a layer share memory~common/model/device_forward.c~s/a->part, n_rows/a->sum, n_rows/; s/acts\.part \+ \(size_t\)first/acts.sum + (size_t)first/~tests/unit/model/test_model_device~
device ranks: a meeting has the number of the one before~common/model/device_forward.c~s/layer \* DMK_MEETINGS \+ which \+ 1/which + 1/~tests/unit/model/test_model_device~
sharing: a hit is a hash alone~common/kv/prefix.c~s/node->parent == parent &&\s+memcmp\(node->ids, ids, sizeof\(node->ids\)\) == 0/node->parent == parent/~tests/unit/kv/test_kv_prefix_weak_hash~
sharing: a decode worker does without the salt~decode/admit.c~s/numerics, r->salt\)/numerics, (struct dmk_bytes){0})/~tests/unit/prefill/test_prefill_core~
sharing: a prefill worker does without the salt~prefill/request.c~s/numerics, request->salt\)/numerics, (struct dmk_bytes){0})/~tests/unit/prefill/test_prefill_core~
cancel: a step that runs does not hear of it~prefill/job.c~s/atomic_store_explicit\(&core->step.cancel, true, memory_order_relaxed\);/(void)0;/g~tests/unit/prefill/test_prefill_core~
END
}

wanted() { # name
  [ ${#words[@]} = 0 ] && return 0
  local word
  for word in "${words[@]}"; do [[ $1 == *"$word"* ]] && return 0; done
  return 1
}

run_test() { # program arguments; the status of the test, its words in $work/out
  (cd "$work/tree" && timeout "$limit" "build/$1" $2 >"$work/out" 2>&1)
}

words=("$@")
mkdir "$work/tree"
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xf - -C "$work/tree"
if [ -e .deps ]; then ln -s "$(readlink -f .deps)" "$work/tree/.deps"; fi
(cd "$work/tree" && meson setup build -Ddeps_dir="$work/tree/.deps" >"$work/meson.log" 2>&1) || {
  tail -20 "$work/meson.log"
  exit 2
}

declare -A passes
rows=()
missed=0
while IFS='~' read -r name files expression program arguments; do
  wanted "$name" || continue
  key="$program $arguments"
  if [ -z "${passes[$key]:-}" ]; then
    ninja -C "$work/tree/build" --quiet "$program" >"$work/ninja.log" 2>&1 || { tail -20 "$work/ninja.log"; exit 2; }
    if ! run_test "$program" "$arguments"; then
      tail -20 "$work/out"
      echo "plant_faults: '$key' fails without any fault" >&2
      exit 2
    fi
    passes[$key]=1
  fi
  for file in $files; do
    perl -0pi -e "$expression" "$work/tree/$file"
    if cmp -s "$work/tree/$file" "$root/$file"; then
      echo "plant_faults: '$name' does not change $file any more" >&2
      exit 2
    fi
  done
  if ! ninja -C "$work/tree/build" --quiet "$program" >"$work/ninja.log" 2>&1; then
    verdict="DOES NOT BUILD"
    missed=$((missed + 1))
  else
    rc=0
    run_test "$program" "$arguments" || rc=$?
    case $rc in
      0) verdict="NOT FOUND" missed=$((missed + 1)) ;;
      124) verdict="OUT OF TIME" missed=$((missed + 1)) ;;
      *) verdict=found ;;
    esac
  fi
  word=$(grep -aE 'S[1-5]:|L[123]|^seed |\[  FAILED  \]|^FAIL|differ|Assertion|assert' "$work/out" | head -1 | cut -c1-90 || true)
  rows+=("$(printf '%-66s %-34s %s' "$name" "${program##*/} $arguments" "$verdict  $word")")
  echo "${rows[-1]}"
  for file in $files; do cp "$root/$file" "$work/tree/$file"; done
done < <(faults)

echo
printf '%-66s %-34s %s\n' fault test verdict
printf '%s\n' "${rows[@]}"
echo "${#rows[@]} faults planted, $missed not found"
[ "$missed" = 0 ]
