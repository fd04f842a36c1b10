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
is 'r["payload_bytes"]' 1677721600 -m opt-13b -c 2048                     # PagedAttention paper: 800 KB a token, 1.6 GB a request
for row in "4096 1342177280" "32768 10737418240" "131072 42949672960"; do # 1.3, 10.7 and 42.9 GB
    is 'r["payload_bytes"]' "${row#* }" -m llama-3-70b -c "${row% *}"
done
is 'r["payload_bytes"]' 343597383680 -m llama-3-70b -c 131072 --kv-heads 64 # 344 GB
is 'r["payload_bytes"]' 21474836480 -m llama-3-70b -c 8192 --kv-heads 64    # over 20 GB, 8 times what GQA needs
is 'r["payload_bytes"] * 64' 21474836480 -m llama-3-70b -c 8192 --kv-heads 1
is 'r["payload_bytes"]' 20480000 -m llama-2-13b -c 2000 --layers 40 --kv-heads 1 --head-dim 64 # 256 bytes a layer and token
# "Insights into DeepSeek-V3" (2025), table 1: bytes a token of a joint record, and of two with key-value heads
is 'r["bytes_per_token"]' 70272 -m deepseek-v3 -c 8192
is 'r["bytes_per_token"]' 327680 -m qwen2.5-72b -c 8192
is 'r["bytes_per_token"]' 516096 -m llama-3.1-405b -c 8192
is 'r["bytes_per_token"]' $((61 * (576 / 2 + 4))) -m deepseek-v3 -c 8192 --kv int4
# layers that slide: 29 of 34 hold 1024 tokens and a ubatch less one, in whole pages of 64; the others everything
is 'r["bytes"]["payload"] + r["bytes"]["slack"]' $((4096 * (29 * 1536 + 5 * 131072))) -m gemma-3-4b -c 131072
# a window of one's own is for the others (4096 tokens and a ubatch less one: 72 pages), and for all with all_layers
is 'r["bytes"]["payload"] + r["bytes"]["slack"]' $((4096 * (29 * 1536 + 5 * 4608))) -m gemma-3-4b -c 131072 --kv window=4096
is 'r["bytes"]["payload"] + r["bytes"]["slack"]' $((4096 * 34 * 1024)) -m gemma-3-4b -c 131072 --kv "window=512 all_layers"
is 'r["bytes"]["payload"] + r["bytes"]["slack"]' $((1024 * (15 * 1024 + 3 * 32768))) -m gemma-3-270m -c 32768

# --- the least time of a token: 140 GB of weights over 3 TB/s are about 45 ms; ten caches come on top; a mixture reads what is active ---
is '45 < r["floor_ns"] * 1e-6 < 47' True -m llama-2-70b -c 1 --bandwidth 3000
is 'r["floor_ns"] * 3000' "$((2 * (80 * 8192 * (2 * 72 * 128 + 3 * 28672) + 2 * 8192 * 32000) + 327680)).0" -m llama-2-70b -c 1 --bandwidth 3000
is 'r["read_bytes"]' $((141104775168 + 26843545600)) -m llama-3-70b -c 8192 --users 10
is 'r["read_bytes"]' $((2 * 37000000000 + 8192 * 70272)) -m deepseek-v3 -c 8192
is 'r["floor_ns"]' None -m llama-2-70b -c 1
# a query of a layer that slides sees its window, not what a ubatch needs beside it: 15 layers of 512 tokens, 3 of all
is 'r["read_bytes"] - r["bytes"]["weights"]' $((1024 * (15 * 512 + 3 * 8192))) -m gemma-3-270m -c 8192
is 'r["read_bytes"] - r["bytes"]["weights"]' $((131072 * 260)) -m llama-3-8b -c 8192 --kv "sink=4 window=256"
is 'r["peak_bytes"] == r["resident_bytes"]' True -m deepseek-v3 -c 4096 --kv int4 # of a joint record no other side waits in the peak
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
is 'r["max_users_bound"]' 9 -m llama-3-70b -c 8192 --budget-bytes 24159191040 # 24 GB / (context x bytes per token), rounded up
is 'r["max_users"]' 8 -m llama-3-70b -c 8192 --budget-bytes 24159191040
"$program" plan -m smollm2-135m -c 333 --kv "int4 sink=4 tail=20" --users 7 --budget-bytes $((one * 10)) >table
grep -Eq "^resident +$one +$seven " table && grep -q "hold the caches of 10 users" table || fail "the table: $(cat table)"

