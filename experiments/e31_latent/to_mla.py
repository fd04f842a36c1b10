#!/usr/bin/env python3
"""Makes a model of grouped queries one of latent attention without training, after TransMLA (arXiv:2502.07864) and MHA2MLA (arXiv:2502.14837).

usage: to_mla.py MODEL.gguf OUT.gguf --moments FILE.npz [--rank R] [--components C | --frequencies F] [--still]
       to_mla.py MODEL.gguf --moments FILE.npz --tokens IDS [--first-chunk I --chunks N -c T]     (makes the moments; needs torch and transformers)

RoPE's pair j of the kv heads is, for each token, a row of H complex numbers that it turns by the same angle; whatever mixes them with complex weights
commutes with it. A joint row of the cache holds, turned, some of these mixtures, which all heads share, and a latent of everything else: of the other mixtures,
which then have no position, and of the values.

    --components C     of each pair the C principal components over the heads are turned (TransMLA; C = 1: 64 channels of a head of 64)
    --frequencies F    of each head F pairs are turned, evenly chosen (MHA2MLA's uniform choice)
    --rank R           of the latent, multiple of 8 (default: all there is, where only positions are lost). Keys are scaled to the values' size before the
                       directions are found, as TransMLA does
    --still            RoPE turns nothing, in the model that is read too: with all ranks nothing is lost then, which checks the conversion

Moments: mean of x x^T over calibration tokens of each layer's normalized input x; keys and values are linear in it.
"""
import argparse
from typing import NamedTuple

import gguf
import numpy as np

F16, F32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
STILL = 1e30  # divides frequencies


class Dims(NamedTuple):
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    rope_base: float


def number(reader, suffix):
    return reader.fields[f"llama.{suffix}"].contents()


def dims_of(reader):
    n_head, n_embd = number(reader, "attention.head_count"), number(reader, "embedding_length")
    return Dims(number(reader, "block_count"), n_head, number(reader, "attention.head_count_kv"), n_embd // n_head, number(reader, "rope.freq_base"))


def matrices_of(reader):
    """name -> float64 [rows][columns]"""
    return lambda name: next(gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors if t.name == name)


# ---- moments ----

def make_moments(args):
    import torch
    import transformers

    path = args.model.rsplit("/", 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path[0], gguf_file=path[1], dtype=torch.float32).eval()
    tokens = np.loadtxt(args.tokens, dtype=np.int64)[args.first_chunk * args.ctx : (args.first_chunk + args.chunks) * args.ctx].reshape(args.chunks, args.ctx)
    sums = np.zeros((len(model.model.layers), model.config.hidden_size, model.config.hidden_size))

    def watch(layer):
        def hook(module, inputs):
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double().numpy()
            sums[layer] += x.T @ x
        return hook

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_pre_hook(watch(i))
    with torch.no_grad():
        for row in tokens:
            model.model(torch.from_numpy(row[None]))
    np.savez_compressed(args.moments, moments=(sums / tokens.size).astype(np.float32))


# ---- conversion of a layer ----

def complex_rows(matrix, heads):
    """[heads * D][E] with pairs side by side -> [pairs][heads][E] complex"""
    rows = matrix.reshape(heads, -1, 2, matrix.shape[-1])
    return (rows[:, :, 0] + 1j * rows[:, :, 1]).transpose(1, 0, 2)


def real_rows(rows):
    """[n][E] complex -> [2 n][E], pairs side by side"""
    return np.stack([rows.real, rows.imag], 1).reshape(2 * len(rows), -1)


def turned_pairs(d, args):
    """(pair, component) of what RoPE turns, and of the rest."""
    pairs = d.head_dim // 2
    chosen = range(pairs) if args.components else [i * pairs // args.frequencies for i in range(args.frequencies)]
    turned = [(j, c) for j in chosen for c in range(args.components or d.n_kv_head)]
    return turned, [(j, c) for j in range(pairs) for c in range(d.n_kv_head) if (j, c) not in turned]


def mixtures(keys, moment, args):
    """Unitary [pairs][heads][components] whose columns the components are: principal ones first, or the heads themselves."""
    if not args.components:
        return np.broadcast_to(np.eye(keys.shape[1]), (keys.shape[0], keys.shape[1], keys.shape[1]))
    energy, vectors = np.linalg.eigh(np.einsum("jhe,ef,jgf->jhg", keys, moment, keys.conj(), optimize=True))
    return vectors[:, :, ::-1]


def rms_scale(matrix, moment):
    return np.sqrt(np.trace(matrix @ moment @ matrix.T))


def convert_layer(d, get, layer, moment, args):
    """The layer's tensors: attn_q, attn_kv_a_mqa, attn_kv_b."""
    keys = complex_rows(get(f"blk.{layer}.attn_k.weight"), d.n_kv_head)
    queries = complex_rows(get(f"blk.{layer}.attn_q.weight"), d.n_head)
    values = get(f"blk.{layer}.attn_v.weight")
    mix = mixtures(keys, moment, args)
    turned, rest = turned_pairs(d, args)
    components = np.einsum("jhc,jhe->jce", mix.conj(), keys)  # k_h = sum_c mix_hc component_c
    pick = lambda rows, which: real_rows(np.array([rows[j, c] for j, c in which]))
    content = pick(components, rest)
    balance = rms_scale(content, moment) / rms_scale(values, moment)
    both = np.concatenate([content / balance, values])
    energy, directions = np.linalg.eigh(both @ moment @ both.T)
    down = directions[:, ::-1][:, : args.rank or len(both)]
    scale = np.sqrt((len(content) + 2 * len(turned)) / d.head_dim)
    q, up = [], []
    for h in range(d.n_head):
        g = h * d.n_kv_head // d.n_head
        # Re(q conj(k_g)) = sum_c Re(q conj(mix_gc) conj(component_c))
        query = queries[:, h, None, :] * mix[:, g, :, None].conj()
        q += [scale * pick(query, rest), scale * pick(query, turned)]
        up += [balance * down[: len(content)], down[len(content) + g * d.head_dim : len(content) + (g + 1) * d.head_dim]]
    return {"attn_q": np.concatenate(q), "attn_kv_a_mqa": np.concatenate([down.T @ both, pick(components, turned)]), "attn_kv_b": np.concatenate(up)}


def rope_divisors(d, args):
    """Of RoPE over the turned channels: what makes its frequencies those of their pairs."""
    pairs = [j for j, _ in turned_pairs(d, args)[0]]
    plain = d.rope_base ** (-np.arange(len(pairs)) / len(pairs))
    return plain * STILL if args.still else plain / d.rope_base ** (-np.array(pairs) / (d.head_dim // 2))


# ---- the file ----

COPIED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "rope.freq_base", "attention.layer_norm_rms_epsilon", "vocab_size")
UINT32 = gguf.GGUFValueType.UINT32


def copy_fields(reader, w):
    """What is not of the architecture: the tokenizer, names."""
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "llama.")) or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        w.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)


