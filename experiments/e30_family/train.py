#!/usr/bin/env python3
"""Trains the tiny family: models that differ in how they keep keys and values and in nothing else. See why.md.

usage: train.py [--runs all|NAME,NAME] [--minutes M] [--work DIR]     (needs jax and optax; text: data/text/kjv.txt, scripts/fetch_kjv.sh)

Every run is a line of RUNS. A run leaves a checkpoint each 100 steps and goes on from it when it is started again; a finished run leaves
results/NAME.json (curves and scores) and weights/NAME.npz in the work folder, from where export.py makes GGUFs.

Written from the papers: RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864 (adjacent pairs), GQA arXiv:2305.13245, MQA arXiv:1911.02150,
SwiGLU arXiv:2002.05202, MLA arXiv:2405.04434 section 2.1 (no low-rank queries), CLA arXiv:2405.12981, AdamW arXiv:1711.05101.
"""
import argparse
import hashlib
import json
import pathlib
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEXT = ROOT / "data" / "text" / "kjv.txt"

N_LAYER, D_MODEL, N_HEAD, HEAD_DIM, N_VOCAB, N_CTX = 4, 96, 6, 16, 256, 512
ROPE_DIM, ROPE_BASE, RMS_EPS = 16, 10000.0, 1e-5
BATCH, TOKENS = 16, 8_000_000
STEPS = TOKENS // (BATCH * N_CTX)
LEARNING_RATES = (1.5e-3, 3e-3, 6e-3)
TEST_SHARE, VALIDATION_SHARE, RECALL_SHARE = 0.05, 0.02, 0.05
SEEDS = (1, 2, 3)

# n_kv_head and shared for attention with keys and values of heads, rank for a latent of MLA; d_ff makes the totals equal within 1 %.
# "shared" 2: a layer with an odd number reads the keys and values of the layer below.
VARIANTS = {
    "mha": dict(n_kv_head=6, d_ff=320),
    "gqa2": dict(n_kv_head=2, d_ff=360),
    "mqa": dict(n_kv_head=1, d_ff=376),
    "mla64": dict(rank=48, d_ff=296),
    "mla32": dict(rank=16, d_ff=328),
    "cla2": dict(n_kv_head=2, shared=2, d_ff=376),
    "mqa_unmatched": dict(n_kv_head=1, d_ff=320),
}
RUNS = [(name, seed) for seed in SEEDS for name in ("mha", "gqa2", "mqa", "mla64", "mla32")] + [("cla2", 1), ("mqa_unmatched", 1)]


def elements_per_token_and_layer(variant):
    """Elements of the cache that a token costs a layer, layers that share counted as their part."""
    return variant["rank"] + ROPE_DIM if "rank" in variant else 2 * variant["n_kv_head"] * HEAD_DIM / variant.get("shared", 1)


def shapes_of(variant):
    """{name: (inputs, outputs)}, vectors (n,). Names say the layer, so that equal names and shapes begin equal in all variants."""
    shapes = {"embed": (N_VOCAB, D_MODEL), "norm": (D_MODEL,)}
    for layer in range(N_LAYER):
        own = {"attn_norm": (D_MODEL,), "ffn_norm": (D_MODEL,), "o": (N_HEAD * HEAD_DIM, D_MODEL),
               "gate": (D_MODEL, variant["d_ff"]), "up": (D_MODEL, variant["d_ff"]), "down": (variant["d_ff"], D_MODEL)}
        if "rank" in variant:
            own.update(q=(D_MODEL, N_HEAD * (HEAD_DIM + ROPE_DIM)), kv_a=(D_MODEL, variant["rank"] + ROPE_DIM), kv_norm=(variant["rank"],),
                       kv_b=(variant["rank"], N_HEAD * 2 * HEAD_DIM))
        else:
            own.update(q=(D_MODEL, N_HEAD * HEAD_DIM))
            if layer % variant.get("shared", 1) == 0:
                own.update(k=(D_MODEL, variant["n_kv_head"] * HEAD_DIM), v=(D_MODEL, variant["n_kv_head"] * HEAD_DIM))
        shapes.update({f"{layer}.{name}": shape for name, shape in own.items()})
    return shapes


