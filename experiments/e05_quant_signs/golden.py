#!/usr/bin/env python3
"""Our KLD against the golden table's (codecs.md of the golden folder): an independent program over the same 20 windows.

    experiments/e05_quant_signs/golden.py    run files of golden.yaml -> golden.csv and a table on stdout; fails if a row is off

A row is off if its KLD is not within 5 %, or its perplexity is not what e04 leaves open: codes at a rounding edge fall to either side with the order of a
sum, which moves the nll of a window by about 0.09 sqrt(KLD) (standard deviation); the limit is three of these over the windows, and 0.05 % for the rest.
The rows must also be in the table's order of KLD. Two that the intervals of our own paired windows do not tell apart may stand either way.
"""
import argparse
import csv
import itertools
import json
import os
import sys
from pathlib import Path

from signs import BOTH, here, keys, kvlab, root, run_files_in, sides, write_csv

KLD_WITHIN, KLD_ZERO = 0.05, 1e-6
# The table's name of a row, ours. Its keys by token at 2 bits are in the order of channels of Hugging Face, whatever its head says (why.md).
ROWS = {"f16 f16": "f16", "q8_0 q8_0": "q8_0", "q4_0 q4_0": "q4_0", "f16 q4_0": sides("f16", "q4_0"), "q8_0 q4_0": sides("q8_0", "q4_0"),
        "q4_0 f16": keys("q4_0"), "q4_0 q4_0 rot=hadamard": "q4_0 rot=hadamard", "q4_0 q4_0 korder=hf": "q4_0 korder=hf", "q5_0 q5_0": "q5_0",
        "q4_1 q4_1": "q4_1", "int4(group=64) f16": keys("int4"), "f16 int4(group=64)": sides("f16", "int4"),
        "kivi2 axes K channel V token G32": BOTH["channel", "token"], "2 bits K token V token G32": BOTH["token", "token"] + " korder=hf",
        "2 bits K channel V channel G32": BOTH["channel", "channel"], "2 bits K token V channel G32": BOTH["token", "channel"] + " korder=hf"}


def golden_rows(path):
    """{name: (ppl, kld, error over windows)}"""
    lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in path.read_text().splitlines() if line.startswith("|"))
    return {cells[0]: (float(cells[1]), float(cells[2]), float(cells[4])) for cells in lines if cells[0] in ROWS}


def compare(args, golden):
    files = run_files_in(args.runs)
    runs = {run["config_kv_given"]: run for run in csv.DictReader(kvlab(args, "log", "export", "--csv", *files).splitlines()) if run["quality_n_chunks"] == "20"}
    rows = []
    for name, spec in ROWS.items():
        if spec not in runs:
            sys.exit(f"{args.runs}: no run of 20 windows for {spec}: kvlab sweep experiments/e05_quant_signs/golden.yaml")
        golden_ppl, golden_kld, error = golden[name]
        kld, ppl = (float(runs[spec]["quality_" + column]) for column in ("kld_mean", "ppl"))
        off = kld > KLD_ZERO if golden_kld == 0 else abs(kld / golden_kld - 1) > KLD_WITHIN
        off = off or abs(ppl / golden_ppl - 1) > 0.0005 + 3 * 0.09 * (golden_kld / 20) ** 0.5
        rows.append({"kv": spec, "row": name, "golden": golden_kld, "golden_se_chunk": error, "kld": kld, "deviation": kld / golden_kld - 1 if golden_kld else "",
                     "golden_ppl": golden_ppl, "ppl": ppl, "windows": 20, "off": int(off), "run": Path(runs[spec]["file"]).stem, "file": runs[spec]["file"]})
    return rows


def out_of_order(args, rows):
    """Pairs of rows that the table has the other way round, and our windows not by chance."""
    for low, high in itertools.combinations(sorted(rows, key=lambda row: row["golden"]), 2):
        if low["kld"] > high["kld"]:
            found = json.loads(kvlab(args, "log", "diff", "--json", low["file"], high["file"]))["quality"]["kld"]
            print(f"order: {low['kv']} above {high['kv']}: {found['verdict']} [{found['low']}, {found['high']}]")
            if found["verdict"] != "not resolved":
                yield low, high


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlab", default=root / "build/kvlab")
    parser.add_argument("--runs", type=Path, default=root / "runs/e05_quant_signs", help="folder of the run files")
    parser.add_argument("--out", type=Path, default=here / "golden.csv")
    parser.add_argument("--golden", type=Path, default=Path(os.environ.get("KVLAB_GOLDEN", root / "../shared/golden")), help="folder of codecs.md")
    args = parser.parse_args()
    if not (args.golden / "codecs.md").exists():
        sys.exit(f"golden.py: no {args.golden}/codecs.md: the golden folder is not part of the repository; --golden says where it is")
    golden = golden_rows(args.golden / "codecs.md")
    if missing := ROWS.keys() - golden.keys():
        sys.exit(f"{args.golden}/codecs.md: no row {', '.join(missing)}")
    rows = compare(args, golden)
    for row in rows:
        print(f"{row['row']:34} KLD {row['kld']:.6f}, golden {row['golden']:.6f}" + (f" ({row['deviation']:+.1%})" if row["golden"] else "") +
              f", ppl {row['ppl']:.4f}, golden {row['golden_ppl']:.4f}" + (": OFF" if row["off"] else ""))
    swapped = list(out_of_order(args, rows))
    for row in rows:
        del row["file"]
    write_csv(args.out, rows)
    if swapped or any(row["off"] for row in rows):
        sys.exit("not the golden table")


if __name__ == "__main__":
    main()
