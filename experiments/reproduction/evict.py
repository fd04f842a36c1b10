#!/usr/bin/env python3
"""What papers on eviction and on reading few tokens claim, and what was measured here: evict.csv, from the tables of e21 to e25 (their scripts write them)."""
import csv
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import paired  # noqa: E402

MODEL = "SmolLM2-135M-Instruct Q4_1"
# paper, claim, a, b at both budgets of an experiment: a has the lower nll
RANKS = {"e22_ranking": [
    ("SnapKV (2404.14469)", "tokens that the newest queries attend to are worth more than the newest tokens", "snapkv", "recency"),
    ("SnapKV (2404.14469)", "better than H2O at equal tokens", "snapkv", "h2o"),
    ("H2O (2306.14048)", "heavy hitters with the newest tokens beat the newest tokens alone", "h2o", "recency"),
    ("TOVA (2401.06104)", "better than a window with sinks", "tova", "recency"),
    ("TOVA (2401.06104)", "better than H2O", "tova", "h2o"),
    ("PyramidKV (2406.02069)", "lower layers with more tokens beat equal layers", "pyramid-snapkv", "snapkv"),
    ("Ada-KV (2407.11550)", "heads that compete beat equal heads, with SnapKV's scores", "ada-snapkv", "snapkv"),
    ("Ada-KV (2407.11550)", "heads that compete beat equal heads, with expected attention", "ada-expected", "expected"),
    ("KeyDiff (2504.15364)", "better than a window with sinks", "keydiff", "recency"),
    ("KeyDiff (2504.15364)", "better than SnapKV", "keydiff", "snapkv"),
    ("Expected Attention (2510.00636)", "better than a window with sinks", "expected", "recency"),
    ("Expected Attention (2510.00636)", "better than SnapKV", "expected", "snapkv"),
    ("L2 norm (2406.11430)", "better than a window with sinks", "knorm", "recency"),
], "e25_more_scores": [
    ("CriticalKV (2502.03805)", "choosing the rest by what values do to the output beats the score alone (SnapKV's)", "critical", "snapkv"),
    ("ChunkKV (2502.00299)", "whole chunks beat single tokens, with SnapKV's scores", "chunk", "snapkv"),
    ("KVzip (2505.23416)", "better than SnapKV", "kvzip", "snapkv"),
    ("KVzip (2505.23416)", "better than H2O", "kvzip", "h2o"),
    ("LagKV (2504.04704)", "better than a window with sinks", "lagkv", "recency"),
    ("LagKV (2504.04704)", "better than SnapKV", "lagkv", "snapkv"),
    ("CurDKV (2509.15038)", "better than SnapKV", "cur", "snapkv"),
    ("Compactor (2507.08143)", "leverage of keys, one of its two scores: better than a window with sinks", "leverage", "recency"),
    ("Compactor (2507.08143)", "attention without a mask, the other: better than a window with sinks", "noncausal", "recency"),
]}
# pages of Quest against the newest tokens at equal tokens read, e21: tokens
PAGES = (64, 128, 256)
# paper, claim, setting, eviction, codec of e23: both at once cost what they cost alone
SUMS = [("H2O (2306.14048)", "goes together with a cache of 4 bits: both cost no more than what each costs", "decode", "h2o", "int4")]


def rows_of(*path):
    file = HERE.parent.joinpath(*path)
    return list(csv.DictReader(open(file))) if file.exists() else []


def row(paper, claim, experiment, measured, low, high, verdict, run):
    return {"paper": paper, "claim": claim, "model": MODEL, "experiment": experiment, "measured": measured, "interval": f"[{float(low):+.4f}, {float(high):+.4f}]",
            "verdict": verdict, "run": run}


VERDICTS = {"better": "reproduced", "worse": "not"}  # anything else: not resolved


def ranks(experiment, claims):
    found = {(r["a"], r["b"], r["removed"]): r for r in rows_of(experiment, "ranking.csv")}
    for paper, claim, a, b in claims:
        for removed in ("0.5", "0.75"):
            r = found.get((a, b, removed))
            if r:
                yield row(paper, f"{claim} ({removed} removed)", experiment, f"nll {float(r['nll_mean']):+.4f}", r["nll_low"], r["nll_high"], VERDICTS.get(r["nll_verdict"], "not resolved"),
                          f"{r['run']} {r['against']}")


def pages():
    for tokens in PAGES:
        for r in rows_of("e21_quest", "pages.csv"):
            if r["a"] == f"read=pages(tokens={tokens},dense=2)" and r["b"].startswith("keep=streaming"):
                yield row("Quest (2406.10774)", f"pages that a query chooses are worth more than as many newest tokens ({tokens} of 512)", "e21_quest", f"KLD {float(r['mean']):+.4f}", r["low"], r["high"],
                          VERDICTS.get(r["verdict"], "not resolved"), r["run"])


def sums():
    for paper, claim, setting, eviction, codec in SUMS:
        for r in rows_of("e23_additivity", "additivity.csv"):
            if (r["setting"], r["eviction"], r["codec"]) == (setting, eviction, codec):
                yield row(paper, claim, "e23_additivity", f"KLD {float(r['kld_both']):.4f}, of the sum {float(r['ratio']):.3f}; minus the sum {float(r['mean']):+.4f}", r["low"], r["high"],
                          {"more than the sum": "not"}.get(r["verdict"], "reproduced"), r["run"])


def needles():
    for r in rows_of("e24_recall", "needle.csv"):
        if (r["policy"], r["question"], r["scored"]) == ("snapkv", "seen", "yes"):
            found = {"paper": "SnapKV (2404.14469)", "claim": f"a pass key is found as with the whole cache where the prompt ends with the question (0.5 of 256 tokens removed, key at {float(r['depth']):g})"}
            yield {**found, "model": MODEL, "experiment": "e24_recall", "measured": f"{float(r['exact']):.2f} of {r['sequences']} (whole cache {float(r['exact_whole']):.2f})",
                   "interval": f"[{float(r['low']):.2f}, {float(r['high']):.2f}]", "verdict": "not" if float(r["high"]) < float(r["exact_whole"]) else "reproduced", "run": r["run"]}


paired.write_csv(HERE / "evict.csv", [*(claim for experiment, claims in RANKS.items() for claim in ranks(experiment, claims)), *sums(), *pages(), *needles()])
