"""Run files of `kvlab eval` as windows, and comparisons that are paired by window. Needs numpy and scipy."""
import argparse
import csv
import subprocess
from pathlib import Path

import numpy as np
from drawing import new_figure, save_figure  # noqa: F401
from run_files import ROOT, run_files_in
from scipy import stats

WINDOW = ("chunk", "length", "depth", "gap", "seed")  # the columns that say which window, or sequence of a task, a row is of


def parse_arguments(about, out, runs, figure):
    """The command line of a script that makes tables in its folder `out` of run files, and `figure` there of the tables."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlab", default=ROOT / "build/kvlab")
    parser.add_argument("--runs", type=Path, default=ROOT / runs, help="folder of the run files, or of the sweeps' folders")
    parser.add_argument("--out", type=Path, default=out, help="folder of what is written, and what the figure is drawn from")
    parser.add_argument("--figure", action="store_true", help=f"draw {figure} from the tables")
    parser.add_argument("--figure-path", type=Path, help="draw there")
    return parser.parse_args()


def read_runs(kvlab, *folders, key=lambda facts: facts["config_kv_given"]):
    """{key: {"run", "facts" (everything the file says), "rows" {window: {column: number}}}} of complete runs, specs as given; of two, the one with more rows."""
    files = run_files_in(*folders)
    export = lambda *words: csv.DictReader(subprocess.run([kvlab, "log", "export", "--csv", *words, *files], capture_output=True, text=True, check=True,
                                                          cwd=ROOT).stdout.splitlines())
    found = [{"run": Path(facts["file"]).stem, "facts": facts, "rows": {}} for facts in export()]
    for row in export("--table", "quality"):
        numbers = {name: float(value) for name, value in row.items() if name != "run" and value}
        found[int(row["run"])]["rows"][tuple(numbers[name] for name in WINDOW if name in numbers)] = numbers
    runs = {}
    for run in found:
        name = key(run["facts"])
        if run["facts"]["status"] == "complete" and (name not in runs or len(run["rows"]) > len(runs[name]["rows"])):
            runs[name] = run
    return runs


def common_windows(*runs):
    return sorted(set.intersection(*(set(run["rows"]) for run in runs)))


def column(run, name, windows):
    return np.array([run["rows"][window][name] for window in windows])


def interval(x):
    """Mean of paired numbers, its 95 % t-interval, and the two-sided p of mean 0."""
    x = np.asarray(x)
    error = x.std(ddof=1) / np.sqrt(len(x))
    half = stats.t.ppf(0.975, len(x) - 1) * error
    p = 2 * stats.t.sf(abs(x.mean() / error), len(x) - 1) if error > 0 else float(x.mean() == 0)
    return {"mean": x.mean(), "low": x.mean() - half, "high": x.mean() + half, "p": p, "n": len(x)}


def holm(p):
    """Adjusted p values (Holm, Scandinavian Journal of Statistics 6(2), 1979), in the order given."""
    order, adjusted, least = np.argsort(p), np.empty(len(p)), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted


def add_holm(rows, p="p", into="p_holm"):
    for row, value in zip(rows, holm(np.array([row[p] for row in rows]))):
        row[into] = value


def verdict(windows, mean, p_holm):
    """Of a difference A - B of losses."""
    return "exploratory" if windows < 16 else "not resolved" if p_holm >= 0.05 else "better" if mean < 0 else "worse"


def differences(runs, pairs):
    """A row for each (A, B) of specs that both ran: the KLD of A less that of B by window, p adjusted over the rows."""
    rows = []
    for a, b in pairs:
        if a in runs and b in runs:
            windows = common_windows(runs[a], runs[b])
            found = interval(column(runs[a], "kld", windows) - column(runs[b], "kld", windows))
            rows.append({"a": a, "b": b, "windows": len(windows), **{k: found[k] for k in ("mean", "low", "high", "p")}, "run": f"{runs[a]['run']} {runs[b]['run']}"})
    add_holm(rows)
    for row in rows:
        row["verdict"] = verdict(row["windows"], row["mean"], row["p_holm"])
    return rows


def differences_table(rows, digits=4):
    """These rows as lines of markdown."""
    return [f"A - B, paired by window; p adjusted over the table (Holm, {len(rows)} rows). Negative: A is better.", "", "| A | B | KLD A - B | p | |", "| --- | --- | ---: | ---: | --- |",
            *(f"| `{row['a']}` | `{row['b']}` | {show(row, digits)} | {row['p_holm']:.2g} | {row['verdict']} |" for row in rows)]


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows)


def show(x, digits=4):
    return f"{x['mean']:+.{digits}f} [{x['low']:+.{digits}f}, {x['high']:+.{digits}f}]"
