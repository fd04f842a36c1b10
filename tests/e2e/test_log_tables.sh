#!/usr/bin/env bash
# log diff, merge and export against Python's reading of the same run files. Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
python3 -c 'import h5py, numpy' 2>/dev/null || { echo "skipped: no python3 with h5py"; exit 77; }
[[ $("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))') != 0 ]] || { echo "skipped: no OpenCL device"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
get() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
model=$root/data/models/tiny.gguf

eval_run() { # NAME KV CHUNKS FIRST COMMAND...
    "$program" eval "${@:5}" -m "$model" -f "$root/LICENSE" -c 64 --kv "$2" --chunks "$3" --first-chunk "$4" -o "runs/$1.h5" >/dev/null 2>&1
}
eval_run a f16 20 0 kld
eval_run b int4 20 0 kld
eval_run c int4 30 5 ppl
eval_run d int4 5 0 ppl
eval_run e "int8 sink=4" 20 40 ppl
mkdir logits
for run in "f16 f16 --logits 5" "int4 int4 --logits 5" "other f16 --logits 5 --first-chunk 1" "none f16"; do
    read -r name kv options <<<"$run"
    # shellcheck disable=SC2086
    "$program" eval ppl -m "$model" -f "$root/LICENSE" -c 64 --chunks 1 --kv "$kv" $options -o "logits/$name.h5" >/dev/null 2>&1 || fail "--logits: $run"
done
"$program" bench -m "$model" -p 16 -n 4 -r 3 -o runs/f.h5 >/dev/null 2>&1

# --- diff ---
"$program" log diff --json runs/a.h5 runs/b.h5 >diff.json || fail "diff"
python3 - <<'PYTHON' || fail "diff of a and b: $(cat diff.json)"
import json, h5py, numpy as np
r = json.load(open("diff.json"))
a, b = (h5py.File(f"runs/{x}.h5") for x in "ab")
assert set(r["config"]) == {"kv"} and "int4" in r["config"]["kv"][1], r["config"]
for name in "resident_bytes", "bytes_per_token", "payload_bytes":
    assert (r["bytes"][name]["a"], r["bytes"][name]["b"]) == (a["memory"].attrs[name], b["memory"].attrs[name]), name
for name in "nll", "kld", "same_top1":
    d = b["quality"][name][:] - a["quality"][name][:]
    half = 2.093024054408263 * d.std(ddof=1) / len(d) ** 0.5 # t, 19 degrees of freedom
    q = r["quality"][name]
    assert q["n"] == 20 and np.allclose([q["difference"], q["low"], q["high"]], [d.mean(), d.mean() - half, d.mean() + half], rtol=1e-7, atol=1e-12), (name, q)
    assert q["verdict"] == ("higher" if q["low"] > 0 else "lower" if q["high"] < 0 else "not resolved"), (name, q)
assert r["quality"]["kld"]["verdict"] == "higher" and r["not_paired"] is None
PYTHON
"$program" log diff runs/a.h5 runs/b.h5 >table && grep -q 'kld .*\[.*\], n 20: higher' table && grep -q 'perplexity ratio' table || fail "the table: $(cat table)"
"$program" log diff --json runs/a.h5 runs/c.h5 >diff.json # 15 chunks in common
[[ $(get diff.json '(r["quality"]["nll"]["n"], r["quality"]["nll"]["verdict"], r["quality"]["nll"]["low"])') == "(15, 'exploratory', None)" ]] || fail "15 chunks: $(cat diff.json)"
"$program" log diff runs/a.h5 runs/c.h5 >table
grep -Eq '^nll .* [+-][0-9.e-]+, n 15: exploratory$' table && grep -Eq '^perplexity ratio B / A [0-9.]+$' table || fail "under 16 chunks there is no interval: $(cat table)"
"$program" log diff --json runs/b.h5 runs/d.h5 >diff.json
[[ $(get diff.json '(r["quality"]["nll"]["n"], r["quality"]["nll"]["difference"], r["quality"]["nll"]["verdict"])') == "(5, 0, 'equal')" ]] || fail "the same: $(cat diff.json)"
"$program" log diff --json runs/a.h5 runs/e.h5 >diff.json
[[ $(get diff.json '(r["quality"], r["not_paired"])') == "({}, 'the runs have no chunk in common')" ]] || fail "no common chunk: $(cat diff.json)"
# of a window of 64 tokens p1 scores 31, p3 as many as are asked for: other tokens
"$program" eval ppl -m "$model" -f "$root/LICENSE" --protocol compress-then-score --context 48 --score 16 --chunks 17 -o other.h5 &>/dev/null || fail "p3"
"$program" log diff --json runs/a.h5 other.h5 >diff.json
[[ $(get diff.json 'r["quality"] == {} and r["not_paired"]') == "of chunk 0 A scores 31 tokens and B 16: "* ]] || fail "other tokens of a window: $(cat diff.json)"
"$program" log diff --json runs/f.h5 runs/f.h5 >diff.json
[[ $(get diff.json '[(k, v["verdict"], v["difference"]) for k, v in r["speed"].items()]') == "[('pp16', 'not resolved', 0), ('tg4', 'not resolved', 0)]" ]] || fail "bench: $(cat diff.json)"
grep -q 'quality is not compared' <("$program" log diff runs/a.h5 runs/f.h5) || fail "a bench has no quality"
"$program" log diff runs/a.h5 2>err && fail "one file is too few"

# --- logits: only of the same window ---
python3 - "$program" <<'PYTHON' || fail "logits"
import json, subprocess, sys, h5py, numpy as np
def diff(*words): return json.loads(subprocess.run([sys.argv[1], "log", "diff", "--json", *words], stdout=subprocess.PIPE, check=True).stdout)
a, b = (h5py.File(f"logits/{name}.h5")["logits"] for name in ("f16", "int4"))
assert a["logit"].shape == (5, 257) and a.attrs["chunk"] == 0, a["logit"]
largest = float(np.abs(b["logit"][:].astype(float) - a["logit"][:]).max())
assert largest > 0.01 and abs(diff("logits/f16.h5", "logits/int4.h5")["largest_logit_difference"] - largest) < 1e-6
for other in ("other", "none"):
    assert diff("logits/f16.h5", f"logits/{other}.h5")["largest_logit_difference"] is None, other
devices = diff("--devices", "logits/f16.h5", "logits/f16.h5")[0]["devices"]
assert [d["logit_largest"] for d in devices] == [0, 0], devices
PYTHON
grep -q 'largest difference of 1285 logits' <("$program" log diff logits/f16.h5 logits/int4.h5) || fail "the line of logits"
if "$program" eval ppl -m "$model" -f "$root/LICENSE" -c 16 --chunks 1 --logits 8 2>err; then fail "more logits than scored tokens"; fi
grep -q 'of a window of 16 tokens 7 are scored' err || fail "more logits than scored tokens: $(cat err)"

# --- devices: two strategies of four runs are shared ---
cp runs/b.h5 runs/b2.h5
"$program" log diff --devices --json runs >devices.json
[[ $(get devices.json '[len(g["devices"]) for g in r]') == "[1, 2, 1, 1, 1, 1]" ]] || fail "devices: $(cat devices.json)"
[[ $(get devices.json '[d["verdict"] for d in r[1]["devices"]]') == "['equal', 'equal']" ]] || fail "devices: $(cat devices.json)"
grep -q 'same top1' <("$program" log diff --devices runs/b.h5 runs/b2.h5) || fail "the table of devices"
grep -q ' reference ' <("$program" log diff --devices runs/b.h5 runs/b2.h5) || fail "the first row is the reference"
"$program" log diff --devices runs/a.h5 >/dev/null 2>err && grep -q 'nothing to compare' err || fail "one run of its kind: $(cat err)"
rm runs/b2.h5
# Groups are told apart by what they are of, have one reference, and say "-" for what a run does not say.
mkdir devices
for x in b d; do
    cp runs/$x.h5 devices/1$x.h5
    cp runs/$x.h5 devices/$([[ $x == b ]] && echo 2 || echo 0)$x.h5
done
python3 -c 'import h5py, numpy; [h5py.File(f"devices/{x}.h5", "r+")["config"].attrs.__setitem__("device", numpy.bytes_("another")) for x in ("2b", "1d")]'
"$program" log diff --devices devices >table
[[ $(grep -c '^eval kld, tiny, text [0-9a-f]*, context 64: k=int4' table) == 1 && $(grep -c '^eval ppl, tiny, text [0-9a-f]*, context 64: k=int4' table) == 1 ]] || fail "groups: $(cat table)"
[[ $(grep -c ' reference ' table) == 2 ]] && ! grep -q 'another .* reference ' table || fail "one device is the reference of all: $(cat table)"
! grep -q nan table || fail "what is not known is a dash: $(cat table)"
"$program" log diff --devices --json devices >devices.json
[[ $(get devices.json '[(g["command"], g["n_ctx"], [d["device"] == "another" for d in g["devices"]]) for g in r]') == "[('eval ppl', 64, [False, True]), ('eval kld', 64, [False, True])]" ]] ||
    fail "devices: $(cat devices.json)"
# A file of a later layout is refused, whoever reads it.
cp runs/a.h5 later.h5
python3 -c 'import h5py; h5py.File("later.h5", "r+").attrs.modify("schema_version", 2)'
for command in "log show later.h5" "log diff later.h5 runs/a.h5" "log export --csv later.h5"; do
    rc=0
    "$program" $command >out 2>err || rc=$?
    [[ $rc == 1 ]] && grep -q 'later.h5: its schema version is 2, this program reads up to 1' err || fail "$command: exit code $rc: $(cat err)"
done

# --- export ---
"$program" log export --csv runs >runs.csv
"$program" log export --csv --table quality runs/a.h5 runs/c.h5 >quality.csv
"$program" log export --csv --table nonesuch runs 2>err && fail "a table that is not there"
python3 - <<'PYTHON' || fail "export"
import csv, h5py, numpy as np
rows = list(csv.DictReader(open("runs.csv")))
assert [r["file"] for r in rows] == [f"runs/{x}.h5" for x in "abcdef"]
for row in rows:
    f = h5py.File(row["file"])
    text = lambda v: v.decode() if isinstance(v, bytes) else v
    said = {k: text(v) for k, v in f.attrs.items()}
    said |= {f"{g}_{k}": text(v) for g in f for k, v in f[g].attrs.items() if k not in ("CLASS", "NAME")}
    assert {k for k, v in row.items() if v != ""} == {"file", *(k for k, v in said.items() if v != "")}, set(said) ^ set(row)
    for k, v in said.items():
        assert row[k] == v if isinstance(v, str) else float(row[k]) == v, (k, v, row[k])
chunks = list(csv.DictReader(open("quality.csv")))
for run, name in enumerate("ac"):
    assert [float(c["nll"]) for c in chunks if c["run"] == str(run)] == list(h5py.File(f"runs/{name}.h5")["quality/nll"]), name
PYTHON

# --- merge ---
"$program" log merge runs -o all.h5 >out || fail "merge"
# Nobody's file is lost by a slip in -o, and merged files are not runs.
sha256sum runs/a.h5 >sum
echo text >other
for file in runs/a.h5 other; do
    rc=0
    "$program" log merge runs/a.h5 -o "$file" 2>err || rc=$?
    [[ $rc == 2 ]] && grep -q "^kvlab: error: $file is there and no merged file" err || fail "merging over $file: exit code $rc: $(cat err)"
done
sha256sum --quiet --check sum && [[ $(cat other) == text ]] || fail "a file was lost"
for command in "log merge all.h5 -o twice.h5" "report all.h5 -o twice.html" "log export --csv all.h5" "log diff runs/a.h5 all.h5" "log diff --devices all.h5"; do
    rc=0
    "$program" $command 2>err || rc=$?
    [[ $rc == 1 && ! -e twice.h5 && ! -e twice.html ]] && grep -q 'all.h5: it holds merged runs' err || fail "$command: exit code $rc: $(cat err)"
done
[[ $("$program" log merge runs/a.h5 -o one.h5) == "one.h5: 1 run" ]] || fail "one run"
rm sum other one.h5
echo broken >runs/broken.h5
rc=0
"$program" log merge runs -o all.h5 >out 2>err || rc=$?
[[ $rc == 1 ]] && grep -q 'left out: runs/broken.h5' err || fail "a broken file: exit code $rc: $(cat err)"
[[ ! -e all.h5.new && ! -e all.h5.new.part ]] || fail "merge left something: $(ls)"
python3 - <<'PYTHON' || fail "merged file"
import h5py, numpy as np
m = h5py.File("all.h5")
def texts(d): return [bytes(r).rstrip(b"\0").decode() for r in d[:].view("S1").reshape(len(d), -1)]
assert m.attrs["status"] in ("complete", b"complete")
files = texts(m["runs/file"])
assert files == [f"runs/{x}.h5" for x in "abcdef"], files
for i, name in enumerate(files):
    f = h5py.File(name)
    assert m["runs/memory_resident_bytes"][i] == f["memory"].attrs["resident_bytes"] if "resident_bytes" in f["memory"].attrs else True
    assert np.array_equal(m["runs/quality_ppl"][i], f["quality"].attrs.get("ppl", np.nan), equal_nan=True)
    if "nll" in f["quality"]:
        of_run = m["quality/run"][:] == i
        assert (m["quality/nll"][of_run] == f["quality/nll"][:]).all()
assert m["runs/config_n_ctx"].dtype.kind in "uf" and len(m["bench/run"]) == 2
def check(name, o): # columns only: nothing compound, nothing of variable length
    if isinstance(o, h5py.Dataset): assert o.dtype.kind in "uifS" and o.dtype.names is None, (name, o.dtype)
m.visititems(check)
PYTHON
for python in python3 /usr/bin/python3; do
    "$python" -c 'import xarray, h5netcdf' 2>/dev/null || continue
    # The lines that `log merge --help` shows, but for the last, which needs pyarrow.
    "$program" log merge --help | sed -n 's/^    \(import xarray\|runs = .*\)/\1/p' | sed 's/e03.h5/all.h5/' >snippet.py
    [[ $(wc -l <snippet.py) == 2 ]] || fail "the snippet: $(cat snippet.py)"
    echo 'assert list(runs.config_n_ctx[:5]) == [64] * 5 and runs.config_kv[0].startswith("k=f16"), runs' >>snippet.py
    "$python" -W ignore snippet.py || fail "the snippet of log merge --help"
    exit 0
done
echo "note: no python3 with xarray and h5netcdf, the snippet was not run"
