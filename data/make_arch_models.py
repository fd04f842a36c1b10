#!/usr/bin/env python3
"""Writes data/models/arch_*.gguf, a small model with random weights of each architecture, and data/golden/arch_answers.h: the logits that
Hugging Face transformers gives for them, in float32 on the weights as they are stored.

usage: data/make_arch_models.py [ROOT]      (needs torch, transformers, numpy and gguf; ROOT: the project's root, default: the one of this script)

Every feature that tells an architecture from llama is made to matter: biases and the weights of norms are far from 0 and 1, windows are
shorter than the text, the scale of gemma3's queries is not that of the head. Queries and keys of mistral are written with RoPE's pairs
side by side, as converters write them; the others as transformers has them.
"""
import pathlib
import sys
import textwrap
import gguf
import numpy as np
import torch
import transformers

SEED = 23
N_EMBD, N_HEAD, HEAD_DIM, N_FF, N_CTX = 64, 4, 16, 96, 256
N_TOKENS, WINDOW = 80, 24
ROWS = (0, 1, 23, 24, 25, 48, 64, 79)
QUERY_SCALAR = 40 # gemma3: scores are divided by its root
COMMON = dict(hidden_size=N_EMBD, intermediate_size=N_FF, num_attention_heads=N_HEAD, head_dim=HEAD_DIM, max_position_embeddings=N_CTX,
              attn_implementation="eager", torch_dtype=torch.float32)

# name: configuration class, model class, its settings, what GGUF adds to the common keys
ARCHS = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM,
              dict(num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=False), {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM,
              dict(num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=True), {}),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM,
               dict(num_hidden_layers=7, num_key_value_heads=1, rms_norm_eps=1e-6, tie_word_embeddings=True, sliding_window=WINDOW,
                    query_pre_attn_scalar=QUERY_SCALAR),
               {"attention.sliding_window": WINDOW, "attention.scale": QUERY_SCALAR**-0.5}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM,
                dict(num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=WINDOW),
                {"attention.sliding_window": WINDOW}),
}
ROPE_BASE = {"qwen2": 1e6, "qwen3": 1e6, "gemma3": 1e6, "mistral": 1e4}
SPM = ("gemma3", "mistral")

# GGUF name of a layer's tensor: transformers' name. Gemma puts a norm before and after each block.
BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
FFN_NORM_GEMMA = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
                  "post_ffw_norm": "post_feedforward_layernorm"}


def byte_level_tokens():
    """Printable stand-ins of the bytes, and one merged token."""
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b != 173]
    hidden = [b for b in range(256) if b not in visible]
    names = [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in range(256)]
    return names + [names[97] + names[98]], [names[97] + " " + names[98]]


