#!/usr/bin/env python3
"""Kept tokens and last outputs of caches whose scores are found anew every N decoded tokens, computed naively in numpy: tests/policy/rescore_answers.h.

Shares no code with kvlab. A list of tokens for each head is all the state there is. Needs numpy.
"""
import numpy as np
from make_decode_answers import DIM, GROUP, HEADS, TOKENS, inputs, rope, softmax

WIDTH = 8  # rows of the output matrix
BIG = 1e30


def output_matrix():
    i = np.arange(WIDTH * HEADS * GROUP * DIM, dtype=np.float64)
    return np.sin(0.29 * i + 0.2).astype(np.float32).astype(np.float64).reshape(WIDTH, HEADS, GROUP, DIM)


class Layer:
    """What a score may look at behind token t: the tokens of a head, keys turned by RoPE, values, all queries."""

    def __init__(self):
        self.q, self.k, self.v = inputs()
        self.turned_q = np.stack([rope(self.q[t], t) for t in range(TOKENS)])
        self.turned_k = np.stack([rope(self.k[t], t) for t in range(TOKENS)])
        self.held, self.t = [[] for _ in range(HEADS)], 0
        self.sums = np.zeros((HEADS, TOKENS))  # attention that tokens got while they were there

    def keys(self, h):
        return self.turned_k[self.held[h], h]

    def values(self, h):
        return self.v[self.held[h], h]

    def attention(self, t, h):
        """[G][n] of query t over the tokens that head h has up to t."""
        tokens = [x for x in self.held[h] if x <= t]
        return softmax(self.turned_q[t, h] @ self.turned_k[tokens, h].T / np.sqrt(DIM))


