#!/usr/bin/env python3
"""Codebooks of compress/codec/turboquant: codebooks.h.

The Lloyd-Max quantizer of one coordinate u = sqrt(D) x_c / |x| of a random direction, whose density is proportional to
(1 - u^2 / D)^((D - 3) / 2) (TurboQuant, arXiv:2504.19874, lemma 1), for D = 8, 16 .. 256 and 1 to 4 bits. Levels become whole numbers up to
127 times a unit, the unit chosen so that this costs least; the unit is kept as M = D / unit^2.
Usage: scripts/make_turboquant_codebooks.py [ROOT]   (prints the relative squared error at D = 64, 128, 256)
"""
import sys
from pathlib import Path

import numpy as np

DIMS, BITS, POINTS = range(8, 257, 8), range(1, 5), 40000


def lloyd_max(dim, bits):
    """(levels, weights of their cells, the best quantizer's error) of the positive half."""
    u = (np.arange(POINTS) + 0.5) * np.sqrt(dim) / POINTS
    weight = (1 - u**2 / dim) ** ((dim - 3) / 2)
    weight /= weight.sum()
    total, first = np.concatenate([[0], np.cumsum(weight)]), np.concatenate([[0], np.cumsum(weight * u)])
    n = 2 ** (bits - 1)
    levels = np.interp((np.arange(n) + 0.5) / n, total[1:], u)
    for _ in range(4000):
        cut = np.concatenate([[0], np.searchsorted(u, (levels[1:] + levels[:-1]) / 2), [POINTS]])
        moved = np.diff(first[cut]) / np.diff(total[cut])
        if np.abs(moved - levels).max() < 1e-12:
            break
        levels = moved
    weights = np.diff(total[cut])
    return levels, weights, (weight * u**2).sum() - (weights * levels**2).sum()


def whole_levels(dim, levels, weights):
    """(M, whole levels) that add the least error."""
    best = None
    for m in np.unique(np.linspace(dim * (48 / levels[-1]) ** 2, dim * (126.5 / levels[-1]) ** 2, 4000).astype(int)):
        unit = np.sqrt(dim / m)
        whole = np.rint(levels / unit)
        cost = (weights * (whole * unit - levels) ** 2).sum()
        if best is None or cost < best[0]:
            best = cost, m, whole.astype(int)
    return best


def main(root):
    text = "/* Codebooks [head_dim / 8 - 1][bits - 1], written by scripts/make_turboquant_codebooks.py; do not edit. */\n"
    text += "#ifndef KVL_TURBOQUANT_CODEBOOKS_H\n#define KVL_TURBOQUANT_CODEBOOKS_H\n#include <stdint.h>\n\n"
    text += "static const struct codebook {\n    uint32_t m;      /* a level L stands for L |x| / sqrt(m) */\n"
    text += "    uint8_t level[8]; /* of the positive half, ascending */\n} codebooks[32][4] = {\n"
    for dim in DIMS:
        rows = []
        for bits in BITS:
            levels, weights, error = lloyd_max(dim, bits)
            cost, m, whole = whole_levels(dim, levels, weights)
            rows.append(f"{{{m}, {{{', '.join(map(str, whole))}}}}}")
            if dim in (64, 128, 256):
                print(f"D {dim} bits {bits}: {error:.6f} best, {error + cost:.6f} with whole levels {whole}")
        text += "    {" + ",\n     ".join(rows) + "},\n"
    (root / "compress/codec/turboquant/codebooks.h").write_text(text + "};\n\n#endif\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
