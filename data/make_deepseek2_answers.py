#!/usr/bin/env python3
"""Writes data/models/arch_deepseek2*.gguf, latent attention with random weights, and data/golden/deepseek2_answers.h: logits by Hugging Face
transformers (DeepseekV2ForCausalLM, float64), which shares no code with kvlab.

usage: data/make_deepseek2_answers.py [ROOT]    (needs numpy, gguf, torch, transformers; ROOT: the project's root, default: that of this script)

All layers are dense. Layers differ in the types of their tensors and in how W_UK and W_UV are stored: as attn_k_b (each head transposed) and
attn_v_b, or as one attn_kv_b. arch_deepseek2_direct.gguf has queries without a low rank (attn_q), heads and latents that are no whole number of
the 32 columns that products take at once, divisors of RoPE's frequencies, and in one layer no norm of the latent, as models have that were converted.
"""
import pathlib
import sys
from typing import NamedTuple

import gguf
import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
from make_tiny_model import add_byte_tokenizer, finish  # noqa: E402

SEED = 23
N_EMBD, N_FF, N_VOCAB, N_CTX = 96, 160, 257, 512
ROPE_BASE, RMS_EPS = 10000.0, 1e-6
N_TOKENS, ROWS = 100, (0, 1, 31, 64, 99)


class Model(NamedTuple):
    name: str
    n_head: int
    q_rank: int  # 0: queries are projected at once
    kv_rank: int
    content: int
    position: int
    value: int
    types: tuple  # of the layers' matrices
    joint_up: tuple
    latent_norm: tuple
    rope_divisor: tuple = ()  # of each pair's frequency

    def shapes(self):
        """name -> rows, columns, size of an output for inputs of size 1"""
        query_rows = self.n_head * (self.content + self.position)
        low_rank = {"attn_q_a": (self.q_rank, N_EMBD, 1.0), "attn_q_b": (query_rows, self.q_rank, 1.6)}
        return (low_rank if self.q_rank else {"attn_q": (query_rows, N_EMBD, 1.6)}) | {
            "attn_kv_a_mqa": (self.kv_rank + self.position, N_EMBD, 1.6),
            "attn_k_b": (self.n_head * self.kv_rank, self.content, 1.3),
            "attn_v_b": (self.n_head * self.value, self.kv_rank, 1.0),
            "attn_output": (N_EMBD, self.n_head * self.value, 1.5),
            "ffn_gate": (N_FF, N_EMBD, 1.0),
            "ffn_up": (N_FF, N_EMBD, 1.0),
            "ffn_down": (N_EMBD, N_FF, 1.5),
        }

    def norms(self):
        return {"attn_norm": N_EMBD} | ({"attn_q_a_norm": self.q_rank} if self.q_rank else {}) | {"attn_kv_a_norm": self.kv_rank, "ffn_norm": N_EMBD}


MODELS = (
    Model("deepseek2", 4, 48, 64, 32, 16, 32, ("F32", "Q8_0", "F16"), (False, False, True), (True, True, True)),
    Model("deepseek2_direct", 6, 0, 48, 16, 16, 16, ("Q8_0", "F16"), (False, True), (True, False), (1, 1, 2, 0.5, 3, 1, 1, 4)),
)


def make_tensors(m):
    """name -> (type, stored data, the float64 values that they stand for), matrices as [rows][columns] or [heads][rows][columns]."""
    rng = np.random.default_rng(SEED)
    tensors = {}

    def add(name, type_name, values):
        if type_name == "Q8_0" and values.shape[-1] % 32:
            type_name = "F16"
        kind = gguf.GGMLQuantizationType[type_name]
        stored = gguf.quants.quantize(values.astype(np.float32), kind)
        tensors[name] = kind, stored, gguf.quants.dequantize(stored, kind).astype(np.float64).reshape(values.shape)

    add("token_embd.weight", "F16", 0.35 * rng.standard_normal((N_VOCAB, N_EMBD)))
    add("output_norm.weight", "F32", 1 + 0.1 * rng.standard_normal(N_EMBD))
    if m.rope_divisor:
        add("rope_freqs.weight", "F32", np.array(m.rope_divisor, dtype=float))
    for layer in range(len(m.types)):
        for name, size in m.norms().items():
            if name != "attn_kv_a_norm" or m.latent_norm[layer]:
                add(f"blk.{layer}.{name}.weight", "F32", 1 + 0.1 * rng.standard_normal(size))
        for name, (rows, columns, gain) in m.shapes().items():
            values = gain / columns**0.5 * rng.standard_normal((rows, columns))
            if name == "attn_k_b":
                values = values.reshape(m.n_head, m.kv_rank, m.content)
            if name == "attn_v_b":
                values = values.reshape(m.n_head, m.value, m.kv_rank)
            if m.joint_up[layer] and name == "attn_k_b":
                keys = values
            elif m.joint_up[layer] and name == "attn_v_b":
                joint = np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, m.kv_rank)
                add(f"blk.{layer}.attn_kv_b.weight", m.types[layer], joint)
            else:
                add(f"blk.{layer}.{name}.weight", m.types[layer], values)
    return tensors


