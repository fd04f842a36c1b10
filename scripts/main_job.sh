#!/usr/bin/env bash
# The end of the quickstart: four ways to keep the cache, compared on one model and one text, in one table.
# Each leaves its run files in a folder of runs/. MODEL, TEXT, CHUNKS and KVLAB (the program) may be set to others.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

kvlab=${KVLAB:-build/kvlab}
model=${MODEL:-data/models/SmolLM2-135M-Instruct.Q4_1.gguf}
text=${TEXT:-data/text/wiki.test.raw}
chunks=${CHUNKS:-16} # windows of 512 tokens; fewer than 16 give no trustworthy error
depth=1024           # tokens in the cache when decoding starts
ubatch=128           # a sliding window is reserved for window + ubatch - 1 tokens

names=(f16 int8 int4 window)
strategies=("f16" "int8" "int4" "f16 sink=4 window=256")

for file in "$kvlab" "$model" "$text"; do
    [[ -e $file ]] || { echo "main_job: $file is missing; scripts/quickstart.sh builds and fetches what is needed" >&2; exit 1; }
done
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
runs=runs/main_job-$(date -u +%Y%m%d-%H%M%S)

echo "Four caches for $(basename "$model"), about a minute each on two cores:"
echo "  quality   $chunks windows of 512 tokens of $(basename "$text"): perplexity, and divergence from the f16 cache"
echo "  speed     prefill of 512 tokens, decode of 32 behind $depth tokens"
for i in "${!names[@]}"; do
    name=${names[i]} kv=${strategies[i]}
    echo
    echo "-- $((i + 1)) of ${#names[@]}: --kv \"$kv\""
    eval_options=(-m "$model" -f "$text" -c 512 --chunks "$chunks" --kv "$kv" --json -o "$runs/eval-$name.h5")
    if [[ $name == f16 ]]; then
        "$kvlab" eval ppl "${eval_options[@]}" >"$results/eval-$name.json"
    else
        "$kvlab" eval kld --base f16 "${eval_options[@]}" >"$results/eval-$name.json"
    fi
    speed_options=(-m "$model" --kv "$kv" --ubatch "$ubatch" -r 2 --json)
    "$kvlab" bench "${speed_options[@]}" -p 512 -n 0 -o "$runs/prefill-$name.h5" >"$results/prefill-$name.json"
    "$kvlab" bench "${speed_options[@]}" -p 0 -n 32 -d "$depth" -o "$runs/decode-$name.h5" >"$results/decode-$name.json"
done

echo
python3 - "$results" "${#names[@]}" "${names[@]}" "${strategies[@]}" <<'PYTHON'
import json, sys

folder, n, *words = sys.argv[1:]
names, strategies = words[:int(n)], words[int(n):]


def load(kind, name):
    with open(f"{folder}/{kind}-{name}.json") as file:
        return json.load(file)


def with_error(value, error, digits):
    return f"{value:.{digits}f}" + (f" +/- {error:.{digits}f}" if error is not None else "")


rows = [["strategy", "bytes/token", "resident MiB", "perplexity", "KLD to f16", "prefill tok/s", "decode tok/s"]]
for name, strategy in zip(names, strategies):
    quality, prefill, decode = load("eval", name), load("prefill", name)[0], load("decode", name)[0]
    rows.append([
        strategy,
        str(decode["bytes_per_token"]),
        f'{decode["resident_bytes"] / 2**20:.2f}',
        with_error(quality["ppl"], quality["ppl_se_chunk"], 3),
        with_error(quality["kld_mean"], quality["kld_se_chunk"], 5) if "kld_mean" in quality else "0",
        with_error(prefill["tokens_per_s"], prefill["sd"], 1),
        with_error(decode["tokens_per_s"], decode["sd"], 1),
    ])
width = [max(map(len, column)) for column in zip(*rows)]
rows.insert(1, ["-" * width[0]] + ["-" * (w - 1) + ":" for w in width[1:]])
for first, *rest in rows:
    print("| " + " | ".join([first.ljust(width[0])] + [cell.rjust(w) for cell, w in zip(rest, width[1:])]) + " |")
PYTHON

cat <<TEXT

bytes/token   what one more token costs; a window costs nothing once it is full
resident      memory reserved for the cache of the decode test, $((depth + 32)) positions
perplexity    +/- standard error over windows; KLD: divergence of the next token's distribution, token by token, so it
              resolves differences that the errors of two perplexities hide

Every run is a file of its own in $runs (HDF5: h5py, xarray, ncdump and h5dump read it). What to try next:
  $kvlab log show $runs/eval-int4.h5
  $kvlab plugins                        what can stand in --kv; kvlab plugins NAME explains one
  $kvlab eval kld -m $model -f $text --chunks $chunks --kv "k=int8 v=int4"
  $kvlab bench -m $model -n 32 --kv f16 --kv int4 --kernels
  $kvlab generate -m $model --chat -p "What does a KV cache keep?" --kv int4
TEXT
