#!/usr/bin/env python3
"""Kept tokens and last outputs of caches that evict while tokens are decoded, computed naively in numpy: tests/policy/decode_answers.h.

Shares no code with kvlab. Everything is computed anew at each step from whole matrices of the tokens that are left: no running state but the list
of those tokens and, for H2O, the sums of attention. Needs numpy.
"""
import numpy as np

TOKENS, HEADS, GROUP, DIM = 60, 2, 3, 16
GONE = 4  # of the tokens that go, the last


def inputs():
    j = np.arange(TOKENS * HEADS * GROUP * DIM, dtype=np.float64)
    q = (3.0 * np.sin(0.37 * j + 0.1)).astype(np.float32).reshape(TOKENS, HEADS, GROUP, DIM)
    j = np.arange(TOKENS * HEADS * DIM, dtype=np.float64)
    k = (2.0 * np.sin(0.73 * j * (1.0 + 0.001 * (j % 7)))).astype(np.float32).reshape(TOKENS, HEADS, DIM)
    v = np.cos(0.51 * j).astype(np.float32).reshape(TOKENS, HEADS, DIM)
    return [a.astype(np.float64) for a in (q, k, v)]


def rope(x, position):
    """x [..., D] turned by position: a number, or one for each row."""
    angle = np.multiply.outer(np.asarray(position, np.float64), 10000.0 ** (-np.arange(0, DIM, 2) / DIM))
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty(np.broadcast_shapes(x.shape, angle.shape[:-1] + (DIM,)))
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def stream(policy, budget, compact, kept_exact=False):
    q, k, v = inputs()
    held = [[] for _ in range(HEADS)]
    sums = np.zeros((HEADS, TOKENS))
    gone_of = [[] for _ in range(HEADS)]
    for t in range(TOKENS):
        attention, out = [], []
        for h in range(HEADS):
            held[h].append(t)
            tokens = np.array(held[h])
            places = np.arange(len(tokens)) if compact else tokens
            p = softmax(rope(q[t, h], places[-1]) @ rope(k[tokens, h], places).T / np.sqrt(DIM))  # [G][n]
            attention.append(p)
            out.append(p @ v[tokens, h])
            sums[h, tokens] += p.sum(axis=0)
        if t == 0:
            continue  # the prompt of one token
        for h in range(HEADS):
            if len(held[h]) <= budget:
                continue
            if policy == "h2o":  # the least of all but the newest half of the budget
                old = [x for x in held[h] if x <= t - budget // 2]
                worth = {x: sums[h, x] for x in old}
            elif policy == "tova":  # the least attention of the newest query over all heads, never the newest token
                total = sum(a.sum(axis=0) for a in attention)
                worth = {x: total[i] for i, x in enumerate(held[h]) if x != t}
            elif policy == "keydiff":  # keys most like the mean direction of all the head has, but for 3 first tokens and the newest 5
                keys = rope(k[held[h], h], np.array(held[h]))
                unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
                cosine = unit @ unit.mean(axis=0)
                worth = {x: -cosine[i] for i, x in enumerate(held[h]) if not kept_exact or 3 <= x <= t - 5}
            else:  # streaming with 4 first tokens
                worth = {x: x for x in held[h] if x >= 4}
            gone = min(worth, key=lambda x: (worth[x], -x))
            if policy == "tova" and h == 0:
                shared = gone
            gone = shared if policy == "tova" else gone
            mass = np.nan if policy in ("streaming", "keydiff") else attention[h].mean(axis=0)[held[h].index(gone)]
            gone_of[h].append((t + 1, gone, mass))
            held[h].remove(gone)
    return held, np.concatenate([o.reshape(-1) for o in out]), gone_of


def floats(out):
    lines = [", ".join(f"{x:.7g}f" if x != int(x) else f"{x:.1f}f" for x in out[i:i + 8]) for i in range(0, len(out), 8)]
    return "     {" + ",\n      ".join(lines) + "}},"


CASES = [
    ("f32 keep=h2o budget=uniform(tokens=20) when=full", "h2o", 20, False),
    ("f32 rope=pre pos=compact keep=h2o budget=uniform(tokens=20) when=full", "h2o", 20, True),
    ("f32 keep=tova budget=uniform(tokens=15) when=full", "tova", 15, False),
    ("f32 sink=3 tail=5 keep=streaming(sink=4) budget=uniform(tokens=16) when=full", "streaming", 16, False),
    ("f32 keep=keydiff budget=uniform(tokens=20) when=full", "keydiff", 20, False),
    ("f32 sink=3 tail=5 keep=keydiff budget=uniform(tokens=16) when=full", "keydiff", 16, False, True),
    ("f32 rope=pre pos=compact keep=streaming(sink=4) budget=uniform(tokens=16) when=full", "streaming", 16, True),
]


def main():
    print("/* Made by scripts/make_decode_answers.py. */\n#include <math.h>")
    print(f"enum {{ DECODE_TOKENS = {TOKENS}, DECODE_HEADS = {HEADS}, DECODE_GROUP = {GROUP}, DECODE_DIM = {DIM} }};")
    print(f"enum {{ DECODE_GONE = {GONE} }};")
    print("static const struct decode_answer {\n    const char *spec;\n    uint32_t n_held, held[DECODE_HEADS][DECODE_TOKENS], n_gone;")
    print("    struct {\n        uint32_t seen, position;\n        float mass;\n    } gone[DECODE_HEADS][DECODE_GONE]; /* the last of them */")
    print("    float out[DECODE_HEADS * DECODE_GROUP * DECODE_DIM]; /* of the last token's queries */\n} decode_answers[] = {")
    for spec, *case in CASES:
        held, out, gone = stream(*case)
        print(f'    {{"{spec}",\n     {len(held[0])},')
        print("     {" + ",\n      ".join("{" + ", ".join(map(str, h)) + "}" for h in held) + "},")
        print(f"     {len(gone[0])},")
        show = lambda x: "NAN" if np.isnan(x) else f"{x:.7g}f"
        print("     {" + ",\n      ".join("{" + ", ".join(f"{{{s}, {p}, {show(m)}}}" for s, p, m in g[-GONE:]) + "}" for g in gone) + "},")
        print(floats(out))
    print("};")


if __name__ == "__main__":
    main()
