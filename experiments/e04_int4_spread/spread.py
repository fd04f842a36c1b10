#!/usr/bin/env python3
"""Perplexity of one model and one text with a fake-quantized cache (protocol P1), with the order of sums as the only thing that changes.

Independent of kvlab: a llama forward pass in numpy on the dequantized weights. Needs numpy and the gguf package.

    build/kvlab tokenize -m M.gguf -f data/text/wiki.test.raw > ids.txt
    python3 experiments/e04_int4_spread/spread.py M.gguf ids.txt [--chunks 40] [--orders 3] [--bits 4] [-o nll.csv]

An order is a seed: the channels of the residual stream and of every feed-forward block are renamed by a random permutation. That is the same function,
and every sum over channels adds its terms in another order. Order 0 is the file's own. The float64 run stands for exact sums; KLD and top-1 are against the f16 cache in float32.
"""
import argparse
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


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


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("model")
    args.add_argument("ids")
    args.add_argument("--ctx", type=int, default=512)
    args.add_argument("--chunks", type=int, default=40)
    args.add_argument("--orders", type=int, default=3)
    args.add_argument("--bits", type=int, default=4)
    args.add_argument("-o", "--output", help="CSV: a line a window, the nll of every run")
    args = args.parse_args()
    windows = np.loadtxt(args.ids, dtype=np.int64)[:args.ctx * args.chunks].reshape(args.chunks, args.ctx)
    target = np.arange(args.ctx - args.ctx // 2 - 1), windows[:, args.ctx // 2 + 1:]

    exact, base = Model(args.model, np.float64, 0), Model(args.model, np.float32, 0)
    others = [Model(args.model, np.float32, order) for order in range(1, args.orders)]
    runs = {f"float32 {i}": model for i, model in enumerate([base] + others)} | {"float64": exact}
    found = []  # [window][run][nll, KLD, same top-1]; the first run is the f16 cache
    for window, right in zip(windows, target[1]):
        f16 = base.log_probabilities(window, half)
        rows = [(-f16[target[0], right].mean(), 0, 1)]
        for model in runs.values():
            coded = model.log_probabilities(window, codes(args.bits))
            rows.append((-coded[target[0], right].mean(), (np.exp(f16) * (f16 - coded)).sum(axis=-1).mean(),
                         (f16.argmax(axis=-1) == coded.argmax(axis=-1)).mean()))
        found.append(rows)
        if args.output:
            np.savetxt(args.output, np.array(found)[:, :, 0], fmt="%.6f", delimiter=",", comments="", header=",".join(["f16", *runs]))

    found = np.array(found)
    print(f"{args.bits} bits, {args.chunks} windows of {args.ctx}; sd: over windows, of the nll less the float64 run's\n"
          f"{'sums':<10} {'PPL':>9} {'KLD':>8} {'top-1':>7} {'sd':>7}")
    for i, name in enumerate(["f16", *runs]):
        nll, kld, top1 = found[:, i].mean(axis=0)
        spread = (found[:, i, 0] - found[:, -1, 0]).std(ddof=1)
        print(f"{name:<10} {np.exp(nll):9.4f} {kld:8.5f} {top1:7.4f}" + (f" {spread:7.4f}" if i else ""))


if __name__ == "__main__":
    main()