# --- --models and the refusal name every public model, and they all work ---
"$program" plan -m nonesuch -c 1 2>err || true
names=$(sed 's/.*public models: //' err)
[[ $(wc -w <<<"$names") -ge 40 ]] || fail "the list of models: $(cat err)"
[[ $("$program" plan --models | tail -n +2 | cut -d" " -f1 | xargs) == "$names" ]] || fail "plan --models: $("$program" plan --models)"
for name in $names; do
    grep -qF "\"$name\"" <("$program" plan -m "$name" -c 64 --json) || fail "plan -m $name"
done

is 'r["model"]' llama-3-70b -m Llama-3-70B -c 64
is 'r["model"]' llama-3-70b -m meta-llama/Meta-Llama-3-70B -c 64

# --- refusals ---
refused 2 'neither a file nor one of the public models' -m nothing-like-it -c 64
refused 2 'did you mean "llama-3-70b"?' -m llama3-70b -c 64
"$program" plan -m smollm2-135m -c 64 --protocol compress-then-score --json >plan.json && [[ $(get plan.json 'r["protocol"]') == p3 ]] || fail "a protocol by its name"
refused 2 'needs --ctx' -m llama-3-8b
refused 2 'did you mean' -m llama-3-8b -c 64 --kv int44
refused 2 'layer' -m smollm2-135m -c 64 --kv "int4 @30-31 kv=f16"
refused 2 'does not divide' -m llama-3-70b -c 64 --kv-heads 3
refused 2 'one record' -m deepseek-v3 -c 64 --kv k=int4
refused 2 'needs a device' -m llama-3-70b -c 64 --measure
refused 1 'GGUF' -m plan.json -c 64

# --- a run on a device holds what was planned for it ---
model=$root/data/models/tiny.gguf
if [[ $("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))') == 0 ]]; then
    echo "note: no OpenCL device, no run compared"
else
    device=${KVLAB_DEVICE:-0}
    refused 4 'more than 16 buffers' -m llama-3.1-405b -c 10000000 --device "$device"
    is 'r["floor_ns"] * r["bandwidth_gbps"] / r["read_bytes"] > 0.99' True -m smollm2-135m -c 64 --device "$device" --measure
    # what the newest token reads: of layers that slide, of a window, of layers that share, of latents
    for run in "arch_gemma3 f16" "tiny int8 sink=4 window=24" "arch_cla f16" "arch_deepseek2 int4 sink=4 tail=20"; do
        small=$root/data/models/${run%% *}.gguf kv=${run#* }
        "$program" eval ppl -m "$small" -f "$root/LICENSE" -c 64 --chunks 1 --ubatch 1 --protocol p2 --kv "$kv" --device "$device" -o read.h5 &>err || fail "$run: $(cat err)"
        read=$("$program" log show --json read.h5 | python3 -c 'import json, sys; print(json.load(sys.stdin)["/memory"]["token_read_bytes"])')
        is 'r["read_bytes"] - r["bytes"]["weights"]' "$read" -m "$small" -c 64 --ubatch 1 --kv "$kv" --device "$device"
        rm read.h5
    done
    for kv in f16 "int4 sink=4 tail=20"; do
        is 'r["weights_estimated"]' False -m "$model" -c 50 --kv "$kv" --ubatch 16 --device "$device"
        "$program" generate -m "$model" -p A -n 50 --ignore-eos --kv "$kv" --ubatch 16 --device "$device" --no-run-file --json >run.json 2>/dev/null
        for key in kv device model protocol ubatch bytes_per_token payload_bytes resident_bytes peak_bytes; do
            [[ $(get plan.json "r['$key']") == "$(get run.json "r['$key']")" ]] ||
                fail "$kv: $key planned $(get plan.json "r['$key']"), in the run $(get run.json "r['$key']")"
        done
    done
fi
