#!/usr/bin/env python3
"""Divergence and NLL of latents of SmolLM2-135M, controls, and the model converted to latent attention.

    run.py [--program build/kvlab] [--work DIR]     runs what latent.csv lacks, row by row (--work: tables and converted models)
    run.py --table                                  verdicts of why.md from latent.csv
    run.py --figure                                 latent.csv -> latent.svg (needs matplotlib)
"""
import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL, TEXT, RESULTS = "data/models/SmolLM2-135M-Instruct.Q4_1.gguf", "data/text/wiki.test.raw", HERE / "latent.csv"
WINDOWS = ["-c", "256", "--chunks", "8"]
COLUMNS = ["row", "kv", "bytes_per_token", "chunk", "kld", "nll", "nll_base"]

TABLES = {"one": "latent rope=pre", "three": "latent(heads=3) rope=pre", "post": "latent"}
RANKS = (16, 24, 32, 40, 48, 56, 64)
# row: (spec, table)
LATENTS = {f"rank {rank}": (f"latent(rank={rank}) rope=pre", "one") for rank in RANKS} | {
    "spread 32": ("latent(rank=32,spread) rope=pre", "one"),
    "spread 48": ("latent(rank=48,spread) rope=pre", "one"),
    "energy 0.9": ("latent(energy=0.9) rope=pre", "one"),
    "energy 0.99": ("latent(energy=0.99) rope=pre", "one"),
    "heads 3, rank 96": ("latent(rank=96,heads=3) rope=pre", "three"),
    "heads 3, rank 144": ("latent(rank=144,heads=3) rope=pre", "three"),
    "keys 32": ("k=latent(rank=32) v=f16 rope=pre", "one"),
    "values 32": ("k=f16 v=latent(rank=32) rope=pre", "one"),
    "post 32": ("latent(rank=32)", "post"),
    "post 64": ("latent(rank=64)", "post"),
    "rank 64 int8": ("latent(rank=64,of=int8) rot=hadamard rope=pre", "one"),
    "rank 64 int4": ("latent(rank=64,of=int4) rot=hadamard rope=pre", "one"),
    "rank 64 int3": ("latent(rank=64,of=int3) rot=hadamard rope=pre", "one"),
    "rank 48 int8": ("latent(rank=48,of=int8) rot=hadamard rope=pre", "one"),
}
CONTROLS = {name: (f"{name} rope=pre", None) for name in ("int8", "int4", "int3", "int2")} | {
    f"{name} hadamard": (f"{name} rot=hadamard rope=pre", None) for name in ("int8", "int4", "int3", "int2")}
CACHES = LATENTS | CONTROLS
# row: options of to_mla.py. 384 elements a token and layer before
CONVERTED = {
    "mla 64+320": "--components 1", "mla 64+256": "--components 1 --rank 256", "mla 64+192": "--components 1 --rank 192",
    "mla 64+128": "--components 1 --rank 128", "mla 128+256": "--components 2", "mla 128+128": "--components 2 --rank 128",
    "pairs 96+288": "--frequencies 16", "pairs 96+160": "--frequencies 16 --rank 160",
}


def output(command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"run.py: exit code {done.returncode} of {' '.join(map(str, command))}")
    return done.stdout


def table_of(args, name):
    path = args.work / f"{name}.h5"
    if not path.exists():
        output([args.program, "calibrate", "-m", MODEL, "-f", TEXT, "-c", 512, "--chunks", 8, "--first-chunk", 140, "--for", TABLES[name], "-o", path])
    return path


def moments_of(args):
    path, tokens = args.work / "moments.npz", args.work / "tokens.txt"
    if not tokens.exists():
        tokens.write_text(output([args.program, "tokenize", "-m", MODEL, "-f", TEXT]))
    if not path.exists():
        output([sys.executable, HERE / "to_mla.py", MODEL, "--moments", path, "--tokens", tokens])
    return path


def evaluate(args, row):
    """kvlab's JSON of a row."""
    base = [args.program, "eval"]
    rest = ["-f", TEXT, *WINDOWS, "--json", "--quiet", "--no-run-file"]
    if row in CACHES:
        spec, table = CACHES[row]
        return json.loads(output([*base, "kld", "-m", MODEL, *rest, "--kv", spec + (f" table={table_of(args, table)}" if table else "")]))
    model = args.work / f"{row.replace(' ', '_').replace('+', '_')}.gguf"
    if not model.exists():
        output([sys.executable, HERE / "to_mla.py", MODEL, model, "--moments", moments_of(args), *CONVERTED[row].split()])
    result = json.loads(output([*base, "ppl", "-m", model, *rest]))
    model.unlink()
    return result


