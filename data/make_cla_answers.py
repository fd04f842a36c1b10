#!/usr/bin/env python3
"""Writes data/models/arch_cla.gguf, a llama with random weights whose layers share keys and values (cross-layer attention, arXiv:2405.12981), and
data/golden/cla_answers.h: what a float64 forward pass makes of it.

usage: data/make_cla_answers.py [ROOT]      (needs numpy and gguf; ROOT: the project's root, default: that of this script)

The key kvlab.attention.kv_source names, for each layer, the layer whose keys and values it reads; a layer that reads another's has no attn_k and attn_v.
The forward pass shares no code with kvlab.
"""
import pathlib
import sys
import gguf
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
from make_tiny_model import add_byte_tokenizer, c_array, finish, rms_norm, rotate, softmax, through_int4, HEAD_DIM, RMS_EPS, ROPE_BASE  # noqa: E402

SEED = 29
KV_SOURCE = (0, 0, 0, 3, 3)
N_EMBD, N_HEAD, N_KV_HEAD, N_FF, N_VOCAB, N_CTX = 64, 4, 2, 96, 257, 512
N_TOKENS, ROWS = 100, (0, 1, 31, 64, 99)
SINK, WINDOW, WINDOW_ROWS = 4, 30, (33, 34, 35, 99)
SHAPES = {  # rows, columns, size of an output for inputs of size 1
    "attn_q": (N_HEAD * HEAD_DIM, N_EMBD, 1.6),
    "attn_k": (N_KV_HEAD * HEAD_DIM, N_EMBD, 1.6),
    "attn_v": (N_KV_HEAD * HEAD_DIM, N_EMBD, 1.0),
    "attn_output": (N_EMBD, N_HEAD * HEAD_DIM, 1.5),
    "ffn_gate": (N_FF, N_EMBD, 1.0),
    "ffn_up": (N_FF, N_EMBD, 1.0),
    "ffn_down": (N_EMBD, N_FF, 1.5),
}


def make_tensors():
    """name -> values as they are stored: binary16 matrices, binary32 vectors."""
    rng = np.random.default_rng(SEED)
    tensors = {"token_embd": np.float16(0.35 * rng.standard_normal((N_VOCAB, N_EMBD))),
               "output_norm": np.float32(1 + 0.1 * rng.standard_normal(N_EMBD))}
    for layer, source in enumerate(KV_SOURCE):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}"] = np.float32(1 + 0.1 * rng.standard_normal(N_EMBD))
        for name, (rows, columns, gain) in SHAPES.items():
            if source == layer or name not in ("attn_k", "attn_v"):
                tensors[f"blk.{layer}.{name}"] = np.float16(gain / columns**0.5 * rng.standard_normal((rows, columns)))
    return tensors


def write_model(path, tensors):
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tiny cla")
    w.add_description(f"random weights, seed {SEED}")
    w.add_context_length(N_CTX)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(len(KV_SOURCE))
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_head_count_kv(N_KV_HEAD)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_layer_norm_rms_eps(RMS_EPS)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_rope_freq_base(ROPE_BASE)
    w.add_array("kvlab.attention.kv_source", list(KV_SOURCE))
    add_byte_tokenizer(w)
    for name, values in tensors.items():
        w.add_tensor(f"{name}.weight", values)
    finish(w)


def forward(tensors, tokens, window=None, cached=lambda x: x):
    """Logits [T][vocab]; window: (sinks, newest tokens seen)."""
    n = len(tokens)
    query, key = np.arange(n)[:, None], np.arange(n)[None, :]
    seen = key <= query
    if window is not None:
        seen &= (key < window[0]) | (key > query - window[1])
    x = tensors["token_embd"][tokens].astype(np.float64)
    made = {}
    for layer, source in enumerate(KV_SOURCE):
        of = lambda name: tensors[f"blk.{layer}.{name}"].astype(np.float64)
        h = rms_norm(x, of("attn_norm"))
        q = rotate((h @ of("attn_q").T).reshape(n, N_HEAD, HEAD_DIM))
        if source == layer:
            made[layer] = (cached(rotate((h @ of("attn_k").T).reshape(n, N_KV_HEAD, HEAD_DIM))),
                           cached((h @ of("attn_v").T).reshape(n, N_KV_HEAD, HEAD_DIM)))
        k, v = (np.repeat(side, N_HEAD // N_KV_HEAD, 1) for side in made[source])
        p = softmax(np.where(seen, np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5, -np.inf))
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(n, -1) @ of("attn_output").T
        h = rms_norm(x, of("ffn_norm"))
        gate = h @ of("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ of("ffn_up").T)) @ of("ffn_down").T
    return rms_norm(x, tensors["output_norm"].astype(np.float64)) @ tensors["token_embd"].astype(np.float64).T


def write_answers(path, tensors):
    tokens = np.random.default_rng(SEED + 1).integers(1, 256, N_TOKENS)
    logits, windowed, int4 = forward(tensors, tokens), forward(tensors, tokens, (SINK, WINDOW)), forward(tensors, tokens, cached=through_int4)
    print(f"logits up to {abs(logits).max():.2f}; the window moves some by {abs(windowed - logits).max():.2f}, int4 by {abs(int4 - logits).max():.2f}",
          file=sys.stderr)
    row_array = lambda name, rows, values: (c_array(f"uint32_t {name}_row[{len(rows)}]", rows, "%d")
                                            + c_array(f"float {name}_logits[{len(rows)}][{N_VOCAB}]", values[list(rows)], "%.9g"))
    path.write_text("\n".join([
        "/* What a float64 forward pass makes of data/models/arch_cla.gguf. Written by data/make_cla_answers.py. */\n",
        f"enum {{ CLA_TOKENS = {N_TOKENS}, CLA_VOCAB = {N_VOCAB}, CLA_LAYERS = {len(KV_SOURCE)}, CLA_OWN_LAYERS = {len(set(KV_SOURCE))}, "
        f"CLA_KV_HEADS = {N_KV_HEAD}, CLA_HEAD_DIM = {HEAD_DIM} }};\n",
        c_array(f"uint32_t cla_kv_source[{len(KV_SOURCE)}]", KV_SOURCE, "%d"),
        c_array(f"int32_t cla_token[{N_TOKENS}]", tokens, "%d"),
        "/* Logits after the tokens at these positions. */\n", row_array("cla", ROWS, logits),
        f"/* The same with --kv \"sink={SINK} window={WINDOW}\". */\n#define CLA_WINDOW \"sink={SINK} window={WINDOW}\"\n",
        row_array("cla_window", WINDOW_ROWS, windowed),
        "/* The same with every key and value through int4 (protocol p1). */\n", row_array("cla_int4", ROWS, int4)]))


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    tensors = make_tensors()
    write_model(root / "data/models/arch_cla.gguf", tensors)
    write_answers(root / "data/golden/cla_answers.h", tensors)


if __name__ == "__main__":
    main()
