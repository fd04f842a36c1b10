#!/usr/bin/env python3
"""nll of a model's windows with a fake-quantized cache (protocol P1), with the order of sums as the only thing that changes, into a run file.

Independent of kvlab: a llama forward pass in numpy on the dequantized weights. Needs numpy, h5py and the gguf package.

    experiments/e04_int4_spread/spread.py [M.gguf [ids.txt]] [--chunks 40] [--orders 3]       runs/e04_int4_spread/numpy-*.h5

An order is a seed: the channels of the residual stream and of every feed-forward block are renamed by a random permutation. That is the same function,
and every sum over channels adds its terms in another order. Order 0 is the file's own. The float64 run stands for exact sums; KLD and top-1 are against the f16 cache in float32.
reference.py does the same with Hugging Face transformers; report.py makes tables of both.
"""
import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Model:
    def __init__(self, path, dtype, order):
        reader = GGUFReader(path)
        field = lambda name: reader.fields[name].contents()
        tensors = {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
        self.n_layer, self.n_head = field("llama.block_count"), field("llama.attention.head_count")
        self.n_kv, self.eps = field("llama.attention.head_count_kv"), field("llama.attention.layer_norm_rms_epsilon")
        self.base, self.dtype = field("llama.rope.freq_base"), dtype
        assert "rope_freqs.weight" not in tensors and "output.weight" not in tensors, "RoPE factors and an own output matrix are not done here"

        rng = np.random.default_rng(order)
        renamed = lambda n: rng.permutation(n) if order else np.arange(n)
        embd = renamed(tensors["token_embd.weight"].shape[1])
        cast = lambda a: np.ascontiguousarray(a, dtype=dtype)
        self.embd = cast(tensors["token_embd.weight"][:, embd])
        self.norm = cast(tensors["output_norm.weight"][embd])
        self.layers = []
        for i in range(self.n_layer):
            get = lambda name: tensors[f"blk.{i}.{name}.weight"]
            ffn = renamed(get("ffn_down").shape[1])
            layer = {name: cast(get(name)[embd]) for name in ("attn_norm", "ffn_norm")}
            layer |= {name: cast(get(name)[:, embd].T) for name in ("attn_q", "attn_k", "attn_v")}
            layer |= {name: cast(get(name)[ffn][:, embd].T) for name in ("ffn_gate", "ffn_up")}
            layer["attn_output"] = cast(get("attn_output")[embd].T)
            layer["ffn_down"] = cast(get("ffn_down")[embd][:, ffn].T)
            self.layers.append(layer)

    def rms(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.dtype(self.eps)) * weight

    def rope(self, x):  # [H][T][D], pairs 2i and 2i+1
        angle = np.outer(np.arange(x.shape[1]), self.base ** (-np.arange(0, x.shape[2], 2) / x.shape[2]))
        cos, sin = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1).reshape(x.shape)

    def log_probabilities(self, ids, store):
        """[T][V] of a window, keys and values read as store() returns them."""
        n = len(ids)
        heads = lambda x, count: x.reshape(n, count, -1).transpose(1, 0, 2)
        future = np.triu(np.full((n, n), -np.inf, self.dtype), 1)
        x = self.embd[ids]
        for w in self.layers:
            h = self.rms(x, w["attn_norm"])
            q = self.rope(heads(h @ w["attn_q"], self.n_head))
            k = store(self.rope(heads(h @ w["attn_k"], self.n_kv)))
            v = store(heads(h @ w["attn_v"], self.n_kv))
            k, v = (np.repeat(a, self.n_head // self.n_kv, axis=0) for a in (k, v))
            s = q @ k.transpose(0, 2, 1) / self.dtype(np.sqrt(q.shape[2])) + future
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            x = x + (p @ v).transpose(1, 0, 2).reshape(n, -1) @ w["attn_output"]
            h = self.rms(x, w["ffn_norm"])
            gate = h @ w["ffn_gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"])) @ w["ffn_down"]
        logits = (self.rms(x, self.norm)[n // 2:n - 1] @ self.embd.T).astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def half(x):
    return x.astype(np.float16).astype(x.dtype)


def codes(bits):
    """Asymmetric codes of `bits` per token and head: what is stored, read back."""
    top = 2 ** bits - 1

    def store(x):
        low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        z, s = half(low), half((high - low) / x.dtype.type(top))
        return np.clip(np.rint((x - z) / np.where(s > 0, s, 1)), 0, top) * s + z
    return store


CACHES = {"f16": half, "int8": codes(8), "int4": codes(4)}
COLUMNS = [("program", "1", "what computed it"), ("kv", "1", "cache"), ("window", "1", "its number"), ("nll", "nat", "mean over the window's second half"),
           ("kld", "nat", "of the first program's f16 cache from it, mean"), ("same_top1", "1", "share of tokens whose likeliest successor is the f16 cache's")]


def parse_arguments(about):
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "data/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("ids", type=Path, nargs="?", help="token ids, one a line (default: those that kvlab tokenize makes of data/text/wiki.test.raw)")
    parser.add_argument("--kvlab", default=ROOT / "build/kvlab")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=40)
    return parser


def read_ids(args):
    words = args.ids.read_text() if args.ids else subprocess.run([args.kvlab, "tokenize", "-m", args.model, "-f", ROOT / "data/text/wiki.test.raw"], check=True,
                                                                  stdout=subprocess.PIPE, text=True).stdout
    ids = np.array(words.split()[:args.ctx * args.chunks], dtype=np.int64)
    if len(ids) < args.ctx * args.chunks:
        sys.exit(f"{len(ids)} tokens, {args.chunks} windows of {args.ctx} need {args.ctx * args.chunks}")
    return ids.reshape(args.chunks, args.ctx)


def scores(log_probabilities, base, right):
    at = np.arange(len(right)), right
    return (float(-log_probabilities[at].mean()), float((np.exp(base) * (base - log_probabilities)).sum(axis=-1).mean()),
            float((base.argmax(axis=-1) == log_probabilities.argmax(axis=-1)).mean()))


def rows_of(runs, i, window):
    base, rows = None, []
    for program, log_probabilities, kv in runs:
        found = log_probabilities(window, CACHES[kv])
        base = found if base is None else base
        rows.append((program, kv, i, *scores(found, base, window[len(window) // 2 + 1:])))
        print("{:<16} {:<5} window {:3}  nll {:.5f}  KLD {:.5f}  same top-1 {:.4f}".format(*rows[-1]), file=sys.stderr, flush=True)
    return rows


def measure(args, name, runs):
    """runs: [(program, its log_probabilities, cache)], the f16 cache that others are compared with first. A run file named `name` and the time; ctrl-c keeps whole windows."""
    sys.path.append(str(HERE.parent / "peers"))
    from runfile import RunFile
    if args.chunks < 1 or args.ctx < 4:
        sys.exit("--chunks: at least 1, --ctx: at least 4")
    windows = read_ids(args)
    config = {"command": f"e04_int4_spread {name}", "model": args.model.name, "n_ctx": args.ctx, "chunks": args.chunks}
    with RunFile(str(ROOT / "runs" / HERE.name / time.strftime(f"{name}-%Y%m%d-%H%M%S.h5", time.gmtime())), "nll of windows with a fake-quantized cache", config) as file:
        rows = []
        try:
            for i, window in enumerate(windows):
                rows += rows_of(runs, i, window)
        except KeyboardInterrupt:
            print(f"stopped: {len(rows) // len(runs)} windows are kept", file=sys.stderr)
        file.table("windows", COLUMNS, rows)
    print(file.path)


def main():
    parser = parse_arguments(__doc__)
    parser.add_argument("--orders", type=int, default=3)
    args = parser.parse_args()
    runs = [(f"numpy, order {order}", Model(args.model, np.float32, order).log_probabilities, "int4") for order in range(args.orders)]
    runs = [(runs[0][0], runs[0][1], "f16"), *runs, ("numpy, float64", Model(args.model, np.float64, 0).log_probabilities, "int4")]
    measure(args, "numpy", runs)


if __name__ == "__main__":
    main()
