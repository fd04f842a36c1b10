#!/usr/bin/env python3
"""From what train.py left in its work folder: runs.csv, rates.csv, curves.csv, positions.csv beside this script; from these variants.csv, verdicts.csv, and family.svg.

usage: report.py [--work DIR] [--figure]      (the figure needs matplotlib; without --work the tables here are read again)
"""
import argparse
import csv
import json
import math
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
POSITIONS = 16  # of a row of positions.csv
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t by degrees of freedom
RUN_COLUMNS = ("run", "git", "end", "variant", "seed", "rate", "d_ff", "n_parameters", "cache_elements", "tokens", "test_bits_per_byte",
               "train_bits_per_byte", "recall_accuracy")
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
    runs = [{"run": path.stem} | json.loads(path.read_text()) for path in sorted(work.glob("*-[0-9].json"))]
    write("runs.csv", RUN_COLUMNS, [[run[column] for column in RUN_COLUMNS] for run in runs])
    write("curves.csv", ("run", "variant", "seed", "step", "train_bits_per_byte"), [(run["run"], run["variant"], run["seed"], *point) for run in runs for point in run["curve"]])
    binned = lambda values: [(i, round(statistics.fmean(values[i:i + POSITIONS]), 5)) for i in range(0, len(values), POSITIONS)]
    write("positions.csv", ("run", "variant", "seed", "first_position", "test_bits_per_byte"),
          [(run["run"], run["variant"], run["seed"], *point) for run in runs for point in binned(run["position_bits_per_byte"])])
    rates = [(path.name.split("-rate-")[0], json.loads(path.read_text())) for path in sorted(work.glob("*-rate-*.json"))]
    write("rates.csv", ("variant", "rate", "validation_bits_per_byte"), [(name, rate["rate"], rate["bits_per_byte"]) for name, rate in rates])


def runs_of(runs, *variants):
    return [row for row in runs if row["variant"] in variants]


def by_seed(runs, variant, value):
    return {row["seed"]: float(row[value]) for row in runs_of(runs, variant)}


def variant_rows(runs):
    """A row a variant, the largest cache first: means over its seeds, with their standard deviations where there are several."""
    for name in sorted({row["variant"] for row in runs}, key=lambda name: (-float(runs_of(runs, name)[0]["cache_elements"]), name)):
        own = runs_of(runs, name)
        row = {"run": " ".join(r["run"] for r in own), "variant": name, **{key: own[0][key] for key in ("cache_elements", "n_parameters", "rate")}, "seeds": len(own)}
        for value in ("test_bits_per_byte", "train_bits_per_byte", "recall_accuracy"):
            values = list(by_seed(runs, name, value).values())
            row |= {value: statistics.fmean(values), f"{value}_sd": statistics.stdev(values) if len(values) > 1 else ""}
        yield row


def verdict_rows(runs):
    """Mean of other - better (better - other where larger is better) over the seeds that both have, with a 95 % t-interval, and what it says."""
    for claim, better, other, value, larger in CLAIMS:
        a, b = by_seed(runs, better, value), by_seed(runs, other, value)
        differences = [(b[seed] - a[seed]) * (-1 if larger else 1) for seed in sorted(a.keys() & b.keys())]
        if not differences:
            print(f"no seed has both: {claim}", file=sys.stderr)
            continue
        mean, n = statistics.fmean(differences), len(differences)
        half = T_975[n - 1] * statistics.stdev(differences) / math.sqrt(n) if n > 1 else ""
        said = "open" if n == 1 else "not resolved" if mean - half <= 0 <= mean + half else "as expected" if mean > 0 else "the other way"
        yield {"run": " ".join(row["run"] for row in runs_of(runs, better, other) if row["seed"] in a and row["seed"] in b), "claim": claim, "better": better, "other": other,
               "difference": mean, "half": half, "seeds": n, "verdict": said}


def write_rows(name, rows):
    if rows:
        write(name, rows[0], [row.values() for row in rows])


def print_report(variants, verdicts):
    spread = lambda row, value, form: f"{row[value]:{form}}" + (f" (sd {row[value + '_sd']:{form}})" if row[value + "_sd"] != "" else "")
    print("| variant | elements | parameters | rate | seeds | test bits a byte | train | recall |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in variants:
        print(f"| {row['variant']} | {float(row['cache_elements']):.0f} | {row['n_parameters']} | {float(row['rate']):g} | {row['seeds']} | "
              f"{spread(row, 'test_bits_per_byte', '.4f')} | {spread(row, 'train_bits_per_byte', '.4f')} | {spread(row, 'recall_accuracy', '.3f')} |")
    print("\n| claim | difference, 95 % | seeds | verdict |\n| --- | ---: | ---: | --- |")
    for row in verdicts:
        half = f" +- {row['half']:.4f}" if row["half"] != "" else ""
        print(f"| {row['claim']} | {row['difference']:+.4f}{half} | {row['seeds']} | {row['verdict']} |")


def draw(runs):
    import drawing
    curves, positions = read("curves.csv"), read("positions.csv")
    names = sorted({row["variant"] for row in runs})
    colours = dict(zip(names, drawing.COLOURS))
    figure, (left, middle, right) = drawing.new_figure(13, 4, columns=3)
    for name in names:
        own = runs_of(runs, name)
        seed = min(row["seed"] for row in own)
        of = lambda rows, x, y: zip(*[(float(row[x]), float(row[y])) for row in rows if row["variant"] == name and row["seed"] == seed])
        left.plot(*of(curves, "step", "train_bits_per_byte"), color=colours[name], linewidth=0.8, label=name)
        middle.plot(*of(positions, "first_position", "test_bits_per_byte"), color=colours[name], linewidth=1)
        right.plot(*zip(*[(float(row["cache_elements"]), float(row["test_bits_per_byte"])) for row in own]), "o", color=colours[name])
    left.set(title="training", xlabel="step", ylabel="bits a byte", ylim=(1.4, 4))
    middle.set(title="test, by position", xlabel="position in the window", ylabel="bits a byte")
    right.set(title="test, a point a seed", xlabel="elements a token and layer", ylabel="bits a byte", xscale="log")
    sizes = sorted({float(row["cache_elements"]) for row in runs})
    right.set_xticks(sizes, [f"{size:g}" for size in sizes])
    right.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    drawing.save_figure(figure, HERE / "family.svg", "experiments/e30_family/report.py --figure")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, help="train.py's work folder")
    parser.add_argument("--figure", action="store_true", help="draw family.svg")
    args = parser.parse_args()
    if args.work:
        collect(args.work)
    runs = read("runs.csv")
    variants, verdicts = list(variant_rows(runs)), list(verdict_rows(runs))
    write_rows("variants.csv", variants)
    write_rows("verdicts.csv", verdicts)
    print_report(variants, verdicts)
    if args.figure:
        draw(runs)


if __name__ == "__main__":
    main()
