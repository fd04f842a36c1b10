#!/usr/bin/env bash
# compress/template: the plug-in that is built outside the tree does what a built-in codec does; built against the headers of ABI 1.0 and 1.1 it
# still does (old plug-in, new host), and hosts of these understand the one of today (new plug-in, old host).
# Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; exit 1; }
command -v cc >/dev/null || { echo "skipped: no C compiler cc"; exit 77; }

# The command of the file's head, and the same with the frozen header.
build() { cc -std=c11 -O2 -shared -fPIC -I "$1" "$root/compress/template/bf16.c" -o "$2" -lm; }
build "$root/compress" "$work/bf16.so"
for old in v1_0 v1_1; do
    build "$root/tests/abi/$old" "$work/$old.so"
    cc -std=c11 -I "$root/tests/abi/$old" "$root/tests/abi/old_host.c" -o "$work/old_host" -ldl -lm
    "$work/old_host" "$work/bf16.so" bf16 || fail "a host of ABI $old does not understand the plug-in of today"
done
"$program" plugins bf16 2>"$work/message" && fail "bf16 is known without --plugin"
grep -q '^# bf16: the upper half' <("$program" plugins bf16 --plugin "$work/bf16.so") || fail "plugins bf16 does not print the card"
grep -q '^bf16  *codec  *16  *K V  *post pre' <("$program" plugins --plugin "$work/bf16.so") || fail "plugins does not list it"

devices=$("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))')
[[ $devices != 0 ]] || { echo "no OpenCL device: not run"; exit 0; }
for object in "$work/bf16.so" "$work"/v1_*.so "$(dirname "$program")/tests/bf16.so"; do
    [[ -e $object ]] || continue
    "$program" check --plugin "$object" bf16 >"$work/check" || fail "$object: $(cat "$work/check")"
    grep -q '^all 14 checks passed$' "$work/check" || fail "$object: $(tail -1 "$work/check")"
done
"$program" check bf16 >/dev/null 2>"$work/message" && fail "check knows bf16 without --plugin"
grep -q "there is no codec 'bf16'" "$work/message" || fail "check bf16 says $(cat "$work/message")"

# Half the bytes of f32 and nearly its perplexity.
ppl() { "$program" eval ppl -m "$root/data/models/tiny.gguf" -f "$root/tests/abi/old_host.c" -c 64 --chunks 2 --exact --json -o "$work/$1.h5" --kv "$1" "${@:2}"; }
ppl f32 >"$work/f32.json" || fail "eval ppl f32"
ppl bf16 --plugin "$work/bf16.so" >"$work/bf16.json" || fail "eval ppl bf16"
python3 - "$work" <<'PYTHON'
import json, sys
f32, bf16 = (json.load(open(f"{sys.argv[1]}/{name}.json")) for name in ("f32", "bf16"))
assert 2 * bf16["bytes_per_token"] == f32["bytes_per_token"], (f32, bf16)
assert 0 < abs(bf16["nll"] - f32["nll"]) < 0.05, (f32["nll"], bf16["nll"])
PYTHON
echo ok
