#!/usr/bin/env python3
"""How decode time grows with the tokens in the cache and prefill time with its length. See why.md.

    experiments/e02_cost_growth/run.py             a run file -> samples.csv, runs.csv, fits.csv (needs numpy and h5py)
    experiments/e02_cost_growth/run.py --report    samples.csv -> fits.csv: coefficients with one standard error, on the medians of the repetitions
    experiments/e02_cost_growth/run.py --figure    samples.csv -> growth.svg (needs matplotlib too)
"""
import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path += [os.path.join(ROOT, "experiments"), os.path.join(ROOT, "experiments", "peers")]
from fitting import fit_polynomial  # noqa: E402

WINDOWED = "int8 window=1024"
CACHES = ["f16", "int8", "int4", WINDOWED]
DECODED = 8
TERMS = ("constant", "linear", "square")


def bench(args, cache, options):
    command = [args.kvlab, "bench", "-m", args.model, "--kv", cache, "-r", "1", "--json", "--no-run-file", "--allow-long", "--quiet", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"run.py: exit code {done.returncode} of {' '.join(command)}")
    return json.loads(done.stdout)


def commas(numbers):
    return ",".join(map(str, numbers))


def measure(args):
    """[(phase, cache, device, tokens in the cache before a decode or in a prefill, repetition, ns of the decoded token or of the prefill)]"""
    rows = []
    for repetition in range(args.repetitions):
        for cache in CACHES:
            for row in bench(args, cache, ["-p", "0", "-n", str(DECODED), "-d", commas(args.depths), "--synthetic"]):
                rows.append(("decode", cache, row["device"], row["depth"], repetition, row["samples_ns"][0] / DECODED))
        for row in bench(args, "f16", ["-p", commas(args.lengths), "-n", "0"]):
            rows.append(("prefill", "f16", row["device"], row["n_prompt"], repetition, row["samples_ns"][0]))
        print(f"repetition {repetition + 1} of {args.repetitions}", file=sys.stderr)
    return rows


def medians(rows, phase, cache):
    """Numbers of tokens, and the median of the repetitions at each."""
    times = {}
    for row in rows:
        if (row["phase"], row["cache"]) == (phase, cache):
            times.setdefault(int(row["n_tokens"]), []).append(float(row["duration_ns"]))
    return np.array(sorted(times), float), np.array([statistics.median(times[n]) for n in sorted(times)])


def fits_of(run, rows):
    """[{run, phase, cache, coefficients with their standard errors, R^2}]"""
    out = []
    for phase, cache, degree in [("decode", cache, 1) for cache in CACHES] + [("prefill", "f16", 2)]:
        coefficients, errors, r2 = fit_polynomial(*medians(rows, phase, cache), degree)
        numbers = {f"{name}_{what}": value for what, values in (("ns", coefficients), ("se", errors)) for name, value in zip(TERMS, values)}
        out.append({"run": run, "phase": phase, "cache": cache} | {f"{name}_{what}": numbers.get(f"{name}_{what}", 0.0) for name in TERMS for what in ("ns", "se")} | {"r2": r2})
    return out