def convert(args):
    reader = gguf.GGUFReader(args.model)
    d, get = dims_of(reader), matrices_of(reader)
    moments = np.load(args.moments)["moments"].astype(np.float64)
    turned, rest = turned_pairs(d, args)
    rank = args.rank or 2 * len(rest) + d.n_kv_head * d.head_dim
    w = gguf.GGUFWriter(args.out, "deepseek2")
    copy_fields(reader, w)
    for name in COPIED:
        field = reader.fields.get(f"llama.{name}")
        if field is not None:
            w.add_key_value(f"deepseek2.{name}", field.contents(), field.types[0])
    for name, value in {"attention.head_count": d.n_head, "attention.head_count_kv": 1, "attention.kv_lora_rank": rank,
                        "attention.key_length": rank + 2 * len(turned), "attention.value_length": rank,
                        "attention.key_length_mla": 2 * (len(rest) + len(turned)), "attention.value_length_mla": d.head_dim,
                        "rope.dimension_count": 2 * len(turned)}.items():
        w.add_key_value(f"deepseek2.{name}", value, UINT32)
    w.add_tensor("rope_freqs.weight", rope_divisors(d, args).astype(np.float32))
    for t in reader.tensors:
        if not t.name.endswith((".attn_q.weight", ".attn_k.weight", ".attn_v.weight")):
            w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    for layer in range(d.n_layer):
        for name, values in convert_layer(d, get, layer, moments[layer], args).items():
            w.add_tensor(f"blk.{layer}.{name}.weight", values.astype(np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(f"{args.out}: latent {rank}, turned {2 * len(turned)}; {rank + 2 * len(turned)} elements a token and layer, {2 * d.n_kv_head * d.head_dim} before")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--moments", required=True)
    parser.add_argument("--tokens", help="ids, one a line (kvlab tokenize): make the moments")
    parser.add_argument("--first-chunk", type=int, default=140)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("-c", "--ctx", type=int, default=512)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--components", type=int)
    parser.add_argument("--frequencies", type=int)
    parser.add_argument("--still", action="store_true")
    args = parser.parse_args()
    if args.tokens:
        return make_moments(args)
    if args.out is None or bool(args.components) == bool(args.frequencies):
        parser.error("OUT.gguf and one of --components and --frequencies are needed")
    convert(args)


if __name__ == "__main__":
    main()
