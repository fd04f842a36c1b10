#!/usr/bin/env python3
"""Known answers of the projection latent: data/golden/latent_answers.h. In numpy, by other ways than the plug-in's.

Keys are made of hidden rows as a model makes them, and reconstructed as Palu does it (arXiv:2407.21118): the SVD of the key matrix that the hidden
rows' Cholesky factor has whitened, cut off. Ranks of layers are found by trying all.
Usage: scripts/make_latent_answers.py [ROOT]"""
import itertools
import sys
from pathlib import Path

import numpy as np

ROWS, WIDTH, HIDDEN, RANK = 96, 16, 24, 8
LAYERS, STREAMS, W, STEP = 5, 2, 64, 16
SHARES, MEANS = (0.5, 0.8, 0.9, 0.99, 1.0), (16, 24, 32, 40, 56, 64)


def array(name, values, c_type="float"):
    values = np.asarray(values)
    text = [f"{v:.9g}" for v in values.ravel()] if c_type == "float" else [str(v) for v in values.ravel()]
    text = [v + ("f" if c_type == "float" and ("." in v or "e" in v) else "") for v in text]
    lines = ",\n    ".join(", ".join(text[i : i + 10]) for i in range(0, len(text), 10))
    return f"static const {c_type} {name}[{len(text)}] = {{\n    {lines}}};\n"


def palu(hidden, matrix):
    """(keys, energies, keys made again of RANK numbers)"""
    whitening = np.linalg.cholesky(hidden.T @ hidden)
    u, s, vt = np.linalg.svd(matrix @ whitening, full_matrices=False)
    up, down = u[:, :RANK] * np.sqrt(s[:RANK]), np.sqrt(s[:RANK])[:, None] * vt[:RANK] @ np.linalg.inv(whitening)
    return hidden @ matrix.T, s**2 / len(hidden), hidden @ down.T @ up.T


def held(energy, ranks):
    """Mean share of energy that the layers hold."""
    return np.mean([energy[l, :, :r].sum() / energy[l].sum() for l, r in enumerate(ranks)])


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    rng = np.random.default_rng(31)
    hidden = rng.standard_normal((ROWS, HIDDEN)) * np.linspace(3, 0.2, HIDDEN) + 0.5
    keys, energies, again = palu(hidden, rng.standard_normal((WIDTH, HIDDEN)))
    decay = rng.uniform(0.02, 0.2, (LAYERS, STREAMS, 1))
    energy = np.float32(np.exp(-decay * np.arange(W)) * rng.uniform(0.1, 30, (LAYERS, STREAMS, 1)) * rng.uniform(0.9, 1.1, (LAYERS, STREAMS, W)))
    energy = -np.sort(-energy, axis=-1)
    wide = energy.astype(np.float64)
    steps = range(STEP, W + 1, STEP)
    by_share = [[min(r for r in steps if r == W or wide[l, :, :r].sum() >= share * wide[l].sum()) for l in range(LAYERS)] for share in SHARES]
    by_mean = [max((c for c in itertools.product(steps, repeat=LAYERS) if sum(c) <= mean * LAYERS), key=lambda c: held(wide, c)) for mean in MEANS]
    with open(root / "data/golden/latent_answers.h", "w") as out:
        out.write("/* Written by scripts/make_latent_answers.py; do not edit. */\n#ifndef KVL_LATENT_ANSWERS_H\n#define KVL_LATENT_ANSWERS_H\n#include <stdint.h>\n\n")
        out.write(f"enum {{ PALU_ROWS = {ROWS}, PALU_WIDTH = {WIDTH}, PALU_RANK = {RANK} }};\n")
        out.write("/* Keys [rows][width], their energies, and the same keys made again of rank numbers each. */\n")
        out.write(array("palu_key", keys) + array("palu_energy", energies) + array("palu_again", again))
        out.write(f"\nenum {{ RANKED_LAYERS = {LAYERS}, RANKED_STREAMS = {STREAMS}, RANKED_W = {W}, RANKED_SHARES = {len(SHARES)}, RANKED_MEANS = {len(MEANS)} }};\n")
        out.write("/* Energies [layers][streams][W], and the layers' ranks for each share of energy and for each mean rank. */\n")
        out.write(array("ranked_energy", energy) + array("ranked_share", SHARES) + array("ranked_mean", MEANS, "uint32_t"))
        out.write(array("ranked_by_share", by_share, "uint32_t") + array("ranked_by_mean", by_mean, "uint32_t") + "\n#endif\n")


if __name__ == "__main__":
    main()