def initial_weights(variant, seed):
    weights = {}
    for name, shape in shapes_of(variant).items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
            continue
        rng = np.random.default_rng([seed, zlib.crc32(f"{name} {shape}".encode())])
        scale = 0.02 if name == "embed" else shape[0] ** -0.5
        if name.endswith((".o", ".down")):
            scale /= (2 * N_LAYER) ** 0.5
        weights[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return weights


def rms_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + RMS_EPS) * weight


def rope(x):
    """x [B][T][H][D], adjacent pairs."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * ROPE_BASE ** (-jnp.arange(half) / half)[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def split_heads(x, n_head):
    return x.reshape(*x.shape[:2], n_head, -1)


def attend_block(q, k, v, first):
    """Queries first ... of a block; q [B][Hk][G][Tq][Dk], k [B][Hk][Tk][Dk], v [B][Hk][Tk][Dv] -> [B][Hk][G][Tq][Dv]; causal."""
    hidden = jnp.arange(k.shape[-2])[None, :] > first + jnp.arange(q.shape[-2])[:, None]
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", q, k) - 1e30 * hidden
    mass = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return jnp.einsum("bhgqk,bhkd->bhgqd", mass, v) / mass.sum(-1, keepdims=True)


def attend(q, k, v):
    """q [B][T][H][Dk], k [B][T][Hk][Dk], v [B][T][Hk][Dv] -> [B][T][H Dv]; causal. In blocks of queries, each with the keys it may see: three
    times as fast here as one T x T product (forward and back, 16 x 512 tokens, 6 heads: 366 ms; 2, 4, 8 blocks: 167, 134, 114 ms)."""
    batch, t, _, d = q.shape
    q = (q * d**-0.5).reshape(batch, t, k.shape[2], -1, d).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    ends = [t * (i + 1) // 8 for i in range(8)]
    out = [attend_block(q[..., first:end, :], k[..., :end, :], v[..., :end, :], first) for first, end in zip([0] + ends, ends)]
    return jnp.concatenate(out, -2).transpose(0, 3, 1, 2, 4).reshape(batch, t, -1)


def keys_and_values(variant, w, x):
    if "rank" not in variant:
        return rope(split_heads(x @ w["k"], variant["n_kv_head"])), split_heads(x @ w["v"], variant["n_kv_head"])
    latent, rotated = jnp.split(x @ w["kv_a"], [variant["rank"]], -1)
    both = split_heads(rms_norm(latent, w["kv_norm"]) @ w["kv_b"], N_HEAD)
    content, v = jnp.split(both, 2, -1)
    rotated = jnp.broadcast_to(rope(rotated[:, :, None, :]), (*content.shape[:3], ROPE_DIM))
    return jnp.concatenate([content, rotated], -1), v


def queries(variant, w, x):
    q = split_heads(x @ w["q"], N_HEAD)
    if "rank" not in variant:
        return rope(q)
    content, rotated = jnp.split(q, [HEAD_DIM], -1)
    return jnp.concatenate([content, rope(rotated)], -1)


def forward(variant, weights, tokens):
    """tokens [B][T] -> logits [B][T][N_VOCAB]."""
    x = weights["embed"][tokens]
    k = v = None
    for layer in range(N_LAYER):
        w = {name.split(".", 1)[1]: value for name, value in weights.items() if name.startswith(f"{layer}.")}
        normed = rms_norm(x, w["attn_norm"])
        if layer % variant.get("shared", 1) == 0:
            k, v = keys_and_values(variant, w, normed)
        x = x + attend(queries(variant, w, normed), k, v) @ w["o"]
        normed = rms_norm(x, w["ffn_norm"])
        x = x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
    return rms_norm(x, weights["norm"]) @ weights["embed"].T


def recall_line(rng):
    """Pairs of two-letter keys and values, then one key again; what follows it is known. -> (line without the value, value)"""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(letters[i] for i in rng.integers(26, size=2)) for _ in range(2 * rng.integers(4, 13))]
    pairs = list(dict(zip(words[0::2], words[1::2])).items())
    key, value = pairs[rng.integers(len(pairs))]
    return " ".join(f"{k}={v}" for k, v in pairs) + f" ? {key}=", value


def texts():
    """Lines to train on, bytes to validate on, bytes to test on; the test is the end of the text, the validation what stands before it."""
    lines = TEXT.read_bytes().splitlines(keepends=True)
    ends = np.cumsum([len(line) for line in lines])
    first_test = int(np.searchsorted(ends, ends[-1] * (1 - TEST_SHARE)))
    first_validation = int(np.searchsorted(ends, ends[-1] * (1 - TEST_SHARE - VALIDATION_SHARE)))
    return lines[:first_validation], b"".join(lines[first_validation:first_test]), b"".join(lines[first_test:])


def training_stream(lines, seed):
    rng = np.random.default_rng([seed, 1])
    out = []
    for line in lines:
        out.append(line)
        if rng.random() < RECALL_SHARE / (1 - RECALL_SHARE):
            begin, value = recall_line(rng)
            out.append(f"{begin}{value}\n".encode())
    return np.frombuffer(b"".join(out), np.uint8)


def batches(stream, seed):
    """[STEPS][BATCH][N_CTX + 1]: every epoch goes through the windows of the stream in another order."""
    rng = np.random.default_rng([seed, 2])
    n_windows = (len(stream) - 1) // N_CTX
    order = np.concatenate([rng.permutation(n_windows) for _ in range(1 + STEPS * BATCH // n_windows)])[: STEPS * BATCH]
    return order.reshape(STEPS, BATCH)[:, :, None] * N_CTX + np.arange(N_CTX + 1)


def windows(data):
    array = np.frombuffer(data, np.uint8)
    n = (len(array) - 1) // N_CTX
    return np.stack([array[i * N_CTX: i * N_CTX + N_CTX + 1] for i in range(n)]).astype(np.int32)


def nll_of(variant):
    def nll(weights, rows):
        logits = forward(variant, weights, rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    return nll


def by_window(nll, weights, rows):
    """Nats of each predicted byte, [windows][N_CTX]."""
    padded = np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % BATCH, 0)])
    return np.concatenate([np.asarray(nll(weights, padded[i:i + BATCH])) for i in range(0, len(padded), BATCH)])[: len(rows)]


def recall_accuracy(variant, weights, test, n=480):
    """Share of recall lines, behind text, whose value is the likeliest continuation byte by byte."""
    rng = np.random.default_rng(7)
    predict = jax.jit(lambda w, rows: jnp.argmax(forward(variant, w, rows), -1))
    right = 0
    for _ in range(n // BATCH):
        rows, values = np.zeros((BATCH, N_CTX), np.int32), []
        for row in rows:
            begin, value = recall_line(rng)
            tail = b"\n" + f"{begin}{value}".encode()
            start = int(rng.integers(len(test) - N_CTX))
            row[:] = np.frombuffer(test[start:start + N_CTX - len(tail)] + tail, np.uint8)
            values.append(row[-2:].copy())
        guess = np.asarray(predict(weights, rows))[:, -3:-1]
        right += int(np.sum(np.all(guess == np.array(values), 1)))
    return right / (n // BATCH * BATCH)


def train(name, seed, rate, steps, work, deadline):
    """-> (weights, curve [(step, train nats a byte)]), or None when the time is over; goes on from a checkpoint."""
    variant, (lines, _, _) = VARIANTS[name], texts()
    stream = training_stream(lines, seed)
    order = batches(stream, seed)
    nll = nll_of(variant)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(steps // 20, 1), steps, rate / 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1,
                            mask=lambda weights: {key: value.ndim > 1 for key, value in weights.items()}))

    @jax.jit
    def step(weights, state, rows):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(nll(w, rows)))(weights)
        update, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, update), state, loss

    weights = {key: jnp.asarray(value) for key, value in initial_weights(variant, seed).items()}
    state, curve, first = optimizer.init(weights), [], 0
    kept = work / f"{name}-{seed}-{rate:g}-{steps}.checkpoint.npz"
    if kept.exists():
        with np.load(kept) as file:
            leaves, structure = jax.tree.flatten((weights, state))
            weights, state = jax.tree.unflatten(structure, [jnp.asarray(file[f"leaf{i}"]) for i in range(len(leaves))])
            curve = [tuple(row) for row in file["curve"].tolist()]
            first = int(file["next"])
    began = time.monotonic()
    for i in range(first, steps):
        weights, state, loss = step(weights, state, stream[order[i]].astype(np.int32))
        if i % 10 == 9 or i == steps - 1:
            curve.append((i + 1, float(loss)))
        if i % 100 == 99 or i == steps - 1:
            temporary = work / "writing.npz"
            np.savez(temporary, next=i + 1, curve=np.array(curve), **{f"leaf{j}": np.asarray(leaf) for j, leaf in enumerate(jax.tree.leaves((weights, state)))})
            temporary.replace(kept)
            left = (time.monotonic() - began) / (i + 1 - first) * (steps - i - 1)
            print(f"{name} seed {seed} rate {rate:g}: step {i + 1} of {steps}, {curve[-1][1] / np.log(2):.3f} bits a byte, {left / 60:.1f} minutes left", file=sys.stderr)
            if time.monotonic() > deadline and i < steps - 1:
                return None
    return weights, curve


def best_rate(name, work, deadline):
    """The rate with the least validation loss after an eighth of the tokens, seed 1; all three are kept in rates.json."""
    kept = work / "rates.json"
    rates = json.loads(kept.read_text()) if kept.exists() else {}
    validation = windows(texts()[1])
    for rate in LEARNING_RATES:
        if f"{rate:g}" in rates.get(name, {}):
            continue
        done = train(name, 1, rate, STEPS // 8, work, deadline)
        if done is None:
            return None
        loss = float(np.mean(by_window(jax.jit(nll_of(VARIANTS[name])), done[0], validation)))
        rates.setdefault(name, {})[f"{rate:g}"] = loss / np.log(2)
        kept.write_text(json.dumps(rates, indent=1) + "\n")
    return float(min(rates[name], key=rates[name].get))


def finish(name, seed, work, deadline):
    """One run to its end: weights and results. False when the time is over."""
    result = work / f"{name}-{seed}.json"
    if result.exists():
        return True
    rate = best_rate(name, work, deadline)
    done = train(name, seed, rate, STEPS, work, deadline) if rate else None
    if done is None:
        return False
    variant, (lines, _, test) = VARIANTS[name], texts()
    weights = {key: np.asarray(value) for key, value in done[0].items()}
    nats = by_window(jax.jit(nll_of(variant)), weights, windows(test))
    np.savez(work / f"{name}-{seed}.npz", **weights)
    seen = by_window(jax.jit(nll_of(variant)), weights, windows(b"".join(lines))[: len(nats)])
    result.write_text(json.dumps(dict(
        variant=name, seed=seed, rate=rate, n_parameters=int(sum(value.size for value in weights.values())), d_ff=variant["d_ff"],
        cache_elements=elements_per_token_and_layer(variant), tokens=STEPS * BATCH * N_CTX, text_sha256=hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        test_bits_per_byte=float(nats.mean() / np.log(2)), train_bits_per_byte=float(seen.mean() / np.log(2)),
        recall_accuracy=recall_accuracy(variant, weights, test), curve=[(i, loss / float(np.log(2))) for i, loss in done[1]],
        window_bits_per_byte=[round(float(x), 5) for x in nats.mean(1) / np.log(2)],
        position_bits_per_byte=[round(float(x), 5) for x in nats.mean(0) / np.log(2)])) + "\n")
    return True


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="all", help="NAME-SEED,...: these only (all: " + " ".join(f"{name}-{seed}" for name, seed in RUNS) + ")")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop at the next checkpoint after this time; a second start goes on")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "family", help="checkpoints, results, weights (default: build/family)")
    args = parser.parse_args()
    args.chosen = [(name, seed) for name, seed in RUNS if args.runs == "all" or f"{name}-{seed}" in args.runs.split(",")]
    if not args.chosen:
        parser.error(f"--runs: none of {args.runs} is a run")
    if not TEXT.exists():
        parser.error(f"{TEXT} is missing: scripts/fetch_kjv.sh makes it")
    return args


def main():
    args = parse_arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    totals = {name: sum(int(np.prod(shape)) for shape in shapes_of(variant).values()) for name, variant in VARIANTS.items()}
    print(totals, file=sys.stderr)
    deadline = time.monotonic() + 60 * args.minutes
    for name, seed in args.chosen:
        if not finish(name, seed, args.work, deadline):
            sys.exit("train.py: the time is over; the same command goes on")


if __name__ == "__main__":
    main()
