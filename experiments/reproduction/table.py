#!/usr/bin/env python3
"""Prints the table of papers' claims, from the *.csv of this folder. Checks every row; one that is wrong stops it. The paper has the same rows.

Columns: paper (authors or name, arXiv number), claim (what it says, with its number), model (ours), experiment (its folder), measured (our number), interval (95 %, or
"exact" where there is nothing to repeat: bytes, counts), verdict, run (runs that it comes from, with spaces between them: `run` of the experiment's *.csv).
"""
import csv
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent
COLUMNS = ["paper", "claim", "model", "experiment", "measured", "interval", "verdict", "run"]
VERDICTS = ["reproduced", "partly", "not", "not resolved"]


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def runs_of(experiment, seen={}):
    """All runs that the experiment's results name."""
    if experiment not in seen:
        files = [path for path in (EXPERIMENTS / experiment).glob("*.csv")]
        seen[experiment] = {run for path in files for row in read_csv(path) for run in (row.get("run") or "").split()}
    return seen[experiment]


def problems_of(row):
    for column in COLUMNS:
        if not row[column]:
            yield f"{column} is empty"
    if row["verdict"] not in VERDICTS:
        yield f"verdict {row['verdict']!r}; wanted one of {', '.join(VERDICTS)}"
    if not (EXPERIMENTS / row["experiment"]).is_dir():
        yield f"no folder experiments/{row['experiment']}"
    for run in row["run"].split():
        if run not in runs_of(row["experiment"]):
            yield f"run {run} is in no *.csv of experiments/{row['experiment']}"


def read_claims():
    claims, problems = [], []
    for path in sorted(HERE.glob("*.csv")):
        for count, row in enumerate(read_csv(path), 2):
            if list(row) != COLUMNS:
                sys.exit(f"{path.name}: the columns are {', '.join(map(str, row))}; wanted {', '.join(COLUMNS)}")
            problems += [f"{path.name}:{count}: {problem}" for problem in problems_of(row)]
            claims.append(row)
    if problems:
        sys.exit("\n".join(problems))
    return claims


def markdown(claims):
    counts = ", ".join(f"{sum(row['verdict'] == verdict for row in claims)} {verdict}" for verdict in VERDICTS)
    lines = [f"{len(claims)} claims: {counts}.", "", "| paper | claim | model | measured | 95 % interval | verdict | runs |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in claims:
        cells = [row[name].replace("|", r"\|") for name in ("paper", "claim", "model", "measured", "interval")]
        lines.append(f"| {' | '.join(cells)} | **{row['verdict']}** | {row['experiment'].split('_')[0]}: {row['run']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(read_claims()))
