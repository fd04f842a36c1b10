#!/usr/bin/env python3
"""Known answers of the kvquant codec: compress/codec/kvquant/answers.h. An independent model of its card in numpy.

Tables come from exact k-means on sorted elements (the codec counts in bins: tests compare its own table with these, within a bin or two).
Usage: scripts/make_kvquant_answers.py [ROOT]"""
import sys
from pathlib import Path

import numpy as np
from make_codec_answers import array, clamp, inputs, to_half


def slots(d, outliers):
    return int(np.ceil(d * outliers / 100))


def ends(row, s):
    """(removed channels, lowest, highest) of a value."""
    order = sorted(range(len(row)), key=lambda c: (row[c], c))
    gone = []
    for _ in range(s):
        if row[order[-1]] - row[order[1]] < row[order[-2]] - row[order[0]]:
            gone.append(order.pop(0))
        else:
            gone.append(order.pop())
    return gone, row[order[0]], row[order[-1]]


def lloyd(u, n):
    u = np.sort(u)
    level = u[(len(u) * (np.arange(n) + 0.5) / n).astype(int)]
    while True:
        cell = np.searchsorted((level[1:] + level[:-1]) / 2, u, side="left")
        moved = np.array([u[cell == i].mean() if (cell == i).any() else level[i] for i in range(n)])
        if np.abs(moved - level).max() <= 1e-9:
            return moved.astype(np.float32)
        level = moved


def calibrate(x, role, bits, outliers, qnorm=False):
    n, d = x.shape
    if role == "K":
        ordered, cut = np.sort(x, axis=0), int(n * outliers / 200)
        low, high = ordered[cut], ordered[n - 1 - cut]
        center, reach = np.float32(0.5) * (high + low), np.float32(0.5) * (high - low)
    else:
        pairs = np.array([ends(row, slots(d, outliers))[1:] for row in x], np.float32)
        center, reach = (np.float32(0.5) * (pairs[:, 1] + pairs[:, 0]))[:, None], (np.float32(0.5) * (pairs[:, 1] - pairs[:, 0]))[:, None]
    u = (x.astype(np.float64) - center) / reach
    inside = u[np.abs(u) <= 1]
    levels = lloyd(inside, 2**bits)
    if qnorm:
        read = levels.astype(np.float64)[np.searchsorted((levels[1:] + levels[:-1]) / 2, inside, side="left")]
        levels = np.concatenate([levels, ((levels - read.mean()) * inside.std() / read.std() + inside.mean()).astype(np.float32)])
    return np.concatenate([center, reach, levels]) if role == "K" else levels


def decode(x, table, role, bits, outliers, qnorm=False):
    x = clamp(x)
    n, d = x.shape
    levels = table[-(2**bits) :].astype(np.float64)
    fitted = table[: -(2**bits)] if qnorm else table
    middle = (np.float32(0.5) * (fitted[-(2**bits) :][1:] + fitted[-(2**bits) :][:-1])).astype(np.float64)
    out = np.zeros_like(x)
    for row, decoded in zip(x, out):
        if role == "K":
            center, reach = table[:d], table[d : 2 * d]
            excess = np.abs(row - center) - reach
            gone = sorted(range(d), key=lambda c: (-excess[c], c))[: slots(d, outliers)]
        else:
            gone, low, high = ends(row, slots(d, outliers))
            center = np.full(d, to_half(np.float32(0.5) * (high + low)))
            reach = np.full(d, to_half(np.float32(0.5) * (high - low)))
        # products of two floats are exact in float64, and its sums round once more than fma, which the inputs here do not show
        edge = np.float32(middle[None, :] * reach[:, None].astype(np.float64) + center[:, None])
        code = (row[:, None] > edge).sum(axis=1)
        decoded[:] = np.float32(levels[code] * reach.astype(np.float64) + center)
        decoded[gone] = to_half(row[gone])
    return out


def main(root):
    rng = np.random.default_rng(9)
    d, n = 16, 400
    sample = (rng.standard_t(4, size=(n, d)) * np.linspace(0.5, 3, d) + np.linspace(-2, 2, d)).astype(np.float32)
    guard = "KVL_KVQUANT_ANSWERS_H"
    text = f"/* Known answers, written by scripts/make_kvquant_answers.py; do not edit. */\n#ifndef {guard}\n#define {guard}\n#include \"kvl_plugin.h\"\n\n"
    rows = inputs(7, d, 4)
    text += array("kvquant_rows", rows)
    answers, tables = "", ""
    for bits, outliers, qnorm in ((3, 1, False), (2, 10, False), (4, 0, False), (2, 1, True)):
        for role in "KV":
            table = calibrate(sample, role, bits, outliers, qnorm)
            name = f"kvquant{bits}{'q' * qnorm}_{role.lower()}"
            text += array(f"{name}_table", table) + array(f"{name}_decoded", decode(rows, table, role, bits, outliers, qnorm))
            answers += f'    {{"bits={bits},outliers={outliers}{",qnorm" * qnorm}", KVL_ROLE_{role}, {d}, {len(rows)}, 0, kvquant_rows, {name}_decoded, 0.0f}},\n'
            tables += f"    {name}_table,\n"
    text += f"static const struct kvl_known_answer kvquant_answers[] = {{\n{answers}}};\n\nstatic const float *const kvquant_tables[] = {{\n{tables}}};\n\n"
    (root / "compress/codec/kvquant/answers.h").write_text(text + "#endif\n")
    text = f"/* What the tables of kvquant/answers.h were made from, written by scripts/make_kvquant_answers.py; do not edit. */\n"
    (root / "tests/codec/kvquant_sample.h").write_text(text + array("kvquant_sample", sample))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