def read_results():
    rows = {}
    if RESULTS.exists():
        with open(RESULTS) as file:
            for line in csv.DictReader(file):
                rows.setdefault(line["row"], []).append(line)
    return rows


def run(args):
    args.work.mkdir(parents=True, exist_ok=True)
    for row in [*CACHES, *CONVERTED]:
        if row in read_results() or args.match not in row: # another run.py may be at work
            continue
        result = evaluate(args, row)
        kv = CACHES[row][0] if row in CACHES else CONVERTED[row]
        with open(RESULTS, "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(COLUMNS)
            for chunk in result["chunks"]:
                writer.writerow([row, kv, result["bytes_per_token"], chunk["chunk"], chunk.get("kld", ""), chunk["nll"], chunk.get("nll_base", "")])
        print(row, result["bytes_per_token"], result.get("kld_mean", result["nll"]), file=sys.stderr)


def column(lines, name):
    return [float(line[name]) for line in lines if line[name] != ""]


def mean_and_error(values):
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def print_table():
    rows = read_results()
    base = next(column(lines, "nll_base") for lines in rows.values() if column(lines, "nll_base"))
    print("| row | bytes a token | mean KLD to f16 | NLL above f16's |\n| --- | ---: | ---: | ---: |")
    for row in [row for row in [*CACHES, *CONVERTED] if row in rows]:
        lines = rows[row]
        kld = "%.4f +- %.4f" % mean_and_error(column(lines, "kld")) if column(lines, "kld") else ""
        above = [nll - b for nll, b in zip(column(lines, "nll"), base)]
        print(f"| {row} | {int(float(lines[0]['bytes_per_token']))} | {kld} | {'%.4f +- %.4f' % mean_and_error(above)} |")
    print("\nA rank and the next larger one: KLD of the larger less that of the smaller, paired by window")
    measured = [rank for rank in RANKS if f"rank {rank}" in rows]
    for low, high in zip(measured, measured[1:]):
        pair = [column(rows[f"rank {rank}"], "kld") for rank in (low, high)]
        mean, error = mean_and_error([b - a for a, b in zip(*pair)])
        print(f"{low} -> {high}: {mean:+.4f} +- {error:.4f}: {'does not rise' if mean <= 2 * error else 'RISES'}")


def figure():
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"svg.hashsalt": "kvlab", "svg.fonttype": "none", "font.size": 9})
    rows = read_results()
    series = [("latent, f16 numbers: rank 16 to 64 of 64", [f"rank {rank}" for rank in RANKS], "o-"),
              ("ranks spread over layers", ["spread 32", "spread 48"], "s"),
              ("three heads together", ["heads 3, rank 96", "heads 3, rank 144"], "^"),
              ("all 64 directions, codes of 3, 4, 8 bits, Hadamard", ["rank 64 int3", "rank 64 int4", "rank 64 int8"], "D-"),
              ("no projection, codes of 2, 3, 4, 8 bits, Hadamard", [f"int{bits} hadamard" for bits in (2, 3, 4, 8)], "x--"),
              ("no projection, codes of 2, 3, 4, 8 bits", [f"int{bits}" for bits in (2, 3, 4, 8)], "+:")]
    fig, ax = plt.subplots(figsize=(7, 4.4))
    for label, names, style in series:
        points = [(float(rows[name][0]["bytes_per_token"]), *mean_and_error(column(rows[name], "kld"))) for name in names if name in rows]
        if not points:
            continue
        x, y, error = zip(*points)
        ax.errorbar(x, y, [2 * e for e in error], fmt=style, markersize=5, linewidth=1, capsize=2, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [3600, 5760, 8640, 11520, 17280, 23040]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("bytes a token (f16: 23,040)")
    ax.set_ylabel("mean KLD to f16, nats (bars: 2 standard errors)")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
    fig.tight_layout()
    fig.savefig(HERE / "latent.svg", metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="build/kvlab")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "latent")
    parser.add_argument("--match", default="", help="rows that contain this text only")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", action="store_true")
    args = parser.parse_args()
    if args.table:
        print_table()
    elif args.figure:
        figure()
    else:
        run(args)


if __name__ == "__main__":
    main()
