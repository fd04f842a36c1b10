#!/usr/bin/env bash
# The same command twice gives the same numbers, bit for bit: quality, kept tokens, drawn tokens; another seed gives others. On the default device for all kinds
# of runs; KVLAB_SLOW=1: on every other one for one of them (minutes of compiling). Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
python3 -c 'import h5py, numpy' 2>/dev/null || { echo "skipped: no python3 with h5py"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
"$program" devices --json >devices.json
python3 -c 'import json; print("\n".join(str(d["index"]) for d in json.load(open("devices.json"))["devices"]))' >devices
[[ -s devices ]] || { echo "skipped: no OpenCL device"; exit 77; }
model=$root/data/models/tiny.gguf text=$root/LICENSE

cat >compare.py <<'PYTHON'
"""Are all numbers of two run files but times the same, bit for bit? Exit code 1 if not. Prints how many there are."""
import re, sys, h5py, numpy as np
first, second = (h5py.File(path) for path in sys.argv[1:])
TIMES = re.compile(r"(.*_)?(per_s|ms|ns|ms_per_token|gbps|gflops)$")
n = 0
def same(a, b): return np.array_equal(np.atleast_1d(a), np.atleast_1d(b), equal_nan=np.asarray(a).dtype.kind == "f")
for group in ("quality", "layers", "evictions", "tokens", "memory"):
    if group not in first: continue
    for name, value in first[group].attrs.items():
        if TIMES.fullmatch(name): continue
        n += 1
        if not same(value, second[group].attrs[name]): sys.exit(f"{group} {name}: {value} and {second[group].attrs[name]}")
    def check(name, data):
        global n
        if not isinstance(data, h5py.Dataset) or TIMES.fullmatch(name.split("/")[-1]): return
        n += data.size
        if not same(data[()], second[group][name][()]): sys.exit(f"{group}/{name} differs")
    first[group].visititems(check)
print(n)
PYTHON
twice() { # NAME COMMAND...: two runs with the same numbers
    local name=$1 i
    shift
    for i in 1 2; do "$program" "$@" -m "$model" -o "$name$i.h5" >/dev/null 2>err || fail "$*: $(cat err)"; done
    python3 compare.py "$name"1.h5 "$name"2.h5 >count || fail "$*: $(cat count)"
    echo "$name: $(cat count) numbers"
}
twice kld eval kld -f "$text" -c 64 --chunks 3 --kv "k=int4 v=kivi(bits=2,residual=0) sink=4 rot=random(seed=3)"
twice kept eval ppl -f "$text" --protocol p3 --context 96 --score 32 --chunks 2 --kv "int8 keep=snapkv(window=8) budget=ada(kept=0.5)"
twice stream eval stream -f "$text" -n 96 --block 8 --kv "int8 keep=h2o budget=uniform(tokens=48) when=full"
twice recall eval recall -f "$text" --context 96 --span 8 --depth 0.5 --gap 16 --seeds 4 --seed 5
twice drawn generate -p "Apache" -n 40 --ignore-eos --temp 1 --top-k 50 --seed 7 --kv int4
"$program" generate -p Apache -n 40 --ignore-eos --temp 1 --top-k 50 --seed 8 --kv int4 -m "$model" -o other.h5 >/dev/null 2>&1
if python3 compare.py drawn1.h5 other.h5 >/dev/null 2>&1; then fail "another seed draws the same tokens"; fi
[[ ${KVLAB_SLOW:-0} == 1 ]] || exit 0
while read -r device; do twice "kld on $device" eval kld -f "$text" -c 64 --chunks 1 --kv int4 --device "$device"; done <devices
