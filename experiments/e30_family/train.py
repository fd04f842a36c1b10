#!/usr/bin/env python3
"""Trains the tiny family: models that differ in how they keep keys and values and in nothing else. See why.md.

usage: train.py [--runs all|NAME-SEED,...] [--minutes M] [--work DIR]     (needs torch and a C compiler; text: data/text/kjv.txt, scripts/fetch_kjv.sh)

Every run is a line of RUNS. A run leaves a checkpoint each 50 steps and goes on from it when it is started again; a finished run leaves
NAME-SEED.json (curves and scores) and NAME-SEED.npz (weights) in the work folder, from where export.py makes GGUFs. A process has one thread:
start the command once a core, each takes what no other is at.

Written from the papers: RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864 (adjacent pairs), GQA arXiv:2305.13245, MQA arXiv:1911.02150,
SwiGLU arXiv:2002.05202, MLA arXiv:2405.04434 section 2.1 (no low-rank queries), CLA arXiv:2405.12981, AdamW arXiv:1711.05101.
"""
import argparse
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEXT = ROOT / "data" / "text" / "kjv.txt"

N_LAYER, D_MODEL, N_HEAD, HEAD_DIM, N_VOCAB, N_CTX = 4, 96, 6, 16, 256, 512
ROPE_DIM, ROPE_BASE, RMS_EPS = 16, 10000.0, 1e-5
BATCH, PART, TOKENS = 16, 4, 8_000_000
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
ONE_SEED = ("cla2", "mqa_unmatched")
RUNS = [(name, seed) for seed in SEEDS for name in VARIANTS if seed == 1 or name not in ONE_SEED]


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


@torch.library.custom_op("family::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """attend.c: q [B][T][H][Dk], k [B][T][Hk][Dk], v [B][T][Hk][16] -> [B][T][H][16], and the logarithms of softmax's sums; causal."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, t, n_head, dk = q.shape
    out, log_sum = q.new_empty(batch, t, n_head, v.shape[3]), q.new_empty(batch, n_head, t)
    library().attend(batch, t, n_head, k.shape[2], dk, *(x.data_ptr() for x in (q, k, v, out, log_sum)))
    return out, log_sum


@attend.register_fake
def _(q, k, v):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[0], q.shape[2], q.shape[1])


@torch.library.custom_op("family::attend_backward", mutates_args=())
def attend_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor,
                    grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, out, log_sum, grad = (x.contiguous() for x in (q, k, v, out, log_sum, grad))
    batch, t, n_head, dk = q.shape
    grads = [torch.empty_like(x) for x in (q, k, v)]
    library().attend_backward(batch, t, n_head, k.shape[2], dk, *(x.data_ptr() for x in (q, k, v, out, log_sum, grad, *grads)))
    return tuple(grads)


@attend_backward.register_fake
def _(q, k, v, out, log_sum, grad):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


attend.register_autograd(lambda ctx, grad, _: attend_backward(*ctx.saved_tensors, grad), setup_context=keep_for_backward)


@functools.cache
def library():
    """attend.c, compiled for this processor."""
    source, compiled = HERE / "attend.c", pathlib.Path(tempfile.mkdtemp()) / "attend.so"
    subprocess.run(["cc", "-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-o", compiled, source, "-lm"], check=True)
    loaded = ctypes.CDLL(str(compiled))
    loaded.attend.argtypes = [ctypes.c_long] * 5 + [ctypes.c_void_p] * 5
    loaded.attend_backward.argtypes = [ctypes.c_long] * 5 + [ctypes.c_void_p] * 9
    return loaded


def rms_norm(x, weight):
    return x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + RMS_EPS) * weight


