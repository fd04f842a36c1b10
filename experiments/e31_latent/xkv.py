#!/usr/bin/env python3
"""What latents that several layers share would give: xKV (arXiv:2503.18893) simulated on SmolLM2, against latents of each layer at the same bytes.

usage: xkv.py MODEL.gguf --tokens IDS [--context T] [--score N] [--chunks C] [--group G] > xkv.csv    (needs torch and transformers; IDS: kvlab tokenize)

As xKV's own code, this does not save memory: a prompt of T tokens attends in full precision, its keys before RoPE and its values are replaced by their projection,
and N more tokens are scored on it, which stay exact. Columns: numbers stored a token, layer and side; where directions are from (the prompt itself, or the text's
other windows); layers that share a latent; numbers of the prompt's own directions, a token, layer and side; KLD to the exact cache.
"""
import argparse
import copy
import sys

import numpy as np
import torch
import transformers


def rotate(x, rotary, back):
    """x [1][H][T][D] of transformers, whose pairs are half a head apart."""
    cos, sin = rotary
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + (-turned if back else turned) * sin


def rows_of(cache, layer, side, rotary):
    """[T][H D]"""
    x = cache.layers[layer].keys if side == "k" else cache.layers[layer].values
    x = rotate(x, rotary, True) if side == "k" else x
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


def put_rows(cache, layer, side, rotary, rows, heads):
    x = rows.reshape(rows.shape[0], heads, -1).transpose(0, 1)[None]
    if side == "k":
        cache.layers[layer].keys = rotate(x, rotary, False)
    else:
        cache.layers[layer].values = x.contiguous()


def directions(rows):
    """Orthonormal columns, the best first."""
    energy, vectors = torch.linalg.eigh((rows.T @ rows).double())
    return vectors.flip(1).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--score", type=int, default=128)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--group", type=int, default=5, help="layers that share; a divisor of the model's")
    parser.add_argument("--ranks", default="16,32,48,64,96")
    parser.add_argument("--calibration", type=int, default=4, help="windows whose keys and values give the text's directions")
    args = parser.parse_args()
    folder, name = args.model.rsplit("/", 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    n_layer, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    length = args.context + args.score
    tokens = torch.from_numpy(np.loadtxt(args.tokens, dtype=np.int64))
    groups = {size: [range(i, i + size) for i in range(0, n_layer, size)] for size in (1, args.group)}

    def prompt(first):
        """Cache and angles of the tokens from first on."""
        ids = tokens[first : first + args.context][None]
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            cos, sin = model.model.rotary_emb(cache.layers[0].keys, torch.arange(args.context)[None])
        return cache, (cos[:, None], sin[:, None])

    def joined(cache, rotary, side, group):
        return torch.cat([rows_of(cache, layer, side, rotary) for layer in group], 1)

    def logprobs(first, cache):
        with torch.no_grad():
            out = model(tokens[first + args.context : first + length][None], past_key_values=cache, use_cache=True)
        return torch.log_softmax(out.logits[0].double(), -1)

    moments = {}
    for i in range(args.calibration):
        cache, rotary = prompt(len(tokens) - (i + 1) * length)
        for size in groups:
            for group in groups[size]:
                for side in "kv":
                    rows = joined(cache, rotary, side, group)
                    moments[size, group.start, side] = moments.get((size, group.start, side), 0) + (rows.T @ rows).double()
    learned = {key: torch.linalg.eigh(m)[1].flip(1).float() for key, m in moments.items()}

    print("window,numbers,directions,layers,own_directions,kld,nll", flush=True)
    for window in range(args.chunks):
        first = window * length
        kept, rotary = prompt(first)
        exact = logprobs(first, copy.deepcopy(kept))
        targets = tokens[first + args.context + 1 : first + length]
        for rank in map(int, args.ranks.split(",")):
            for size in groups:
                for origin in ("prompt", "text"):
                    cache = copy.deepcopy(kept)
                    for group in groups[size]:
                        for side in "kv":
                            rows = joined(kept, rotary, side, group)
                            basis = (directions(rows) if origin == "prompt" else learned[size, group.start, side])[:, : rank * size]
                            again = (rows @ basis @ basis.T).split(rows.shape[1] // size, 1)
                            for layer, part in zip(group, again):
                                put_rows(cache, layer, side, rotary, part, heads)
                    got = logprobs(first, cache)
                    kld = (exact.exp() * (exact - got)).sum(-1)[:-1].mean().item()
                    nll = -got[:-1].gather(1, targets[:, None]).mean().item()
                    own = rank * rows.shape[1] / args.context if origin == "prompt" else 0
                    print(f"{window},{rank},{origin},{size},{own:.1f},{kld:.6f},{nll:.6f}", flush=True)
    print(f"exact nll of the last window {-exact[:-1].gather(1, targets[:, None]).mean().item():.6f}", file=sys.stderr)


if __name__ == "__main__":
    main()
