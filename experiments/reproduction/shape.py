#!/usr/bin/env python3
"""What papers on smaller caches by the model's shape claim (fewer heads, latents, shared layers), and what was measured here: shape.csv, from the tables of e30 and e31."""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import paired  # noqa: E402

FAMILY, SMOLLM = "families of 0.5 M parameters, trained here", "SmolLM2-135M-Instruct Q4_1"
LEAST_WINDOWS = 16
# paper, claim, variant that is said to have the lower loss (or one that is no higher), the other; a pair of e30's verdicts
TRAINED = [
    ("GQA (2305.13245)", "one kv head for all (MQA) has a higher loss than a kv head each", "mha", "mqa"),
    ("DeepSeek-V2 (2405.04434)", "latent attention has a lower loss than GQA at equal cache", "mla64", "gqa2"),
    ("DeepSeek-V2 (2405.04434)", "latent attention has a lower loss than MQA at equal cache", "mla32", "mqa"),
]
# paper, claim, row of e31, row it is compared with, column, True if the claim is that the first has less
LATENTS = [
    ("TransMLA (2502.07864)", "conversion without training loses already when nothing but positions is lost (Llama-3.2-1B: 9.75 to 16.1)", "family 16+176", "family", "nll", False,
     "MHA of the family, 0.5 M parameters"),
    ("xKV (2503.18893)", "latents that layers share lose less than each layer's own, at equal bytes", "five layers, rank 160", "one layer, rank 32", "kld", True, SMOLLM),
    ("Palu (2407.21118)", "heads together lose less than each alone, at equal bytes", "heads 3, rank 96", "rank 32", "kld", True, SMOLLM),
    ("Palu (2407.21118)", "ranks by what a layer needs lose less than equal ones, at equal bytes", "spread 32", "rank 32", "kld", True, SMOLLM),
]


def claim(paper, text, model, experiment, measured, found, verdict, run):
    return {"paper": paper, "claim": text, "model": model, "experiment": experiment, "measured": measured, "interval": f"[{found['low']:+.4f}, {found['high']:+.4f}]", "verdict": verdict, "run": run}


def verdict_of(found, lower_claimed, enough):
    """Of a difference that is claimed to be below (or above) 0."""
    if not enough or found["low"] <= 0 <= found["high"]:
        return "not resolved"
    return "reproduced" if (found["high"] < 0) == lower_claimed else "not"


def trained():
    """Differences in bits a byte, paired by seed: e30 gives `other - better`."""
    for paper, text, better, other in TRAINED:
        for row in paired.read_csv(HERE.parent / "e30_family/verdicts.csv"):
            if (row["better"], row["other"]) == (better, other) and "recall" not in row["claim"]:
                mean, half = -float(row["difference"]), float(row["half"])
                found = {"mean": mean, "low": mean - half, "high": mean + half}
                yield claim(paper, text, FAMILY, "e30_family", f"{mean:+.4f} bits a byte ({row['seeds']} seeds)", found, verdict_of(found, True, True), row["run"])


def latents():
    rows = paired.read_csv(HERE.parent / "e31_latent/latent.csv")
    for paper, text, a, b, column, lower, model in LATENTS:
        ours, other = ({row["chunk"]: row for row in rows if row["row"] == name} for name in (a, b))
        windows = sorted(ours.keys() & other.keys(), key=int)
        found = paired.interval([float(ours[w][column]) - float(other[w][column]) for w in windows])
        runs = f"{ours[windows[0]]['run']} {other[windows[0]]['run']}"
        yield claim(paper, text, model, "e31_latent", f"{column.upper() if column == 'kld' else column} {found['mean']:+.4f} ({len(windows)} windows)", found,
                    verdict_of(found, lower, len(windows) >= LEAST_WINDOWS), runs)


paired.write_csv(HERE / "shape.csv", [*trained(), *latents()])
