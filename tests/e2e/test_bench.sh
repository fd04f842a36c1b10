#!/usr/bin/env bash
# bench end to end: tests and their names, formats, samples, run files, kernel times, refusals. No number here is a speed that must hold.
# Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
model=$root/data/models/tiny.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
get() { python3 -c 'import json, math, statistics, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
bench() { "$program" bench -m "$model" "$@"; }
expect_refusal() { # WORDS-OF-THE-MESSAGE ARGUMENTS...
    local words=$1 rc=0
    shift
    bench --no-run-file "$@" >out 2>err || rc=$?
    [[ $rc == 2 ]] || fail "$*: exit code $rc, wanted 2"
    grep -qF -- "$words" err || fail "$*: the message lacks \"$words\": $(cat err)"
    [[ ! -s out ]] || fail "$*: something on stdout: $(cat out)"
}

# --- usage ---
expect_refusal "nothing to time" -p 0 -n 0
expect_refusal '"x" is not a whole number' -p 16,x
expect_refusal '"" is not a whole number' -d 0,
expect_refusal '"-1" is not a whole number' -n -1
expect_refusal '"0000000000000000000000000000000000000016" is not a whole number' -n 0000000000000000000000000000000000000016
expect_refusal "--allow-long" -p 16 -n 0 -d 4096
expect_refusal "nosuch" --kv nosuch

# --- every length at every depth for every strategy; JSON ---
bench -p 0,16 -n 3,5 -d 0,70 -r 3 --ubatch 32 --kv f16 --kv "sink=2 window=8 kv=int4" --json -o two.h5 >run.json 2>err
[[ $(get run.json '[x["test"] for x in r]') == "$(python3 -c 'print(2 * ["pp16", "tg3", "tg5", "pp16@d70", "tg3@d70", "tg5@d70"])')" ]] ||
    fail "the tests: $(get run.json '[x["test"] for x in r]')"
get run.json '[x[k] for x in r for k in "kv device model protocol ubatch bytes_per_token payload_bytes resident_bytes peak_bytes run_file sd".split()]' >/dev/null
[[ $(get run.json 'all(len(x["samples_ns"]) == 3 and min(x["samples_ns"]) > 0 for x in r)') == True ]] || fail "three samples of every test wanted"
[[ $(get run.json 'all(math.isclose(x["tokens_per_s"], statistics.mean(rates), rel_tol=1e-9) and math.isclose(x["sd"], statistics.stdev(rates), rel_tol=1e-6)
    for x in r for rates in [[1e9 * (x["n_prompt"] + x["n_gen"]) / ns for ns in x["samples_ns"]]])') == True ]] || fail "mean or sd is not that of the samples"
[[ $(get run.json '{(x["protocol"], x["ubatch"], x["n_ctx"]) for x in r}') == "{('p2', 32, 86)}" ]] || fail "protocol, ubatch, n_ctx"
[[ $(get run.json '[x["run_file"] for x in r]') == "$(python3 -c 'print(6 * ["two-1.h5"] + 6 * ["two-2.h5"])')" && -f two-1.h5 && -f two-2.h5 ]] || fail "a run file a strategy"
[[ $(get run.json 'r[0]["payload_bytes"] > r[1]["payload_bytes"] > 0') == True ]] || fail "payload of 16 and of 3 tokens"
[[ $(get run.json 'r[6]["bytes_per_token"] < r[0]["bytes_per_token"]') == True ]] || fail "int4 takes less than f16 a token"
[[ $(get run.json 'r[6]["resident_bytes"] < r[0]["resident_bytes"] / 2') == True ]] || fail "a window of int4 takes less than half of f16"

# --- sequences in step: their tokens count, and each has a cache of its own ---
bench -p 16 -n 3 -d 20 -r 2 --sequences 3 --json -o three.h5 >three.json 2>/dev/null
[[ $(get three.json '[x["test"] for x in r]') == "['pp16x3@d20', 'tg3x3@d20']" ]] || fail "names of tests of sequences"
[[ $(get three.json 'all(math.isclose(x["tokens_per_s"], statistics.mean(3e9 * (x["n_prompt"] + x["n_gen"]) / ns for ns in x["samples_ns"]), rel_tol=1e-9) for x in r)') == True ]] || fail "rates of sequences"
bench -p 16 -n 3 -d 20 -r 1 --json -o single.h5 >single.json 2>/dev/null
[[ $(get three.json 'r[0]["bytes_per_token"]') == $(get single.json 'r[0]["bytes_per_token"]') ]] || fail "bytes/token of sequences are those of one"
[[ $(get three.json 'r[0]["payload_bytes"]') == $((3 * $(get single.json 'r[0]["payload_bytes"]'))) ]] || fail "three sequences take three caches"
expect_refusal "sequences in step" --sequences 2 --kv "latent(rank=8)"

# --- one sample has no deviation; one strategy keeps the file's name; strategies default to f16 ---
bench -p 8 -n 0 -r 1 --warmup 0 --format json -o one.h5 >one.json 2>/dev/null
[[ -f one.h5 && $(get one.json '(r[0]["sd"], "k=f16" in r[0]["kv"])') == "(None, True)" ]] || fail "one sample: $(cat one.json)"

# --- table and CSV carry the same tests ---
bench -p 8 -n 2 -r 1 --no-run-file --kv f16 --kv "kv=int8(group=16)" >table 2>err
[[ $(grep -c '^| f16 .*| \(pp8\|tg2\) ' table) == 2 && $(grep -c '^| kv=int8(group=16) ' table) == 2 && ! -s err ]] || fail "the table: $(cat table err)"
bench -p 8 -n 2 -r 2 --no-run-file --kv "kv=int4(group=16,scheme=sym)" --format csv >table.csv 2>/dev/null
python3 - <<'PYTHON' || fail "the CSV: $(cat table.csv)"
import csv
rows = list(csv.DictReader(open("table.csv")))
assert [row["test"] for row in rows] == ["pp8", "tg2"]
assert all(row["kv"] == "kv=int4(group=16,scheme=sym)" and None not in row and None not in row.values() for row in rows)
assert all(float(row["tokens_per_s"]) > 0 and float(row["sd"]) >= 0 for row in rows)
PYTHON

# --- kernels: only those of the repetitions, and time that adds up ---
bench -p 16 -n 4 -d 0,40 -r 2 --kernels --json -o kernels.h5 >kernels.json 2>/dev/null
[[ $(get kernels.json 'all(x["wall_ns"] >= x["span_ns"] >= x["busy_ns"] > 0 for x in r)') == True ]] || fail "wall >= span >= busy"
[[ $(get kernels.json 'all(math.isclose(sum(k["ns_sum"] for k in x["kernels"]), x["busy_ns"]) for x in r)') == True ]] || fail "the kernels do not sum up to busy_ns"
[[ $(get kernels.json 'all(x["wall_ns"] == sum(x["samples_ns"]) for x in r)') == True ]] || fail "wall_ns is not the samples' sum"
# 2 repetitions of 4 tokens, one embedding a token: launches of warm-up and fill are not counted.
[[ $(get kernels.json '[k["calls"] for x in r if x["n_gen"] for k in x["kernels"] if k["name"] == "kvl_embed"]') == "[8, 8]" ]] || fail "launches of the embedding"
bench -p 16 -n 4 -r 1 --kernels --no-run-file >table 2>/dev/null
grep -q '^measured peaks: read' table && grep -q '^pp16: ' table && grep -q '^tg4: ' table && [[ $(grep -c '^| kvl_embed ' table) == 2 ]] || fail "the kernel tables: $(cat table)"

# --- the run file ---
if python3 -c 'import h5py' 2>/dev/null; then
    python3 - <<'PYTHON' || fail "the run files"
import h5py, json, math
text = lambda column: [row.tobytes().rstrip(b"\0").decode() for row in column[:]]
for path, runs in (("two-1.h5", json.load(open("run.json"))[:6]), ("kernels.h5", json.load(open("kernels.json")))):
    f = h5py.File(path)
    assert f["bench/test"].shape[0] == len(runs) and text(f["bench/test"]) == [r["test"] for r in runs]
    phase, duration = text(f["steps/phase"]), f["steps/duration_ns"][:]
    for i, r in enumerate(runs):
        assert [int(d) for p, d in zip(phase, duration) if p == r["test"]] == r["samples_ns"]
        assert math.isclose(f["bench/tokens_per_s"][i], r["tokens_per_s"], rel_tol=1e-12) and f["bench/ns_min"][i] == min(r["samples_ns"])
        assert f["bench/busy_ns"][i] == r.get("busy_ns", 0)
    fullest = max(runs, key=lambda r: r["depth"] + r["n_prompt"] + r["n_gen"])
    assert f["memory"].attrs["payload_bytes"] == fullest["payload_bytes"] > 0
    assert f["memory"].attrs["resident_bytes"] == f["memory"].attrs["plan_resident_bytes"] == runs[0]["resident_bytes"]
    assert {"fill", "warm-up"} <= set(phase)
kernels = h5py.File("kernels.h5")["kernels"]
assert set(text(kernels["phase"])) == {"pp16", "tg4", "pp16@d40", "tg4@d40"}
PYTHON
else
    echo "note: no h5py, run files not looked into"
fi
