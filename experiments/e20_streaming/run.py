#!/usr/bin/env python3
"""StreamingLLM's claim on a stream of tens of thousands of tokens: runs what is missing, then the table of why.md and its figure. Needs numpy."""
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
sys.path.append(os.path.dirname(HERE))
from run_files import run_files_in  # noqa: E402

SCORED = 32  # tokens at the end of every stretch of one cache length that are compared
SINKS = [4, 0, 1, 2, 8]
PAPER = "StreamingLLM (2309.17453)"
# What the paper says, the row of the summary that answers (cache, measure, against), what it is, and the verdict in words of experiments/reproduction.
CLAIMS = [
    ("with 4 sinks perplexity stays flat far beyond the cache's length", ("sinks 4", "slope", "recomputed"), "nat per 8,192 tokens", "reproduced"),
    ("sliding over 4 sinks is as good as recomputing the window", ("sinks 4", "difference", "recomputed"), "nat", "reproduced"),
    ("a window without sinks breaks down (perplexity 5158 for 5.40, Llama-2-13B)", ("sinks 0", "difference", "sinks_4"), "nat: worse at once, no breakdown", "partly"),
    ("1 sink is not enough (11.88 for 9.59 with 4, Llama-2-7B)", ("sinks 1", "difference", "sinks_4"), "nat", "not"),
    ("positions must be those in the cache, not those in the text", ("sinks 4, pos=keep", "difference in the last quarter", "sinks_4"), "nat with those in the text, last quarter", "reproduced"),
]