def snapkv(layer, h, window=64, kernel=5):
    held = layer.held[h]
    newest = 0
    while newest < min(window, len(held)) and held[-1 - newest] == layer.t - newest:
        newest += 1
    old = len(held) - newest
    mean = sum(layer.attention(t, h)[:, :old] for t in range(layer.t - newest + 1, layer.t + 1)) / newest
    padded = np.pad(mean, ((0, 0), (kernel // 2, kernel // 2)))
    pooled = sum(padded[:, i:i + old] for i in range(kernel)) / kernel
    return np.concatenate([pooled.mean(axis=0), np.full(newest, 2.0)])


def expected(layer, h, sink=4, future=512, recent=256):
    first = max(sink, layer.t + 1 - recent)
    score = np.zeros(len(layer.held[h]))
    for g in range(GROUP):
        q = layer.q[first:layer.t + 1, h, g]
        mean, centred = q.mean(axis=0), q - q.mean(axis=0)
        turn = np.stack([rope(np.eye(DIM), layer.t + 1 + p) for p in range(future)]).mean(axis=0)  # row c: what channel c becomes, on average
        mu, sigma = mean @ turn, turn.T @ (centred.T @ centred / len(q)) @ turn
        k = layer.keys(h)[sink:]
        score[sink:] += softmax(k @ mu / np.sqrt(DIM) + np.einsum("ti,ij,tj->t", k, sigma, k) / (2 * DIM)) / GROUP
    score *= np.linalg.norm(layer.values(h), axis=1)
    score[:sink] = BIG
    return score


def keydiff(layer, h):
    unit = layer.keys(h) / np.linalg.norm(layer.keys(h), axis=1, keepdims=True)
    mean = unit.mean(axis=0)
    return -(unit @ mean) / np.linalg.norm(mean)


def observed(layer, h):
    held = np.array(layer.held[h])
    return layer.sums[h, held] / GROUP / (layer.t + 1 - held)


def h2o(layer, h, newest):
    score = layer.sums[h, layer.held[h]] / GROUP
    score[len(score) - newest:] = BIG
    return score


def lagkv(layer, h, sink=4, lag=8):
    n = len(layer.held[h])
    if n < sink + 2 * lag:
        return np.concatenate([np.ones(sink), np.arange(n - sink) / (n - sink)])
    score = np.ones(n)
    for p in range((n - sink) // lag - 1):
        own, after = slice(sink + p * lag, sink + (p + 1) * lag), slice(sink + (p + 1) * lag, sink + (p + 2) * lag)
        spread = 0
        for rows in (layer.keys(h), layer.values(h)):
            low, high = rows[after].min(axis=0), rows[after].max(axis=0)
            spread = spread + softmax(((rows[own] - low) / (high - low)).std(axis=1, ddof=1)) / 2
        score[own] = np.argsort(np.argsort(spread, kind="stable"), kind="stable") / lag
    return score


def best(score, n):
    """Indices of the n best, of equal ones the first."""
    return np.argsort(-score, kind="stable")[:n]


def share_out(scores, budget, safeguard):
    """Ada-KV: tokens of each head when all compete for `budget` a head."""
    scores = [s.copy() for s in scores]
    for s in scores:
        s[best(s, int(safeguard * budget))] = BIG
    flat = [(-x, h, i) for h, s in enumerate(scores) for i, x in enumerate(s)]
    winners = [h for _, h, _ in sorted(flat)[:HEADS * budget]]
    return scores, [winners.count(h) for h in range(HEADS)]


def critical(layer, scores, targets, first=0.5, epsilon=1e-4):
    w = output_matrix()
    out = []
    for h, (s, target) in enumerate(zip(scores, targets)):
        norm = np.abs(np.einsum("egd,td->tge", w[:, h], layer.values(h))).sum(axis=2).mean(axis=1)
        changed = np.where(s >= BIG, s, (s + epsilon) * norm)
        changed[best(s, int(first * target))] = BIG
        out.append(changed)
    return out


def chunked(scores, budget, size):
    """Whole chunks by their mean over the heads, which have the same tokens; a head never gets more than its budget."""
    n = len(scores[0])
    starts = range(0, n, size)
    mean = np.array([sum(s[a:a + size].sum() for s in scores) / len(scores[0][a:a + size]) for a in starts])
    stay = np.concatenate([np.arange(a, min(n, a + size)) for a in (starts[i] for i in sorted(best(mean, max(1, int(len(mean) * budget / n)))))])
    changed = np.full(n, -BIG)
    changed[stay] = BIG
    return [changed] * HEADS, [min(len(stay), budget)] * HEADS


def stream(score, budget, every, ada=None, wrap=None):
    layer = Layer()
    for t in range(TOKENS):
        layer.t = t
        for h in range(HEADS):
            layer.held[h].append(t)
            layer.sums[h, layer.held[h]] += layer.attention(t, h).sum(axis=0)
        out = [layer.attention(t, h) @ layer.values(h) for h in range(HEADS)]
        if t == 0 or t % every != 0 or sum(map(len, layer.held)) <= HEADS * budget:
            continue
        scores = [score(layer, h) for h in range(HEADS)]
        targets = [budget] * HEADS
        if ada is not None:
            scores, targets = share_out(scores, budget, ada)
        if wrap == "critical":
            scores = critical(layer, scores, targets)
        elif wrap is not None:
            scores, targets = chunked(scores, budget, wrap)
        for h in range(HEADS):
            layer.held[h] = [layer.held[h][i] for i in sorted(best(scores[h], targets[h]))]
    return layer.held, np.concatenate([o.reshape(-1) for o in out])


CASES = [
    ("keep=snapkv(window=6) budget=uniform(tokens=20) when=every:7", snapkv, dict(window=6), 20, 7, {}),
    ("keep=snapkv budget=uniform(tokens=12) when=every:9", snapkv, {}, 12, 9, {}),  # the window is wider than what stays
    ("keep=snapkv(window=6) budget=ada(tokens=20) when=every:7", snapkv, dict(window=6), 20, 7, dict(ada=0.2)),
    ("keep=snapkv(window=3,kernel=1) budget=ada(tokens=12,safeguard=0) when=full", snapkv, dict(window=3, kernel=1), 12, 1, dict(ada=0.0)),
    ("keep=expected budget=uniform(tokens=20) when=every:8", expected, {}, 20, 8, {}),
    ("keep=keydiff budget=ada(tokens=20) when=every:5", keydiff, {}, 20, 5, dict(ada=0.2)),
    ("keep=observed budget=uniform(tokens=30) when=every:6", observed, {}, 30, 6, {}),
    ("keep=h2o budget=ada(tokens=20) when=every:6", h2o, dict(newest=10), 20, 6, dict(ada=0.2)),
    ("keep=lagkv(lag=8) budget=uniform(tokens=24) when=every:10", lagkv, {}, 24, 10, {}),
    ("keep=critical(of=snapkv(window=6)) budget=uniform(tokens=20) when=every:7", snapkv, dict(window=6), 20, 7, dict(wrap="critical")),
    ("keep=critical(of=expected) budget=ada(tokens=18) when=every:6", expected, {}, 18, 6, dict(ada=0.2, wrap="critical")),
    ("keep=chunk(of=snapkv(window=6),size=4) budget=uniform(tokens=22) when=every:7", snapkv, dict(window=6), 22, 7, dict(wrap=4)),
    ("keep=chunk(of=keydiff,size=5) budget=uniform(tokens=22) when=every:4", keydiff, {}, 22, 4, dict(wrap=5)),  # more than the budget in whole chunks
]


def main():
    print("/* Made by scripts/make_rescore_answers.py. */")
    print(f"enum {{ RESCORE_TOKENS = {TOKENS}, RESCORE_HEADS = {HEADS}, RESCORE_GROUP = {GROUP}, RESCORE_DIM = {DIM} }};")
    print("static const struct rescore_answer {\n    const char *spec;\n    uint32_t n_held[RESCORE_HEADS], held[RESCORE_HEADS][RESCORE_TOKENS];")
    print("    float out[RESCORE_HEADS * RESCORE_GROUP * RESCORE_DIM]; /* of the last token's queries */\n} rescore_answers[] = {")
    for spec, score, options, budget, every, rest in CASES:
        held, out = stream(lambda layer, h: score(layer, h, **options), budget, every, **rest)
        print(f'    {{"f32 {spec}",\n     {{{", ".join(str(len(h)) for h in held)}}},')
        print("     {" + ",\n      ".join("{" + ", ".join(map(str, h)) + "}" for h in held) + "},")
        lines = [", ".join(f"{x:.7g}f" if x != int(x) else f"{x:.1f}f" for x in out[i:i + 8]) for i in range(0, len(out), 8)]
        print("     {" + ",\n      ".join(lines) + "}},")
    print("};")


if __name__ == "__main__":
    main()
