#!/usr/bin/env bash
# kill -9 of a sweep at 100 random moments, half of them together with its cell: the run files that were there stay as they were, those of a finished sweep in
# the same folder too, no cell is lost, and each kill costs at most the cell that was running. Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
kills=${KVLAB_KILLS:-100} seed=1
RANDOM=$seed
echo "$kills kills, seed $seed"

# A cell as kvlab writes it: under .part, then renamed. Long enough to be hit.
cat >fake <<'SH'
#!/bin/sh
for word; do out=$word; done
echo start >>starts
[ -e "$out" ] && echo "$out" >>twice
set -C
echo content >"$out.part" || exit 1
set +C
for i in 1 2 3 4 5 6 7 8; do echo more; done >>"$out.part"
mv "$out.part" "$out"
SH
chmod +x fake
printf 'name: k\ncommand: cell\nprogram: ./fake\nseeds: [%s]\n' "$(seq -s, 1 1500)" >grid.yaml
"$program" sweep grid.yaml --dry-run --json >cells.json

mkdir -p runs/k
# Run files of a sweep that has ended, where there is a device to make some.
printf 'name: k\ncommand: eval ppl\nmodels: [%s]\ntexts: [%s]\nkv: [f16, int4]\nctx: [64]\noptions: [--chunks=3]\n' "$root/data/models/tiny.gguf" "$root/LICENSE" >ended.yaml
ended=0
if "$program" sweep ended.yaml &>/dev/null; then ended=2; else echo "note: no device, no real run files"; rm -f runs/k/*; fi
find runs -name '*.h5' -exec sha256sum {} + >sums
done_before=$ended hit=0
for ((i = 0; i < kills; i++)); do
    "$program" sweep grid.yaml >/dev/null 2>&1 &
    pid=$!
    sleep "0.$(printf %03d $((RANDOM % 350 + 30)))"
    children=$(pgrep -P $pid || true)
    kill -9 $pid 2>/dev/null && hit=$((hit + 1))
    ((i % 2)) && [[ -n $children ]] && kill -9 $children 2>/dev/null || true
    wait $pid 2>/dev/null || true
    now=$(find runs -name "*.h5" | wc -l)
    ((now >= done_before)) || fail "kill $i: $done_before run files became $now"
    done_before=$now
done
[[ $hit == "$kills" ]] || echo "note: $((kills - hit)) sweeps had ended before their kill"
sleep 0.3 # cells whose sweep died end by themselves
"$program" sweep grid.yaml >out 2>err || fail "the last sweep: $(cat err)"

[[ ! -s sums ]] || sha256sum --quiet --check sums || fail "run files of the sweep that had ended have changed"
while read -r _ file; do grep -q 'status *complete' <("$program" log show "$file") || fail "$file does not open"; mv "$file" .; done <sums
files=$(find runs -name '*.h5' | wc -l) starts=$(wc -l <starts)
[[ $files == 1500 ]] || fail "$files run files of 1500"
[[ ! -e twice ]] || fail "cells ran again that were done: $(cat twice)"
[[ $(find runs -type f ! -name '*.h5' | wc -l) == 0 ]] || fail "left over: $(find runs -type f ! -name '*.h5')"
for file in runs/k/*.h5; do [[ $(wc -l <"$file") == 9 ]] || fail "$file is not whole"; done
((starts - files <= kills)) || fail "$kills kills cost $((starts - files)) cells"
echo "$files cells, $((done_before - ended)) of them before the last sweep; $hit kills cost $((starts - files)) cells"
