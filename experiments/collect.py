#!/usr/bin/env python3
"""The results of an experiment as they are kept in git, from its run files: runs.csv, a row a run, and a file for each table asked for.

    experiments/collect.py e20_streaming --tables quality       runs/e20_streaming/*.h5 -> experiments/e20_streaming/runs.csv, quality.csv
    experiments/collect.py e02_cost_growth --tables fits -f runs/e02_cost_growth-20261130-093012.h5

The column `run` names a run everywhere: its file without folder and ending, which for the cells of a sweep is the hash of what they resolve to. Runs whose
files are not here any more keep their rows. Needs h5py.
"""
import argparse
import csv
import re
import shlex
import sys
from pathlib import Path

import h5py
import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# What does not tell runs of one experiment apart and is said by the others: abilities of the device, parts of sums.
LEFT_OUT = re.compile(r"Conventions|title|schema_version|host|device_(?!driver|version|\w+_gbps|fma_gflops|launch_us)|memory_(ledger_|classes)|config_(cl_source|tokenizer)_sha256|\w*_(CLASS|NAME)$")


def plain(value):
    """A value as CSV has it: text, whole numbers, floats; empty where there is none."""
    if isinstance(value, (bytes, np.bytes_)):
        return value.decode()
    value = value.item() if isinstance(value, np.generic) else value
    return "" if value != value else value


def portable(text):
    """Without paths of the machine that it ran on: they begin at a folder of the project, or are the file's name alone."""
    return re.sub(r"(?<![\w./:-])/\S*?((?:build|data|experiments|runs)/|[^/\s,)]+(?![^\s,)]))", r"\1", text)


def portable_command(command):
    """A command line as it is typed in the project's root."""
    program, *words = shlex.split(command)
    return shlex.join(["build/kvlab" if Path(program).name.startswith("kvlab") else portable(program), *map(portable, words)])


def run_row(name, file):
    row = {"run": name} | {key: plain(value) for key, value in file.attrs.items()}
    for group, place in file.items():
        row |= {f"{group}_{key}": plain(value) for key, value in place.attrs.items() if np.ndim(value) == 0}
    row = {key: portable(value) if isinstance(value, str) else value for key, value in row.items()} | {"command_line": portable_command(row["command_line"])}
    return {key: value for key, value in row.items() if not LEFT_OUT.match(key)}


def table_rows(name, group):
    n = int(group["committed"][()])
    columns = {}
    for key, data in group.items():
        if "units" not in data.attrs or data.ndim == 0 or data.shape[0] < n:
            continue
        values = data[:n]
        columns[key] = [row.tobytes().rstrip(b"\0").decode() for row in values] if data.ndim == 2 else [plain(value) for value in values]
    return [{"run": name} | dict(zip(columns, row)) for row in zip(*columns.values())]


def read_csv(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path, rows):
    """Rows in the order of their runs; a run that is there already is replaced."""
    new = {row["run"] for row in rows}
    rows = sorted([row for row in read_csv(path) if row["run"] not in new] + rows, key=lambda row: row["run"])
    columns = dict.fromkeys(key for row in rows for key in row)
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(f"{path}: {len(rows)} rows, {len(new)} runs read")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="name of its folder")
    parser.add_argument("-f", "--files", nargs="+", type=Path, help="run files (default: all of runs/<experiment>)")
    parser.add_argument("--tables", default="", help="comma list of tables whose rows are kept too")
    args = parser.parse_args()
    out = HERE / args.experiment
    files = args.files or sorted((ROOT / "runs" / args.experiment).glob("*.h5"))
    if not out.is_dir() or not files:
        sys.exit(f"collect.py: {f'no run files in runs/{args.experiment}' if out.is_dir() else f'no folder {out}'}")
    runs, tables = [], {name: [] for name in args.tables.split(",") if name}
    for path in files:
        with h5py.File(path) as file:
            name = path.name.removesuffix(".h5")
            runs.append(run_row(name, file))
            for table in tables:
                if table in file:
                    tables[table] += table_rows(name, file[table])
    write_csv(out / "runs.csv", runs)
    for name, rows in tables.items():
        if not rows:
            sys.exit(f"collect.py: no run file has rows of a table {name}")
        write_csv(out / f"{name}.csv", rows)


if __name__ == "__main__":
    main()
