#!/usr/bin/env bash
# --layer-errors: what codecs change in each layer's and head's keys and values, against an independent forward pass (experiments/e04_int4_spread/spread.py) and its 4-bit
# codes; exact caches change nothing, what must not matter does not, sinks are left out, a projection counts what it leaves out, and the results stay the same.
# Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
python3 -c 'import h5py, numpy' 2>/dev/null || { echo "skipped: no python3 with h5py and numpy"; exit 77; }
[[ $("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))') != 0 ]] || { echo "skipped: no OpenCL device"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
model=$root/data/models/tiny.gguf
errors() { # NAME KV ARGUMENT...
    "$program" eval ppl -m "${with:-$model}" -f "$root/LICENSE" -c 64 --chunks 1 --exact --layer-errors --kv "$2" -o "$1.h5" "${@:3}" >"$1.txt" 2>&1 || fail "$2: $(cat "$1.txt")"
}
errors f32 f32
errors f16 f16
errors int4 int4
errors int2 int2
errors hf "int4 korder=hf"
errors pre "int4 rope=pre"
errors hadamard "int4 rot=hadamard"
errors mixed "f16 @1-1 v=int4"
errors values "k=f16 v=int4"
errors sink "int4 sink=8"
errors tail "int4 tail=16"
errors p3 int4 --protocol compress-then-score --context 48 --score 16
errors evicted "int4 keep=streaming budget=uniform(kept=0.5)" --protocol compress-then-score --context 48 --score 16
errors page kivi
"$program" calibrate -m "$model" -f "$root/LICENSE" -c 64 --chunks 4 --for "latent rope=pre" -o latent.h5 &>/dev/null || fail "calibrate"
for rank in 8 16 32; do errors "rank$rank" "latent(rank=$rank) rope=pre table=latent.h5"; done
"$program" calibrate -m "$model" -f "$root/LICENSE" -c 64 --chunks 4 --for "latent(layers=3,heads=2) rope=pre" -o layers.h5 &>/dev/null || fail "calibrate three layers"
for rank in 24 96; do errors "layers$rank" "latent(rank=$rank,layers=3,heads=2,of=f32) rope=pre table=layers.h5" --protocol compress-then-score --context 48 --score 16; done
with=$root/data/models/arch_deepseek2.gguf errors mla int4
with=$root/data/models/arch_gemma3.gguf errors slides int4
with=$root/data/models/arch_cla.gguf errors shared int4
"$program" eval ppl -m "$model" -f "$root/LICENSE" -c 64 --chunks 1 --exact --kv int4 -o plain.h5 &>/dev/null
rc=0
"$program" eval stream -m "$model" -f "$root/LICENSE" -n 64 --layer-errors 2>err || rc=$?
[[ $rc == 2 ]] && grep -q layer-errors err || fail "eval stream has no windows: $(cat err)"
"$program" tokenize -m "$model" -f "$root/LICENSE" >ids

python3 - "$root" <<'PYTHON' || fail "the errors"
import sys, h5py, numpy as np
def maps(name):
    layers = h5py.File(f"{name}.h5").get("layers", {})
    return {side: layers[f"{side}_error"][:] for side in ("key", "value") if f"{side}_error" in layers}
int4 = maps("int4")
assert int4["key"].shape == int4["value"].shape == (3, 2) and all(np.isfinite(x).all() for x in int4.values())
layers = h5py.File("int4.h5")["layers"]
assert [d[0].name.split("/")[-1] for d in layers["key_error"].dims] == ["layer", "head"] and layers["key_error"].attrs["units"] == b"1"
assert all((x == 0).all() for x in maps("f32").values()), maps("f32")
assert all((0 < x).all() and (x < 3e-4).all() for x in maps("f16").values()), maps("f16")
for side in ("key", "value"):
    same = lambda a, b: np.allclose(maps(a)[side], maps(b)[side], rtol=1e-5)
    assert (maps("int2")[side] > 3 * int4[side]).all()
    assert same("hf", "int4"), "the order of channels is nothing to one group a head"
    assert same("tail", "int4"), "what is exact only now is not exact later"
    assert same("p3", "evicted"), "what is evicted is nothing to the codec"
    assert not same("hadamard", "int4") and not same("sink", "int4")
assert not np.allclose(maps("pre")["key"], int4["key"], rtol=1e-3) and np.allclose(maps("pre")["value"], int4["value"], rtol=1e-5)
assert np.allclose(maps("values")["value"], int4["value"], rtol=1e-5) and np.allclose(maps("values")["key"], maps("f16")["key"])
mixed = maps("mixed")
assert np.allclose(mixed["value"][1], int4["value"][1], rtol=1e-5) and np.allclose(mixed["value"][[0, 2]], maps("f16")["value"][[0, 2]])
ranks = [maps(f"rank{rank}") for rank in (8, 16, 32)]
for side in ("key", "value"):
    assert (ranks[0][side] > 1.1 * ranks[1][side]).all() and (ranks[1][side] > 10 * ranks[2][side]).all() and (ranks[0][side] < 1).all() and (ranks[2][side] < 1e-2).all(), ranks
def moments(name, side):
    """Of a calibration table: sum of energy x direction direction^T, [layers or groups][streams][W][W]."""
    table = h5py.File(f"{name}.h5")[side]
    energy, directions = table["energy"][:], table["directions"][:].reshape(*table["energy"].shape, -1)
    return np.einsum("lsr,lsri,lsrj->lsij", energy, directions, directions)
for side in "kv": # the rows of three layers and two heads, one behind the other, are those of each layer and head
    together, alone = moments("layers", side)[0, 0], moments("latent", side)
    for i in range(6):
        assert np.allclose(together[32 * i:32 * i + 32, 32 * i:32 * i + 32], alone[i // 2, i % 2], atol=1e-4 * abs(alone).max()), (side, i)
few, more = (maps(f"layers{rank}") for rank in (24, 96))
for side in ("key", "value"): # what they share is said of the first of them
    assert np.isfinite(few[side][0, 0]) and np.isnan(few[side][1:]).all() and more[side][0, 0] < few[side][0, 0] < 1, few
mla = maps("mla")
assert list(mla) == ["key"] and mla["key"].shape[1] == 1 and (mla["key"] > 0.01).all(), mla
assert all(np.isfinite(x).all() and (x > 0.01).all() for x in maps("slides").values())
shared = maps("shared")
assert (np.isnan(shared["key"]).all(1) == np.isnan(shared["value"]).all(1)).all() and 0 < np.isnan(shared["key"]).all(1).sum() < len(shared["key"]), shared
a, b = (h5py.File(f"{name}.h5") for name in ("int4", "plain"))
assert dict(a["quality"].attrs)["nll"] == dict(b["quality"].attrs)["nll"] and "key_error" not in b["layers"], "--layer-errors changes results"

try:
    import gguf  # noqa: F401
except ImportError:
    sys.exit(print("note: no python3 with gguf, errors not compared with an independent pass"))
sys.path.append(f"{sys.argv[1]}/experiments/e04_int4_spread")
import spread
pass_ = spread.Model(f"{sys.argv[1]}/data/models/tiny.gguf", np.float64, 0)
rows = []  # keys and values of each layer, [H][T][D]
keep = lambda x: (rows.append(x), x)[1]
pass_.log_probabilities(np.loadtxt("ids", dtype=np.int64)[:64], keep)
worst = 0
for name, bits in (("int4", 4), ("int2", 2)):
    for i, x in enumerate(rows):
        x = x.astype(np.float32)
        back = spread.codes(bits)(x)
        want = np.sqrt(((back - x).astype(np.float64) ** 2).sum((1, 2)) / (x.astype(np.float64) ** 2).sum((1, 2)))
        got = maps(name)[("key", "value")[i % 2]][i // 2]
        worst = max(worst, abs(got / want - 1).max())
assert worst < 2e-3, worst
values = np.concatenate([rows[i][:, :48].transpose(1, 0, 2).reshape(48, -1) for i in (1, 3, 5)], 1) # [T][layers * heads * D]
for rank, found in ((24, few), (96, more)):
    directions = h5py.File("layers.h5")["v/directions"][0, 0].reshape(192, 192)[:rank]
    left_out = np.linalg.norm(values - values @ directions.T @ directions) / np.linalg.norm(values)
    assert abs(found["value"][0, 0] / left_out - 1) < 2e-3, (rank, found, left_out)
print(f"errors of {2 * len(rows)} sides of layers are those of an independent pass, within {worst:.1e}")
PYTHON
