#!/usr/bin/env python3
"""Which layers suffer from few bits, and what a mix of widths that follows from it is worth.

    experiments/e06_sensitivity/sensitivity.py tables    runs/e06_tables: probe.so and the tables of heads.yaml (needs a C compiler and h5py)
    experiments/e06_sensitivity/sensitivity.py mix       runs/e06_sensitivity -> sensitivity.csv, mix.yaml
    experiments/e06_sensitivity/sensitivity.py table     runs/e06_mix -> mix.csv, and the table of the verdict on stdout
    experiments/e06_sensitivity/sensitivity.py heads     runs/e06_heads -> heads.csv
    experiments/e06_sensitivity/sensitivity.py figure    sensitivity.csv, heads.csv -> sensitivity.svg (needs numpy and matplotlib)
"""
import argparse
import csv
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
root = here.parent.parent
sys.path.append(str(here.parent))
from run_files import run_files_in  # noqa: E402

MODEL = "data/models/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS, HEADS = 30, 3
CODEC = "kivi(bits={},residual=0)"
GRID = """# sensitivity.py mix wrote this. All caches of the list reserve the same bytes.
name: e06_mix
command: eval kld
models: [{model}]
texts: [data/text/wiki.test.raw]
ctx: [512]
options: [--chunks=16, --exact, --base=f16, --base-logits=runs/base_logits]
kv:
{cells}
"""


def kvlab(args, *words):
    return subprocess.run([args.kvlab, *words], capture_output=True, text=True, check=True, cwd=root).stdout


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def runs_of(args, folder):
    files = run_files_in(folder)
    return [{"run": Path(facts["file"]).stem} | facts for facts in csv.DictReader(kvlab(args, "log", "export", "--csv", *files).splitlines())]


# ---- one head: a plug-in that codes the streams that its table names ----

def tables(args):
    import h5py
    folder = root / "runs/e06_tables"
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / "probe.so"
    subprocess.run(["cc", "-std=c11", "-O2", "-shared", "-fPIC", "-I", "compress", here / "probe.c", "-o", probe, "-lm"], check=True, cwd=root)
    for bits, head in itertools.product((2, 4), range(HEADS)):
        path = folder / f"probe{bits}_{head}.h5"
        path.unlink(missing_ok=True)
        kvlab(args, "calibrate", "-m", MODEL, "-f", "data/text/wiki.test.raw", "--plugin", str(probe), "--for", f"probe(bits={bits})", "-c", "64", "--chunks", "1",
              "-o", str(path))
        with h5py.File(path, "r+") as file:
            for side in "kv":
                file[side]["coded"][...] = [[[float(other == head)] for other in range(HEADS)]] * LAYERS


def heads(args):
    rows = []
    for run in runs_of(args, "runs/e06_heads"):
        layer, bits, head = re.fullmatch(r"f16 @(\d+)-\d+ kv=probe\(bits=(\d)\) table=runs/e06_tables/probe\d_(\d).h5", run["config_kv_given"]).groups()
        rows.append({"run": run["run"], "layer": int(layer), "head": int(head), "bits": int(bits), "kld": run["quality_kld_mean"], "kld_se": run["quality_kld_se"],
                     "windows": run["quality_n_chunks"], "git": run["git"]})
    write_csv(here / "heads.csv", sorted(rows, key=lambda row: (row["bits"], row["head"], row["layer"])))


# ---- the choice ----

def measured(args):
    rows = []
    for run in runs_of(args, "runs/e06_sensitivity"):
        layer, side, bits = re.fullmatch(r"f16 @(\d+)-\d+ ([kv])=kivi\(bits=(\d),residual=0\)", run["config_kv_given"]).groups()
        rows.append({"run": run["run"], "layer": int(layer), "side": side, "bits": int(bits), "kld": run["quality_kld_mean"], "kld_se": run["quality_kld_se"],
                     "windows": run["quality_n_chunks"], "git": run["git"]})
    return sorted(rows, key=lambda row: (row["bits"], row["side"], row["layer"]))


def spec_of(bits, base=2):
    """bits: {(layer, side): bits}; those that it leaves out have `base`."""
    def words(layer):
        own = {side: bits.get((layer, side), base) for side in "kv"}
        if own["k"] == own["v"]:
            return f"kv={CODEC.format(own['k'])}" if own["k"] != base else ""
        return " ".join(f"{side}={CODEC.format(width)}" for side, width in own.items() if width != base)
    text, start = CODEC.format(base), 0
    for same, layers in itertools.groupby(range(LAYERS), words):
        n = len(list(layers))
        text += f" @{start}-{start + n - 1} {same}" if same else ""
        start += n
    return text


def greedy(cost):
    """A bit more, again and again, for the pair where it is worth most, from 2 to 4 bits, 3 on average. The model of what b bits cost is the step squared."""
    step = {bits: (3 / (2 ** bits - 1)) ** 2 for bits in (2, 3, 4)}
    bits = dict.fromkeys(cost, 2)
    for _ in cost:
        best = max((pair for pair in cost if bits[pair] < 4), key=lambda pair: cost[pair] * (step[bits[pair]] - step[bits[pair] + 1]))
        bits[best] += 1
    return bits


