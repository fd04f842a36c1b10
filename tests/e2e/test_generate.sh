#!/usr/bin/env bash
# generate end to end: what the cache saves, reproducibility, refusals. Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
model=$root/data/models/tiny.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
get() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
generate() { "$program" generate -m "$model" --no-run-file "$@"; }
expect_refusal() { # WORDS-OF-THE-MESSAGE ARGUMENTS...
    local words=$1 rc=0
    shift
    generate "$@" >out 2>err || rc=$?
    [[ $rc == 2 ]] || fail "$*: exit code $rc, wanted 2"
    grep -qF -- "$words" err || fail "$*: the message lacks \"$words\": $(cat err)"
}

# --- usage ---
: >empty
expect_refusal "either -p TEXT or -f FILE"
expect_refusal "either -p TEXT or -f FILE" -p a -f empty
expect_refusal "prompt is empty" -p ""
expect_refusal "prompt is empty" -f empty
expect_refusal "needs --chat" -p a --system b
expect_refusal "--allow-long" -p ab -n 2048

# --- the cache against recomputation: T keys and values against T(T+1)/2, the same tokens ---
for case in "6 6 21" "100 100 5050"; do
    read -r n cached recomputed <<<"$case"
    generate -p A -n "$n" --ignore-eos --exact --json >with.json 2>/dev/null
    generate -p A -n "$n" --ignore-eos --exact --no-cache --json >without.json 2>/dev/null
    [[ $(get with.json 'r["kv_computed"]') == "$cached" ]] || fail "n $n: $(get with.json 'r["kv_computed"]') computed, wanted $cached"
    [[ $(get without.json 'r["kv_computed"]') == "$recomputed" ]] || fail "n $n: $(get without.json 'r["kv_computed"]') computed, wanted $recomputed"
    [[ $(get with.json 'r["ids"]') == "$(get without.json 'r["ids"]')" ]] || fail "n $n: other tokens without the cache"
    [[ $(get with.json '(r["n_prompt"], r["n_generated"], len(r["ids"]))') == "(1, $n, $n)" ]] || fail "n $n: wrong counts"
done
generate -p A -n 20 --ignore-eos --protocol p4 --kv int4 --json >with.json 2>/dev/null
generate -p A -n 20 --ignore-eos --protocol p4 --kv int4 --no-cache --json >without.json 2>/dev/null
[[ $(get with.json 'r["ids"]') == "$(get without.json 'r["ids"]')" ]] || fail "p4, int4: other tokens without the cache"

# --- three ways to print the same ---
generate -f <(printf 'A') -n 30 --ignore-eos --ids >ids 2>/dev/null
generate -p A -n 30 --ignore-eos --json >run.json 2>/dev/null
[[ $(get run.json '"\n".join(map(str, r["ids"]))') == "$(cat ids)" ]] || fail "--ids differs from --json"
generate -p A -n 30 --ignore-eos >text 2>err
python3 - <<'PYTHON' || fail "the text is not the ids' bytes"
ids = [int(line) for line in open("ids")]
assert open("text", "rb").read() == bytes(ids) + b"\n"
PYTHON
grep -q '^time to first token' err && grep -q '^keys and values computed *30 tokens' err || fail "the report on stderr: $(cat err)"

# --- drawing: a seed is reproducible, another seed is another text ---
for seed in 1 1 2; do generate -p A -n 40 --ignore-eos --ids --temp 1 --top-k 50 --seed $seed 2>/dev/null | md5sum; done >sums
[[ $(sed -n 1p sums) == "$(sed -n 2p sums)" ]] || fail "seed 1 twice gives two texts"
[[ $(sed -n 1p sums) != "$(sed -n 3p sums)" ]] || fail "seeds 1 and 2 give one text"

# --- a run file; a full disk is an error ---
"$program" generate -m "$model" -p A -n 5 --ignore-eos -o run.h5 >/dev/null 2>&1
"$program" log show run.h5 >shown
grep -q 'status *complete' shown && grep -q 'kv_computed *5' shown || fail "the run file: $(head -20 shown)"
if [[ -w /dev/full ]]; then
    rc=0
    generate -p A -n 50 --ignore-eos >/dev/full 2>err || rc=$?
    [[ $rc == 1 ]] && grep -q 'stdout' err || fail "stdout on a full disk: exit code $rc, $(cat err)"
fi

# --- Ctrl-C while the prompt is read: seen between ubatches ---
python3 -c 'print("word " * 400, end="")' >long
"$program" generate -m "$model" -f long -n 5 --ubatch 1 -o stopped.h5 >out 2>err &
pid=$!
for _ in $(seq 600); do [[ -e stopped.h5.part ]] && break; sleep 0.05; done
kill -INT $pid
rc=0
wait $pid || rc=$?
[[ $rc == 1 ]] && grep -q 'interrupted: 0 of 5 tokens' err || fail "interrupted prompt: exit code $rc, $(cat err)"

# --- a real model, if there is one: chat template, UTF-8 ---
large=${KVLAB_MODEL:-$root/data/models/SmolLM2-135M-Instruct.Q4_1.gguf}
if [[ -f $large ]]; then
    "$program" generate -m "$large" --no-run-file --exact --chat -p "What is the capital of France?" -n 20 >text 2>/dev/null
    grep -q Paris text || fail "SmolLM2 on the capital of France: $(cat text)"
else
    echo "note: no $large (KVLAB_MODEL names it), chat not checked"
fi
