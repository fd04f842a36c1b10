#!/usr/bin/env python3
"""A text generated with the cache and without: what is computed, and how the time of a token grows. Runs what is missing, then prints the table and writes
runs.csv, steps.csv and fits.csv (needs numpy and h5py); --figure draws steps.csv and fits.csv instead (needs matplotlib). See why.md."""
import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE.parent))
import collect  # noqa: E402
from fitting import fit_polynomial  # noqa: E402

MODES = {"cache": [], "no cache": ["--no-cache"]}
LAST = 8  # tokens at the end whose median is told


def run_file(args, mode, repetition):
    return args.output / f"{mode.replace(' ', '_')}_{repetition}.h5"


def run_missing(args):
    for repetition in range(args.repetitions):
        for mode, option in MODES.items():
            path = run_file(args, mode, repetition)
            if not path.exists():
                command = [*args.under.split(), args.kvlab, "generate", "--exact", "-m", args.model, "-p", "The", "-n", str(args.tokens), "--ignore-eos", "--quiet", "-o", str(path), *option]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
                print(path, file=sys.stderr)


def durations(args, mode):
    """[tokens in front and itself] ns of a token, the least of the repetitions: what else the machine does only adds. The first two tokens are left out: programs are made there."""
    steps = []
    for repetition in range(args.repetitions):
        with h5py.File(run_file(args, mode, repetition)) as file:
            n = int(file["steps/committed"][()])
            steps.append(file["steps/duration_ns"][:n].astype(float))
    return np.min(steps, axis=0)[2:]


def fit(args, mode):
    """ns of token t as a straight line in t, each number with its standard error; the last tokens' median, least and most."""
    ns = durations(args, mode)
    (constant, linear), (constant_se, linear_se), r2 = fit_polynomial(np.arange(len(ns)) + 3.0, ns, 1)
    return {"run": run_file(args, mode, 0).stem, "mode": mode, "constant_ns": constant, "constant_se": constant_se, "linear_ns": linear, "linear_se": linear_se,
            "r2": r2, "last_ns": np.median(ns[-LAST:]), "last_min": ns[-LAST:].min(), "last_max": ns[-LAST:].max(), "total_ns": ns.sum()}


def read_csv(name):
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def draw():
    import drawing
    figure, axes = drawing.new_figure(7.5, 4.2)
    steps = read_csv("steps.csv")
    tokens = np.array([int(row["tokens"]) for row in steps])
    for fitted, column, colour, label in zip(read_csv("fits.csv"), ("cache_ns", "no_cache_ns"), drawing.COLOURS, ("with the cache", "recomputed")):
        axes.plot(tokens, [int(row[column]) * 1e-6 for row in steps], "o", color=colour, markersize=3, label=label)
        axes.plot(tokens, (float(fitted["constant_ns"]) + float(fitted["linear_ns"]) * tokens) * 1e-6, color=colour, linewidth=1)
    axes.set(xlabel="tokens", ylabel="ms for the next token", yscale="log", title="least of two repetitions, and straight lines through them")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    drawing.save_figure(figure, HERE / "steps.svg", "experiments/e03_no_cache/run.py --figure")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvlab", default=str(ROOT / "build" / "kvlab"))
    parser.add_argument("--model", default=str(ROOT / "data" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / HERE.name, help="folder of the run files")
    parser.add_argument("--under", default="", help="words before each command: nice, chrt -f 1")
    parser.add_argument("--figure", action="store_true", help="draw steps.svg, and do nothing else")
    args = parser.parse_args()
    if args.figure:
        return draw()
    args.output.mkdir(parents=True, exist_ok=True)
    run_missing(args)
    files = [run_file(args, mode, r) for mode in MODES for r in range(args.repetitions)]
    rows = []
    for path in files:
        with h5py.File(path) as file:
            rows.append(collect.run_row(path.stem, file))
    collect.write_csv(HERE / "runs.csv", rows)
    times = {mode: durations(args, mode) for mode in MODES}
    steps = [{"run": run_file(args, "no cache", 0).stem, "tokens": t + 3, "cache_ns": int(a), "no_cache_ns": int(b)} for t, (a, b) in enumerate(zip(*times.values()))]
    fits = [fit(args, mode) for mode in MODES]
    collect.write_csv(HERE / "steps.csv", steps)
    collect.write_csv(HERE / "fits.csv", fits)
    print("| | keys and values computed | ms at no tokens | us a token in front | R^2 | ms of the last tokens |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for f in fits:
        computed = next(row["quality_kv_computed"] for row in rows if row["run"] == f["run"])
        print(f"| {f['mode']} | {computed} | {f['constant_ns'] * 1e-6:.2f} +- {f['constant_se'] * 1e-6:.2f} | {f['linear_ns'] * 1e-3:.2f} +- {f['linear_se'] * 1e-3:.2f} "
              f"| {f['r2']:.4f} | {f['last_ns'] * 1e-6:.2f} ({f['last_min'] * 1e-6:.2f}-{f['last_max'] * 1e-6:.2f}) |")


if __name__ == "__main__":
    main()
