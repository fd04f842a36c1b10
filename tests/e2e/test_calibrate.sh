#!/usr/bin/env bash
# kvlab calibrate with the tiny model: the table is made, used, recorded, and refused where it does not belong. Called with the program and
# the project's root.
set -euo pipefail
program=$1 root=$2
model=$root/data/models/tiny.gguf text=$root/README.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
# WANTED-EXIT-CODE PART-OF-THE-MESSAGE ARGUMENTS...
refused() {
    local wanted=$1 part=$2 rc=0
    shift 2
    "$program" "$@" >out 2>err || rc=$?
    [[ $rc == "$wanted" ]] && grep -qF -- "$part" err || fail "$*: exit code $rc, wanted $wanted and \"$part\": $(cat err)"
}
calibrate() { "$program" calibrate -m "$model" -f "$text" -c 64 "$@"; }
eval_kld() { "$program" eval kld -m "$model" -f "$text" -c 64 --exact "$@"; }

"$program" devices >/dev/null 2>&1 || { echo "no OpenCL device"; exit 77; }
calibrate --chunks 6 --first-chunk 6 --for "kvquant rope=pre sink=1" -o t.h5 --json >made.json 2>/dev/null
grep -q "\"n_tokens\":[[:space:]]*378" made.json || fail "6 windows of 63 tokens behind the sink: $(cat made.json)"
sum=$(sha256sum t.h5 | cut -d' ' -f1)
grep -q "$sum" made.json || fail "sha256 of the table"

# Made again it is the same table.
calibrate --chunks 6 --first-chunk 6 --for "kvquant rope=pre sink=1" -o again.h5 >/dev/null 2>&1
cmp t.h5 again.h5 || fail "two calibrations on the same text differ"
[[ ! -e t.h5.part ]] || fail "a part is left"

# It serves, with its digest in the run file; 4 bits beat 2.
eval_kld --chunks 2 --kv "kvquant rope=pre sink=1 table=t.h5" -o run.h5 >three 2>/dev/null
"$program" log show run.h5 >shown
grep -q "$sum" shown || fail "the run file has no sha256 of the table"
for bits in 2 4; do
    calibrate --chunks 6 --first-chunk 6 --for "kvquant(bits=$bits) rope=pre sink=1" -o "t$bits.h5" >/dev/null 2>&1
    eval_kld --chunks 2 --no-run-file --kv "kvquant(bits=$bits) rope=pre sink=1 table=t$bits.h5" >"kld$bits" 2>/dev/null
done
awk '/^kld/ {print $2}' kld4 three kld2 | sort -cg || fail "divergence at 4, 3 and 2 bits: $(grep -h ^kld kld4 three kld2)"

refused 2 "kvlab calibrate" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv kvquant
refused 2 "form rope=pre" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv "kvquant table=t.h5"
refused 2 "codec kvquant(bits=3" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv "kvquant(bits=4) rope=pre table=t.h5"
refused 1 "none.h5" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv "kvquant table=none.h5"
refused 1 "cannot open as a calibration table" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv "kvquant table=$text"
refused 1 "" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv "kvquant table=run.h5"
refused 2 "exists already" calibrate -m "$model" -f "$text" -c 64 --for kvquant -o t.h5
refused 2 "neither int4 nor int4 needs a table" calibrate -m "$model" -f "$text" -c 64 --for int4 -o u.h5
refused 2 "a table serves one setting" calibrate -m "$model" -f "$text" -c 64 --for "kvquant @0-0 int4" -o u.h5
refused 2 "sink=64 leaves nothing" calibrate -m "$model" -f "$text" -c 64 --for "kvquant sink=64" -o u.h5
[[ ! -e u.h5 && ! -e u.h5.part ]] || fail "a refused calibration left a file"

# A projection's table serves every rank and codec; more directions lose less, all of them nothing.
calibrate --chunks 6 --first-chunk 6 --for "latent rope=pre" -o l.h5 >/dev/null 2>&1
for rank in 32 24 16 8; do
    eval_kld --chunks 2 --no-run-file --kv "latent(rank=$rank,of=f32) rope=pre rot=hadamard table=l.h5" 2>/dev/null | awk '/^kld/ {print $2}'
