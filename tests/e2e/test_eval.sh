#!/usr/bin/env bash
# eval ppl and eval kld end to end. Called with the program and the project's root.
# Golden logits of another tiny random model (token id = byte value; KVLAB_GOLDEN) make an independent check possible: they give every token's nll.
set -euo pipefail
program=$1 root=$2
model=$root/data/models/tiny.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
near() { python3 -c 'import sys; a, b, t = map(float, sys.argv[1:]); sys.exit(not abs(a - b) <= t)' "$@"; }
# The value of a Python expression over the JSON object `r` in file $1.
get() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
expect_refusal() { # WORDS-OF-THE-MESSAGE ARGUMENTS...
    local words=$1 rc=0
    shift
    "$program" eval ppl -m "$model" --no-run-file "$@" >out 2>err || rc=$?
    [[ $rc == 2 ]] || fail "$*: exit code $rc, wanted 2"
    grep -qF -- "$words" err || fail "$*: the message lacks \"$words\": $(cat err)"
    [[ ! -s out ]] || fail "$*: something on stdout"
}

python3 -c 'import random, sys
random.seed(1); sys.stdout.buffer.write(bytes(random.randrange(1, 128) for _ in range(1500)))' >text
: >empty

# --- usage ---
expect_refusal "one window of 1656" -f text --protocol p3 --context 1400 # its context and scored tokens are options of their own
expect_refusal "compress-then-score" -f text -c 64 --kv "keep=knorm budget=uniform(kept=0.5)"
keep="keep=knorm budget=uniform(kept=0.5)"
for words in "-c 64 --protocol p2" "-c 64 --protocol p4" "-c 1020 --protocol p2" "-c 1024 --protocol p2 --ubatch 600"; do # what is scored would be the prompt
    for spec in "$keep" "$keep when=full" "read=pages(tokens=16)" "k=think"; do expect_refusal "begins with a prompt" -f text --kv "$spec" $words; done
done
expect_refusal "-c 1024 or more with --ubatch 512 or less" -f text --kv "$keep" --protocol p2 --ubatch 600 -c 1024
expect_refusal "empty" -f empty
expect_refusal "one window" -f text -c 1600
expect_refusal "trained" -f text -c 4096
expect_refusal "has 23 windows" -f text -c 64 --chunks 24
expect_refusal "windows 0 to 22" -f text -c 64 --first-chunk 23

# --- perplexity: keys, run file, windows ---
"$program" eval ppl -m "$model" -f text -c 64 --json -o all.h5 >all.json 2>err
[[ -f all.h5 && ! -e all.h5.part ]] || fail "no complete run file"
grep -q 'run file: all.h5' err || fail "the run file is not named on stderr"
[[ $(get all.json '(r["n_chunks"], r["n_tokens"], [c["chunk"] for c in r["chunks"]] == list(range(23)))') == "(23, 713, True)" ]] ||
    fail "23 windows of 31 scored tokens wanted"
get all.json '[r[k] for k in "kv device model protocol ubatch bytes_per_token payload_bytes resident_bytes peak_bytes run_file ppl ppl_se ppl_se_chunk nll".split()]' >/dev/null
near "$(get all.json 'sum(c["nll"] * c["n"] for c in r["chunks"]) / r["n_tokens"]')" "$(get all.json 'r["nll"]')" 1e-9 || fail "mean of the windows"
near "$(get all.json '__import__("math").exp(r["nll"])')" "$(get all.json 'r["ppl"]')" 1e-6 || fail "ppl is not exp(nll)"
near "$(get all.json '__import__("statistics").stdev(c["nll"] for c in r["chunks"]) / 23 ** .5 * r["ppl"]')" "$(get all.json 'r["ppl_se_chunk"]')" 1e-6 ||
    fail "error over windows"

"$program" eval ppl -m "$model" -f text -c 64 --first-chunk 5 --chunks 2 --json --no-run-file >some.json 2>/dev/null
[[ $(get some.json 'r["chunks"]') == "$(get all.json 'r["chunks"][5:7]')" ]] || fail "windows 5 and 6 alone differ from those of the whole run"
[[ $(get some.json 'r["run_file"]') == None && ! -d runs ]] || fail "--no-run-file left a file"

