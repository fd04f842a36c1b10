#!/usr/bin/env bash
# Gemma 3 270M (scripts/fetch_gemma.sh; optional): llama.cpp's tokens, known windows, and layers that slide held in flat memory. Called with the
# program and the project's root. With KVLAB_SLOW=1 also llama.cpp's perplexities.
set -euo pipefail
program=$1 root=$2
model=$root/data/models/gemma-3-270m-q4_k_m.gguf text=$root/data/text/wiki.test.raw
for file in "$model" "$text"; do [[ -f $file ]] || { echo "skipped: no $file (scripts/fetch_gemma.sh)"; exit 77; }; done
fail() { echo "FAILED: $*" >&2; exit 1; }
number() { python3 -c "import json, sys; r = json.load(sys.stdin); print($1)"; }

ids=$("$program" tokenize -m "$model" -f "$text" --bos | sha256sum)
[[ $ids == "ddeac710d6ca5b6e7f79a0a329da53c498e7ef24042965546ee73ad1680c2e5d  -" ]] || fail "other ids than llama.cpp's: $ids"

# 15 layers of 1024 tokens (512 and a ubatch less one, in pages), 3 of all; a token of a layer takes 1024 bytes.
for ctx in 4096 32768; do
    held=$("$program" plan -m "$model" -c $ctx --json | number 'r["bytes"]["payload"] + r["bytes"]["slack"]')
    [[ $held -eq $((1024 * (15 * 1024 + 3 * ctx))) ]] || fail "$held bytes for $ctx tokens"
done

devices=$("$program" devices)
[[ $devices == "0 "* ]] || { echo "skipped the rest: no OpenCL device"; exit 0; }
measure() { "$program" eval ppl -m "$model" -f "$text" --no-run-file --json --quiet "$@"; }

# Measured with PoCL 3.1; transformers in float32 gives the first window of 2048 tokens 2.661806, llama.cpp 2.66291.
near() { python3 -c "import sys; sys.exit(abs($1 / $2 - 1) > $3)" || fail "$4: $1, known $2"; }
near "$(measure -c 512 --chunks 1 | number 'r["nll"]')" 2.4152846 5e-4 "nll of a window of 512"
near "$(measure -c 2048 --chunks 1 | number 'r["nll"]')" 2.6618063 5e-4 "nll of a window of 2048"
[[ ${KVLAB_SLOW-} == 1 ]] || exit 0
near "$(measure -c 512 --chunks 10 | number 'r["ppl"]')" 19.0158 5e-3 "perplexity of windows of 512"
near "$(measure -c 2048 --chunks 4 --ubatch 4 | number 'r["ppl"]')" 17.0013 5e-3 "perplexity of windows of 2048" # activations in 8 bits, as llama.cpp's: 16.961
near "$(measure -c 2048 --chunks 4 | number 'r["ppl"]')" 16.9141 1e-3 "perplexity of windows of 2048 in float32"