def choose(rows):
    """{name: spec} of caches of 3 bits a number, on average."""
    cost = {(row["layer"], row["side"]): float(row["kld"]) for row in rows if row["bits"] == 2}
    by_layer = {layer: cost[layer, "k"] + cost[layer, "v"] for layer in range(LAYERS)}
    pairs = sorted(cost, key=cost.get, reverse=True)
    layers = sorted(by_layer, key=by_layer.get, reverse=True)[:LAYERS // 2]
    four, two = CODEC.format(4), CODEC.format(2)
    return {"3 bits everywhere": CODEC.format(3), "greedy, 2 to 4 bits": spec_of(greedy(cost), 3),
            "halves of 4 and 2 bits": spec_of(dict.fromkeys(pairs[:LAYERS], 4)), "the halves, turned round": spec_of(dict.fromkeys(pairs[LAYERS:], 4)),
            "keys 4, values 2": f"k={four} v={two}", "keys 2, values 4": f"k={two} v={four}",
            "halves by layer": spec_of({(layer, side): 4 for layer in layers for side in "kv"})}


def resident_bytes(args, spec):
    return json.loads(kvlab(args, "plan", "-m", MODEL, "--ctx", "4096", "--json", "--kv", spec))["resident_bytes"]


def mix(args):
    rows = measured(args)
    write_csv(here / "sensitivity.csv", rows)
    specs = choose(rows)
    sizes = {name: resident_bytes(args, spec) for name, spec in specs.items()}
    assert len(set(sizes.values())) == 1, f"not of equal bytes: {sizes}"
    cells = "\n".join(f"  # {name}\n  - {spec}" for name, spec in specs.items())
    (here / "mix.yaml").write_text(GRID.format(model=MODEL, cells=cells))


# ---- the verdict ----

def table(args):
    by_spec = {run["config_kv_given"]: run for run in runs_of(args, "runs/e06_mix")}
    specs = choose(read_csv_numbers())
    uniform, rows = by_spec[specs["3 bits everywhere"]], []
    print("| cache | KLD | less 3 bits everywhere, 95 % | windows | verdict | MiB at 4096 |\n| --- | --- | --- | --- | --- | --- |")
    for name, spec in specs.items():
        if spec not in by_spec:
            print(f"no run yet, left out: {name}", file=sys.stderr)
            continue
        run = by_spec[spec]
        found = json.loads(kvlab(args, "log", "diff", "--json", uniform["file"], run["file"]))["quality"]["kld"]
        size = resident_bytes(args, spec)
        rows.append({"run": run["run"], "against": uniform["run"], "cache": name, "kld": run["quality_kld_mean"], "kld_se_chunk": run["quality_kld_se_chunk"], "difference": found["difference"], "low": found["low"],
                     "high": found["high"], "windows": found["n"], "verdict": found["verdict"], "resident_bytes_4096": size, "git": run["git"], "kv": spec})
        difference = f"{found['difference']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]" if run is not uniform else ""
        print(f"| {name} | {float(run['quality_kld_mean']):.4f} +- {float(run['quality_kld_se_chunk']):.4f} | {difference} | {found['n']} | {found['verdict'] if difference else ''} | {size / 2**20:.2f} |")
    write_csv(here / "mix.csv", rows)


def read_csv_numbers(name="sensitivity.csv"):
    return [row | {"layer": int(row["layer"]), "bits": int(row["bits"])} for row in read_csv(here / name)]


def figure(args):
    import drawing
    import numpy as np
    from matplotlib.colors import LogNorm
    sides = {"k": "keys", "v": "values"}
    found = [(f"{sides[row['side']]}, {row['bits']} bits", row) for row in read_csv_numbers()]
    if (here / "heads.csv").exists():
        found += [(f"kv head {row['head']}, {row['bits']} bits", row) for row in read_csv_numbers("heads.csv")]
    names = list(dict.fromkeys(name for name, _ in found))
    kld = np.full((len(names), LAYERS), np.nan)
    for name, row in found:
        kld[names.index(name), row["layer"]] = float(row["kld"])
    picture, axes = drawing.new_figure(13, 1.2 + 0.36 * len(names))
    image = axes.imshow(kld, norm=LogNorm(), cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(kld):
        if not np.isnan(value):
            axes.text(x, y, f"{1000 * value:.2g}", ha="center", va="center", fontsize=7, color="white" if image.norm(value) < 0.6 else "black")
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(LAYERS))
    axes.set_xlabel("the only layer that is coded; in the cells KLD to f16 in thousandths of a nat a token (2 windows: exploratory)")
    picture.colorbar(image, label="KLD, nats a token")
    drawing.save_figure(picture, here / "sensitivity.svg", "experiments/e06_sensitivity/sensitivity.py figure")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tables", "mix", "table", "heads", "figure"])
    parser.add_argument("--kvlab", default=root / "build/kvlab")
    args = parser.parse_args()
    {"tables": tables, "mix": mix, "table": table, "heads": heads, "figure": figure}[args.what](args)


if __name__ == "__main__":
    main()