for ubatch in 1 7 64; do
    "$program" eval ppl -m "$model" -f text -c 64 --chunks 4 --exact --kv f32 --ubatch $ubatch --json --no-run-file >u$ubatch.json 2>/dev/null
    near "$(get u$ubatch.json 'r["nll"]')" "$(get u1.json 'r["nll"]')" 2e-5 || fail "ubatch $ubatch changes the nll"
done

"$program" eval ppl -m "$model" -f text -c 64 --chunks 2 --profile 2>err >table
grep -q '^ppl .*exploratory' table || fail "two windows must be called exploratory"
default=(runs/eval-ppl-????????-??????-????????.h5)
[[ -f ${default[0]} ]] || fail "no run file under its default name"

# --- compress-then-score ---
p3=(--protocol compress-then-score --context 96 --score 32 --chunks 3 --exact)
"$program" eval ppl -m "$model" -f text "${p3[@]}" --kv "f32 keep=snapkv(window=8) budget=ada(removed=0.5)" --json -o p3.h5 >p3.json 2>/dev/null
[[ $(get p3.json '(r["protocol"], r["n_chunks"], r["n_tokens"])') == "('p3', 3, 96)" ]] || fail "3 windows of 32 scored tokens wanted"
near "$(get p3.json '(16 * r["nll_1_16"] + 16 * r["nll_17_64"]) / 32')" "$(get p3.json 'r["nll"]')" 1e-6 || fail "bins by distance"
"$program" eval ppl -m "$model" -f text "${p3[@]}" --kv "f32 keep=snapkv(window=8) budget=ada(kept=1)" --json --no-run-file >whole.json 2>/dev/null
"$program" eval ppl -m "$model" -f text "${p3[@]}" --kv f32 --json --no-run-file >none.json 2>/dev/null
near "$(get whole.json 'r["nll"]')" "$(get none.json 'r["nll"]')" 2e-5 || fail "keeping everything changes the nll"
"$program" eval kld -m "$model" -f text "${p3[@]}" --kv "f32 keep=snapkv(window=8) budget=ada(removed=0.5)" --base f32 --json --no-run-file >kld.json 2>/dev/null
near "$(get kld.json 'r["nll"]')" "$(get p3.json 'r["nll"]')" 1e-6 || fail "eval kld under p3: another nll"
near "$(get kld.json 'r["nll_base"]')" "$(get none.json 'r["nll"]')" 2e-5 || fail "eval kld under p3: another base"
[[ $(get kld.json 'r["kld_mean"] > 0') == True ]] || fail "half the tokens are gone and nothing has changed"
for name in kld same_top1; do
    near "$(get kld.json "(16 * r['${name}_1_16'] + 16 * r['${name}_17_64']) / 32")" "$(get kld.json "r['$name' if '$name' in r else 'kld_mean']")" 1e-6 || fail "bins of $name"
    get kld.json "all('${name}_17_64' in c for c in r['chunks'])" | grep -q True || fail "bins of $name by window"
done
get p3.json 'r["resident_bytes"] < r["peak_bytes"]' | grep -q True || fail "the peak is above what stays"

# --- content of the run file; the golden logits ---
if python3 -c 'import h5py, numpy' 2>/dev/null; then
    golden=${KVLAB_GOLDEN:-$root/../shared/golden}
    python3 - "${default[0]}" <<'PYTHON' || fail "content of the run file"
import sys, h5py
f = h5py.File(sys.argv[1])
assert f.attrs["status"] in ("complete", b"complete")
assert len(f["quality/nll"]) == 2 and len(f["steps/t_ns"]) == 2 and len(f["kernels/calls"]) > 2
assert f["kernels/ns_sum"][:].min() > 0
assert f["memory/layer_bytes"].shape == (7, 3)
m = f["memory"].attrs
assert m["plan_resident_bytes"] == m["resident_bytes"] and m["plan_bytes_per_token"] == m["bytes_per_token"], dict(m)
p3 = h5py.File("p3.h5")
budget, first, kept = (p3["layers/" + name][:] for name in ("budget", "kept_first", "kept_position"))
assert budget.shape == (3, 2) and (budget.sum(axis=1) == 2 * 48).all() and len(kept) == budget.sum()
for b, k in zip(budget.flat, first.flat):
    assert (kept[k:k + b][1:] > kept[k:k + b][:-1]).all() and set(range(88, 96)) <= set(kept[k:k + b])
