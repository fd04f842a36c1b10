#!/usr/bin/env python3
"""What a token of each model of the family costs: bytes, bits a byte (from the run files of grid.yaml), decode time behind a cache of random rows.

usage: cost.py times [--kvlab P] [-r N]    times.csv beside this script, models in turns; on a machine that does nothing else
       cost.py report [--runs DIR]         table of what is there, and cost.svg (needs h5py and matplotlib)
"""
import argparse
import csv
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = ("mha", "gqa2", "mla64", "mqa", "mla32", "cla2")
DEPTHS = (128, 1024, 8192)
DECODED = 256
COLUMNS = ("model", "device", "depth", "repetition", "us_per_token")


def bench(program, model):
    command = [program, "bench", "-m", ROOT / f"data/models/family-{model}.gguf", "--kv", "f16", "-p", "0", "-n", str(DECODED), "-d",
               ",".join(map(str, DEPTHS)), "-r", "1", "--synthetic", "--allow-long", "--no-run-file", "--json", "--quiet"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"cost.py: exit code {done.returncode} of {' '.join(map(str, command))}")
    return json.loads(done.stdout)


def measure(args):
    with open(HERE / "times.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for repetition in range(args.repetitions):
            for model in MODELS:
                for row in bench(args.kvlab, model):
                    writer.writerow([model, row["device"], row["depth"], repetition, f"{row['samples_ns'][0] / DECODED * 1e-3:.2f}"])


def medians():
    """{(model, depth): us a token}"""
    samples = {}
    with open(HERE / "times.csv", newline="") as file:
        for row in csv.DictReader(file):
            samples.setdefault((row["model"], int(row["depth"])), []).append(float(row["us_per_token"]))
    return {key: statistics.median(values) for key, values in samples.items()}


def quality(folder):
    """{(model, cache): (bytes a token, bits a byte)}"""
    import h5py
    import math
    found = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            text = lambda value: value.decode() if isinstance(value, bytes) else str(value)
            model = text(file["config"].attrs["model"]).removeprefix("family ")
            found[model, text(file["config"].attrs["kv_given"])] = (int(file["memory"].attrs["bytes_per_token"]), float(file["quality"].attrs["nll"]) / math.log(2))
    return found


def draw(times, costs):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    # Colours of Okabe and Ito, told apart by people of any colour vision.
    colours = dict(zip(MODELS, ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]))
    for model in MODELS:
        points = sorted(cost for (name, _), cost in costs.items() if name == model)
        if points:
            left.plot(*zip(*points), "o-", color=colours[model], linewidth=1, label=model)
        line = [(depth, times[model, depth]) for depth in DEPTHS if (model, depth) in times]
        if line:
            right.plot(*zip(*line), "o-", color=colours[model], linewidth=1, label=model)
    left.set(title="f16, int8, int4", xlabel="bytes a token", ylabel="bits a byte", xscale="log")
    right.set(title="decode", xlabel="tokens in the cache", ylabel="us a token", xscale="log", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "cost.svg")


def report(args):
    times, costs = medians(), quality(args.runs)
    caches = ("f16", "int8", "int4")
    print("| model | " + " | ".join(f"{cache}: bytes a token, bits a byte" for cache in caches) + " | " + " | ".join(f"us behind {depth}" for depth in DEPTHS) + " |")
    print("| --- |" + " ---: |" * (len(caches) + len(DEPTHS)))
    for model in MODELS:
        cells = [f"{costs[model, cache][0]}, {costs[model, cache][1]:.4f}" if (model, cache) in costs else "" for cache in caches]
        cells += [f"{times[model, depth]:.0f}" if (model, depth) in times else "" for depth in DEPTHS]
        print(f"| {model} | " + " | ".join(cells) + " |")
    draw(times, costs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "report"))
    parser.add_argument("--kvlab", default=ROOT / "build" / "kvlab")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--runs", type=pathlib.Path, default=ROOT / "runs" / "e32_family_cost")
    args = parser.parse_args()
    measure(args) if args.what == "times" else report(args)


if __name__ == "__main__":
    main()