done >by_rank
sort -cg by_rank || fail "divergence at ranks 32, 24, 16 and 8: $(cat by_rank)"
awk 'NR == 1 && $1 >= 1e-4 {exit 1}' by_rank || fail "all directions change the logits: $(cat by_rank)"
eval_kld --chunks 2 --no-run-file --kv "latent(rank=32) rope=pre table=l.h5" 2>/dev/null | awk '/^kld/ {exit $2 < 1e-4 ? 0 : 1}' || fail "all directions in f16 against f16"
# Ranks by layer: a mean rank costs at most what the same rank everywhere does, and a larger share of energy more.
bytes_of() { "$program" plan -m "$model" -c 64 --kv "$1 rope=pre table=l.h5" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["bytes_per_token"])'; }
equal=$(bytes_of "latent(rank=24)") spread=$(bytes_of "latent(rank=24,spread)") whole=$(bytes_of "latent(energy=1)")
(( spread <= equal && spread > equal * 2 / 3 )) || fail "ranks that are 24 on average: $spread bytes, rank 24 $equal"
(( $(bytes_of "latent(energy=0.5)") < $(bytes_of "latent(energy=0.9)") && whole == $(bytes_of "latent(rank=32)") )) || fail "bytes of shares of energy"
eval_kld --chunks 2 --no-run-file --kv "latent(energy=0.9,of=f32) rope=pre table=l.h5" >by_energy 2>/dev/null || fail "ranks by energy: $(cat by_energy)"
refused 2 "use one of them" plan -m "$model" -c 64 --kv "latent(energy=0.9,spread)"
refused 2 "16 channels" plan -m "$model" -c 64 --kv "latent(rank=8,spread) rope=pre table=l.h5"
refused 2 "form rope=pre" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv "latent table=l.h5"
refused 2 "streams with" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --kv "latent(rank=8,heads=2) rope=pre table=l.h5"
# Layers that share latents: the table is of groups of layers; behind a compressed prompt more directions lose less, all of them nothing.
calibrate --chunks 6 --first-chunk 6 --for "latent(layers=3,heads=2) rope=pre" -o s.h5 >/dev/null 2>&1
shared() { "$program" eval kld -m "$model" -f "$text" --exact --protocol compress-then-score --context 32 --score 32 --chunks 2 --no-run-file --base f16 --kv "$1" 2>err; }
for rank in 192 96 48 16; do shared "latent(rank=$rank,layers=3,heads=2,of=f32) rope=pre rot=hadamard table=s.h5" | awk '/^kld/ {print $2}'; done >by_rank
sort -cg by_rank || fail "divergence at ranks 192, 96, 48 and 16 of three layers: $(cat by_rank)"
awk 'NR == 1 && $1 >= 1e-4 {exit 1}' by_rank || fail "all directions of three layers change the logits: $(cat by_rank)"
shared "latent(rank=192,layers=3,heads=2) rope=pre table=s.h5" | awk '/^kld/ {exit $2 < 1e-4 ? 0 : 1}' || fail "all directions of three layers in f16 against f16"
[[ $("$program" plan -m "$model" -c 64 --kv "latent(rank=48,layers=3,heads=2) rope=pre" --protocol p4 --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["bytes_per_token"])') == $((2 * 48 * 2)) ]] ||
    fail "bytes of a token that three layers share"
refused 2 "layers (or groups)" eval kld -m "$model" -f "$text" --protocol compress-then-score --context 32 --score 32 --chunks 1 --no-run-file --kv "latent(rank=8,heads=2) rope=pre table=s.h5"
refused 2 "layers (or groups)" eval kld -m "$model" -f "$text" --protocol compress-then-score --context 32 --score 32 --chunks 1 --no-run-file --kv "latent(rank=8,layers=3,heads=2) rope=pre table=l.h5"
for protocol in p2 p4; do
    refused 2 "use --protocol compress-then-score" eval kld -m "$model" -f "$text" -c 64 --chunks 1 --no-run-file --protocol $protocol --kv "latent(rank=8,layers=3,heads=2) rope=pre table=s.h5"
done
# What a cache refuses makes no table, and is told in the same words.
as_cache() { # PART-OF-THE-MESSAGE MODEL SPEC
    local model=$root/data/models/$2.gguf
    "$program" plan -m "$model" -c 64 --kv "$3" >/dev/null 2>cache_err && fail "$2: the cache takes $3"
    "$program" calibrate -m "$model" -f "$text" -c 64 --chunks 1 --for "$3" -o u.h5 >out 2>err && fail "$2: a table for $3, which the cache refuses"
    cmp -s err cache_err && grep -qF -- "$1" err || fail "$2, $3: wanted \"$1\", calibrate says: $(cat err), plan: $(cat cache_err)"
}
as_cache "use a divisor" tiny "latent(layers=2)"
as_cache "use a divisor" tiny "latent(heads=3)"
as_cache "give both sides the same" tiny "k=latent(layers=3) v=latent"
as_cache "window= slides" tiny "latent(layers=3) window=16"
as_cache "layers that read the keys and values of others" family-cla2 "latent(layers=2)"
as_cache "slides by itself" arch_gemma3 "latent(layers=7)"
as_cache "stores one latent row" arch_deepseek2 latent
refused 1 "no codec learns yet" calibrate -m "$root/data/models/arch_deepseek2.gguf" -f "$text" -c 64 --for kvquant -o u.h5
[[ ! -e u.h5 && ! -e u.h5.part ]] || fail "a refused calibration of latents left a file"
