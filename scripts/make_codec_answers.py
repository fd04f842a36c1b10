#!/usr/bin/env python3
"""Known answers of the built-in codecs: compress/codec/*/answers.h, and ggml's blocks: tests/codec/ggml_blocks.h.

An independent model of the method cards: numpy's float32 and float16, and exact fractions where the card says "exact quotient".
Usage: scripts/make_codec_answers.py [ROOT]   (writes the headers; run again and compare to check them)
       GGML_BASE=libggml-base.so scripts/make_codec_answers.py   also compares the modelled blocks with ggml's own, byte for byte
"""
import ctypes
import math
import os
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

from make_turboquant_codebooks import lloyd_max, whole_levels

HALF_MAX = np.float32(65504)


def to_half(x):
    return np.float32(np.float16(np.float32(x)))


def clamp(x):
    return np.clip(np.nan_to_num(x, nan=0.0), -HALF_MAX, HALF_MAX).astype(np.float32)


def fma(a, b, c):
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def nearest(d, scale, low, high):
    """Exact d / scale rounded half to even (Python's round on a Fraction), clamped."""
    if scale == 0:
        return 0
    return max(low, min(high, round(Fraction(float(d)) / Fraction(float(scale)))))


FP8 = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}


def fp8_numbers(kind):
    """All magnitudes of an 8-bit float, ascending."""
    mantissa, bias, largest = FP8[kind]
    codes = np.arange(largest + 1)
    exponent, fraction = codes >> mantissa, codes & (1 << mantissa) - 1
    return np.where(exponent > 0, fraction + (1 << mantissa), fraction) * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)


def beside(kind, x, away):
    """The number of the 8-bit float next to x, away from zero or towards it."""
    numbers, size = fp8_numbers(kind), abs(np.float64(x))
    if size < 2.0**-100:
        return np.float32(0)
    at = np.searchsorted(numbers, size, side="left" if away else "right") - (0 if away else 1)
    return np.float32(np.copysign(numbers[min(at, len(numbers) - 1)], x)) + np.float32(0)


def int_params(x, bits, sym, clip, kind):
    """Scale and zero of numbers of which codes span `clip` of the range."""
    low, high = x.min(), x.max()
    if sym:
        scale = np.float32(clip) * np.abs(x).max() / np.float32(2 ** (bits - 1) - 1)
        return (to_half(scale) if kind == "f16" else beside(kind, scale, True)), np.float32(0)
    cut = np.float32(0.5) * (np.float32(1) - np.float32(clip))
    low, high = fma(cut, high - low, low), fma(-cut, high - low, high)
    if kind == "f16":
        return to_half((high - low) / np.float32(2**bits - 1)), to_half(low)
    zero = beside(kind, low, low < 0)
    return beside(kind, max(high - zero, np.float32(0)) / np.float32(2**bits - 1), True), zero


def int_group(x, bits, sym, clip=1.0, search=0, kind="f16"):
    steps, low = (2 ** (bits - 1) - 1, 1 - 2 ** (bits - 1)) if sym else (2**bits - 1, 0)
    step, best = np.float32((1 - clip) / max(search, 1)), None
    for i in range(search + 1) if search else [1]:
        scale, zero = int_params(x, bits, sym, fma(np.float32(-i), step, np.float32(1)), kind)
        codes = [nearest(np.float32(v - zero), scale, low, steps) for v in x]
        # code * scale + zero has under 53 bits: exact in float64, so one rounding, as fma has
        decoded = [np.float32(np.float64(code) * np.float64(scale) + np.float64(zero)) for code in codes]
        error = np.float32(0)
        for a, b in zip(x, decoded):
            error = fma(np.float32(a - b), np.float32(a - b), error)
        if best is None or error < best[0]:
            best = error, decoded
    return best[1]


def decode_int(bits, group, sym, x, **quantizer):
    x = clamp(x)
    group = group or x.shape[1]
    rows = [[int_group(row[g : g + group], bits, sym, **quantizer) for g in range(0, len(row), group)] for row in x]
    return np.array(rows, np.float32).reshape(x.shape)


