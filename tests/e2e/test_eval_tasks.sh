#!/usr/bin/env bash
# eval recall, needle and continuation end to end, and what evictions leave in the run file. Called with the program and the project's root.
# Independent: the continuation's first difference is where `generate` with the two caches first differs; kept positions and losses in the file are
# those of the float64 pass behind data/golden/tiny_witness_answers.h.
set -euo pipefail
program=$1 root=$2
model=$root/data/models/tiny.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
get() { python3 -c 'import json, math, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
expect() { [[ $(get "$1" "$2") == True ]] || fail "$1: $2: $(cat "$1")"; }
refused() { # WORDS-OF-THE-MESSAGE COMMAND ARGUMENTS...
    local words=$1 rc=0
    shift
    "$program" eval "$@" -m "$model" --no-run-file >out 2>err || rc=$?
    [[ $rc == 2 ]] || fail "$*: exit code $rc, wanted 2: $(cat err)"
    grep -qF -- "$words" err || fail "$*: the message lacks \"$words\": $(cat err)"
    [[ ! -s out ]] || fail "$*: something on stdout"
}

python3 -c 'import random, sys
random.seed(1); sys.stdout.buffer.write(bytes(random.randrange(1, 128) for _ in range(1500)))' >text
head -c 300 text >short

# --- usage ---
refused "--question" needle -f text
refused "seen|unseen" needle -f text --question maybe
refused '"0.5x" is not a number from 0 to 1' recall -f text --depth 0,0.5x
refused '"1.5" is not a whole number' recall -f text --gap 1.5
refused '"" is not a number' recall -f text --depth 0,
refused '"2" is not a number from 0 to 1' needle -f text --question seen --depth 2
refused "has no room for it" recall -f text --context 64 --span 64
refused "cut from at least" recall -f short --context 128 --span 64
refused '"63" is not a whole number from 64' needle -f text --question seen --length 63
refused "head, needle and question alone have" needle -f text --question seen --length 150
refused "one window of 1664" recall -f text --context 1600
refused "--context" continuation -f text --context 0
refused "--loss measures" recall -f text --context 96 --span 8 --loss
refused "--loss measures" ppl -f text -c 64 --loss
refused "layer" recall -f text --context 96 --span 8 --kv "keep=knorm budget=layers(kept=0.5,share=1:2)"

# --- recall: what is kept of everything is everything, and rows give the cells ---
recall=(-f text --context 96 --span 16 --seeds 4 --exact --base f32)
"$program" eval recall -m "$model" "${recall[@]}" --kv "f32 keep=knorm budget=uniform(kept=1)" --depth 0,0.5,1 --gap 0,9 --json --no-run-file >all.json 2>/dev/null
expect all.json 'len(r["cells"]) == 6 and [(c["depth"], c["gap"]) for c in r["cells"]] == [(d, g) for d in (0, 0.5, 1) for g in (0, 9)]'
expect all.json 'all(abs(c["gain"] - c["gain_base"]) < 2e-5 for c in r["cells"])'
"$program" eval recall -m "$model" "${recall[@]}" --kv "f32 keep=knorm budget=uniform(kept=0.3)" --depth 0.5 --gap 9 --json -o recall.h5 >some.json 2>/dev/null
expect some.json 'abs(r["cells"][0]["gain_base"] - json.load(open("all.json"))["cells"][3]["gain_base"]) < 2e-5'
expect some.json 'abs(r["cells"][0]["gain"] - r["cells"][0]["gain_base"]) > 1e-3'
expect some.json '(r["cells"][0]["kept"] is None) == (r["n_cells_scored"] == 0)'
expect some.json 'r["recall_kept_se"] == r["cells"][0]["kept_se"] or abs(r["recall_kept_se"] - r["cells"][0]["kept_se"]) < 1e-12'
"$program" eval recall -m "$model" "${recall[@]}" --kv f32 --depth 0.5 --seed 1 --json --no-run-file >other.json 2>/dev/null
expect other.json 'r["cells"][0]["nll_first"] != json.load(open("all.json"))["cells"][2]["nll_first"]'
# The span's nll at first is that of the same tokens in a plain window: the text itself is the sequence when the span is cut from where it stands.
"$program" eval recall -m "$model" "${recall[@]}" --kv f32 --depth 0.5 >table 2>/dev/null
grep -q '^| *depth |' table || fail "no table"

# --- needle ---
for question in seen unseen; do
    "$program" eval needle -m "$model" -f text --question $question --length 220,260 --depth 0,1 --seeds 2 --exact --base f32 \
        --kv "f32 keep=tova budget=uniform(kept=1)" --json -o needle-$question.h5 >$question.json 2>/dev/null
    expect $question.json 'len(r["cells"]) == 4 and all(abs(c["nll"] - c["nll_base"]) < 2e-5 and c["n"] == 2 for c in r["cells"])'
    expect $question.json 'r["question"] == "'$question'" and r["n_cells_scored"] == 0 and all(c["exact"] is None for c in r["cells"])' # a random model
done
"$program" eval needle -m "$model" -f text --question unseen --length 220 --depth 0.5 --seeds 1 --no-run-file >table 2>/dev/null
grep -q '|  none |.*0.00' table || fail "a cell in which the full cache fails must say so: $(cat table)"

# --- continuation: the first difference is that of two `generate` runs ---
spec="f32 keep=snapkv(window=8) budget=uniform(kept=0.6)"
common=(-m "$model" -f text --context 96 -n 24 --exact --base f32 --json)
"$program" eval continuation "${common[@]}" --kv "$spec" --ubatch 1 --chunks 3 -o continuation.h5 >continuation.json 2>/dev/null
"$program" eval continuation "${common[@]}" --kv "f32 keep=snapkv(window=8) budget=uniform(kept=1)" --chunks 3 --no-run-file >same.json 2>/dev/null
expect same.json '(r["first_median"], r["first_median_censored"], r["n_diverged"], r["same_top1"]) == (24, 1, 0, 1)'
for chunk in 0 1 2; do
    dd if=text of=part bs=1 skip=$((chunk * 120)) count=96 status=none
    for kv in f32 "$spec"; do
        "$program" generate -m "$model" -f part -n 24 --exact --ignore-eos --kv "$kv" --json --no-run-file >generated.json 2>/dev/null
        get generated.json 'next(v for v in r.values() if isinstance(v, list) and v and isinstance(v[0], int))'
    done | python3 -c 'import ast, sys
a, b = (ast.literal_eval(line) for line in sys.stdin)
print(next((i for i in range(24) if i >= len(a) or i >= len(b) or a[i] != b[i]), 24))'
done | tr '\n' ' ' >wanted

if ! python3 -c 'import h5py, numpy' 2>/dev/null; then
    echo "note: no python3 with h5py and numpy, run files not checked"
    exit 0
fi
python3 - "$(cat wanted)" <<'PYTHON' || fail "run files of the tasks"
import json, sys, h5py, numpy as np
f = h5py.File("continuation.h5")["quality"]
wanted = [int(x) for x in sys.argv[1].split()]
assert list(f["first"][:]) == wanted, (list(f["first"][:]), wanted)
assert len(set(wanted)) > 1 or wanted[0] < 24, "nothing differs"
r = json.load(open("continuation.json"))
assert r["first_median"] == sorted(wanted)[1] and r["n_diverged"] == sum(x < 24 for x in wanted)
assert abs(r["same_top1"] - f["same_top1"][:].mean()) < 1e-9
f = h5py.File("recall.h5")
q, cell = f["quality"], json.load(open("some.json"))["cells"][0]
assert list(q["seed"][:]) == [0, 1, 2, 3] and (q["gap"][:] == 9).all() and (q["depth"][:] == 0.5).all()
gain, base = q["nll_first"][:] - q["nll_repeat"][:], q["nll_first"][:] - q["nll_repeat_base"][:]
assert abs(gain.mean() - cell["gain"]) < 1e-9 and abs(base.mean() - cell["gain_base"]) < 1e-9
assert f["config"].attrs["depth"] in (b"0.5", "0.5") and f["config"].attrs["gap"] in (b"9", "9")
assert len(f["evictions/kept"]) == 4 * 3 * 2, "an eviction a sequence, layer and head"
f = h5py.File("needle-seen.h5")
assert len(f["quality/nll"]) == 8 and f["config"].attrs["question"] in (b"seen", "seen")
PYTHON

# --- evictions: positions and losses against the independent pass ---
answers=$root/data/golden/tiny_witness_answers.h
python3 - "$answers" <<'PYTHON'
import re, sys
tokens = re.search(r"witness_token\[\d+\] = {([^}]*)}", open(sys.argv[1]).read()).group(1)
open("witness", "wb").write(bytes(int(t) for t in tokens.split(",")))
PYTHON
for keep in oracle "kvzip(chunk=40,lead=4,sink=2)"; do
    "$program" eval ppl -m "$model" -f witness --protocol p3 --context 96 --score 44 --chunks 1 --exact --loss --kv "f32 keep=$keep budget=uniform(tokens=24)" \
        -o witness.h5 --json >witness.json 2>/dev/null
    python3 - "$answers" "${keep%%(*}" <<'PYTHON' || fail "evictions of $keep"
import json, re, sys, h5py, numpy as np
text, name = open(sys.argv[1]).read(), sys.argv[2]
def answer(what):
    body = re.search(rf"{name}_{what}(\[\w+\])+ = {{(.*?)}};", text, re.S).group(2)
    return np.array([float(x) for x in re.findall(r"[-+.\de]+", body)])
f = h5py.File("witness.h5")
e, position = f["evictions"], f["evictions/positions/position"][:]
assert len(e["kept"]) == 6 and (e["kept"][:] == 24).all() and (e["target"][:] == 24).all() and (e["position"][:] == 96).all()
assert list(zip(e["layer"][:], e["head"][:])) == [(l, h) for l in range(3) for h in range(2)] and (e["eviction"][:] == 0).all()
assert "".join(c.decode() for c in np.asarray(e["source"][0]).ravel()).rstrip("\0") == "exact"
assert (e["first"][:] == np.arange(6) * 24).all() and (position == answer("kept")).all(), "kept positions"
assert abs(e["mass_lost"][:] - answer("mass_lost")).max() < 1e-5 and abs(e["output_error"][:] - answer("output_error")).max() < 1e-5
assert (f["layers/kept_position"][:] == position).all()
r = json.load(open("witness.json"))
for what in "mass_lost", "output_error":
    assert abs(r[what] - answer(what).mean()) < 1e-5 and abs(f["quality"].attrs[what] - r[what]) < 1e-9, what
PYTHON
    rm witness.h5
done
# Decoding: what layers hold in the end, one more row a layer and head.
"$program" generate -m "$model" -p "$(head -c 60 "$root/LICENSE" | tr -d '\n')" -n 30 --kv "f32 keep=h2o budget=uniform(tokens=24) when=full" -o decode.h5 >/dev/null 2>&1 || fail "generate"
python3 - <<'PYTHON' || fail "evictions while decoding"
import h5py, numpy as np
f = h5py.File("decode.h5")
e, position = f["evictions"], f["evictions/positions/position"][:]
source = ["".join(c.decode() for c in np.asarray(row).ravel()).rstrip("\0") for row in e["source"][:]]
assert source[-6:] == ["used"] * 6, source
for first, kept, seen in zip(e["first"][-6:], e["kept"][-6:], e["position"][-6:]):
    mine = position[first:first + kept]
    assert kept <= 25 and (np.diff(mine.astype(int)) > 0).all() and mine[-1] == seen - 1, (kept, mine, seen)
# What went, forward from the prompt's eviction, leaves what is held in the end; behind each token it leaves the budget.
g = f["evictions/gone"]
assert f["evictions"].attrs["gone"] == f["evictions"].attrs["gone_logged"] == len(g["position"]) == 6 * (e["position"][-1] - e["position"][0])
for i in range(6):
    prompt, end = (set(position[a:a + n]) for a, n in ((e["first"][j], e["kept"][j]) for j in (i, len(e["kept"]) - 6 + i)))
    mine = (g["layer"][:] == e["layer"][i]) & (g["head"][:] == e["head"][i])
    held, seen = prompt, e["position"][0]
    for when, where, mass in zip(g["seen"][mine], g["position"][mine], g["mass"][mine]):
        held = (held | set(range(seen, when))) - {where}
        seen = when
        assert len(held) == 24 and 0 <= mass < 1, (when, where, mass)
    assert held == end, (held, end)
assert (g["eviction"][:] == e["eviction"][-1]).all()
PYTHON