assert "nll_65_256" in p3["quality"] and p3["config"].attrs["kv"].decode().find("keep=snapkv(window=8") > 0
for group, names in {"config": "kv kv_given model_sha256 text_sha256 cl_source_sha256 protocol ubatch n_ctx exact",
                     "memory": "bytes_per_token resident_bytes peak_bytes ledger_total_bytes", "quality": "ppl nll"}.items():
    for name in names.split():
        assert name in f[group].attrs, (group, name)
assert f["quality/nll"].dims[0][0].name.endswith("quality_row")
PYTHON
else
    echo "note: no python3 with h5py and numpy, golden logits and run file content not checked"
    golden=""
fi
if [[ -f $golden/tiny-llama.h5 ]]; then
    python3 - "$golden/tiny-llama.h5" >nll <<'PYTHON'
import sys, h5py, numpy as np
f = h5py.File(sys.argv[1])
tokens, logits = f["tokens"][:], f["logits"][:].astype(np.float64)
bytes_ = bytes(int(t) for t in tokens)
open("golden.txt", "wb").write(bytes_)
top = logits.max(1)
nll = top + np.log(np.exp(logits - top[:, None]).sum(1))
print(np.mean([nll[i] - logits[i, tokens[i + 1]] for i in range(192, 383)]))
PYTHON
    "$program" eval ppl -m "$golden/tiny-llama.gguf" -f golden.txt -c 384 --exact --kv f32 --json --no-run-file >golden.json 2>/dev/null
    near "$(get golden.json 'r["nll"]')" "$(cat nll)" 1e-5 || fail "nll $(get golden.json 'r["nll"]') differs from the golden logits' $(cat nll)"
    [[ $(get golden.json 'r["n_tokens"]') == 191 ]] || fail "191 scored tokens wanted"
else
    echo "note: no golden logits (KVLAB_GOLDEN names their folder), nll not compared with them"
fi

# --- divergence ---
"$program" eval kld -m "$model" -f text -c 64 --chunks 4 --json --no-run-file >same.json 2>/dev/null
[[ $(get same.json '(r["kld_mean"], r["kld_max"], r["kld_se"], r["same_top1"], r["rms_dp"], r["ppl_ratio"])') == "(0, 0, 0, 1, 0, 1)" ]] ||
    fail "f16 against itself: $(get same.json 'r["kld_mean"], r["kld_max"], r["same_top1"], r["rms_dp"]')"
"$program" eval kld -m "$model" -f text -c 64 --chunks 4 --json --kv int4 -o int4.h5 >int4.json 2>/dev/null
[[ $(get int4.json 'r["kld_mean"] > 1e-7 and r["kld_p1"] <= r["kld_median"] <= r["kld_p99"] <= r["kld_max"] and r["same_top1"] <= 1') == True ]] ||
    fail "int4 against f16"
near "$(get int4.json 'r["nll_base"]')" "$(get same.json 'r["nll"]')" 0 || fail "the base is not what f16 alone gives"
near "$(get int4.json 'r["ppl_ratio"] * r["ppl_base"]')" "$(get int4.json 'r["ppl"]')" 1e-6 || fail "the ratio is not ppl / ppl_base"
"$program" eval kld -m "$model" -f text -c 64 --chunks 4 --json --kv int8 --no-run-file >int8.json 2>/dev/null
[[ $(get int8.json 'r["kld_mean"]') != 0 ]] || fail "int8 must differ from f16"
python3 -c 'import sys; sys.exit(not float(sys.argv[1]) < float(sys.argv[2]))' "$(get int8.json 'r["kld_mean"]')" "$(get int4.json 'r["kld_mean"]')" ||
    fail "int8 is not closer to f16 than int4"

# Behind a prompt of 512 tokens, of which half are gone.
"$program" eval kld -m "$model" -f text -c 1024 --chunks 1 --json --kv "$keep" --protocol p2 --no-run-file >behind.json 2>err || fail "p2 with keep=, scored behind the prompt: $(cat err)"
[[ $(get behind.json 'r["kld_mean"]') != 0 ]] || fail "p2 with keep=: scored tokens do not see that tokens are gone"
"$program" eval kld -m "$model" -f text -c 64 --kv f16 --base "$keep" --protocol p2 --no-run-file >out 2>err && fail "a base that scores its prompt was taken"
grep -q 'begins with a prompt' err || fail "a base that scores its prompt: $(cat err)"

