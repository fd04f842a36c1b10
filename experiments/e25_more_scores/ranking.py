#!/usr/bin/env python3
"""The scores that e22 left out: from the run files of grid.yaml the differences to recency, to the score they refine, and to quantization, paired by window.

    experiments/e25_more_scores/ranking.py             runs/e25_more_scores -> windows.csv, caches.csv, ranking.csv, ranking.md (needs numpy, scipy)
    experiments/e25_more_scores/ranking.py --figure    caches.csv, ranking.csv -> ranking.svg (needs matplotlib too)
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from ranked import Ranking  # noqa: E402

SNAPKV = "snapkv(window=32,kernel=7,pool=max)"
CONTROLS = {"recency": "streaming", "h2o": "h2o", "snapkv": SNAPKV}
SCORES = {"observed": "observed", "critical": f"critical(of={SNAPKV})", "chunk": f"chunk(of={SNAPKV},size=20)", "kvzip": "kvzip", "lagkv": "lagkv", "cur": "cur", "leverage": "leverage",
          "noncausal": "noncausal"}
POLICIES = {name: (score, "uniform", {}) for name, score in {**CONTROLS, **SCORES, "oracle": "oracle"}.items()}
PAIRS = [*[(name, "recency") for name in (*SCORES, "h2o", "snapkv", "oracle", "quantized")], *[(name, "quantized") for name in SCORES], *[(name, "oracle") for name in SCORES],
         *[(name, "snapkv") for name in ("critical", "chunk", "kvzip", "lagkv", "cur")], ("kvzip", "h2o"), ("observed", "h2o")]

if __name__ == "__main__":
    Ranking(HERE, POLICIES, PAIRS).main(__doc__)
