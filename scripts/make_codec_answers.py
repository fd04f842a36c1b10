#!/usr/bin/env python3
"""Known answers of the built-in codecs: compress/codec/*/answers.h.

An independent model of the method cards: numpy's float32 and float16, and exact fractions where the card says "exact quotient".
Usage: scripts/make_codec_answers.py [ROOT]   (writes the headers; run again and compare to check them)
"""
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

HALF_MAX = np.float32(65504)


def to_half(x):
    return np.float32(np.float16(np.float32(x)))


def clamp(x):
    return np.clip(np.nan_to_num(x, nan=0.0), -HALF_MAX, HALF_MAX).astype(np.float32)


def nearest(d, scale, low, high):
    """Exact d / scale rounded half to even (Python's round on a Fraction), clamped."""
    if scale == 0:
        return 0
    return max(low, min(high, round(Fraction(float(d)) / Fraction(float(scale)))))


def int_group(x, bits, sym):
    if sym:
        steps = 2 ** (bits - 1) - 1
        scale, zero, low = to_half(np.abs(x).max() / np.float32(steps)), np.float32(0), -steps
    else:
        steps = 2**bits - 1
        scale, zero, low = to_half((x.max() - x.min()) / np.float32(steps)), to_half(x.min()), 0
    codes = [nearest(np.float32(v - zero), scale, low, steps) for v in x]
    # code * scale + zero has under 53 bits: exact in float64, so one rounding, as fma has
    return [np.float32(np.float64(code) * np.float64(scale) + np.float64(zero)) for code in codes]


def decode_int(bits, group, sym, x):
    x = clamp(x)
    group = group or x.shape[1]
    rows = [[int_group(row[g : g + group], bits, sym) for g in range(0, len(row), group)] for row in x]
    return np.array(rows, np.float32).reshape(x.shape)


def inputs(n, dim, seed):
    """Ordinary rows with an outlier channel; from the third row on constant, tiny, huge and tie-making ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, dim)).astype(np.float32)
    x[:, 5] *= 12
    special = [np.full(dim, 0.3), np.zeros(dim), rng.normal(size=dim) * 3e-8, rng.normal(size=dim) * 5e4, np.arange(dim) / 2 - 3]
    for i in range(2, n):
        x[i] = special[(i - 2) % len(special)]
    return x


def number(v):
    return float(v).hex().replace("0x1.0000000000000p", "0x1p").replace("0x0.0p+0", "0") + "f" if v != 0 else "0"


def trim_hex(text):
    """0x1.8000000000000p+1f -> 0x1.8p+1f"""
    head, _, tail = text.partition("p")
    return (head.rstrip("0").rstrip(".") if "." in head else head) + ("p" + tail if tail else "")


def array(name, values):
    words = [trim_hex(number(v)) for v in values.ravel()]
    lines = [", ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
    return f"static const float {name}[] = {{\n    " + ",\n    ".join(lines) + "};\n"


def header(folder, codecs):
    """codecs: name -> list of (options, x name, x, decoded)"""
    guard = f"KVL_{folder.upper()}_ANSWERS_H"
    text = f"/* Known answers, written by scripts/make_codec_answers.py; do not edit. */\n#ifndef {guard}\n#define {guard}\n#include \"kvl_plugin.h\"\n\n"
    written = set()
    for codec, cases in codecs.items():
        rows = []
        for i, (options, x_name, x, decoded) in enumerate(cases):
            if x_name not in written:
                text += array(x_name, x)
                written.add(x_name)
            name = f"{codec}_decoded_{i}"
            text += array(name, decoded)
            for role in "KV":
                rows.append(f'    {{"{options}", KVL_ROLE_{role}, {x.shape[1]}, {x.shape[0]}, 0, {x_name}, {name}, 0.0f}},\n')
        text += f"static const struct kvl_known_answer {codec}_answers[] = {{\n{''.join(rows)}}};\n\n"
    return text + "#endif\n"


def main(root):
    wide, narrow = inputs(2, 64, 1), inputs(7, 16, 2)
    integers = {
        f"int{bits}": [
            ("", "wide", wide, decode_int(bits, 0, False, wide)),
            ("sym", "wide", wide, decode_int(bits, 0, True, wide)),
            ("group=8", "narrow", narrow, decode_int(bits, 8, False, narrow)),
            ("group=8,sym", "narrow", narrow, decode_int(bits, 8, True, narrow)),
        ]
        for bits in (8, 4)
    }
    floats = {"f32": [("", "narrow", narrow, narrow)], "f16": [("", "narrow", narrow, to_half(clamp(narrow)))]}
    (root / "compress/codec/int/answers.h").write_text(header("int", integers))
    (root / "compress/codec/float/answers.h").write_text(header("float", floats))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