def rope(x, turns):
    """x [B][T][H][D], adjacent pairs as complex numbers; turns [T][1][D / 2]."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def turns_of(t, d):
    angle = np.arange(t)[:, None, None] * ROPE_BASE ** (-np.arange(d // 2) / (d // 2))
    return torch.tensor(np.exp(1j * angle), dtype=torch.complex64)


def split_heads(x, n_head):
    return x.unflatten(-1, (n_head, -1))


def keys_and_values(variant, w, x, turns):
    if "rank" not in variant:
        return rope(split_heads(x @ w["k"], variant["n_kv_head"]), turns), split_heads(x @ w["v"], variant["n_kv_head"])
    latent, rotated = (x @ w["kv_a"]).split([variant["rank"], ROPE_DIM], -1)
    content, v = split_heads(rms_norm(latent, w["kv_norm"]) @ w["kv_b"], N_HEAD).chunk(2, -1)
    rotated = rope(rotated.unsqueeze(2), turns).expand(*content.shape[:3], ROPE_DIM)
    return torch.cat([content, rotated], -1), v


def queries(variant, w, x, turns):
    q = split_heads(x @ w["q"], N_HEAD)
    if "rank" not in variant:
        return rope(q, turns)
    content, rotated = q.split([HEAD_DIM, ROPE_DIM], -1)
    return torch.cat([content, rope(rotated, turns)], -1)


def forward(variant, weights, tokens, turns):
    """tokens [B][T] -> logits [B][T][N_VOCAB]."""
    x = F.embedding(tokens, weights["embed"])
    k = v = None
    for layer in range(N_LAYER):
        w = {name.split(".", 1)[1]: value for name, value in weights.items() if name.startswith(f"{layer}.")}
        normed = rms_norm(x, w["attn_norm"])
        if layer % variant.get("shared", 1) == 0:
            k, v = keys_and_values(variant, w, normed, turns)
        x = x + attend(queries(variant, w, normed, turns), k, v)[0].flatten(-2) @ w["o"]
        normed = rms_norm(x, w["ffn_norm"])
        x = x + (F.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
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
    return np.stack([array[i * N_CTX: i * N_CTX + N_CTX + 1] for i in range(n)]).astype(np.int64)


def unpack(variant, flat):
    """{name: array} of all weights in one vector."""
    shapes = shapes_of(variant)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), flat.split([math.prod(shape) for shape in shapes.values()]))}


def nll_of(variant):
    """(weights in one vector, rows [B][N_CTX + 1]) -> nats of each predicted byte [B][N_CTX]"""
    turns = turns_of(N_CTX, ROPE_DIM)

    def nll(flat, rows):
        logits = forward(variant, unpack(variant, flat), rows[:, :-1], turns)
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(rows.shape[0], N_CTX)
    return nll


@torch.no_grad()
def by_window(nll, flat, rows):
    """Nats of each predicted byte, [windows][N_CTX]."""
    return np.concatenate([nll(flat, torch.tensor(rows[i:i + BATCH])).numpy() for i in range(0, len(rows), BATCH)])


@torch.no_grad()
def recall_accuracy(variant, flat, test, n=480):
    """Share of recall lines, behind text, whose value is the likeliest continuation byte by byte."""
    rng = np.random.default_rng(7)
    weights, turns = unpack(variant, flat), turns_of(N_CTX, ROPE_DIM)
    right = 0
    for _ in range(n // BATCH):
        rows = np.zeros((BATCH, N_CTX), np.int64)
        for row in rows:
            begin, value = recall_line(rng)
            tail = b"\n" + f"{begin}{value}".encode()
            start = int(rng.integers(len(test) - N_CTX))
            row[:] = np.frombuffer(test[start:start + N_CTX - len(tail)] + tail, np.uint8)
        guess = forward(variant, weights, torch.tensor(rows), turns).argmax(-1).numpy()
        right += int(np.sum(np.all(guess[:, -3:-1] == rows[:, -2:], 1)))
    return right / (n // BATCH * BATCH)


class Adam:
    """AdamW of weights in one vector: gradients clipped to length 1, warm-up over a twentieth of the steps, then a cosine down to a tenth."""

    def __init__(self, variant, rate, steps):
        self.rate, self.steps, self.warm = rate, steps, max(steps // 20, 1)
        self.decays = torch.cat([torch.full((math.prod(shape),), float(len(shape) > 1)) for shape in shapes_of(variant).values()])
        self.mean, self.square = torch.zeros_like(self.decays), torch.zeros_like(self.decays)

    def rate_at(self, step):
        if step < self.warm:
            return self.rate * step / self.warm
        return self.rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - self.warm) / (self.steps - self.warm))))

    def step(self, flat, gradient, i, b1=0.9, b2=0.95, decay=0.1):
        gradient = gradient / max(1.0, float(gradient.norm()))
        self.mean.lerp_(gradient, 1 - b1)
        self.square.lerp_(gradient * gradient, 1 - b2)
        change = (self.mean / (1 - b1 ** (i + 1))) / ((self.square / (1 - b2 ** (i + 1))).sqrt() + 1e-8)
        flat -= self.rate_at(i) * (change + decay * self.decays * flat)


def gradient_of(nll, flat, rows):
    """Mean nats of rows [BATCH][N_CTX + 1] and their gradient, a few rows at a time: what they need fits the processor's caches."""
    flat = flat.detach().requires_grad_()
    total = 0.0
    for part in torch.tensor(rows).split(PART):
        loss = nll(flat, part).sum() / (BATCH * N_CTX)
        loss.backward()
        total += loss.item()
    return total, flat.grad


