#!/usr/bin/env python3
"""Writes data/golden/quant_answers.h: blocks of every weight format and the floats that the gguf Python package makes of them.

usage: scripts/make_quant_answers.py > data/golden/quant_answers.h      (needs numpy and gguf)

Codes are random bytes with a fixed seed; the f16 scales of a block come from SCALES, which has both ends of f16's range. No scale is
infinite or NaN: such a block is not valid.
"""
import numpy as np
import gguf

SEED = 20240607
# Ordinary, negative, largest, smallest normal, smallest subnormal, zero.
SCALES = [0.0123, -0.37, 65504.0, 2.0**-14, 2.0**-24, 0.0]
# Type: byte offsets of its f16 scales, blocks.
FORMATS = {
    "F32": ([], 16), "F16": ([], 16), "BF16": ([], 16),
    "Q4_0": ([0], 6), "Q4_1": ([0, 2], 6), "Q5_0": ([0], 6), "Q5_1": ([0, 2], 6), "Q8_0": ([0], 6),
    "Q4_K": ([0, 2], 4), "Q5_K": ([0, 2], 4), "Q6_K": ([208], 4),
}
EXTREMES = [0.0, -0.0, 1.0, -1.5, 3.0e4, -2.0**-14, 2.0**-24, float("inf"), float("-inf")]


def plain(name, n, rng):
    """Elements of a float type: the extremes, then random ones."""
    x = np.concatenate([np.array(EXTREMES), rng.standard_normal(n - len(EXTREMES))]).astype(np.float32)
    if name == "F16":
        return x.astype(np.float16).view(np.uint8).reshape(n, 2)
    if name == "BF16":
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, 2)
    return x.view(np.uint8).reshape(n, 4)


def blocks(name, offsets, n, rng):
    """n blocks [n][bytes]; scale s of block i is SCALES[i + s]: the two scales of a block differ."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    out = rng.integers(0, 256, size=(n, size), dtype=np.uint8)
    for i in range(n):
        for s, offset in enumerate(offsets):
            scale = np.array([SCALES[(i + s) % len(SCALES)]], dtype=np.float16)
            out[i, offset:offset + 2] = scale.view(np.uint8)
    return out


def array(declaration, numbers, digits):
    per_line = 120 // (digits + 4)
    lines = [", ".join(f"0x{v:0{digits}x}" for v in numbers[i:i + per_line]) for i in range(0, len(numbers), per_line)]
    print(f"static const {declaration} = {{\n    " + ",\n    ".join(lines) + ",\n};")


def main():
    rng = np.random.default_rng(SEED)
    print(f"/* Written by scripts/make_quant_answers.py (gguf {gguf_version()}, seed {SEED}). Do not edit. */\n// clang-format off")
    rows = []
    for name, (offsets, n) in FORMATS.items():
        kind = gguf.GGMLQuantizationType[name]
        data = blocks(name, offsets, n, rng) if offsets else plain(name, n, rng)
        stored = data.view(np.float32) if name == "F32" else data.view(np.float16) if name == "F16" else data
        values = np.ascontiguousarray(gguf.quants.dequantize(stored, kind), dtype=np.float32).ravel().view(np.uint32)
        low = name.lower()
        array(f"unsigned char quant_in_{low}[]", data.ravel(), 2)
        array(f"unsigned quant_out_{low}[]", values, 8)
        rows.append(f'    {{"{name}", {n}, sizeof quant_in_{low}, sizeof quant_out_{low} / 4, quant_in_{low}, quant_out_{low}}},')
    print("static const struct quant_answer {\n    const char *name;\n    unsigned n_blocks, n_bytes, n_values;\n"
          "    const unsigned char *in;\n    const unsigned *out; /* bits of f32 */\n} quant_answers[] = {")
    print("\n".join(rows) + "\n};")


def gguf_version():
    from importlib.metadata import version
    return version("gguf")


main()
