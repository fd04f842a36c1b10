#!/usr/bin/env bash
# check end to end: everything passes on the default device, and a codec whose known answer or device body is wrong is found out.
# Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "FAILED: $*"; exit 1; }
devices=$("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))')
[[ $devices != 0 ]] || { echo "skipped: no OpenCL device"; exit 77; }

# --- the built-in methods ---
"$program" check --json >"$work/check.json" || fail "exit code $?: $(cat "$work/check.json")"
python3 - "$work/check.json" <<'PYTHON'
import json, sys
r = json.load(open(sys.argv[1]))
names = [c["name"] for c in r["checks"]]
assert all(c["ok"] and 0 <= c["difference"] <= c["allowed"] for c in r["checks"]), r
assert len(set(names)) == len(names) >= 60, names
for wanted in ("codec k=f16: known answer", "codec v=int4(group=8,sym): bytes of a page that differ", "codec k=int8: decoded rows",
               "weights Q4_1, 1 token", "weights Q6_K, 7 tokens", "weights Q8_0, 1 token, activations of 8 bits", "rms norm", "rope"):
    assert wanted in names, (wanted, names)
assert sum(n.startswith("attention ") for n in names) >= 10, names
PYTHON

# --- a plug-in like f32, with a fault in one place ---
command -v cc >/dev/null || { echo "note: no cc, faulty plug-ins not built"; exit 0; }
# plugin NAME SED-SCRIPT-FOR-THE-DEVICE-BODY THIRD-NUMBER-OF-THE-ANSWER
plugin() {
    {
        echo '#define TEXT(name) kvl_text_compress_codec_float_##name'
        echo 'const char TEXT(card_md)[] = "", TEXT(float_cl)[] ='
        sed -e "$2" -e 's/["\\]/\\&/g; s/.*/"&\\n"/' "$root/compress/codec/float/float.cl"
        echo ';'
        echo '#include "codec/float/float.c"'
        echo 'static const float x[16] = {1, 2, 3}, decoded[16] = {1, 2, '"$3"'};'
        echo "static const struct kvl_known_answer $1_answers[] = {{\"\", KVL_ROLE_K, 16, 1, 0, x, decoded, 0.0f},"
        echo "                                                       {\"\", KVL_ROLE_V, 16, 1, 0, x, decoded, 0.0f}};"
        echo "#define $1_init f32_init"
        echo "#define $1_encode f32_encode"
        echo "#define $1_decode f32_decode"
        echo "FLOAT_CODEC($1, \"a test\");"
        echo "const struct kvl_plugin_head *const kvl_plugins[] = {&kvl_codec_$1.head, 0};"
    } >"$work/$1.c"
    cc -shared -fPIC -I"$root/compress" -o "$work/$1.so" "$work/$1.c"
}
# expect NAME CODE LINE-PATTERN...: check of the plug-in; each pattern must be among the failed lines, and nothing else.
expect() {
    local name=$1 code=$2 rc=0
    shift 2
    "$program" check --plugin "$work/$name.so" "$name" >"$work/out" 2>"$work/err" || rc=$?
    [[ $rc == "$code" ]] || fail "$name: exit code $rc, wanted $code: $(cat "$work/out" "$work/err")"
    [[ $(grep -c '^FAILED' "$work/out") == $# ]] || fail "$name: wanted $# failures: $(grep '^FAILED' "$work/out")"
    for pattern; do grep -q "^FAILED.*$pattern" "$work/out" || fail "$name: \"$pattern\" did not fail: $(cat "$work/out")"; done
    [[ $# == 0 ]] || grep -q "$# of [0-9]* checks failed" "$work/err" || fail "$name: the error: $(cat "$work/err")"
}
plugin sound "" 3
plugin misinformed "" 3.001
plugin misreading 's/o\[i\] = /&1.0001f * /' 3
plugin miswriting 's/t0 + i, c)\] = value/t0 + i, c)] = value * 1.0001f/' 3
expect sound 0
expect misinformed 3 "k=misinformed: known answer" "v=misinformed: known answer"
expect misreading 3 "k=misreading: decoded rows" "v=misreading: decoded rows" "k=misreading: known answer" "v=misreading: known answer"
expect miswriting 3 "k=miswriting: bytes" "v=miswriting: bytes" "k=miswriting: decoded" "v=miswriting: decoded" "k=miswriting: known answer" \
    "v=miswriting: known answer" "attention k=miswriting"
