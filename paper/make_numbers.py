#!/usr/bin/env python3
"""Every number of the paper, out of the results of the experiments: experiments/*/numbers.txt -> build/numbers.tex, tables, curves and the list of sources.

A line of numbers.txt is one of these, with FILE a CSV file of the same folder (experiments/collect.py makes them), CONDITIONS that choose rows, several with `;`
between them (column=value, column!=value, column~regular expression, column!~regular expression), and `by COLUMN` for another order than the file's:

    NAME = FILE [CONDITIONS] : TEXT                       a macro \\NAME; exactly one row fits
    rows NAME = FILE [CONDITIONS] by COLUMN : TEXT        build/NAME.tex, a line a row, for \\rowsof{NAME} in a table
    plot NAME = FILE [CONDITIONS] by COLUMN : TEXT        build/NAME.dat, the same for pgfplots

In TEXT, <column> stands for the row's value, <column:FORMAT> for a number in Python's format, <column:1e-6*.2f> or <column:1/1024*.2f> for one that is multiplied first,
<column/column:FORMAT> for the ratio of two. A row names the run that it comes from in the column `run`, or several with spaces between them; each has its row in runs.csv. Rows of results from before
run files were kept name none: `run!=` leaves them out.

An experiment is in the paper once it has a paper.tex, which uses the macros, and a runs.csv; one without results is named as missing.
"""
import re
import sys
from fractions import Fraction
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent / "experiments"
BUILD = HERE / "build"
sys.path.append(str(EXPERIMENTS / "reproduction"))
import table  # noqa: E402

LINE = re.compile(r"(?:(rows|plot) )?(\w+) = (\S+)(?: \[(.*)\])?(?: by (\w+))? : (.*)")
SPECIAL = {"\\": r"\textbackslash{}"} | {c: "\\" + c for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}


def escaped(text):
    return "".join(SPECIAL.get(c, c) for c in text)


def chosen(rows, conditions):
    for condition in filter(None, (part.strip() for part in (conditions or "").split(";"))):
        name, other, how, wanted = re.fullmatch(r"(\w+)(!?)([=~])(.*)", condition).groups()
        if rows and name not in rows[0]:
            raise KeyError(f"no column {name}; there are {', '.join(rows[0])}")
        fits = lambda value: value == wanted if how == "=" else re.search(wanted, value) is not None
        rows = [row for row in rows if fits(row[name]) != bool(other)]
    return rows


def filled(text, row):
    def value(place):
        name, below, form = place.groups()
        for column in filter(None, (name, below)):
            if column not in row:
                raise KeyError(f"no column {column}; there are {', '.join(row)}")
        if form is None:
            return escaped(row[name])
        scale, _, form = form.rpartition("*")
        return format(float(row[name]) * float(Fraction(scale or 1)) / float(row[below] if below else 1), form)
    return re.sub(r"<(\w+)(?:/(\w+))?(?::([^>]*))?>", value, text)


class Experiment:
    def __init__(self, folder, macros):
        self.folder, self.files, self.used, self.macros = folder, {}, {}, macros
        self.runs = {row["run"]: row for row in table.read_csv(folder / "runs.csv")}

    def rows(self, name, conditions):
        if name not in self.files:
            self.files[name] = table.read_csv(self.folder / name)
        rows = chosen(self.files[name], conditions)
        for row in rows:
            for run in (row.get("run") or "").split() or ["(none named)"]:
                if run not in self.runs:
                    raise KeyError(f"a row of {name} is of run {run}, which runs.csv does not have")
                self.used[run] = self.runs[run]
        return rows

    def take(self, line):
        kind, name, file, conditions, order, text = LINE.fullmatch(line).groups()
        rows = self.rows(file, conditions)
        if order:
            rows.sort(key=lambda row: float(row[order]))
        if kind is None and len(rows) != 1 or not rows:
            raise KeyError(f"{len(rows)} rows fit, wanted {'some' if kind else 'one'}")
        lines = [filled(text, row) for row in rows]
        if kind is None:
            if name in self.macros:
                raise KeyError(f"\\{name} is there already")
            self.macros[name] = lines[0]
        else:
            (BUILD / f"{name}.{'tex' if kind == 'rows' else 'dat'}").write_text("\n".join(lines) + "\n")

    def read(self):
        path = self.folder / "numbers.txt"
        for count, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                try:
                    self.take(line)
                except (KeyError, ValueError, OSError, AttributeError) as error:
                    sys.exit(f"{path.relative_to(HERE.parent)}:{count}: {error.args[0] if error.args else error}\n    {line}")

    def source(self):
        said = lambda column: ", ".join(sorted({row[column][:10] for row in self.used.values() if row.get(column)})) or "--"
        return f"\\path{{{self.folder.name}}} & {', '.join(map(escaped, sorted(self.used)))} & {escaped(said('git'))} & {said('end')} \\\\\n"


def claim_row(claim):
    cells = [escaped(claim[name]) for name in ("paper", "claim", "measured", "interval", "verdict", "experiment")]
    cells[3] = cells[3].replace(", ", ",~") # intervals stay whole
    cells[5] = cells[5].split(r"\_")[0]
    return " & ".join(cells) + " \\\\\n"


def main():
    BUILD.mkdir(exist_ok=True)
    folders = sorted(path.parent for path in EXPERIMENTS.glob("e*/paper.tex"))
    macros = {}
    experiments = [Experiment(folder, macros) for folder in folders if (folder / "runs.csv").exists()]
    for experiment in experiments:
        experiment.read()
    missing = [folder.name for folder in sorted(EXPERIMENTS.glob("e[0-9]*")) if folder not in [e.folder for e in experiments]]
    macros["withoutResults"] = ", ".join(f"\\path{{{name}}}" for name in missing) or "none"
    (BUILD / "numbers.tex").write_text("".join(f"\\newcommand{{\\{name}}}{{{text}}}\n" for name, text in macros.items()))
    (BUILD / "experiments.tex").write_text("".join(f"\\input{{../experiments/{e.folder.name}/paper.tex}}\n" for e in experiments))
    claims = table.read_claims()
    (BUILD / "reproduced.tex").write_text("".join(map(claim_row, claims)))
    (BUILD / "sources.tex").write_text("".join(e.source() for e in experiments))
    print(f"{len(macros) - 1} numbers of {sum(len(e.used) for e in experiments)} runs of {len(experiments)} experiments, {len(claims)} claims; not in the paper: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