# --- logits of the base kept from run to run: the same numbers, read where they are known ---
kept_kld() { "$program" eval kld -m "$model" -f text --json --no-run-file --base-logits kept "$@" 2>err; }
same_chunks() { [[ $(get "$1" 'r["chunks"]') == "$(get "$2" 'r["chunks"]')" ]] || fail "--base-logits, $3: other numbers"; }
files_kept() { [[ $(ls kept | wc -l) == "$1" ]] || fail "--base-logits, $2: $(ls kept | wc -l) files, wanted $1"; }
kept_kld -c 64 --chunks 3 --kv int4 >written.json
files_kept 3 "first run"
[[ $(get written.json 'r["base_prefill_tokens_per_s"] > 0') == True ]] || fail "the base ran without a speed"
kept_kld -c 64 --chunks 4 --kv int4 >read.json
same_chunks read.json int4.json "three windows of four read"
kept_kld -c 64 --chunks 4 --kv int8 >read.json
same_chunks read.json int8.json "another strategy"
[[ $(get read.json 'r["base_prefill_tokens_per_s"]') == None ]] || fail "the base did not run and has a speed"
files_kept 4 "the same base"
damaged=(kept/*)
printf x | dd of="${damaged[0]}" bs=1 seek=5000 conv=notrunc 2>/dev/null
truncate -s 100 "${damaged[1]}"
kept_kld -c 64 --chunks 4 --kv int8 >read.json
[[ $(grep -c damaged err) == 2 ]] || fail "two damaged files: $(cat err)"
same_chunks read.json int8.json "damaged files"
kept_kld -c 64 --chunks 4 --kv int8 >read.json
[[ ! -s err ]] || fail "damaged files were not written again: $(cat err)"
kept_kld -c 64 --chunks 4 --kv int8 --base int8 >read.json
[[ $(get read.json 'r["kld_mean"]') == 0 ]] || fail "--base-logits, int8 against itself: $(get read.json 'r["kld_mean"]')"
files_kept 8 "another base"
KVLAB_MASK=vectors kept_kld -c 64 --chunks 4 --kv int8 >read.json
[[ $(get read.json 'r["base_prefill_tokens_per_s"] > 0') == True ]] || fail "logits of other kernels were read"
files_kept 12 "other kernels"
: >nofolder
for folder in "" nofolder nofolder/sub; do
    "$program" eval kld -m "$model" -f text -c 64 --chunks 4 --kv int8 --no-run-file --base-logits "$folder" >out 2>err && fail "--base-logits '$folder' was taken"
    [[ ! -s out ]] && grep -q 'error: .*folder' err || fail "--base-logits '$folder': $(cat err)"
done
for run in 1 2; do kept_kld -c 1400 --allow-long --chunks 1 --kv int8 >long$run.json; done
same_chunks long1.json long2.json "a window of three pieces"
for run in 1 2; do kept_kld "${p3[@]}" --kv int8 >p3kept$run.json; done
same_chunks p3kept1.json p3kept2.json "compress-then-score"
[[ $(get p3kept2.json 'r["base_prefill_tokens_per_s"]') == None ]] || fail "compress-then-score: the base ran again"

# --- Ctrl-C ---
for _ in $(seq 40); do cat text; done >long
"$program" eval ppl -m "$model" -f long -c 64 -o stopped.h5 >out 2>err &
pid=$!
for _ in $(seq 200); do [[ -e stopped.h5.part ]] && break; sleep 0.05; done
sleep 0.3
kill -INT $pid
rc=0
wait $pid || rc=$?
if [[ -f stopped.h5 ]]; then
    echo "note: the run ended before it could be interrupted"
else
    [[ $rc == 1 ]] || fail "interrupted: exit code $rc, wanted 1"
    grep -q 'interrupted: [0-9]* of 937 windows' err || fail "interrupted: $(cat err)"
    grep -q 'status *interrupted' <("$program" log show stopped.h5.part) || fail "the interrupted file does not say so"
fi
