#!/usr/bin/env python3
"""What is left of a repeated span and of a pass key: the run files of recall.yaml and needle.yaml -> recall.csv, needle.csv, tasks.md (needs numpy, scipy).

    experiments/e24_recall/tasks.py             runs/e24_recall, runs/e24_needle -> the tables
    experiments/e24_recall/tasks.py --figure    recall.csv, needle.csv -> tasks.svg (needs matplotlib too)
"""
import csv
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import paired  # noqa: E402

POLICY = {"streaming": "recency", "snapkv": "snapkv", "keydiff": "keydiff"}  # score -> name
SOLVED = 0.9  # share of a cell's sequences that the whole cache has to answer


def policy_of(facts):
    return next(name for score, name in POLICY.items() if f"keep={score}" in facts["config_kv_given"])


def cells(run, *names):
    """(the cell's values, windows) for each combination of these columns."""
    values = lambda window: tuple(run["rows"][window][name] for name in names)
    for cell in sorted({values(window) for window in run["rows"]}):
        yield cell, sorted(window for window in run["rows"] if values(window) == cell)


def share_interval(successes, n):
    """Wilson's 95 % interval of a share."""
    z, share = 1.959964, successes / n
    middle, half = share + z * z / (2 * n), z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def recall_rows(runs):
    for name, run in runs.items():
        for (depth,), windows in cells(run, "depth"):
            first, again, base = (paired.column(run, column, windows) for column in ("nll_first", "nll_repeat", "nll_repeat_base"))
            gain, whole = first - again, first - base
            kept = gain.mean() / whole.mean()
            error = paired.interval(gain - kept * whole)  # of a ratio of means, paired (delta method)
            half = (error["high"] - error["mean"]) / whole.mean()
            yield {"policy": name, "depth": depth, "sequences": len(windows), "gain": gain.mean(), "gain_whole": whole.mean(), "kept": kept, "low": kept - half, "high": kept + half,
                   "run": run["run"]}


def needle_rows(runs):
    for (name, question), run in runs.items():
        for (length, depth), windows in cells(run, "length", "depth"):
            exact, base, nll, nll_base = (paired.column(run, column, windows) for column in ("exact", "exact_base", "nll", "nll_base"))
            low, high = share_interval(exact.sum(), len(windows))
            more = paired.interval(nll - nll_base)
            yield {"policy": name, "question": question, "length": int(length), "depth": depth, "sequences": len(windows), "exact_whole": base.mean(),
                   "scored": "yes" if base.mean() >= SOLVED else "no", "exact": exact.mean(), "low": low, "high": high, "nll": nll.mean(), "nll_more": more["mean"], "nll_more_low": more["low"],
                   "nll_more_high": more["high"], "run": run["run"]}


def write_table(path, recall, needle):
    lines = ["<!-- tasks.py writes these tables -->", "| policy | span at depth | sequences | gain, nats | of the whole cache | kept |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {row['policy']} | {row['depth']:g} | {row['sequences']} | {row['gain']:.3f} | {row['gain_whole']:.3f} | {row['kept']:.3f} [{row['low']:.3f}, {row['high']:.3f}] |"
              for row in recall]
    lines += ["", "| policy | question | tokens | needle at | sequences | exact, whole cache | exact | nll - whole |", "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in needle:
        found = f"{row['exact']:.2f} [{row['low']:.2f}, {row['high']:.2f}] | {row['nll_more']:+.2f} [{row['nll_more_low']:+.2f}, {row['nll_more_high']:+.2f}]"
        lines.append(f"| {row['policy']} | {row['question']} | {row['length']} | {row['depth']:g} | {row['sequences']} | {row['exact_whole']:.2f} | "
                     f"{found if row['scored'] == 'yes' else 'not scored | '} |")
    path.write_text("\n".join(lines) + "\n")


def draw(args):
    recall, needle = (list(csv.DictReader(open(args.out / name))) for name in ("recall.csv", "needle.csv"))
    figure, (left, right) = paired.new_figure(11, 4, columns=2)
    for axes, rows, value, place in ((left, recall, "kept", lambda row: f"span at {float(row['depth']):g}"),
                                     (right, [row for row in needle if row["scored"] == "yes"], "exact", lambda row: f"{row['question']}, at {float(row['depth']):g}")):
        places = list(dict.fromkeys(place(row) for row in rows))
        for i, (name, colour) in enumerate(zip(POLICY.values(), ("black", "#0072B2", "#D55E00"))):
            own = [row for row in rows if row["policy"] == name]
            y = np.array([float(row[value]) for row in own])
            error = np.abs([y - [float(row["low"]) for row in own], [float(row["high"]) for row in own] - y])
            axes.errorbar([places.index(place(row)) + (i - 1) * 0.15 for row in own], y, error, fmt="o", color=colour, capsize=3, label=name)
        axes.set_xticks(range(len(places)), places)
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.axhline(1, color="grey", linewidth=0.6)
        axes.grid(axis="y", alpha=0.3)
    left.set(ylabel="share of the whole cache's gain that is kept (95 %)", title="a span that comes again")
    right.set(ylabel="share of pass keys found (95 %)", title="a pass key; the question seen by the eviction or not", ylim=(-0.05, 1.05))
    left.legend()
    paired.save_figure(figure, args.figure_path or args.out / "tasks.svg", "experiments/e24_recall/tasks.py --figure")


def main():
    args = paired.parse_arguments(__doc__, HERE, "runs", "tasks.svg")
    if args.figure or args.figure_path:
        return draw(args)
    recall = list(recall_rows(paired.read_runs(args.kvlab, args.runs / "e24_recall", key=policy_of)))
    needle = list(needle_rows(paired.read_runs(args.kvlab, args.runs / "e24_needle", key=lambda facts: (policy_of(facts), facts["config_question"]))))
    paired.write_csv(args.out / "recall.csv", recall)
    paired.write_csv(args.out / "needle.csv", needle)
    write_table(args.out / "tasks.md", recall, needle)


if __name__ == "__main__":
    main()