def train(name, seed, rate, steps, work, deadline):
    """-> (weights, curve [(step, train nats a byte)]), or None when the time is over; goes on from a checkpoint."""
    variant, (lines, _, _) = VARIANTS[name], texts()
    stream = training_stream(lines, seed)
    order = batches(stream, seed)
    nll = nll_of(variant)
    adam = Adam(variant, rate, steps)
    flat, curve, first = torch.cat([torch.tensor(x).flatten() for x in initial_weights(variant, seed).values()]), [], 0
    kept = work / f"{name}-{seed}-{rate:g}-{steps}.checkpoint.npz"
    if kept.exists():
        with np.load(kept) as file:
            flat, adam.mean, adam.square = (torch.tensor(file[key]) for key in ("flat", "mean", "square"))
            curve = [tuple(row) for row in file["curve"].tolist()]
            first = int(file["next"])
    began = time.monotonic()
    for i in range(first, steps):
        loss, gradient = gradient_of(nll, flat, stream[order[i]].astype(np.int64))
        adam.step(flat, gradient, i)
        if i % 10 == 9 or i == steps - 1:
            curve.append((i + 1, loss))
        if i % 50 == 49 or i == steps - 1:
            part = kept.with_suffix(".part.npz")
            np.savez(part, next=i + 1, curve=np.array(curve), flat=flat.numpy(), mean=adam.mean.numpy(), square=adam.square.numpy())
            part.replace(kept)
            left = (time.monotonic() - began) / (i + 1 - first) * (steps - i - 1)
            print(f"{name} seed {seed} rate {rate:g}: step {i + 1} of {steps}, {loss / math.log(2):.3f} bits a byte, {left / 60:.1f} minutes left",
                  file=sys.stderr, flush=True)
            if time.monotonic() > deadline and i < steps - 1:
                return None
    return flat, curve


def rates_of(name, work):
    """{rate: bits a byte of the validation text after an eighth of the tokens, seed 1}, as far as it is known."""
    return {json.loads(path.read_text())["rate"]: json.loads(path.read_text())["bits_per_byte"] for path in sorted(work.glob(f"{name}-rate-*.json"))}


def try_rate(name, rate, work, deadline):
    """One learning rate for an eighth of the tokens. False when the time is over."""
    done = train(name, 1, rate, STEPS // 8, work, deadline)
    if done is None:
        return False
    loss = by_window(nll_of(VARIANTS[name]), done[0], windows(texts()[1])).mean()
    (work / f"{name}-rate-{rate:g}.json").write_text(json.dumps(dict(rate=rate, bits_per_byte=float(loss / math.log(2)))) + "\n")
    return True


def finish(name, seed, work, deadline):
    """One run to its end: weights and results. False when the time is over."""
    rates = rates_of(name, work)
    rate = min(rates, key=rates.get)
    done = train(name, seed, rate, STEPS, work, deadline)
    if done is None:
        return False
    variant, (lines, _, test) = VARIANTS[name], texts()
    flat, curve = done
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    nats = by_window(nll_of(variant), flat, windows(test))
    seen = by_window(nll_of(variant), flat, windows(b"".join(lines))[: len(nats)])
    np.savez(work / f"{name}-{seed}.npz", **{key: value.numpy() for key, value in unpack(variant, flat).items()})
    (work / f"{name}-{seed}.json").write_text(json.dumps(dict(
        git=commit or "unknown", end=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), variant=name, seed=seed, rate=rate, rates=rates,
        n_parameters=len(flat), d_ff=variant["d_ff"], cache_elements=elements_per_token_and_layer(variant), tokens=STEPS * BATCH * N_CTX, text_sha256=hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        test_bits_per_byte=float(nats.mean() / math.log(2)), train_bits_per_byte=float(seen.mean() / math.log(2)),
        recall_accuracy=recall_accuracy(variant, flat, test), curve=[(i, round(loss / math.log(2), 5)) for i, loss in curve],
        window_bits_per_byte=[round(float(x), 5) for x in nats.mean(1) / math.log(2)],
        position_bits_per_byte=[round(float(x), 5) for x in nats.mean(0) / math.log(2)])) + "\n")
    return True


@contextlib.contextmanager
def claimed(path):
    """False if another process has it."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def tasks(chosen):
    """(result, does it) of the learning rates and the runs, a variant's rates before its first run."""
    seen = set()
    for name, seed in chosen:
        if name not in seen:
            seen.add(name)
            for rate in LEARNING_RATES:
                yield f"{name}-rate-{rate:g}", name, lambda *where, name=name, rate=rate: try_rate(name, rate, *where)
        yield f"{name}-{seed}", name, lambda *where, name=name, seed=seed: finish(name, seed, *where)


def one_task(chosen, work, deadline):
    """Does the first task that is neither done nor taken nor waits for rates. -> "done", "late", "wait" or "nothing left"."""
    left = False
    for result, name, do in tasks(chosen):
        if (work / f"{result}.json").exists():
            continue
        left = True
        if "-rate-" not in result and len(rates_of(name, work)) < len(LEARNING_RATES):
            continue
        with claimed(work / f"{result}.lock") as mine:
            if mine and not (work / f"{result}.json").exists():
                return "done" if do(work, deadline) else "late"
    return "wait" if left else "nothing left"


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
    torch.set_num_threads(1)
    deadline = time.monotonic() + 60 * args.minutes
    while (state := one_task(args.chosen, args.work, deadline)) != "nothing left":
        if state == "late" or time.monotonic() > deadline:
            sys.exit("train.py: the time is over; the same command goes on")
        if state == "wait":
            time.sleep(10)


if __name__ == "__main__":
    main()
