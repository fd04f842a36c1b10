#!/usr/bin/env bash
# kvlab tune and what its entries do to other commands. Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=$root/data/models/tiny.gguf
unset KVLAB_MASK KVLAB_TUNE_FILE
export XDG_CONFIG_HOME=$work/config

fail() { echo "FAILED: $*"; exit 1; }
"$program" devices --json >"$work/devices.json"
[[ $(python3 -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["devices"]))' "$work/devices.json") != 0 ]] ||
    { echo "skipped: no OpenCL device"; exit 77; }
# EXIT-CODE ARGUMENTS...
tune() {
    local wanted=$1 rc=0
    shift
    "$program" tune "$@" >"$work/out" 2>"$work/err" || rc=$?
    [[ $rc == "$wanted" ]] || fail "tune $*: exit code $rc, wanted $wanted: $(cat "$work/out" "$work/err")"
}
small=(-m "$model" --tokens 8 --depth 64 --pairs 1)

# --- words and refusals ---
tune 0 --help
grep -q -- --tune-file "$work/out" || fail "help: $(cat "$work/out")"
"$program" --help >"$work/out" && grep -q KVLAB_TUNE_FILE "$work/out" || fail "overview does not name KVLAB_TUNE_FILE"
"$program" completion bash >"$work/out" && grep -q '"tune") .*words="clblast gemm gemv attend"' "$work/out" || fail "completion"
tune 2 conv
grep -q 'kernel "conv" has no tunables; these have: clblast, gemm, gemv, attend' "$work/err" || fail "$(cat "$work/err")"
tune 2 --pairs 0
tune 1 -m "$work/none.gguf"
KVLAB_MASK=vectors tune 2 "${small[@]}" gemv
grep -q 'KVLAB_MASK' "$work/err" || fail "$(cat "$work/err")"

# --- a run: JSON, and an entry only for what differs from what is in use ---
tune 0 "${small[@]}" --limit 1 --json gemv && mv "$work/out" "$work/defaults"
tune 0 "${small[@]}" --limit 3 --json gemv
python3 - "$work/out" "$work/defaults" <<'PYTHON'
import json, os, sys
r, defaults = (json.load(open(f)) for f in sys.argv[1:])
(row,) = r["kernels"]
assert row["kernel"] == "gemv" and row["metric"] == "GB/s" and row["tried"] <= 3 and row["rejected"] == 0, r
assert row["best"] > 0 and row["default"] > 0 and 0 < row["ratio"] <= 1, r
tuned = row["setting"] != defaults["kernels"][0]["setting"]
assert os.path.exists(r["tune_file"]) == tuned and r["tune_file"].endswith("/config/kvlab/tune.txt"), r
if tuned:
    lines = open(r["tune_file"]).read().splitlines()
    assert lines[0] == "device %s | %s" % (r["device"], r["driver"]) and lines[1].startswith("gemv " + row["setting"] + "  # "), lines
PYTHON
tune 0 "${small[@]}" --limit 2 --dry-run gemm
grep -q 'of the time' "$work/out" || fail "a line a candidate: $(cat "$work/out")"
grep -q '  best: product=' "$work/out" || fail "the best: $(cat "$work/out")"

# --- what entries do: the file names them, exact results stay the same to the bit ---
python3 - "$work/out" >"$work/forced.txt" <<'PYTHON'
import re, sys
name, driver = re.match(r"device  (.*) \(.*?, ([^()]*)\)$", open(sys.argv[1]).readline()).groups()
print(f"device {name} | {driver}\ngemm product=clblast cols=32 tokens=24 tile=4 # forced\ngemv pairs=4 groups=1\nattend block=32 rows=6 splits=1")
PYTHON
head -c 100000 "$root/data/text/wiki.test.raw" >"$work/text" 2>/dev/null || seq 20000 >"$work/text"
# NAME TUNE-FILE ARGUMENTS...: the result without what differs by nature
ppl() {
    local name=$1 file=$2
    shift 2
    KVLAB_TUNE_FILE=$file "$program" eval ppl -m "$model" -f "$work/text" -c 64 --chunks 3 --kv int8 --json -o "$work/$name.h5" "$@" >"$work/$name.json" \
        2>"$work/$name.err" || fail "eval ppl with ${file:-no file}: $(cat "$work/$name.err")"
    python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(r["nll"], [c["nll"] for c in r["chunks"]])' "$work/$name.json" >"$work/$name.nll"
}
ppl plain "" --exact
ppl forced "$work/forced.txt" --exact
cmp "$work/plain.nll" "$work/forced.nll" || fail "exact results depend on tuning"
ppl rough "$work/forced.txt"
python3 - "$work/plain.json" "$work/rough.json" <<'PYTHON'
import json, sys
a, b = (json.load(open(f))["nll"] for f in sys.argv[1:])
assert abs(a - b) < 0.05, (a, b)
PYTHON
used() { "$program" log show "$work/$1.h5" | grep tuning_ >"$work/show" || fail "$1.h5 names no tuning"; }
used forced
grep -q 'tuning_gemm.*product=clblast cols=32 tokens=24 tile=4 (device entry, .*forced.txt)' "$work/show" || fail "run file: $(cat "$work/show")"
used plain
grep -q 'tuning_attend.*\(built-in\|data/tune\)' "$work/show" || fail "run file of a plain run: $(cat "$work/show")"

# --- masked devices do not take them ---
KVLAB_MASK=int_dot ppl masked "$work/forced.txt" --exact
used masked
grep -q 'tuning_gemm.*(built-in)' "$work/show" || fail "masked: $(cat "$work/show")"

# --- damaged files: a warning with the line, and results as without ---
{ echo "gemm tile=4"; head -n 1 "$work/forced.txt"; echo "gemm tile=5"; echo "gemv pairs"; } >"$work/wrong.txt"
ppl wrong "$work/wrong.txt" --exact
cmp "$work/plain.nll" "$work/wrong.nll" || fail "results with a wrong file"
grep -q 'warning: .*wrong.txt, line 3 ignored: gemm: tile=5 is not legal' "$work/wrong.err" || fail "no warning: $(cat "$work/wrong.err")"
head -c 4096 /dev/urandom >"$work/noise.txt"
ppl noise "$work/noise.txt" --exact
grep -q 'warning: .*noise.txt' "$work/noise.err" || fail "noise: $(cat "$work/noise.err")"
ppl folder "$work" --exact
echo "tune: entries, refusals, damaged files"
