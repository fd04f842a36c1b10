# The tables in compress/README.md are what `kvlab plugins --md` prints and what compress/speed.csv holds, which has every codec at both depths; the
# commands' other forms answer.
set -u
program=$1 root=$2
fail() { echo "FAILED: $*"; exit 1; }
table=$(sed -n '/<!-- plugins:begin -->/,/<!-- plugins:end -->/p' "$root/compress/README.md" | sed '1d;$d')
printed=$("$program" plugins --md) || fail "plugins --md"
[ -n "$table" ] || fail "compress/README.md has no table between the markers plugins:begin and plugins:end"
diff <(echo "$table") <(echo "$printed") || fail "the table of compress/README.md is stale: run scripts/make_compress_readme.py"
grep -q '^streaming-llm  *sink=4 window=1020 pos=compact$' <("$program" plugins) || fail "plugins does not list the presets"
grep -q '^# int8, int4, int3, int2: ' <("$program" plugins int4) || fail "plugins int4 does not print the method card"
grep -q 'group .*0 to 65536; default 0' <("$program" plugins int4) || fail "plugins int4 does not print the options"
message=$("$program" plugins int5 2>&1 >/dev/null) && fail "plugins int5 succeeded"
case $message in *"did you mean int8?"*) ;; *) fail "no suggestion in: $message" ;; esac
if command -v python3 >/dev/null; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/scripts" "$work/compress"
    cp "$root/scripts/make_compress_readme.py" "$work/scripts"
    cp "$root/compress/README.md" "$root/compress/speed.csv" "$work/compress"
    python3 "$work/scripts/make_compress_readme.py" "$program" || fail "make_compress_readme.py"
    diff "$root/compress/README.md" "$work/compress/README.md" || fail "a table of compress/README.md is stale: run scripts/make_compress_readme.py"
    "$program" plugins --json | python3 -c '
import json, sys
answer = json.load(sys.stdin)
bits = {p["name"]: p["bits_per_element"] for p in answer["plugins"] if p["kind"] == "codec"}
wanted = {"f32": 32, "f16": 16, "int8": 8.5, "int4": 4.5, "int3": 3.5, "int2": 2.5, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5,
          "q4_0": 4.5, "iq4_nl": 4.5, "fp8_e4m3": 8.25, "fp8_e5m2": 8.25, "kivi": 3, "kvquant": 3.375, "turboquant": 3.25}
assert wanted.items() <= bits.items(), bits
assert [o["name"] for o in answer["plugins"][2]["options"]] == ["group", "scheme", "clip", "search", "scale"]
assert answer["presets"][0]["name"] == "streaming-llm"
' || fail "plugins --json"
    "$program" plugins --json | python3 -c '
import csv, json, re, sys
answer = json.load(sys.stdin)
presets = {p["name"]: p["kv"] for p in answer["presets"]}
rows = [(int(row["depth"]), presets.get(row["kv"], row["kv"])) for row in csv.DictReader(open(sys.argv[1]))]
for depth in (4096, 32768):
    timed = {name for at, kv in rows if at == depth for name in re.findall(r"(?:^|\b[kv]=)(\w+)\b(?!=)", kv)}
    missing = {p["name"] for p in answer["plugins"] if p["kind"] == "codec"} - timed - {"f16"}
    assert not missing, f"{depth} tokens: {missing} not timed: scripts/codec_speed.py"
' "$root/compress/speed.csv" || fail "compress/speed.csv"
fi
