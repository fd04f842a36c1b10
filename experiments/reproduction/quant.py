#!/usr/bin/env python3
"""What papers on quantized caches claim, and what was measured here: quant.csv, from the tables of e05 (signs.csv, runs.csv, chunks.csv).

A claim that one choice is better than another is *reproduced* if all its signs are as the paper has them, *partly* if some are, *not resolved* if all their
intervals contain 0, else *not*. A claim that a cache loses little is put as the ratio of its perplexity to the f16 cache's on the same windows: *reproduced* if the
95 % interval reaches down to the paper's ratio. One that it breaks down: if all of it is above 1.5. The papers' models have 7 billion parameters or more, ours 0.135.
"""
import csv
import math
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
E05 = HERE.parent / "e05_quant_signs"
sys.path.insert(0, str(E05))
from signs import GEAR as PARTS, THINK, kvquant, write_csv  # noqa: E402

MODEL = "SmolLM2-135M-Instruct Q4_1"
STUDENT = {16: 2.1314, 20: 2.0930}  # t of 95 %, by windows
KIVI, KVQUANT, QUAROT = "KIVI (2402.02750)", "KVQuant (2401.18079)", "QuaRot (2404.00456)"
TURBOQUANT, GEAR, THINK_PAPER = "TurboQuant (2504.19874)", "GEAR (2403.05527)", "ThinK (2407.21018)"

# (paper, claim, what signs.py has to say of its signs, signs: name and bits of rows of signs.csv)
SIGNS = [
    (KIVI, "2 bits: keys by channel and values by token are best (Table 3)",
     "holds", [("K channel, V token < K channel, V channel", "2"), ("K channel, V token < K token, V token", "2")]),
    (KIVI, "2 bits: all by channel is worse than all by token (GSM8K 0 and 0.83)", "reversed", [("K channel, V channel < K token, V token", "2")]),
    (KIVI, "2 bits with 128 newest tokens exact: better than by token with the same", "holds", [("KIVI-2 as published < K token, V token, same tail", "2")]),
    (KVQUANT, "3-bit keys by channel: before RoPE is better than after", "holds", [("K before RoPE < after", "3")]),
    (KVQUANT, "1 % outliers apart are better than none, 3 and 2 bits", "holds", [("outliers 1 % < none, kvquant", "3"), ("outliers 1 % < none, kvquant", "2")]),
    (QUAROT, "keys need bits more than values: K4 V2 is better than K2 V4", "holds", [("K 4 bits, V 2 < K 2 bits, V 4, Hadamard", "4, 2")]),
    (QUAROT, "a Hadamard rotation helps codes by token, 4, 3, 2 bits", "holds", [(f"Hadamard < none, int{bits}", bits) for bits in "432"]),
    (QUAROT, "clip 0.95 is better than 1, 4 bits (5.510 and 5.513)", "holds", [("clip at 0.95 < none, int4 with Hadamard", "4")]),
    (TURBOQUANT, "with fewer bits better than KIVI (2.5 and 3; ours 2.75 and 3)", "holds", [("turboquant, K 3 bits, V 2 < kivi", "3, 2; 2")]),
    (TURBOQUANT, "codes of the rotated coordinates' law are better than a rotation with minimum and maximum", "holds",
     [(f"turboquant < Hadamard, int{bits}", bits) for bits in "432"]),
    (TURBOQUANT, "for inner products b - 1 bits and a sketch are better than b bits", "reversed", [("turboquant K 3 bits < 2 bits and sketch", "3")]),
    (GEAR, "2 bits: a low-rank part of the error and outliers are better than codes alone",
     "holds", [(f"{part} < none, gear", "2") for part in PARTS]),
    (GEAR, "2 bits: better than KIVI", "holds", [("gear < kivi", "2")]),
]