def write_model(path, m, tensors):
    w = gguf.GGUFWriter(path, "deepseek2")
    w.add_name(f"arch-{m.name.replace('_', '-')}")
    w.add_description(f"random weights, seed {SEED}")
    w.add_context_length(N_CTX)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(len(m.types))
    w.add_feed_forward_length(N_FF)
    w.add_head_count(m.n_head)
    w.add_head_count_kv(1)
    w.add_key_length(m.kv_rank + m.position)
    w.add_value_length(m.kv_rank)
    w.add_key_length_mla(m.content + m.position)
    w.add_value_length_mla(m.value)
    if m.q_rank:
        w.add_q_lora_rank(m.q_rank)
    w.add_kv_lora_rank(m.kv_rank)
    w.add_layer_norm_rms_eps(RMS_EPS)
    w.add_rope_dimension_count(m.position)
    w.add_rope_freq_base(ROPE_BASE)
    add_byte_tokenizer(w)
    for name, (kind, stored, _) in tensors.items():
        w.add_tensor(name, stored, raw_dtype=kind)
    finish(w)


def state_of(m, tensors):
    """The same weights under Hugging Face's names."""
    get = lambda name: tensors[name + ".weight"][2]
    state = {"model.embed_tokens.weight": get("token_embd"), "model.norm.weight": get("output_norm"), "lm_head.weight": get("token_embd")}
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj",
             "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
             "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    for layer in range(len(m.types)):
        for ours, theirs in names.items():
            if f"blk.{layer}.{ours}.weight" in tensors:
                state[f"model.layers.{layer}.{theirs}.weight"] = get(f"blk.{layer}.{ours}")
        if m.joint_up[layer]:
            up = get(f"blk.{layer}.attn_kv_b")
        else:
            up = np.concatenate([get(f"blk.{layer}.attn_k_b").transpose(0, 2, 1), get(f"blk.{layer}.attn_v_b")], axis=1).reshape(-1, m.kv_rank)
        state[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = up
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}


def logits_of(m, tensors, tokens):
    config = transformers.DeepseekV2Config(
        vocab_size=N_VOCAB, hidden_size=N_EMBD, intermediate_size=N_FF, num_hidden_layers=len(m.types), num_attention_heads=m.n_head,
        num_key_value_heads=m.n_head, q_lora_rank=m.q_rank or None, kv_lora_rank=m.kv_rank, qk_nope_head_dim=m.content, qk_rope_head_dim=m.position,
        v_head_dim=m.value, first_k_dense_replace=len(m.types), max_position_embeddings=N_CTX, rms_norm_eps=RMS_EPS, rope_theta=ROPE_BASE,
        tie_word_embeddings=True, attention_bias=False, attn_implementation="eager")
    model = transformers.DeepseekV2ForCausalLM(config).double().eval()
    missing, unexpected = model.load_state_dict(state_of(m, tensors), strict=False)
    assert not unexpected and all("rotary" in name or "kv_a_layernorm" in name for name in missing), (missing, unexpected)
    for layer, has_norm in zip(model.model.layers, m.latent_norm):
        if not has_norm:
            layer.self_attn.kv_a_layernorm = torch.nn.Identity()
    if m.rope_divisor:
        model.model.rotary_emb.inv_freq /= torch.tensor(m.rope_divisor)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def write_answers(out, m, logits):
    """What the model is, and rows of its logits."""
    out.write(f"enum {{ {m.name.upper()}_LAYERS = {len(m.types)}, {m.name.upper()}_RANK = {m.kv_rank}, {m.name.upper()}_POSITION = {m.position} }};\n")
    out.write(f"static const float {m.name}_logits[DEEPSEEK2_ROWS][DEEPSEEK2_VOCAB] = {{\n")
    for row in ROWS:
        values = [f"{np.float32(v):.9g}" for v in logits[row]]
        out.write("    {" + ",\n     ".join(", ".join(v + ("f" if "." in v or "e" in v else ".0f") for v in values[i : i + 10]) for i in range(0, N_VOCAB, 10)) + "},\n")
    out.write("};\n")


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    tokens = [int(t) for t in np.random.default_rng(SEED + 1).integers(0, N_VOCAB, N_TOKENS)]
    with open(root / "data/golden/deepseek2_answers.h", "w") as out:
        out.write("/* Written by data/make_deepseek2_answers.py; do not edit. Logits of data/models/arch_deepseek2*.gguf by Hugging Face transformers\n")
        out.write(f" * {transformers.__version__} in float64. */\n#ifndef KVL_DEEPSEEK2_ANSWERS_H\n#define KVL_DEEPSEEK2_ANSWERS_H\n#include <stdint.h>\n\n")
        out.write(f"enum {{ DEEPSEEK2_TOKENS = {N_TOKENS}, DEEPSEEK2_VOCAB = {N_VOCAB}, DEEPSEEK2_ROWS = {len(ROWS)} }};\n")
        out.write("static const int32_t deepseek2_token[DEEPSEEK2_TOKENS] = {" + ", ".join(map(str, tokens)) + "};\n")
        out.write("static const uint32_t deepseek2_row[DEEPSEEK2_ROWS] = {" + ", ".join(map(str, ROWS)) + "};\n")
        for m in MODELS:
            tensors = make_tensors(m)
            write_model(root / f"data/models/arch_{m.name}.gguf", m, tensors)
            write_answers(out, m, logits_of(m, tensors, tokens))
        out.write("\n#endif\n")


if __name__ == "__main__":
    main()
