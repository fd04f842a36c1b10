#!/usr/bin/env python3
"""Which evicted tokens cost least: from the run files of grid.yaml the differences to recency and to quantization, paired by window.

    experiments/e22_ranking/ranking.py             runs/e22_ranking -> windows.csv, caches.csv, ranking.csv, ranking.md (needs numpy, scipy)
    experiments/e22_ranking/ranking.py --figure    caches.csv, ranking.csv -> ranking.svg (needs matplotlib too)
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from ranked import Ranking  # noqa: E402

SNAPKV = "snapkv(window=32,kernel=7,pool=max)"
POLICIES = {
    "recency": ("streaming", "uniform", {}),
    "snapkv": (SNAPKV, "uniform", {}),
    "ada-snapkv": (SNAPKV, "ada", {}),
    "pyramid-snapkv": (SNAPKV, "pyramid", {0.5: ",window=32", 0.75: ",window=32,beta=3.5"}),
    "tova": ("tova", "uniform", {}),
    "h2o": ("h2o", "uniform", {}),
    "expected": ("expected(epsilon=0.01)", "uniform", {}),
    "ada-expected": ("expected(epsilon=0.01)", "ada", {}),
    "keydiff": ("keydiff", "uniform", {}),
    "knorm": ("knorm", "uniform", {}),
    "random": ("random(window=32)", "uniform", {}),
    "oracle": ("oracle", "uniform", {}),
}


def comparisons():
    against_recency = [(name, "recency") for name in POLICIES if name != "recency"] + [("quantized", "recency")]
    budgets = [("ada-snapkv", "snapkv"), ("pyramid-snapkv", "snapkv"), ("ada-expected", "expected")]
    papers = [("snapkv", "h2o"), ("tova", "h2o"), ("expected", "snapkv"), ("keydiff", "snapkv")]
    scores = [name for name in POLICIES if name not in ("recency", "random", "oracle")]
    bounds = [(name, bound) for bound in ("quantized", "oracle") for name in scores]
    return against_recency + budgets + papers + bounds + [("snapkv", "random"), ("oracle", "quantized")]


if __name__ == "__main__":
    Ranking(HERE, POLICIES, comparisons(), widths=("int8", "int4", "int2")).main(__doc__)
