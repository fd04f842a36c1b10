#!/usr/bin/env python3
"""Writes data/models/arch_deepseek2.gguf, latent attention with random weights, and data/golden/deepseek2_answers.h: logits by Hugging Face
transformers (DeepseekV2ForCausalLM, float64), which shares no code with kvlab.

usage: data/make_deepseek2_answers.py [ROOT]    (needs numpy, gguf, torch, transformers; ROOT: the project's root, default: that of this script)

All layers are dense. Layers differ in the types of their tensors and in how W_UK and W_UV are stored: as attn_k_b (each head transposed) and
attn_v_b, or as one attn_kv_b.
"""
import pathlib
import sys
import gguf
import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
from make_tiny_model import byte_tokens  # noqa: E402

SEED = 23
N_LAYER, N_EMBD, N_HEAD, N_FF, N_VOCAB, N_CTX = 3, 96, 4, 160, 257, 512
Q_RANK, KV_RANK, CONTENT, POSITION, VALUE = 48, 64, 32, 16, 32
ROPE_BASE, RMS_EPS = 10000.0, 1e-6
N_TOKENS, ROWS = 100, (0, 1, 31, 64, 99)
TYPES = ("F32", "Q8_0", "F16")
JOINT_UP = (False, False, True)

SHAPES = {  # rows, columns, size of an output for inputs of size 1
    "attn_q_a": (Q_RANK, N_EMBD, 1.0),
    "attn_q_b": (N_HEAD * (CONTENT + POSITION), Q_RANK, 1.6),
    "attn_kv_a_mqa": (KV_RANK + POSITION, N_EMBD, 1.6),
    "attn_k_b": (N_HEAD * KV_RANK, CONTENT, 1.3),
    "attn_v_b": (N_HEAD * VALUE, KV_RANK, 1.0),
    "attn_output": (N_EMBD, N_HEAD * VALUE, 1.5),
    "ffn_gate": (N_FF, N_EMBD, 1.0),
    "ffn_up": (N_FF, N_EMBD, 1.0),
    "ffn_down": (N_EMBD, N_FF, 1.5),
}
NORMS = {"attn_norm": N_EMBD, "attn_q_a_norm": Q_RANK, "attn_kv_a_norm": KV_RANK, "ffn_norm": N_EMBD}


def make_tensors():
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
    for layer in range(N_LAYER):
        for name, size in NORMS.items():
            add(f"blk.{layer}.{name}.weight", "F32", 1 + 0.1 * rng.standard_normal(size))
        for name, (rows, columns, gain) in SHAPES.items():
            values = gain / columns**0.5 * rng.standard_normal((rows, columns))
            if name == "attn_k_b":
                values = values.reshape(N_HEAD, KV_RANK, CONTENT)
            if name == "attn_v_b":
                values = values.reshape(N_HEAD, VALUE, KV_RANK)
            if JOINT_UP[layer] and name == "attn_k_b":
                keys = values
            elif JOINT_UP[layer] and name == "attn_v_b":
                joint = np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, KV_RANK)
                add(f"blk.{layer}.attn_kv_b.weight", TYPES[layer], joint)
            else:
                add(f"blk.{layer}.{name}.weight", TYPES[layer], values)
    return tensors