def read_runs():
    """{run: its rows of samples.csv}"""
    with open(os.path.join(HERE, "samples.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    return {run: [row for row in rows if row["run"] == run] for run in dict.fromkeys(row["run"] for row in rows)}


def report():
    """samples.csv -> fits.csv, and the table of it."""
    fits = []
    print("| run | phase | cache | constant ms | us a token | ns a token^2 | R^2 |\n| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for run, rows in read_runs().items():
        fits += fits_of(run, rows)
        tokens, ns = medians(rows, "decode", WINDOWED)
        full = ns[tokens >= 2048]
        if len(full) > 1:
            print(f"{run}: {WINDOWED}: behind {tokens[-1]:.0f} tokens {full[-1] / full[0]:.3f} of the time behind 2048", file=sys.stderr)
    for fit in fits:
        terms = [f"{fit[name + '_ns'] * scale:.3f} +- {fit[name + '_se'] * scale:.3f}" for name, scale in zip(TERMS, (1e-6, 1e-3, 1))]
        print(f"| {fit['run']} | {fit['phase']} | {fit['cache']} | {' | '.join(terms)} | {fit['r2']:.4f} |")
    with open(os.path.join(HERE, "fits.csv"), "w", newline="") as file:
        table = csv.DictWriter(file, fits[0], lineterminator="\n")
        table.writeheader()
        table.writerows(fits)


def draw():
    import drawing
    runs = read_runs()
    figure, panels = drawing.new_figure(4.4 * 2, 3.6 * len(runs), columns=2, rows=len(runs))
    colours = dict(zip(CACHES, drawing.COLOURS))
    for row, (run, samples) in zip(panels.reshape(-1, 2), runs.items()):
        for fit in fits_of(run, samples):
            panel = row[int(fit["phase"] == "prefill")]
            own = [sample for sample in samples if (sample["phase"], sample["cache"]) == (fit["phase"], fit["cache"])]
            x = np.linspace(0, max(float(sample["n_tokens"]) for sample in own), 200)
            panel.plot([float(sample["n_tokens"]) for sample in own], [float(sample["duration_ns"]) * 1e-6 for sample in own], "o", markersize=3, color=colours[fit["cache"]], label=fit["cache"])
            panel.plot(x, np.polynomial.polynomial.polyval(x, [fit[f"{name}_ns"] for name in TERMS]) * 1e-6, "-", color=colours[fit["cache"]], linewidth=1)
        for panel, title, label in zip(row, ["decode: a line in the kept tokens", "prefill: a line and a parabola"], ["tokens in the cache", "tokens of the prompt"]):
            panel.set(title=f"{title}\n{samples[0]['device']}", xlabel=label, ylabel="ms, every repetition", ylim=(0, None))
            panel.legend(frameon=False, fontsize=8)
    drawing.save_figure(figure, os.path.join(HERE, "growth.svg"), "experiments/e02_cost_growth/run.py --figure")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("-m", "--model", default="data/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--depths", type=numbers, default=[0, 1024, 2048, 4096, 8192, 12288, 16384])
    parser.add_argument("--lengths", type=numbers, default=[256, 512, 1024, 2048, 3072, 4096])
    parser.add_argument("--kvlab", default=os.path.join(ROOT, "build", "kvlab"))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--figure", action="store_true", help="draw growth.svg, and do nothing else")
    parser.add_argument("-o", "--output", default=time.strftime("runs/e02_cost_growth-%Y%m%d-%H%M%S.h5", time.gmtime()))
    args = parser.parse_args()
    args.model, args.kvlab, args.output = (os.path.abspath(os.path.join(ROOT, path)) for path in (args.model, args.kvlab, args.output))
    return args


def main():
    args = parse_arguments()
    if args.figure:
        return draw()
    if args.report:
        return report()
    config = {"command": "e02_cost_growth", "model": os.path.basename(args.model), "repetitions": args.repetitions,
              "depths": commas(args.depths), "lengths": commas(args.lengths), "device": os.environ.get("KVLAB_DEVICE", "")}
    from runfile import RunFile
    with RunFile(args.output, "growth of decode and prefill time", config) as run:
        run.table("samples", [
            ("phase", "1", "decode or prefill"),
            ("cache", "1", "kvlab's spec"),
            ("device", "1", "name of the OpenCL device"),
            ("n_tokens", "1", "in the cache before a decode, or in the prompt"),
            ("repetition", "1", "its number"),
            ("duration_ns", "ns", "of a decoded token, or of the prefill"),
        ], measure(args))
    subprocess.run([sys.executable, os.path.join(ROOT, "experiments", "collect.py"), os.path.basename(HERE), "--tables", "samples", "-f", args.output], check=True)
    report()


if __name__ == "__main__":
    main()