def decode_kivi(bits, group, axis, role, x, **quantizer):
    """KIVI: groups of `group` tokens of a channel (axis channel; the last may be short), or of `group` channels of a token."""
    x = clamp(x)
    if (axis or {"K": "channel", "V": "token"}[role]) == "token":
        return decode_int(bits, group, False, x, **quantizer)
    cells = [int_group(column, bits, False, **quantizer) for start in range(0, len(x), group) for column in x[start : start + group].T]
    parts = [np.array(cells[i : i + x.shape[1]], np.float32).T for i in range(0, len(cells), x.shape[1])]
    return np.concatenate(parts)


def matvec(r, v):
    """Rows of r times v, summed with fma in order."""
    total = np.zeros(len(r), np.float32)
    for column, weight in zip(r.T, v):
        total = fma(column, weight, total)
    return total


def to_one(v):
    """Powers of two off, the largest in [1, 2)."""
    reach = np.abs(v).max()
    return np.ldexp(v, 1 - np.frexp(reach)[1]).astype(np.float32) if reach >= 2.0**-100 else np.zeros_like(v)


def outliers(v, each):
    """Indices of the largest, then of as many smallest."""
    each = min(each, (len(v) - 1) // 2)
    top = sorted(range(len(v)), key=lambda i: (-v[i], i))[:each]
    rest = [i for i in range(len(v)) if i not in top]
    return top + sorted(rest, key=lambda i: (v[i], i))[:each]


def decode_gear(bits, block, rank, each, role, x):
    if len(x) > block:
        return np.concatenate([decode_gear(bits, block, rank, each, role, x[:block]), decode_gear(bits, block, rank, each, role, x[block:])])
    x = clamp(x)
    turn = (lambda m: m.T) if role == "K" else (lambda m: m)  # rows are the groups
    listed = [outliers(v, each) for v in turn(x)]
    codes = []
    for v, out in zip(turn(x), listed):
        inner = np.delete(v, out)
        steps = 2**bits - 1
        scale, zero = to_half((inner.max() - inner.min()) / np.float32(steps)), to_half(inner.min())
        q = [nearest(np.float32(number - zero), scale, 0, steps) for number in v]
        codes.append([np.float32(np.float64(c) * np.float64(scale) + np.float64(zero)) for c in q])
    smooth = turn(np.array(codes, np.float32)).copy()
    rest = x - smooth
    for row, out in zip(turn(rest), listed):
        row[out] = 0  # a view, also of the transpose
    for _ in range(rank):
        channel = np.array([-1 if ((c + 1) * 0x9E3779B9 & 0xFFFFFFFF) >> 31 else 1 for c in range(x.shape[1])], np.float32)
        for _ in range(3):
            token = to_one(matvec(rest, channel))
            channel = to_one(matvec(rest.T, token))
        channel = to_half(channel)
        square = matvec(channel[None], channel)[0]
        token = matvec(rest, channel)
        token = to_half(clamp(np.where(np.abs(token) < 2.0**-100, 0, token / square))) if square else np.zeros_like(token)
        rest = fma(-token[:, None], channel[None], rest)
        smooth = fma(token[:, None], channel[None], smooth)
    for row, number, out in zip(turn(smooth), turn(x), listed):
        row[out] += to_half(clamp(number[out] - row[out]))
    return smooth


# ---- ggml's blocks ----

BLOCK = 32
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
GGML_BITS = {"q8_0": 8, "q5_1": 5, "q5_0": 5, "q4_1": 4, "q4_0": 4, "iq4_nl": 4}


def ggml_quantize(kind, x):
    """(d, m, codes) of 32 numbers; d and m before they become binary16."""
    top = np.float32(2 ** GGML_BITS[kind] - 1)
    low = np.float32(0)
    if kind.endswith("_1"):
        low = x.min()
        d = (x.max() - low) / top
    else:
        far = x[np.argmax(np.abs(x))]  # the first of the largest
        d = {"q8_0": abs(far) / np.float32(127), "iq4_nl": far / np.float32(-127)}.get(kind, far / -((top + 1) / 2))
    inverse = np.float32(1) / d if abs(d) >= 2.0**-100 else np.float32(0)
    y = (x - low) * inverse
    if kind == "q8_0":
        codes = np.copysign(np.floor(np.abs(y.astype(np.float64)) + 0.5), y).astype(int)
    elif kind == "iq4_nl":
        codes = np.array([15 - np.argmin(np.abs(NONLINEAR[::-1].astype(np.float64) - float(v))) for v in y])  # the upper of two
        xq = qq = np.float32(0)
        for value, q in zip(x, NONLINEAR[codes]):
            xq += value * value * q * value
            qq += value * value * q * q
        d = np.float32(0) if abs(d) < 2.0**-28 else xq / qq
    else:
        offset = np.float32(0.5) if kind.endswith("_1") else (top + 1) / 2 + np.float32(0.5)
        codes = np.minimum(y + offset, top).astype(int)
    return d, low, codes


def ggml_block(kind, x):
    """(bytes as ggml stores them, decoded) of 32 numbers."""
    d, m, codes = ggml_quantize(kind, x)
    params = [np.float16(0) if abs(v) <= 2.0**-25 else np.float16(v) for v in ((d, m) if kind.endswith("_1") else (d,))]
    raw = b"".join(v.tobytes() for v in params)
    if kind == "q8_0":
        raw += codes.astype(np.int8).tobytes()
        numbers = codes
    else:
        if GGML_BITS[kind] == 5:
            raw += sum(int(code >> 4) << i for i, code in enumerate(codes)).to_bytes(4, "little")
        raw += bytes((int(a) & 15) | (int(b) & 15) << 4 for a, b in zip(codes[:16], codes[16:]))
        numbers = NONLINEAR[codes] if kind == "iq4_nl" else codes - {"q5_0": 16, "q4_0": 8}.get(kind, 0)
    minimum = np.float64(params[1]) if kind.endswith("_1") else 0.0
    return raw, np.float32(numbers * np.float64(params[0]) + minimum)


def ggml_rows(kind, x):
    """(blocks, decoded) of rows; with GGML_BASE the blocks are compared with ggml's, where zeros may have either sign."""
    blocks = [ggml_block(kind, part) for part in clamp(x).reshape(-1, BLOCK)]
    raw = b"".join(b[0] for b in blocks)
    if "GGML_BASE" in os.environ:
        numbers, out = np.ascontiguousarray(clamp(x).ravel()), ctypes.create_string_buffer(len(raw))
        quantize = getattr(ctypes.CDLL(os.environ["GGML_BASE"]), f"quantize_row_{kind}_ref")
        quantize(ctypes.c_void_p(numbers.ctypes.data), out, ctypes.c_int64(numbers.size))
        size, theirs = len(blocks[0][0]), bytearray(out.raw)
        for at in range(0, len(theirs), size):
            if kind == "iq4_nl" and not numbers[at // size * BLOCK :][:BLOCK].any():
                theirs[at : at + size] = raw[at : at + size]  # ggml leaves the codes of zeros undefined
            for param in range(at, at + (4 if kind.endswith("_1") else 2), 2):
                if theirs[param : param + 2] == b"\x00\x80":
                    theirs[param + 1] = 0
        assert theirs == raw, (kind, [i for i, (a, b) in enumerate(zip(theirs, raw)) if a != b])
    return raw, np.array([b[1] for b in blocks]).reshape(x.shape)


def ggml_blocks_header(names, x):
    text = "/* ggml's blocks of the known answers' input, written by scripts/make_codec_answers.py; do not edit. */\n"
    text += "#ifndef KVL_GGML_BLOCKS_H\n#define KVL_GGML_BLOCKS_H\n#include <stdint.h>\n\n"
    for name in names:
        words = [str(b) for b in ggml_rows(name, x)[0]]
        lines = [", ".join(words[i : i + 24]) for i in range(0, len(words), 24)]
        text += f"static const uint8_t {name}_blocks[] = {{\n    " + ",\n    ".join(lines) + "};\n"
    return text + "\n#endif\n"


# ---- 8-bit floats ----


def decode_fp8(kind, x):
    """The nearest of all numbers, the even code of two that are equally near."""
    x, numbers = clamp(x), fp8_numbers(kind)
    out = np.zeros_like(x)
    for row, decoded in zip(x, out):
        wanted = np.abs(row).max() / np.float32(numbers[-1])
        scale = np.float16(wanted)
        if np.float32(scale) < wanted:
            scale = np.nextafter(scale, np.float16(np.inf))
        if scale == 0:
            continue
        for c, value in enumerate(row):
            y = np.float64(np.float32(np.abs(value)) / np.float32(scale))
            distance = np.abs(numbers - y)
            code = min(np.flatnonzero(distance == distance.min()), key=lambda k: k % 2)
            decoded[c] = np.copysign(numbers[code] * np.float64(scale), value if code else 1)
    return out


# ---- TurboQuant ----


def sum_of_squares(row):
    total = np.float32(0)
    for v in row.astype(np.float64):
        total = np.float32(v * v + np.float64(total))
    return total


def half_root(total, m):
    """The binary16 nearest to sqrt(total / m)."""
    guess = np.float16(np.sqrt(np.float64(total) / m))
    near = [np.nextafter(guess, np.float16(0)), guess, np.nextafter(guess, np.float16(np.inf))]
    return min(near, key=lambda h: abs(np.float64(h) - np.sqrt(np.float64(total) / m)))


def sketch_sign(seed, turn, n):
    h = [((seed * 2 + turn) * 0x9E3779B9 + c * 0x85EBCA6B) & 0xFFFFFFFF for c in range(n)]
    h = [((v ^ v >> 16) * 0x7FEB352D) & 0xFFFFFFFF for v in h]
    h = [((v ^ v >> 15) * 0x846CA68B) & 0xFFFFFFFF for v in h]
    return np.array([-1 if v >> 31 else 1 for v in h], np.float32)


def hadamard(x):
    """float32 butterflies, near neighbours first."""
    half = 1
    while half < len(x):
        x = x.reshape(-1, 2, half)
        x = np.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1).ravel()
        half *= 2
    return x


def decode_turboquant(bits, sketch, seed, x):
    n = x.shape[1]
    x = np.where(np.abs(x) < 2.0**-100, 0, clamp(x)).astype(np.float32)
    levels, weights, _ = lloyd_max(n, bits - sketch)
    _, m, whole = whole_levels(n, levels, weights)
    levels = np.concatenate([-whole[::-1], whole])
    middles = (levels[1:] + levels[:-1]) / 2
    out = np.zeros_like(x)
    for row, decoded in zip(x, out):
        scale = np.float64(half_root(sum_of_squares(row), m))
        code = np.searchsorted(middles * scale, row.astype(np.float64)) if scale else np.zeros(n, int)
        decoded[:] = levels[code] * scale
        if sketch:
            residual = row - decoded
            mean = np.exp(math.lgamma(n / 2) - math.lgamma(n / 2 + 0.5)) / np.sqrt(np.pi)
            gamma = np.float64(half_root(sum_of_squares(residual), round((n * n * mean) ** 2)))
            d0, d1 = sketch_sign(seed, 0, n), sketch_sign(seed, 1, n)
            sign = np.where(hadamard(hadamard(residual * d0) * d1) >= 0, 1, -1).astype(np.float32)
            decoded[:] = d0 * hadamard(d1 * hadamard(sign)) * gamma + decoded.astype(np.float64)
    return out


# ---- ThinK ----


def think_table(ratio, q, x):
    """Slot of each channel, -1 where it is dropped: q [head][query][D], x [token][D]."""
    score = np.square(q.astype(np.float64)).sum((0, 1)) * np.square(clamp(x).astype(np.float64)).sum(0)
    dropped = sorted(range(x.shape[1]), key=lambda c: (score[c], -c))[: int(x.shape[1] * ratio)]
    kept = np.array([c not in dropped for c in range(x.shape[1])])
    return np.where(kept, np.cumsum(kept) - 1, -1).astype(np.float32)


# ---- inputs and headers ----


def inputs(n, dim, seed):
    """Ordinary rows with an outlier channel; from the third row on constant, tiny, huge and tie-making ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, dim)).astype(np.float32)
    x[:, 5] *= 12
    special = [np.full(dim, 0.3), np.zeros(dim), rng.normal(size=dim) * 3e-8, rng.normal(size=dim) * 5e4, np.arange(dim) / 2 - 3]
    for i in range(2, n):
        x[i] = special[(i - 2) % len(special)]
    return x


def columns(n, dim, seed):
    """Ordinary columns, one with large numbers, then a constant, a zero, a tie-making, a tiny and a huge one."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, dim)).astype(np.float32)
    x[:, 5] *= 12
    for c, column in enumerate([np.full(n, 0.3), np.zeros(n), np.arange(n) / 2 - 3, rng.normal(size=n) * 3e-8, rng.normal(size=n) * 5e4]):
        x[:, 7 + c] = column
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


def header(folder, codecs, tables=None):
    """codecs: name -> list of (options, x name, x, decoded or {role: decoded}); tables: name -> one for each answer"""
    guard = f"KVL_{folder.upper()}_ANSWERS_H"
    text = f"/* Known answers, written by scripts/make_codec_answers.py; do not edit. */\n#ifndef {guard}\n#define {guard}\n#include \"kvl_plugin.h\"\n\n"
    written = set()
    for codec, cases in codecs.items():
        rows = []
        for i, (options, x_name, x, decoded) in enumerate(cases):
            if x_name not in written:
                text += array(x_name, x)
                written.add(x_name)
            by_role = decoded if isinstance(decoded, dict) else {"": decoded}
            for suffix, values in by_role.items():
                text += array(f"{codec}_decoded_{i}{suffix.lower()}", values)
            for role in "KV" if "" in by_role else by_role:
                name = f"{codec}_decoded_{i}{role.lower() if role in by_role else ''}"
                rows.append(f'    {{"{options}", KVL_ROLE_{role}, {x.shape[1]}, {x.shape[0]}, 0, {x_name}, {name}, 0.0f}},\n')
        text += f"static const struct kvl_known_answer {codec}_answers[] = {{\n{''.join(rows)}}};\n\n"
        names = [f"{codec}_table_{i}" for i in range(len((tables or {}).get(codec, [])))]
        text += "".join(array(name, table) for name, table in zip(names, (tables or {}).get(codec, [])))
        text += f"static const float *const {codec}_tables[] = {{{', '.join(names)}}};\n\n" if names else ""
    return text + "#endif\n"


def main(root):
    wide, narrow = inputs(2, 64, 1), inputs(7, 16, 2)
    hard = inputs(7, 64, 3)
    cases = [("", "wide", wide), ("sym", "wide", wide), ("group=8", "narrow", narrow), ("group=8,sym", "narrow", narrow)]
    settings = {"": (0, False), "sym": (0, True), "group=8": (8, False), "group=8,sym": (8, True)}
    integers = {
        f"int{bits}": [(options, name, x, decode_int(bits, *settings[options], x)) for options, name, x in cases[::step]]
        for bits, step in ((8, 1), (4, 1), (3, 3), (2, 3))
    }
    integers["int4"] += [
        ("clip=0.95", "wide", wide, decode_int(4, 0, False, wide, clip=0.95)),
        ("group=8,clip=0.5,search=5", "narrow", narrow, decode_int(4, 8, False, narrow, clip=0.5, search=5)),
        ("group=8,e4m3", "narrow", narrow, decode_int(4, 8, False, narrow, kind="e4m3")),
    ]
    integers["int2"] += [
        ("sym,clip=0.6,search=4", "narrow", narrow, decode_int(2, 0, True, narrow, clip=0.6, search=4)),
        ("group=8,e5m2,clip=0.4,search=6", "narrow", narrow, decode_int(2, 8, False, narrow, clip=0.4, search=6, kind="e5m2")),
    ]
    integers["int3"].append(("group=8,sym,e4m3", "narrow", narrow, decode_int(3, 8, True, narrow, kind="e4m3")))
    grouped = columns(32, 16, 4)
    kivi = [("group=16,residual=32", 2, 16, None), ("bits=4,group=32,residual=0,channel", 4, 32, "channel"),
            ("bits=3,group=16,residual=16,token", 3, 16, "token")]  # fmt: skip
    integers["kivi"] = [
        (options, "grouped", grouped, {role: decode_kivi(*setting, role, grouped) for role in "KV"}) for options, *setting in kivi
    ]
    integers["kivi"].append(("bits=3,group=16,residual=16,clip=0.7,search=3,e4m3", "grouped", grouped,
                             {role: decode_kivi(3, 16, None, role, grouped, clip=0.7, search=3, kind="e4m3") for role in "KV"}))  # fmt: skip
    gear = [("block=16,outliers=2", 2, 16, 2, 2), ("bits=4,block=32,rank=4", 4, 32, 4, 1), ("bits=3,block=16,rank=0,outliers=0", 3, 16, 0, 0)]
    integers["gear"] = [
        (options, "grouped", grouped, {role: decode_gear(*setting, role, grouped) for role in "KV"}) for options, *setting in gear
    ]
    floats = {"f32": [("", "narrow", narrow, narrow)], "f16": [("", "narrow", narrow, to_half(clamp(narrow)))]}
    ggml = {name: [("", "hard", hard, ggml_rows(name, hard)[1])] for name in GGML_BITS}
    fp8 = {f"fp8_{kind}": [("", "hard", hard, decode_fp8(kind, hard))] for kind in FP8}
    turbo = {"turboquant": [("", "hard", hard, decode_turboquant(3, False, 1, hard)),
                            ("bits=4", "narrow", narrow, decode_turboquant(4, False, 1, narrow)),
                            ("bits=2", "hard", hard, decode_turboquant(2, False, 1, hard))]}  # fmt: skip
    sketched = [("bits=3,sketch=sign", "hard", hard, decode_turboquant(3, True, 1, hard)),
                ("bits=2,sketch=sign,seed=7", "narrow", narrow, decode_turboquant(2, True, 7, narrow))]  # fmt: skip
    turbo["turboquant"] += [(options, name, x, {"K": decoded}) for options, name, x, decoded in sketched]
    ratios, q = (0.4, 0.75), np.random.default_rng(5).normal(size=(3, 8, 64)).astype(np.float32)
    thinned = [think_table(ratio, q, hard[:2]) for ratio in ratios]
    think = [(f"ratio={ratio},recent=0", "hard", hard, {"K": np.where(table < 0, 0, to_half(clamp(hard)))}) for ratio, table in zip(ratios, thinned)]
    (root / "compress/codec/think/answers.h").write_text(header("think", {"think": think}, {"think": thinned}))
    (root / "compress/codec/turboquant/answers.h").write_text(header("turboquant", turbo))
    (root / "compress/codec/ggml/answers.h").write_text(header("ggml", ggml))
    (root / "compress/codec/fp8/answers.h").write_text(header("fp8", fp8))
    (root / "tests/codec/ggml_blocks.h").write_text(ggml_blocks_header(GGML_BITS, hard))
    (root / "compress/codec/int/answers.h").write_text(header("int", integers))
    (root / "compress/codec/float/answers.h").write_text(header("float", floats))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
