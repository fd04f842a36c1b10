#!/usr/bin/env python3
"""Writes GGUFs of what train.py trained, data/models/family-NAME.gguf, matrices in binary16, one token a byte; and data/golden/family_answers.h: what the
training code makes of the first bytes of the test text with these weights. See why.md.

usage: export.py [--work DIR] [--seed S] [-o ROOT]     (needs torch, gguf and numpy; exports every variant that has weights)

MHA, GQA and MQA are the architecture llama, MLA is deepseek2 without experts and without low-rank queries. Where a layer reads the keys and
values of another (CLA), kvlab.attention.kv_source names, for each layer, the layer that writes them; what is not read has no tensor.
"""
import argparse
import pathlib

import textwrap

import gguf
import numpy as np
import torch

import train

NAMES = {"o": "attn_output", "q": "attn_q", "k": "attn_k", "v": "attn_v", "kv_a": "attn_kv_a_mqa", "kv_norm": "attn_kv_a_norm", "kv_b": "attn_kv_b",
         "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def byte_tokens():
    """GPT-2's names of the 256 bytes, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tensor_name(name):
    if name in ("embed", "norm"):
        return {"embed": "token_embd.weight", "norm": "output_norm.weight"}[name]
    layer, part = name.split(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def describe(w, name, variant):
    w.add_name(f"family {name}")
    w.add_context_length(train.N_CTX)
    w.add_embedding_length(train.D_MODEL)
    w.add_block_count(train.N_LAYER)
    w.add_feed_forward_length(variant["d_ff"])
    w.add_head_count(train.N_HEAD)
    w.add_layer_norm_rms_eps(train.RMS_EPS)
    w.add_rope_dimension_count(train.ROPE_DIM)
    w.add_rope_freq_base(train.ROPE_BASE)
    w.add_value_length(train.HEAD_DIM)
    w.add_vocab_size(train.N_VOCAB)
    if "rank" in variant:
        w.add_head_count_kv(train.N_HEAD)
        w.add_key_length(train.HEAD_DIM + train.ROPE_DIM)
        w.add_kv_lora_rank(variant["rank"])
        w.add_leading_dense_block_count(train.N_LAYER)
    else:
        w.add_head_count_kv(variant["n_kv_head"])
        w.add_key_length(train.HEAD_DIM)
    if variant.get("shared", 1) > 1:
        w.add_array("kvlab.attention.kv_source", [layer - layer % variant["shared"] for layer in range(train.N_LAYER)])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(byte_tokens())
    w.add_token_types([gguf.TokenType.NORMAL] * train.N_VOCAB)
    w.add_token_merges(["a b"])  # "ab" is no token, so this never merges; a GGUF cannot hold an empty list
    w.add_bos_token_id(10)
    w.add_eos_token_id(10)
    w.add_add_bos_token(False)


def export(name, weights, path):
    """weights {name: array (inputs, outputs) or vector}; GGUF stores rows of outputs. Vectors stay binary32."""
    w = gguf.GGUFWriter(path, "deepseek2" if "rank" in train.VARIANTS[name] else "llama")
    describe(w, name, train.VARIANTS[name])
    for key, value in weights.items():
        if value.ndim == 1:
            w.add_tensor(tensor_name(key), value.astype(np.float32))
        else:
            w.add_tensor(tensor_name(key), np.ascontiguousarray(value if key == "embed" else value.T).astype(np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def answer(name, weights, piece):
    """Mean nats of a byte of the piece with the weights as they are stored, in binary32."""
    stored = {key: torch.tensor(value.astype(np.float16 if value.ndim == 2 else np.float32).astype(np.float32)) for key, value in weights.items()}
    flat = torch.cat([stored[key].flatten() for key in train.shapes_of(train.VARIANTS[name])])
    return float(train.by_window(train.nll_of(train.VARIANTS[name]), flat, piece[None]).mean())


def write_answers(path, piece, answers):
    lines = "".join(f'    {{"{name}", {train.N_LAYER * train.elements_per_token_and_layer(train.VARIANTS[name]):.0f}, {nats:.9g}}},\n'
                    for name, nats in answers.items())
    path.write_text(
        "/* What the training code makes of a piece of the King James Bible, the beginning of the test text. Written by experiments/e30_family/export.py. */\n"
        f"enum {{ FAMILY_TOKENS = {len(piece)} }};\nstatic const int32_t family_token[FAMILY_TOKENS] = {{\n"
        + textwrap.fill(", ".join(map(str, piece)), 130)
        + "};\n/* data/models/family-NAME.gguf: elements of a token's keys and values in all layers, mean nats of the tokens behind the first. */\n"
        f"static const struct {{\n    const char *name;\n    uint32_t elements;\n    double nll;\n}} family_answer[] = {{\n{lines}}};\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=pathlib.Path, default=train.ROOT / "build" / "family", help="where train.py left the weights")
    parser.add_argument("--seed", type=int, default=1, help="which of the trained ones (default: 1)")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=train.ROOT, help="the project's root, in whose data/ the files go")
    args = parser.parse_args()
    piece, answers = train.windows(train.texts()[2])[0], {}
    for name in train.VARIANTS:
        trained = args.work / f"{name}-{args.seed}.npz"
        if not trained.exists():
            continue
        with np.load(trained) as file:
            weights = dict(file)
        path = args.output / "data" / "models" / f"family-{name}.gguf"
        export(name, weights, path)
        answers[name] = answer(name, weights, piece)
        print(f"{path}: {path.stat().st_size} bytes, {answers[name]:.6f} nats a byte of the piece")
    write_answers(args.output / "data" / "golden" / "family_answers.h", piece, answers)


if __name__ == "__main__":
    main()