# (paper, claim, cache, bound of the ratio of perplexities to the f16 cache: the paper's own where it has one)
LOSSES = [
    (KVQUANT, "nuq3-1 %: perplexity 5.75 instead of 5.68 (LLaMA-7B)", kvquant(3), "at most", 5.75 / 5.68),
    (KVQUANT, "nuq3: 5.87 instead of 5.68", kvquant(3, 0, "_0"), "at most", 5.87 / 5.68),
    (KVQUANT, "nuq2-1 %: 6.01 instead of 5.68", kvquant(2), "at most", 6.01 / 5.68),
    (KVQUANT, "nuq2: 7.23 instead of 5.68", kvquant(2, 0, "_0"), "at most", 7.23 / 5.68),
    (KVQUANT, "int4 by token: 5.98 instead of 5.68", "int4", "at most", 5.98 / 5.68),
    (KVQUANT, "int3 by token breaks down: 10.87 instead of 5.68, x 1.914", "int3", "at least", 1.5),
    (KVQUANT, "int2 by token breaks down: 11779 instead of 5.68", "int2", "at least", 1.5),
    (QUAROT, "K4 V4: 5.51 instead of 5.47 (Llama-2-7B)", "quarot4", "at most", 5.51 / 5.47),
    (QUAROT, "K3 V3: 5.68 instead of 5.47", "quarot3", "at most", 5.68 / 5.47),
    (QUAROT, "K2 V2: 9.23 instead of 5.47", "quarot2", "at most", 9.23 / 5.47),
    (QUAROT, "K4 V2: 5.75 instead of 5.47", "k=int4 v=int2 rot=hadamard", "at most", 5.75 / 5.47),
    (QUAROT, "K2 V4: 8.06 instead of 5.47", "k=int2 v=int4 rot=hadamard", "at most", 8.06 / 5.47),
    (KIVI, "2 bits, 128 newest tokens exact: almost no loss (LongBench 44.27 of 44.52; put as 1 % of perplexity)", "kivi2", "at most", 1.01),
    (TURBOQUANT, "3.5 bits: no loss (LongBench-E 50.06 of 50.06; put as 1 %; ours 4.25 bits)", "turboquant4", "at most", 1.01),
    (GEAR, "2 bits: almost no loss (GSM8K 54.59 of 54.21; put as 1 %)", "gear", "at most", 1.01),
    (THINK_PAPER, "without 40 % of key channels: almost no loss (put as 1 %)", THINK[""], "at most", 1.01),
    (THINK_PAPER, "without 20 % of key channels: almost no loss (put as 1 %)", THINK["0.2"], "at most", 1.01),
]


def read_csv(name):
    with open(E05 / name, newline="") as file:
        return list(csv.DictReader(file))


def sign_row(paper, claim, wanted, signs, found, run_of):
    rows = [row for name, bits in signs for row in found if (row["as"], row["sign"], row["bits"]) == ("paper", name, bits)]
    if not rows:
        return None
    verdicts = {row["verdict"] for row in rows}
    runs = dict.fromkeys(run_of[row[side]]["run"] for row in rows for side in ("better", "other"))
    return {"paper": paper, "claim": claim, "model": MODEL, "experiment": "e05_quant_signs",
            "measured": "; ".join(f"KLD {float(row['kld_better']):.4f} against {float(row['kld_other']):.4f}" for row in rows),
            "interval": "; ".join(f"{float(row['difference']):+.4f} [{float(row['low']):+.4f}, {float(row['high']):+.4f}]" for row in rows),
            "verdict": "reproduced" if verdicts == {wanted} else "partly" if wanted in verdicts else "not resolved" if verdicts == {"not resolved"} else "not",
            "run": " ".join(runs)}


def loss_row(paper, claim, spec, bound, limit, run_of, chunks):
    if spec not in run_of:
        return None
    lost = [float(c["nll"]) - float(c["nll_base"]) for c in chunks if c["run"] == run_of[spec]["run"]]
    mean, error = statistics.fmean(lost), STUDENT[len(lost)] * statistics.stdev(lost) / math.sqrt(len(lost))
    middle, low, high = (math.exp(x) for x in (mean, mean - error, mean + error))
    return {"paper": paper, "claim": claim, "model": MODEL, "experiment": "e05_quant_signs", "measured": f"perplexity x {middle:.4g} ({bound} {limit:.4g})",
            "interval": f"x [{low:.4g}, {high:.4g}]", "verdict": "reproduced" if (low <= limit if bound == "at most" else low >= limit) else "not",
            "run": run_of[spec]["run"]}


def main():
    found, chunks, run_of = read_csv("signs.csv"), read_csv("chunks.csv"), {row["kv"]: row for row in read_csv("runs.csv")}
    rows = [sign_row(*claim, found, run_of) for claim in SIGNS] + [loss_row(*claim, run_of, chunks) for claim in LOSSES]
    order = [KIVI, KVQUANT, QUAROT, TURBOQUANT, GEAR, THINK_PAPER]
    write_csv(HERE / "quant.csv", sorted((row for row in rows if row), key=lambda row: order.index(row["paper"])))


if __name__ == "__main__":
    main()
