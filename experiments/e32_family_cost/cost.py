#!/usr/bin/env python3
"""What a token of each model of the family costs: bytes, bits a byte (from the run files of grid.yaml), decode time behind a cache of random rows.

usage: cost.py times [--kvlab P] [-r N]    runs/e32_family_cost-times-*.h5, models in turns; on a machine that does nothing else -> times.csv, runs.csv
       cost.py report [--runs DIR]         runs/e32_family_cost, if it is there -> costs.csv, runs.csv; the table of these (these two need h5py, report scipy too)
       cost.py figure                      costs.csv, times.csv -> cost.svg (needs matplotlib)
"""
import argparse
import csv
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE.parent), str(HERE.parent / "peers")]
MODELS = ("mha", "gqa2", "mla64", "mqa", "mla32", "cla2")
CACHES = ("f16", "int8", "int4")
KEPT = 0.375  # of the tokens: int4's bytes with heads of 16
CONTROLS = {"sink=4 window=188": ("recency", "s"), f"keep=oracle budget=uniform(kept={KEPT})": ("oracle", "*")}
DEPTHS = (128, 1024, 8192)
DECODED = 256
COLUMNS = [("model", "1", "of the family"), ("device", "1", "name of the OpenCL device"), ("depth", "1", "tokens in the cache before"), ("repetition", "1", "its number"),
           ("us_per_token", "us", "of a decoded token")]


def bench(program, model):
    command = [program, "bench", "-m", ROOT / f"data/models/family-{model}.gguf", "--kv", "f16", "-p", "0", "-n", str(DECODED), "-d",
               ",".join(map(str, DEPTHS)), "-r", "1", "--synthetic", "--allow-long", "--no-run-file", "--json", "--quiet"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"cost.py: exit code {done.returncode} of {' '.join(map(str, command))}")
    return json.loads(done.stdout)


def measure(args):
    from runfile import RunFile
    path = ROOT / time.strftime("runs/e32_family_cost-times-%Y%m%d-%H%M%S.h5", time.gmtime())
    with RunFile(str(path), "decode time of the family", {"command": "e32_family_cost", "repetitions": args.repetitions, "decoded": DECODED}) as run:
        run.table("times", COLUMNS, [(model, row["device"], row["depth"], repetition, row["samples_ns"][0] / DECODED * 1e-3)
                                     for repetition in range(args.repetitions) for model in MODELS for row in bench(args.kvlab, model)])
    subprocess.run([sys.executable, HERE.parent / "collect.py", HERE.name, "--tables", "times", "-f", path], check=True)


def read(name):
    path = HERE / name
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def medians():
    """{(model, depth): (median, least, most) us a token} of the newest run."""
    rows, samples = read("times.csv"), {}
    for row in rows:
        if row["run"] == rows[-1]["run"]:
            samples.setdefault((row["model"], int(row["depth"])), []).append(float(row["us_per_token"]))
    return {key: (statistics.median(values), min(values), max(values)) for key, values in samples.items()}


def collect(args):
    """costs.csv: bytes a token of the context and bits a byte of each model and cache with the standard error over windows; those above the model's own f16 and above mha's in
    the same windows, with half their 95 % intervals."""
    import paired
    runs = paired.read_runs(args.kvlab, args.runs, key=lambda facts: (facts["config_model"].removeprefix("family "), facts["config_kv_given"]))
    subprocess.run([sys.executable, HERE.parent / "collect.py", HERE.name, "-f", *(args.runs / f"{run['run']}.h5" for run in runs.values())], check=True)
    rows = []
    for (model, kv), run in sorted(runs.items()):
        row = {"run": run["run"], "model": model, "kv": kv, "bytes_per_token": int(float(run["facts"]["memory_bytes_per_token"]) * (KEPT if kv in CONTROLS else 1))}
        for name, base in (("above", runs[model, "f16"]), ("above_mha", runs["mha", "f16"])):
            windows = paired.common_windows(run, base)
            bits, before = (paired.column(which, "nll", windows) / math.log(2) for which in (run, base))
            found = paired.interval(bits - before) if run is not base else {"mean": 0.0, "high": 0.0}
            row |= {name: found["mean"], f"{name}_half": found["high"] - found["mean"]}
        rows.append(row | {"bits_per_byte": bits.mean(), "se": bits.std(ddof=1) / math.sqrt(len(bits)), "windows": len(bits)})
    paired.write_csv(HERE / "costs.csv", rows)


def draw():
    import drawing
    times, costs = medians(), read("costs.csv")
    figure, (left, right) = drawing.new_figure(9.5, 4, columns=2)
    for model, colour in zip(MODELS, drawing.COLOURS):
        for kinds, shape in ((CACHES, "o-"), *(((kv,), shape) for kv, (_, shape) in CONTROLS.items())):
            points = sorted([float(row[name]) for name in ("bytes_per_token", "above_mha", "above_mha_half")] for row in costs if row["model"] == model and row["kv"] in kinds)
            if points:
                x, y, error = zip(*points)
                left.errorbar(x, y, error, fmt=shape, color=colour, linewidth=1, capsize=2)
        line = [(depth, *times[model, depth]) for depth in DEPTHS if (model, depth) in times]
        if line:
            x, middle, least, most = map(list, zip(*line))
            right.errorbar(x, middle, [[m - a for m, a in zip(middle, least)], [b - m for m, b in zip(middle, most)]], fmt="o-", color=colour, linewidth=1, capsize=2, label=model)
    left.set(title="lines: f16, int8, int4; controls: recency (squares), oracle (stars)", xlabel="bytes a token of the context", ylabel="bits a byte above mha's with f16 (95 %)", xscale="log")
    right.set(title="decode, f16", xlabel="tokens in the cache", ylabel="us a token (median, least, most)", xscale="log", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    drawing.save_figure(figure, HERE / "cost.svg", "experiments/e32_family_cost/cost.py figure")


def cell_of(row):
    numbers = {name: float(row[name]) for name in ("bits_per_byte", "se", "above", "above_half")}
    return f"{row['bytes_per_token']}, " + ("{bits_per_byte:.4f} +- {se:.4f}" if row["kv"] == "f16" else "{bits_per_byte:.4f}, {above:+.4f} +- {above_half:.4f}").format(**numbers)


def report(args):
    if any(args.runs.glob("*.h5")):
        collect(args)
    times, costs = medians(), {(row["model"], row["kv"]): row for row in read("costs.csv")}
    print("| model | " + " | ".join(f"{cache}: bytes a token, bits a byte" + (", above f16" if cache != "f16" else "") for cache in CACHES) + " | " + " | ".join(f"us behind {depth}" for depth in DEPTHS) + " |")
    print("| --- |" + " ---: |" * (len(CACHES) + len(DEPTHS)))
    for model in MODELS:
        cells = [cell_of(costs[model, cache]) if (model, cache) in costs else "" for cache in CACHES]
        cells += ["{:.0f} ({:.0f}-{:.0f})".format(*times[model, depth]) if (model, depth) in times else "" for depth in DEPTHS]
        print(f"| {model} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "report", "figure"))
    parser.add_argument("--kvlab", default=ROOT / "build" / "kvlab")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--runs", type=pathlib.Path, default=ROOT / "runs" / "e32_family_cost")
    args = parser.parse_args()
    {"times": measure, "report": report, "figure": lambda _: draw()}[args.what](args)


if __name__ == "__main__":
    main()
