#!/usr/bin/env bash
# plan end to end: published sizes, users and budgets, refusals, and that a run holds what was planned. Called with the program and the
# project's root.
set -euo pipefail
program=$1 root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
get() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
# is EXPRESSION-OF-r VALUE ARGUMENT...: the value in the JSON of a plan.
is() {
    local expression=$1 wanted=$2
    shift 2
    "$program" plan "$@" --json >plan.json
    [[ $(get plan.json "$expression") == "$wanted" ]] || fail "plan $*: $expression is $(get plan.json "$expression"), wanted $wanted"
}
refused() { # CODE WORDS ARGUMENT...
    local code=$1 words=$2 rc=0
    shift 2
    "$program" plan "$@" >out 2>err || rc=$?
    [[ $rc == "$code" ]] || fail "plan $*: exit code $rc, wanted $code"
    grep -qF -- "$words" err || fail "plan $*: the message lacks \"$words\": $(cat err)"
}

# --- published sizes: no file, no device (an unusable driver folder hides all of them) ---
OCL_ICD_VENDORS=$work/none is 'r["bytes_per_token"]' 327680 -m llama-3-70b -c 8192
[[ $(get plan.json 'sorted(r["bytes"])') == "['index', 'payload', 'scale', 'scratch', 'slack', 'table', 'weights']" ]] || fail "keys of bytes: $(cat plan.json)"
[[ $(get plan.json '(r["model"], r["device"], r["protocol"], r["ubatch"], r["users"], r["max_users"], r["weights_estimated"])') == \
    "('llama-3-70b', None, 'p2', 512, 1, None, True)" ]] || fail "keys: $(cat plan.json)"
[[ $(get plan.json 'r["payload_bytes"] == r["bytes"]["payload"] == 8192 * 327680') == True ]] || fail "payload: $(cat plan.json)"
is 'r["bytes"]["payload"]' 26843545600 -m llama-3-70b -c 8192 --users 10
is 'r["bytes_per_token"]' 819200 --model opt-13b --ctx 2048
is 'r["bytes_per_token"]' 23040 -m smollm2-135m -c 100
is 'r["bytes_per_token"]' 12240 -m smollm2-135m -c 100 --kv int8
is 'r["bytes_per_token"]' 6480 -m smollm2-135m -c 100 --kv int4

# --- classes sum up; users multiply all but the weights; a budget ---
sum='r["resident_bytes"] == sum(n for c, n in r["bytes"].items() if c not in ("weights", "scratch"))'
is "$sum" True -m smollm2-135m -c 333 --kv "int4 sink=4 tail=20" --users 7
seven=$(get plan.json 'r["resident_bytes"]') weights=$(get plan.json 'r["bytes"]["weights"]')
is 'r["resident_bytes"] * 7' "$seven" -m smollm2-135m -c 333 --kv "int4 sink=4 tail=20"
one=$(get plan.json 'r["resident_bytes"]')
[[ $(get plan.json 'r["bytes"]["weights"]') == "$weights" ]] || fail "weights depend on the users"
is 'r["max_users"]' 9 -m smollm2-135m -c 333 --kv "int4 sink=4 tail=20" --budget-bytes $((one * 10 - 1))
is 'r["max_users"]' 10 -m smollm2-135m -c 333 --kv "int4 sink=4 tail=20" --budget-bytes $((one * 10))
is 'r["max_users"]' 0 -m smollm2-135m -c 333 --kv "int4 sink=4 tail=20" --budget-bytes $((one - 1))
"$program" plan -m smollm2-135m -c 333 --kv "int4 sink=4 tail=20" --users 7 --budget-bytes $((one * 10)) >table
grep -Eq "^resident +$one +$seven " table && grep -q "hold the caches of 10 users" table || fail "the table: $(cat table)"

# --- --help names every public model, and they all work ---
"$program" plan -m nonesuch -c 1 2>err || true
names=$(sed 's/.*public models: //' err)
[[ $(wc -w <<<"$names") -ge 5 ]] || fail "the list of models: $(cat err)"
for name in $names; do
    "$program" plan --help | grep -qw -- "$name" || fail "plan --help does not name $name"
    is 'r["model"]' "$name" -m "$name" -c 64
done

# --- refusals ---
refused 2 'neither a file nor one of the public models' -m llama-3 -c 64
refused 2 'needs --ctx' -m llama-3-8b
refused 2 'did you mean' -m llama-3-8b -c 64 --kv int44
refused 2 'layer' -m smollm2-135m -c 64 --kv "int4 @30-31 kv=f16"
refused 4 'more than 16 buffers' -m llama-3-70b -c 1000000
refused 1 'GGUF' -m plan.json -c 64

# --- a run on a device holds what was planned for it ---
model=$root/data/models/tiny.gguf
if [[ $("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))') == 0 ]]; then
    echo "note: no OpenCL device, no run compared"
else
    device=${KVLAB_DEVICE:-0}
    for kv in f16 "int4 sink=4 tail=20"; do
        is 'r["weights_estimated"]' False -m "$model" -c 50 --kv "$kv" --ubatch 16 --device "$device"
        "$program" generate -m "$model" -p A -n 50 --ignore-eos --kv "$kv" --ubatch 16 --device "$device" --no-run-file --json >run.json 2>/dev/null
        for key in kv device model protocol ubatch bytes_per_token payload_bytes resident_bytes peak_bytes; do
            [[ $(get plan.json "r['$key']") == "$(get run.json "r['$key']")" ]] ||
                fail "$kv: $key planned $(get plan.json "r['$key']"), in the run $(get run.json "r['$key']")"
        done
    done
fi
