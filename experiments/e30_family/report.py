#!/usr/bin/env python3
"""From what train.py left in its work folder: runs.csv, rates.csv, curves.csv, positions.csv beside this script, the verdicts as text, and family.svg.

usage: report.py [--work DIR] [--figure]      (the figure needs matplotlib; without --work the tables here are read again)
"""
import argparse
import collections
import csv
import json
import math
import pathlib
import statistics

HERE = pathlib.Path(__file__).resolve().parent
POSITIONS = 16  # of a row of positions.csv
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t by degrees of freedom
RUN_COLUMNS = ("variant", "seed", "rate", "d_ff", "n_parameters", "cache_elements", "tokens", "test_bits_per_byte", "train_bits_per_byte", "recall_accuracy")
# (claim, better or equal, other, value, larger is better): better is expected not to be worse than other
CLAIMS = (
    ("1. MQA's test loss is at least MHA's", "mha", "mqa", "test_bits_per_byte", False),
    ("2. MLA-64 is not worse than GQA-2 at equal cache", "mla64", "gqa2", "test_bits_per_byte", False),
    ("3. MQA recalls less than MHA", "mha", "mqa", "recall_accuracy", True),
    ("MLA-32 against MQA at equal cache", "mla32", "mqa", "test_bits_per_byte", False),
    ("MHA against GQA-2", "mha", "gqa2", "test_bits_per_byte", False),
)


def write(name, columns, rows):
    with open(HERE / name, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def read(name):
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def collect(work):
    runs = [json.loads(path.read_text()) for path in sorted(work.glob("*-[0-9].json"))]
    write("runs.csv", RUN_COLUMNS, [[run[column] for column in RUN_COLUMNS] for run in runs])
    write("curves.csv", ("variant", "seed", "step", "train_bits_per_byte"), [(run["variant"], run["seed"], *point) for run in runs for point in run["curve"]])
    binned = lambda values: [(i, round(statistics.fmean(values[i:i + POSITIONS]), 5)) for i in range(0, len(values), POSITIONS)]
    write("positions.csv", ("variant", "seed", "first_position", "test_bits_per_byte"),
          [(run["variant"], run["seed"], *point) for run in runs for point in binned(run["position_bits_per_byte"])])
    rates = [(path.name.split("-rate-")[0], json.loads(path.read_text())) for path in sorted(work.glob("*-rate-*.json"))]
    write("rates.csv", ("variant", "rate", "validation_bits_per_byte"), [(name, rate["rate"], rate["bits_per_byte"]) for name, rate in rates])


def by_seed(runs, variant, value):
    return {row["seed"]: float(row[value]) for row in runs if row["variant"] == variant}


def verdict(runs, better, other, value, larger):
    """Mean of other - better (better - other where larger is better) over the seeds that both have, with a 95 % t-interval, and what it says."""
    a, b = by_seed(runs, better, value), by_seed(runs, other, value)
    differences = [(b[seed] - a[seed]) * (-1 if larger else 1) for seed in sorted(a.keys() & b.keys())]
    if not differences:
        return "no seed has both"
    mean, n = statistics.fmean(differences), len(differences)
    each = ", ".join(f"{x:+.4f}" for x in differences)
    if n == 1:
        return f"{mean:+.4f} with one seed: no interval, open"
    half = T_975[n - 1] * statistics.stdev(differences) / math.sqrt(n)
    said = "not resolved" if mean - half <= 0 <= mean + half else "resolved, as expected" if mean > 0 else "resolved, the other way"
    return f"{mean:+.4f} +- {half:.4f} ({n} seeds: {each}): {said}"


def print_report(runs):
    variants = collections.OrderedDict((row["variant"], row) for row in runs)
    print("| variant | elements | parameters | rate | seeds | test bits a byte | train | recall |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, row in sorted(variants.items(), key=lambda item: (-float(item[1]["cache_elements"]), item[0])):
        mean = lambda value: statistics.fmean(by_seed(runs, name, value).values())
        print(f"| {name} | {float(row['cache_elements']):.0f} | {row['n_parameters']} | {float(row['rate']):g} | {len(by_seed(runs, name, 'seed'))} | "
              f"{mean('test_bits_per_byte'):.4f} | {mean('train_bits_per_byte'):.4f} | {mean('recall_accuracy'):.3f} |")
    print()
    for claim, *what in CLAIMS:
        print(f"{claim}: {verdict(runs, *what)}")


def draw(runs):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    curves, positions = read("curves.csv"), read("positions.csv")
    names = sorted({row["variant"] for row in runs})
    # Colours of Okabe and Ito, told apart by people of any colour vision.
    colours = dict(zip(names, ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for name in names:
        seed = min(row["seed"] for row in runs if row["variant"] == name)
        of = lambda rows, x, y: zip(*[(float(row[x]), float(row[y])) for row in rows if row["variant"] == name and row["seed"] == seed])
        left.plot(*of(curves, "step", "train_bits_per_byte"), color=colours[name], linewidth=0.8, label=name)
        middle.plot(*of(positions, "first_position", "test_bits_per_byte"), color=colours[name], linewidth=1)
        right.plot(*zip(*[(float(row["cache_elements"]), float(row["test_bits_per_byte"])) for row in runs if row["variant"] == name]), "o",
                   color=colours[name])
    left.set(title="training", xlabel="step", ylabel="bits a byte", ylim=(1.5, 4))
    middle.set(title="test, by position", xlabel="position in the window", ylabel="bits a byte")
    right.set(title="test, by cache", xlabel="elements a token and layer", ylabel="bits a byte", xscale="log")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "family.svg")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, help="train.py's work folder")
    parser.add_argument("--figure", action="store_true", help="draw family.svg")
    args = parser.parse_args()
    if args.work:
        collect(args.work)
    runs = read("runs.csv")
    print_report(runs)
    if args.figure:
        draw(runs)


if __name__ == "__main__":
    main()
