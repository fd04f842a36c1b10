#!/usr/bin/env bash
# NLL and KLD of latents of SmolLM2-135M, to why.md's table. Usage: experiments/e31_latent/run.sh [build/kvlab] [folder for tables]
set -euo pipefail
cd "$(dirname "$0")/../.."
program=${1:-build/kvlab} tables=${2:-$(mktemp -d)}
model=data/models/SmolLM2-135M-Instruct.Q4_1.gguf text=data/text/wiki.test.raw

calibrate() { [[ -e $tables/$1.h5 ]] || "$program" calibrate -m "$model" -f "$text" -c 512 --chunks 8 --first-chunk 140 --for "$2" -o "$tables/$1.h5"; }
calibrate one "latent rope=pre"
calibrate three "latent(heads=3) rope=pre"
calibrate post "latent"

one="rope=pre table=$tables/one.h5" three="rope=pre table=$tables/three.h5" post="table=$tables/post.h5"
for kv in f16 "latent(rank=56) $one" "latent(rank=48) $one" "latent(rank=144,heads=3) $three" "latent(rank=32) $one" "latent(rank=96,heads=3) $three" \
    "k=latent(rank=32) v=f16 $one" "k=f16 v=latent(rank=32) $one"; do
    printf '%-50s ' "${kv%% table=*}"
    "$program" eval ppl -m "$model" -f "$text" -c 256 --chunks 8 --no-run-file --kv "$kv" 2>/dev/null | awk '/^cache/ {bytes = $2} /^nll/ {print bytes, "bytes a token, nll", $2}'
done
for kv in "latent(rank=64) $one" "latent(rank=64) $post" "latent(rank=32) $one" "latent(rank=32) $post" "latent(rank=64,of=int4) rot=hadamard $one" "int4 rot=hadamard rope=pre"; do
    printf '%-50s ' "${kv%% table=*}"
    "$program" eval kld -m "$model" -f "$text" -c 256 --chunks 4 --no-run-file --kv "$kv" 2>/dev/null | awk '/^cache/ {bytes = $2} /^kld/ {print bytes, "bytes a token, kld", $2}'
done