def spm_tokens():
    """Control tokens, bytes, characters and pieces with falling scores: (texts, types, scores)."""
    T = gguf.TokenType
    pieces = ["▁", "e", "t", "a", "o", "n", "h", "s", "r", "i", "l", "d", "▁t", "he", "▁the", "in", "▁a", "er", "on", "an", "▁an", "and",
              "▁and", "ing", "ll", "▁▁", "▁▁▁", "ello", "lo", "▁h", "▁hell", "hell", "é", "▁é", "日", "日本", "th", "the", "tt", "ss", "sss"]
    rows = [("<pad>", T.CONTROL, 0.0), ("<eos>", T.CONTROL, 0.0), ("<bos>", T.CONTROL, 0.0), ("<unk>", T.UNKNOWN, 0.0)]
    rows += [("\n", T.USER_DEFINED, 0.0), ("\n\n", T.USER_DEFINED, 0.0), ("<b>", T.USER_DEFINED, 0.0), ("  ", T.USER_DEFINED, 0.0)]
    rows += [(f"<0x{b:02X}>", T.BYTE, 0.0) for b in range(256)]
    scores = [-float(i // 2) for i in range(len(pieces))]  # two each have the same score
    return [list(column) for column in zip(*(rows + [(p, T.NORMAL, s) for p, s in zip(pieces, scores)]))]


def add_tokenizer(w, arch):
    if arch in SPM:
        texts, types, scores = spm_tokens()
        w.add_tokenizer_model("llama")
        w.add_tokenizer_pre("default")
        w.add_token_list(texts)
        w.add_token_types(types)
        w.add_token_scores(scores)
        w.add_bos_token_id(2)
        w.add_eos_token_id(1)
        w.add_unk_token_id(3)
        w.add_add_bos_token(True)
        if arch == "gemma3":
            w.add_add_space_prefix(False)
        return
    texts, merges = byte_level_tokens()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(texts)
    w.add_token_types([gguf.TokenType.NORMAL] * len(texts))
    w.add_token_merges(merges)
    w.add_eos_token_id(0)
    w.add_add_bos_token(False)


def n_vocab(arch):
    return len(spm_tokens()[0]) if arch in SPM else len(byte_level_tokens()[0])


def make_model(arch):
    config_class, model_class, settings, _ = ARCHS[arch]
    if arch == "gemma3":
        settings = settings | dict(rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": ROPE_BASE[arch]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})
    else:
        settings = settings | dict(rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE[arch]})
    model = model_class(config_class(vocab_size=n_vocab(arch), **COMMON, **settings)).eval()
    rng = np.random.default_rng([SEED, sorted(ARCHS).index(arch)])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = parameter.shape
            if name.endswith("bias"):
                values = 0.7 * rng.standard_normal(shape)
            elif len(shape) == 1:
                values = (0.0 if arch == "gemma3" else 1.0) + 0.3 * rng.standard_normal(shape)
            elif "embed_tokens" in name:
                values = 0.35 * rng.standard_normal(shape) / (2 if arch == "gemma3" else 1)  # gemma3 multiplies by 8
            else:
                values = 1.5 * rng.standard_normal(shape) / shape[1] ** 0.5
            stored = np.float16(values) if len(shape) == 2 else np.float32(values)
            parameter.copy_(torch.from_numpy(np.float32(stored)))
    return model


def neighbours(x):
    """Rows (or elements) i and i + D / 2 of each head side by side."""
    return x.reshape(-1, 2, HEAD_DIM // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write_model(path, arch, model):
    config, extra = model.config, ARCHS[arch][3]
    w = gguf.GGUFWriter(path, arch)
    w.add_name(f"tiny {arch}")
    w.add_description(f"random weights, seed {SEED}")
    w.add_context_length(N_CTX)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(ROPE_BASE[arch])
    for key, value in extra.items():
        (w.add_uint32 if isinstance(value, int) else w.add_float32)(f"{arch}.{key}", value)
    add_tokenizer(w, arch)
    state = {name.removeprefix("model."): value.numpy() for name, value in model.state_dict().items()}
    block = BLOCK | (FFN_NORM_GEMMA if arch == "gemma3" else FFN_NORM)
    plus = 1.0 if arch == "gemma3" else 0.0 # transformers multiplies by 1 + weight

    def add(name, values):
        if values.ndim == 2:
            w.add_tensor(name, values.astype(np.float16))
        else:
            w.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", state["embed_tokens.weight"])
    add("output_norm.weight", state["norm.weight"] + plus)
    if not config.tie_word_embeddings:
        add("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for name, theirs in block.items():
            for kind in ("weight", "bias"):
                values = state.get(f"layers.{layer}.{theirs}.{kind}")
                if values is None:
                    continue
                if arch == "mistral" and name in ("attn_q", "attn_k"):
                    values = neighbours(values)
                add(f"blk.{layer}.{name}.{kind}", values + (plus if values.ndim == 1 else 0.0))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def c_array(declaration, values, form):
    values = np.asarray(values)
    if values.ndim == 2:
        body = ",\n".join("{" + textwrap.fill(", ".join(form % v for v in row), 130) + "}" for row in values)
    else:
        body = textwrap.fill(", ".join(form % v for v in values), 130)
    return f"static const {declaration} = {{\n{body}}};\n"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    tokens = np.random.default_rng(SEED).integers(4, 250, N_TOKENS)
    parts = [
        f"/* Logits of transformers {transformers.__version__} for data/models/arch_*.gguf. Written by data/make_arch_models.py. */\n",
        f"enum {{ ARCH_TOKENS = {N_TOKENS}, ARCH_ROWS = {len(ROWS)} }};\n",
        c_array(f"int32_t arch_token[{N_TOKENS}]", tokens, "%d"),
        "/* The positions whose logits are here. */\n", c_array(f"uint32_t arch_row[{len(ROWS)}]", ROWS, "%d"),
    ]
    for arch in ARCHS:
        model = make_model(arch)
        write_model(root / f"data/models/arch_{arch}.gguf", arch, model)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens[None])).logits[0].numpy()
        print(f"{arch}: logits {logits.std():.2f} +/-, up to {abs(logits).max():.2f}", file=sys.stderr)
        parts.append(c_array(f"float arch_{arch}[{len(ROWS)}][{n_vocab(arch)}]", logits[list(ROWS)], "%.7g"))
    (root / "data/golden/arch_answers.h").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
