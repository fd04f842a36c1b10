#!/usr/bin/env python3
"""StreamingLLM's claim on a stream of tens of thousands of tokens: runs what is missing, then the table of why.md (--table streaming.csv) and its figure. Needs numpy."""
import argparse
import csv
import json
import math
import os
import subprocess
import sys

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SCORED = 32  # tokens at the end of every stretch of one cache length that are compared
SINKS = [4, 0, 1, 2, 8]
INTERVALS = ("minus_4_sinks", "minus_4_sinks_last_quarter", "minus_recomputed", "slope")


def rows(args):
    """name -> arguments of kvlab, in the order in which they run."""
    stream = ["eval", "stream", "-n", str(args.tokens), "--block", str(SCORED)]
    compact = lambda s: [*stream, "--kv", f"sink={s} window={args.cache - s} pos=compact"]
    context = ["--context", str(args.cache - SCORED), "--score", str(SCORED), "--chunks", str(args.tokens // args.cache)]
    out = {"sinks 4": compact(4), "sinks 0": compact(0)}
    out["recomputed"] = ["eval", "ppl", "--kv", "f16", "--protocol", "compress-then-score", *context]
    out["sinks 4, pos=keep"] = [*stream, "--kv", f"sink=4 window={args.cache - 4} pos=keep", "--allow-long"]
    return out | {f"sinks {s}": compact(s) for s in SINKS[2:]}


def file_name(name):
    return name.replace(" ", "_").replace(",", "").replace("=", "-")


def run_missing(args, name, words):
    path = os.path.join(args.output, file_name(name))
    if not os.path.exists(path + ".json") and not args.report:
        command = [*args.under.split(), args.kvlab, *words, "-m", args.model, "-f", args.file, "--json", "--quiet", "-o", path + ".h5"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if done.returncode != 0:
            sys.exit(f"run.py: exit code {done.returncode} of {' '.join(command)}")
        with open(path + ".json.part", "w") as file:
            file.write(done.stdout)
        os.rename(path + ".json.part", path + ".json")
        print(f"{name}: done", file=sys.stderr)
    if not os.path.exists(path + ".json"):
        return None
    with open(path + ".json") as file:
        return json.load(file)


def compared(args, result):
    """[tokens / cache] nll of the last tokens of every stretch; the first is left out: nothing has gone yet."""
    if "chunks" in result:
        return np.array([chunk["nll"] for chunk in result["chunks"]][1:])
    nll = {block["first"]: block["nll"] for block in result["blocks"]}
    return np.array([nll[(i + 1) * args.cache - SCORED] for i in range(1, args.tokens // args.cache)])


def t_quantile(df):
    """97.5 % quantile of Student's t (Cornish-Fisher; 1e-3 from 10 degrees of freedom on)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def mean_interval(x):
    half = t_quantile(len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return x.mean(), x.mean() - half, x.mean() + half


def slope_interval(args, difference):
    """Least squares, per 8,192 tokens."""
    at = (np.arange(len(difference)) + 2) * args.cache / 8192
    centred = at - at.mean()
    slope = (centred * difference).sum() / (centred**2).sum()
    rest = difference - difference.mean() - slope * centred
    half = t_quantile(len(at) - 2) * math.sqrt((rest**2).sum() / (len(at) - 2) / (centred**2).sum())
    return slope, slope - half, slope + half


def after(args, result, start):
    """nll of every block from token `start` on."""
    return np.array([block["nll"] for block in result["blocks"] if block["first"] >= start and block["n"] == SCORED])


def measures(args, results):
    """A row a stream; an interval is (mean, low, high), None without what it is compared with."""
    base, four = results.get("recomputed"), results.get("sinks 4")
    for name, r in results.items():
        if not r or "blocks" not in r:
            continue
        minus_four = lambda start: mean_interval(after(args, r, start) - after(args, four, start)) if four and four is not r else None
        difference = compared(args, r) - compared(args, base) if base else None
        yield {"cache": name, "nll": after(args, r, args.cache).mean(), "minus_4_sinks": minus_four(args.cache), "minus_4_sinks_last_quarter": minus_four(args.tokens * 3 // 4),
               "minus_recomputed": mean_interval(difference) if base else None, "slope": slope_interval(args, difference) if base else None,
               "bytes_first": r["blocks"][0]["resident_bytes"], "bytes_last": r["blocks"][-1]["resident_bytes"], "run": file_name(name)}


def print_table(args, results, rows):
    show = lambda interval: "{:+.3f} [{:+.3f}, {:+.3f}]".format(*interval) if interval else ""
    print(f"| cache of {args.cache}, {args.tokens} tokens | nll behind token {args.cache} | minus 4 sinks | the same, last quarter | minus recomputed | slope per 8,192 | bytes first, last |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        cells = [show(row[name]) for name in INTERVALS]
        print("|", " | ".join([row["cache"], f"{row['nll']:.4f}", *cells, f"{row['bytes_first']}, {row['bytes_last']}"]), "|")
    if results.get("recomputed"):
        print(f"| recomputed, last {SCORED} of every {args.cache} | {compared(args, results['recomputed']).mean():.4f} | | | | | |")


def write_table(path, rows):
    """Each interval as three columns: NAME, NAME_low, NAME_high."""
    flat = lambda row: {key: cell for name, value in row.items() for key, cell in
                        (zip((name, name + "_low", name + "_high"), value or ("", "", "")) if name in INTERVALS else ((name, value),))}
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, flat(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in flat(row).items()} for row in rows)


def draw(args, results):
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7, 4))
    per_point = max(1, args.tokens // 64 // SCORED)
    for name, r in results.items():
        if r and "blocks" in r:
            nll = after(args, r, SCORED)
            nll = nll[:len(nll) // per_point * per_point].reshape(-1, per_point).mean(axis=1)
            axes.plot((np.arange(len(nll)) + 0.5) * per_point * SCORED, nll, lw=1, label=name)
    axes.axvline(args.cache, color="grey", lw=0.5)
    axes.set(xlabel="token of the stream", ylabel="nll (nats a token)", title=f"cache of {args.cache} tokens")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(args.figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvlab", default=os.path.join(ROOT, "build", "kvlab"))
    parser.add_argument("--model", default=os.path.join(ROOT, "data", "models", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--file", default=os.path.join(ROOT, "data", "text", "wiki.test.raw"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--output", default=os.path.join(ROOT, "runs", "e20_streaming"), help="folder of the rows' files")
    parser.add_argument("--under", default="", help="words before each command: nice, chrt -i 0")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--table", help="the same table as comma-separated values")
    parser.add_argument("--figure")
    args = parser.parse_args()
    os.makedirs(args.output, exist_ok=True)
    results = {name: run_missing(args, name, words) for name, words in rows(args).items()}
    measured = list(measures(args, results))
    print_table(args, results, measured)
    if args.table and measured:
        write_table(args.table, measured)
    if args.figure:
        draw(args, results)


main()
