#!/usr/bin/env bash
# Numbers of a real model, SmolLM2-135M (scripts/fetch_model.sh, or KVLAB_MODEL): perplexity of known windows, and divergences that are
# ordered as they must be. Called with the program and the project's root. Takes about half a minute on two quiet cores.
set -euo pipefail
program=$1 root=$2
model=${KVLAB_MODEL:-$root/data/models/SmolLM2-135M-Instruct.Q4_1.gguf}
text=$root/data/text/wiki.test.raw
for file in "$model" "$text"; do [[ -f $file ]] || { echo "skipped: no $file (scripts/fetch_model.sh)"; exit 77; }; done
devices=$("$program" devices)
[[ $devices == "0 "* ]] || { echo "skipped: no OpenCL device"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

eval_json() { # KIND CHUNKS NAME ARGUMENTS...: result in NAME.json
    local kind=$1 chunks=$2 name=$3
    shift 3
    "$program" eval "$kind" -m "$model" -f "$text" -c 512 --chunks "$chunks" --exact --no-run-file --json "$@" >"$name.json" 2>err ||
        { echo "FAILED: eval $kind $*: $(cat err)"; exit 1; }
}

eval_json ppl 4 f16 --kv f16
eval_json kld 1 same --kv f16 --base f16
eval_json kld 2 int8 --kv int8 --base f16
eval_json kld 2 int4 --kv int4 --base f16

python3 - <<'PYTHON'
import json
r = {name: json.load(open(name + ".json")) for name in ("f16", "same", "int8", "int4")}

# Measured with PoCL 3.1 on x86-64, exact mode; over 40 windows the same program gives 22.4998, llama.cpp with activations
# rounded to 8 bits 22.5958 +/- 0.6848. Other devices add in another order, which changes the sixth digit.
for chunk, nll in enumerate((2.5307246, 3.5850197, 3.1856715, 3.0822028)):
    found = r["f16"]["chunks"][chunk]
    print(f"window {chunk}: nll {found['nll']:.7f}, known {nll:.7f}")
    assert found["chunk"] == chunk and found["n"] == 255
    assert abs(found["nll"] / nll - 1) < 5e-4, "another perplexity"

assert [r["same"][key] for key in ("kld_mean", "kld_max", "rms_dp")] == [0, 0, 0], "f16 differs from itself"
assert (r["same"]["same_top1"], r["same"]["ppl_ratio"]) == (1, 1), "f16 differs from itself"
kld = {name: r[name]["kld_mean"] for name in ("int8", "int4")}
top = {name: r[name]["same_top1"] for name in ("int8", "int4")}
print(f"mean divergence from f16: int8 {kld['int8']:.6f}, int4 {kld['int4']:.4f}; same top token: {top['int8']:.3f}, {top['int4']:.3f}")
for name in ("int8", "int4"):  # both runs must have had the same base, the cache that was measured alone above
    base = sum(c["nll_base"] for c in r[name]["chunks"]) / 2
    assert abs(base - (r["f16"]["chunks"][0]["nll"] + r["f16"]["chunks"][1]["nll"]) / 2) < 1e-6, "another base"
assert 0 < kld["int8"] < 2e-3 < 2e-2 < kld["int4"] < 0.5, "divergences"
assert top["int4"] < top["int8"] < 1 and r["int8"]["ppl"] < r["int4"]["ppl"], "order"
PYTHON
