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

MODES = {"cache": [], "no cache": ["--no-cache"]}


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


def fit(args, mode, degree):
    """ns of token t as a polynomial in t, constant first, each with its standard error, and R^2."""
    ns = durations(args, mode)
    t = np.arange(len(ns)) + 3.0
    terms = np.vander(t, degree + 1, increasing=True)
    c, *_ = np.linalg.lstsq(terms, ns, rcond=None)
    rest = ns - terms @ c
    variance = rest @ rest / (len(ns) - degree - 1) * np.linalg.inv(terms.T @ terms).diagonal()
    return {"run": run_file(args, mode, 0).stem, "mode": mode, "constant_ns": c[0], "constant_se": variance[0] ** 0.5, "linear_ns": c[1], "linear_se": variance[1] ** 0.5,
            "r2": 1 - rest @ rest / ((ns - ns.mean()) @ (ns - ns.mean())), "last_ns": np.median(ns[-8:]), "total_ns": ns.sum()}


def read_csv(name):
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def draw(path):
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
    drawing.save_figure(figure, path, "experiments/e03_no_cache/run.py --figure steps.svg")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvlab", default=str(ROOT / "build" / "kvlab"))
    parser.add_argument("--model", default=str(ROOT / "data" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / HERE.name, help="folder of the run files")
    parser.add_argument("--under", default="", help="words before each command: nice, chrt -f 1")
    parser.add_argument("--figure", metavar="FILE", help="draw the results, and do nothing else")
    args = parser.parse_args()
    if args.figure:
        return draw(args.figure)
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
    fits = [fit(args, mode, 1) for mode in MODES]
    collect.write_csv(HERE / "steps.csv", steps)
    collect.write_csv(HERE / "fits.csv", fits)
    print("| | keys and values computed | ms at no tokens | us a token in front | R^2 | ms of the last tokens |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for f in fits:
        computed = next(row["quality_kv_computed"] for row in rows if row["run"] == f["run"])
        print(f"| {f['mode']} | {computed} | {f['constant_ns'] * 1e-6:.2f} +- {f['constant_se'] * 1e-6:.2f} | {f['linear_ns'] * 1e-3:.2f} +- {f['linear_se'] * 1e-3:.2f} "
              f"| {f['r2']:.4f} | {f['last_ns'] * 1e-6:.2f} |")


if __name__ == "__main__":
    main()