def rows(args):
    """name -> arguments of kvlab, in the order in which they run."""
    stream = ["eval", "stream", "-n", str(args.tokens), "--block", str(SCORED)]
    compact = lambda s: [*stream, "--kv", f"sink={s} window={args.cache - s} pos=compact"]
    context = ["--context", str(args.cache - SCORED), "--score", str(SCORED), "--chunks", str(args.tokens // args.cache)]
    out = {"sinks 4": compact(4), "sinks 0": compact(0)}
    out["recomputed"] = ["eval", "ppl", "--kv", "f16", "--protocol", "compress-then-score", *context]
    out["sinks 4, pos=keep"] = [*stream, "--kv", f"sink=4 window={args.cache - 4} pos=keep", "--allow-long"]
    return out | {f"sinks {s}": compact(s) for s in SINKS[2:]}


def file_name(row):
    return row.replace(" ", "_").replace(",", "").replace("=", "-")


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


def summary(args, results):
    """[{run, cache, measure, against, mean, low, high}]: what why.md's table and the paper say of the streams."""
    rows = []
    base, four = results.get("recomputed"), results.get("sinks 4")
    for name, r in results.items():
        if not r or "blocks" not in r:
            continue
        def add(measure, against, mean, low="", high=""):
            rows.append({"run": file_name(name), "cache": name, "measure": measure, "against": file_name(against), "mean": mean, "low": low, "high": high})
        add("nll", "", *mean_interval(after(args, r, args.cache)))
        for measure, start in (("difference", args.cache), ("difference in the last quarter", args.tokens * 3 // 4)):
            if four and four is not r:
                add(measure, "sinks 4", *mean_interval(after(args, r, start) - after(args, four, start)))
        if base:
            difference = compared(args, r) - compared(args, base)
            add("difference", "recomputed", *mean_interval(difference))
            add("slope", "recomputed", *slope_interval(args, difference))
        for measure, block in (("first bytes", 0), ("last bytes", -1)):
            add(measure, "", r["blocks"][block]["resident_bytes"])
    return rows


def print_table(args, results, rows):
    print(f"| cache of {args.cache}, {args.tokens} tokens | nll behind token {args.cache} | minus 4 sinks | the same, last quarter | minus recomputed | slope per 8,192 | bytes first, last |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in dict.fromkeys(row["cache"] for row in rows):
        found = {(row["measure"], row["against"]): row for row in rows if row["cache"] == name}
        show = lambda *key, form="+.3f": f"{found[key]['mean']:{form}} [{found[key]['low']:{form}}, {found[key]['high']:{form}}]" if key in found else ""
        print(f"| {name} | {show('nll', '', form='.3f')} | {show('difference', 'sinks_4')} | {show('difference in the last quarter', 'sinks_4')} | {show('difference', 'recomputed')} "
              f"| {show('slope', 'recomputed')} | {found['first bytes', '']['mean']}, {found['last bytes', '']['mean']} |")
    if results.get("recomputed"):
        mean, low, high = mean_interval(compared(args, results["recomputed"]))
        print(f"| recomputed, last {SCORED} of every {args.cache} | {mean:.3f} [{low:.3f}, {high:.3f}] | | | | | |")


def claims(found):
    """Rows for experiments/reproduction."""
    by_key = {(row["cache"], row["measure"], row["against"]): row for row in found}
    return [{"paper": PAPER, "claim": claim, "model": "SmolLM2-135M-Instruct Q4_1", "experiment": os.path.basename(HERE), "measured": f"{by_key[key]['mean']:+.3f} {unit}",
             "interval": f"[{by_key[key]['low']:+.3f}, {by_key[key]['high']:+.3f}]", "verdict": verdict, "run": f"{by_key[key]['run']} {by_key[key]['against']}"}
            for claim, key, unit, verdict in CLAIMS if key in by_key]


def curves(args, results):
    """[{run, cache, token, nll}]: means of 16 blocks, for figures."""
    rows = []
    for name, r in results.items():
        if r and "blocks" in r:
            nll = after(args, r, SCORED)
            nll = nll[:len(nll) // 16 * 16].reshape(-1, 16).mean(axis=1)
            rows += [{"run": file_name(name), "cache": name, "token": int((i + 0.5) * 16 * SCORED) + SCORED, "nll": f"{value:.6f}"} for i, value in enumerate(nll)]
    return rows


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def draw(args):
    """From curves.csv."""
    import drawing
    figure, axes = drawing.new_figure(7.5, 4.4)
    with open(os.path.join(HERE, "curves.csv"), newline="") as file:
        points = list(csv.DictReader(file))
    for name, colour in zip(dict.fromkeys(row["cache"] for row in points), drawing.COLOURS):
        own = [row for row in points if row["cache"] == name]
        axes.plot([int(row["token"]) for row in own], [float(row["nll"]) for row in own], color=colour, lw=1, label=name)
    axes.axvline(args.cache, color="grey", lw=0.5)
    axes.set(xlabel="token of the stream (a point is the mean of 512)", ylabel="nll, nats a token", title=f"cache of {args.cache} tokens; a grey line where it is full")
    axes.legend(fontsize=8)
    drawing.save_figure(figure, os.path.join(HERE, "streaming.svg"), "experiments/e20_streaming/run.py --figure")


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
    parser.add_argument("--results", action="store_true", help="write summary.csv, curves.csv and ../reproduction/stream.csv")
    parser.add_argument("--figure", action="store_true", help="draw streaming.svg of curves.csv, and do nothing else")
    args = parser.parse_args()
    if args.figure:
        return draw(args)
    if args.report:
        run_files_in(args.output)
    os.makedirs(args.output, exist_ok=True)
    results = {name: run_missing(args, name, words) for name, words in rows(args).items()}
    found = summary(args, results)
    print_table(args, results, found)
    if args.results:
        if missing := [name for name, result in results.items() if not result]:
            sys.exit(f"run.py: nothing written, no run yet of {', '.join(missing)}")
        write_csv(os.path.join(HERE, "summary.csv"), found)
        write_csv(os.path.join(HERE, "curves.csv"), curves(args, results))
        write_csv(os.path.join(ROOT, "experiments", "reproduction", "stream.csv"), claims(found))


if __name__ == "__main__":
    main()
