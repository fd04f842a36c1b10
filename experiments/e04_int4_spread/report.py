#!/usr/bin/env python3
"""How far right programs lie apart, from the windows of all of them (needs numpy and scipy).

    experiments/collect.py e04_int4_spread --tables windows,quality    runs/e04_int4_spread -> runs.csv, windows.csv (spread.py, reference.py), quality.csv (grid.yaml)
    experiments/e04_int4_spread/report.py                              these -> programs.csv, pairs.csv, and both as tables

programs.csv: each program's means with standard errors over windows. pairs.csv: nll of two programs with the same cache, paired by window: mean with its 95 % t-interval, and
the standard deviation sd of a window; sd / sqrt(windows) is by how much, relatively, their perplexities differ by chance.
"""
import csv
import itertools
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import paired  # noqa: E402

MEASURES = ("nll", "kld", "same_top1")


def read(name):
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def read_windows():
    """{(cache, program): {"run", "rows": {window: {measure: number}}}}; kvlab's f16 caches are those that its others were compared with."""
    found = {}
    def add(kv, program, run, window, *values):
        found.setdefault((kv, program), {"run": run, "rows": {}})["rows"][int(window)] = dict(zip(MEASURES, map(float, values)))
    for row in read("windows.csv"):
        add(row["kv"], row["program"], row["run"], row["window"], *(row[name] for name in MEASURES))
    runs = {row["run"]: row for row in read("runs.csv")}
    for row in read("quality.csv"):
        run = runs[row["run"]]
        program = f"kvlab, {'PoCL' if 'PoCL' in run['device_version'] else 'Intel'}"
        add(run["config_kv_given"], program, row["run"], row["chunk"], *(row[name] for name in MEASURES))
        add("f16", program, row["run"], row["chunk"], row["nll_base"], 0, 1)
    return dict(sorted(found.items()))


def program_rows(found):
    for (kv, program), run in found.items():
        windows = paired.common_windows(run)
        mean, se = {}, {}
        for name in MEASURES:
            values = paired.column(run, name, windows)
            mean[name], se[name] = values.mean(), values.std(ddof=1) / np.sqrt(len(values))
        yield {"run": run["run"], "kv": kv, "program": program, "windows": len(windows), "ppl": np.exp(mean["nll"]), "ppl_se": np.exp(mean["nll"]) * se["nll"],
               "kld": mean["kld"], "kld_se": se["kld"], "same_top1": mean["same_top1"], "same_top1_se": se["same_top1"]}


def pair_rows(found):
    for (one, a), (other, b) in itertools.combinations(found.items(), 2):
        if one[0] == other[0]:
            windows = paired.common_windows(a, b)
            nll, kld = (paired.column(a, name, windows) - paired.column(b, name, windows) for name in ("nll", "kld"))
            sd, intervals = nll.std(ddof=1), {"": paired.interval(nll), "kld_": paired.interval(kld)}
            yield {"run": f"{a['run']} {b['run']}", "kv": one[0], "a": one[1], "b": other[1], "windows": len(windows), "sd": sd, "relative_ppl": sd / np.sqrt(len(windows)),
                   **{name + k: x[k] for name, x in intervals.items() for k in ("mean", "low", "high")}}


def main():
    found = read_windows()
    programs, pairs = list(program_rows(found)), list(pair_rows(found))
    paired.write_csv(HERE / "programs.csv", programs)
    paired.write_csv(HERE / "pairs.csv", pairs)
    print("| cache | program | windows | PPL | KLD | same top-1 |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for row in programs:
        print("| {kv} | {program} | {windows} | {ppl:.4f} +- {ppl_se:.2f} | {kld:.6f} +- {kld_se:.6f} | {same_top1:.4f} +- {same_top1_se:.4f} |".format(**row))
    print("\n| cache | A | B | windows | nll of A - B, 95 % | sd of a window | of a perplexity |\n| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for row in pairs:
        print("| {kv} | {a} | {b} | {windows} | {mean:+.5f} [{low:+.5f}, {high:+.5f}] | {sd:.5f} | {percent:.3f} % |".format(**row, percent=100 * row["relative_ppl"]))


if __name__ == "__main__":
    main()