def write_model(path, tensors):
    w = gguf.GGUFWriter(path, "deepseek2")
    w.add_name("arch-deepseek2")
    w.add_description(f"random weights, seed {SEED}")
    w.add_context_length(N_CTX)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(N_LAYER)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_head_count_kv(1)
    w.add_key_length(KV_RANK + POSITION)
    w.add_value_length(KV_RANK)
    w.add_key_length_mla(CONTENT + POSITION)
    w.add_value_length_mla(VALUE)
    w.add_q_lora_rank(Q_RANK)
    w.add_kv_lora_rank(KV_RANK)
    w.add_layer_norm_rms_eps(RMS_EPS)
    w.add_rope_dimension_count(POSITION)
    w.add_rope_freq_base(ROPE_BASE)
    tokens, merges = byte_tokens()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.NORMAL] * N_VOCAB)
    w.add_token_merges(merges)
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)
    w.add_add_bos_token(False)
    for name, (kind, stored, _) in tensors.items():
        w.add_tensor(name, stored, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def state_of(tensors):
    """The same weights under Hugging Face's names."""
    get = lambda name: tensors[name + ".weight"][2]
    state = {"model.embed_tokens.weight": get("token_embd"), "model.norm.weight": get("output_norm"), "lm_head.weight": get("token_embd")}
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q_a": "self_attn.q_a_proj",
             "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
             "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    for layer in range(N_LAYER):
        for ours, theirs in names.items():
            state[f"model.layers.{layer}.{theirs}.weight"] = get(f"blk.{layer}.{ours}")
        if JOINT_UP[layer]:
            up = get(f"blk.{layer}.attn_kv_b")
        else:
            up = np.concatenate([get(f"blk.{layer}.attn_k_b").transpose(0, 2, 1), get(f"blk.{layer}.attn_v_b")], axis=1).reshape(-1, KV_RANK)
        state[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = up
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}


def logits_of(tensors, tokens):
    config = transformers.DeepseekV2Config(
        vocab_size=N_VOCAB, hidden_size=N_EMBD, intermediate_size=N_FF, num_hidden_layers=N_LAYER, num_attention_heads=N_HEAD,
        num_key_value_heads=N_HEAD, q_lora_rank=Q_RANK, kv_lora_rank=KV_RANK, qk_nope_head_dim=CONTENT, qk_rope_head_dim=POSITION,
        v_head_dim=VALUE, first_k_dense_replace=N_LAYER, max_position_embeddings=N_CTX, rms_norm_eps=RMS_EPS, rope_theta=ROPE_BASE,
        tie_word_embeddings=True, attention_bias=False, attn_implementation="eager")
    model = transformers.DeepseekV2ForCausalLM(config).double().eval()
    missing, unexpected = model.load_state_dict(state_of(tensors), strict=False)
    assert not unexpected and all("rotary" in name for name in missing), (missing, unexpected)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    tensors = make_tensors()
    write_model(root / "data/models/arch_deepseek2.gguf", tensors)
    tokens = [int(t) for t in np.random.default_rng(SEED + 1).integers(0, N_VOCAB, N_TOKENS)]
    logits = logits_of(tensors, tokens)
    with open(root / "data/golden/deepseek2_answers.h", "w") as out:
        out.write("/* Written by data/make_deepseek2_answers.py; do not edit. Logits of data/models/arch_deepseek2.gguf by Hugging Face transformers\n")
        out.write(f" * {transformers.__version__} in float64. */\n#ifndef KVL_DEEPSEEK2_ANSWERS_H\n#define KVL_DEEPSEEK2_ANSWERS_H\n#include <stdint.h>\n\n")
        out.write(f"enum {{ DEEPSEEK2_TOKENS = {N_TOKENS}, DEEPSEEK2_VOCAB = {N_VOCAB}, DEEPSEEK2_ROWS = {len(ROWS)} }};\n")
        out.write(f"enum {{ DEEPSEEK2_LAYERS = {N_LAYER}, DEEPSEEK2_RANK = {KV_RANK}, DEEPSEEK2_POSITION = {POSITION} }};\n")
        out.write("static const int32_t deepseek2_token[DEEPSEEK2_TOKENS] = {" + ", ".join(map(str, tokens)) + "};\n")
        out.write("static const uint32_t deepseek2_row[DEEPSEEK2_ROWS] = {" + ", ".join(map(str, ROWS)) + "};\n")
        out.write("static const float deepseek2_logits[DEEPSEEK2_ROWS][DEEPSEEK2_VOCAB] = {\n")
        for row in ROWS:
            values = [f"{np.float32(v):.9g}" for v in logits[row]]
            out.write("    {" + ",\n     ".join(", ".join(v + ("f" if "." in v or "e" in v else ".0f") for v in values[i : i + 10]) for i in range(0, N_VOCAB, 10)) + "},\n")
        out.write("};\n\n#endif\n")


if __name__ == "__main__":
    main()
