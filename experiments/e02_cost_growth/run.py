#!/usr/bin/env python3
"""How decode time grows with the tokens in the cache and prefill time with its length: samples, fits, a run file, a figure. See why.md."""
import argparse
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
from runfile import RunFile  # noqa: E402

WINDOWED = "int8 window=1024"
CACHES = ["f16", "int8", "int4", WINDOWED]
DECODED = 8


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
    tokens = sorted({row[3] for row in rows if row[:2] == (phase, cache)})
    return np.array(tokens, float), np.array([statistics.median(row[5] for row in rows if (*row[:2], row[3]) == (phase, cache, n)) for n in tokens])


def fit(tokens, ns, degree):
    """Coefficients, constant first, and R^2."""
    coefficients = np.polynomial.polynomial.polyfit(tokens, ns, degree)
    rest = ns - np.polynomial.polynomial.polyval(tokens, coefficients)
    return coefficients, 1.0 - float(np.sum(rest**2) / np.sum((ns - ns.mean()) ** 2))


def fits_of(rows):
    out = []
    for phase, cache, degree in [("decode", cache, 1) for cache in CACHES] + [("prefill", "f16", 2)]:
        tokens, ns = medians(rows, phase, cache)
        c, r2 = fit(tokens, ns, degree)
        out.append((phase, cache, float(c[0]), float(c[1]), float(c[2]) if degree == 2 else 0.0, r2))
    return out


def print_fits(rows, fits):
    print("| phase | cache | constant ms | us a token | ns a token^2 | R^2 |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for phase, cache, constant, linear, square, r2 in fits:
        print(f"| {phase} | {cache} | {constant * 1e-6:.2f} | {linear * 1e-3:.3f} | {square:.3f} | {r2:.4f} |")
    tokens, ns = medians(rows, "decode", WINDOWED)
    full = ns[tokens >= 2048]
    if len(full) > 1:
        print(f"\n{WINDOWED}: behind {tokens[-1]:.0f} tokens {full[-1] / full[0]:.3f} of the time behind 2048")


def draw(rows, fits, path):
    import drawing
    figure, panels = drawing.new_figure(9, 3.8, columns=2)
    colours = dict(zip(CACHES, drawing.COLOURS))
    for phase, cache, *coefficients, _ in fits:
        panel = panels[int(phase == "prefill")]
        tokens, ns = medians(rows, phase, cache)
        line = np.linspace(0, tokens[-1], 200)
        panel.plot(tokens, ns * 1e-6, "o", color=colours[cache], label=cache)
        panel.plot(line, np.polynomial.polynomial.polyval(line, coefficients) * 1e-6, "-", color=colours[cache], linewidth=1)
    for panel, title, x in zip(panels, ["decode: a line in the kept tokens", "prefill: a line and a parabola"], ["tokens in the cache", "tokens of the prompt"]):
        panel.set(title=title, xlabel=x, ylabel="ms", ylim=(0, None))
        panel.legend(frameon=False)
    drawing.save_figure(figure, path, f"experiments/e02_cost_growth/run.py --figure {os.path.basename(path)}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("-m", "--model", default="data/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--depths", type=numbers, default=[0, 1024, 2048, 4096, 8192, 12288, 16384])
    parser.add_argument("--lengths", type=numbers, default=[256, 512, 1024, 2048, 3072, 4096])
    parser.add_argument("--kvlab", default=os.path.join(ROOT, "build", "kvlab"))
    parser.add_argument("--figure", help="SVG or PNG to draw")
    parser.add_argument("-o", "--output", default=time.strftime("runs/e02_cost_growth-%Y%m%d-%H%M%S.h5", time.gmtime()))
    args = parser.parse_args()
    args.model, args.kvlab, args.output = (os.path.abspath(os.path.join(ROOT, path)) for path in (args.model, args.kvlab, args.output))
    return args


def main():
    args = parse_arguments()
    config = {"command": "e02_cost_growth", "model": os.path.basename(args.model), "repetitions": args.repetitions,
              "depths": commas(args.depths), "lengths": commas(args.lengths), "device": os.environ.get("KVLAB_DEVICE", "")}
    with RunFile(args.output, "growth of decode and prefill time", config) as run:
        rows = measure(args)
        run.table("samples", [
            ("phase", "1", "decode or prefill"),
            ("cache", "1", "kvlab's spec"),
            ("device", "1", "name of the OpenCL device"),
            ("n_tokens", "1", "in the cache before a decode, or in the prompt"),
            ("repetition", "1", "its number"),
            ("duration_ns", "ns", "of a decoded token, or of the prefill"),
        ], rows)
        fits = fits_of(rows)
        run.table("fits", [
            ("phase", "1", "decode or prefill"),
            ("cache", "1", "kvlab's spec"),
            ("constant_ns", "ns", "time at no tokens"),
            ("linear_ns", "ns", "a token"),
            ("square_ns", "ns", "a token squared, 0 for a decode"),
            ("r2", "1", "share of the medians' variance that the fit explains"),
        ], fits)
    print_fits(rows, fits)
    if args.figure:
        draw(rows, fits, args.figure)


if __name__ == "__main__":
    main()
