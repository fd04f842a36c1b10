#!/usr/bin/env bash
# KLD of 16 cache types on SmolLM2 against an independent float32 run (codecs.md of the golden folder, KVLAB_GOLDEN), 20 windows each: a quarter of an hour, so
# only with KVLAB_SLOW=1. Called with the program, the project's root and, to keep the run files, a folder for them.
set -euo pipefail
program=$1 root=$2
golden=${KVLAB_GOLDEN:-$root/../shared/golden}
skip() { echo "skipped: $*"; exit 77; }
[[ ${KVLAB_SLOW:-0} == 1 ]] || skip "KVLAB_SLOW=1 runs it"
[[ -f $golden/codecs.md ]] || skip "no golden folder (KVLAB_GOLDEN names another)"
[[ -f $root/data/models/SmolLM2-135M-Instruct.Q4_1.gguf ]] || skip "no SmolLM2 (scripts/fetch_model.sh)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
runs=${3:-$work/runs}
cd "$root"
"$program" sweep experiments/e05_quant_signs/golden.yaml --quiet --output "$runs"
python3 experiments/e05_quant_signs/golden.py --kvlab "$program" --golden "$golden" --runs "$runs" --out "$work/golden.csv"
