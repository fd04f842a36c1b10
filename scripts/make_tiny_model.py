#!/usr/bin/env python3
"""Writes data/models/tiny.gguf, a llama with random weights, and data/golden/tiny_answers.h: what a float64 forward pass makes of it. And
data/golden/tiny_witness_answers.h: which tokens of a prompt its continuation and its repetition look at, and what evictions cost.

usage: scripts/make_tiny_model.py [ROOT]      (needs numpy and gguf; ROOT: the project's root, default: the one of this script)

The forward pass below is written from the papers (RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864 with adjacent pairs, GQA
arXiv:2305.13245, SwiGLU arXiv:2002.05202) and compress/codec/int/card.md; it shares no code with kvlab. It also gives the logits of a
sliding window with sinks and of a 4-bit cache, so that the read rule of host/cache/README.md has an independent answer for each.
"""
import pathlib
import sys
import textwrap
import gguf
import numpy as np

SEED = 11
N_LAYER, N_EMBD, N_HEAD, N_KV_HEAD, HEAD_DIM, N_FF, N_VOCAB, N_CTX = 3, 96, 6, 2, 32, 160, 257, 2048
ROPE_BASE, RMS_EPS = 10000.0, 1e-5
N_TOKENS, N_GREEDY_PROMPT, N_GREEDY = 140, 8, 40
ROWS = (0, 1, 63, 64, 127, 128, 139)
SINK, WINDOW, WINDOW_ROWS = 4, 50, (53, 54, 55, 100, 139)
INT4_ROWS = (1, 31, 62)
N_PROMPT, N_KEPT = 96, 24                 # of the witnesses' answers: the rest of the tokens is the continuation
PART, LEAD, SINKS = 40, 4, 2              # kvzip's options there
REQUESTS = ("\n\nRepeat the previous context exactly.", "\n\nRepeat the part of the previous context exactly, starting with")

# Types of the matrices of each layer; an attention block may mix them, and one has three different ones.
TYPES = (
    dict(attn_q="Q8_0", attn_k="Q8_0", attn_v="Q8_0", attn_output="Q8_0", ffn_gate="Q8_0", ffn_up="Q8_0", ffn_down="Q8_0"),
    dict(attn_q="Q4_1", attn_k="Q8_0", attn_v="F16", attn_output="Q5_1", ffn_gate="Q4_0", ffn_up="Q4_0", ffn_down="Q5_0"),
    dict(attn_q="F16", attn_k="F16", attn_v="BF16", attn_output="F16", ffn_gate="F16", ffn_up="F16", ffn_down="F32"),
)
# Rows, columns and how large an output element is for inputs of size 1. The blocks outweigh the embedding, so that the tied output
# does not just repeat its input.
SHAPES = {
    "attn_q": (N_HEAD * HEAD_DIM, N_EMBD, 1.6),
    "attn_k": (N_KV_HEAD * HEAD_DIM, N_EMBD, 1.6),
    "attn_v": (N_KV_HEAD * HEAD_DIM, N_EMBD, 1.0),
    "attn_output": (N_EMBD, N_HEAD * HEAD_DIM, 1.5),
    "ffn_gate": (N_FF, N_EMBD, 1.0),
    "ffn_up": (N_FF, N_EMBD, 1.0),
    "ffn_down": (N_EMBD, N_FF, 1.5),
}


def make_tensors():
    """name -> (type, stored data, the float64 values that they stand for)."""
    rng = np.random.default_rng(SEED)
    tensors = {}

    def add(name, type_name, values):
        kind = gguf.GGMLQuantizationType[type_name]
        stored = gguf.quants.quantize(values.astype(np.float32), kind)
        tensors[name] = kind, stored, gguf.quants.dequantize(stored, kind).astype(np.float64)

    add("token_embd.weight", "F16", 0.35 * rng.standard_normal((N_VOCAB, N_EMBD)))
    add("output_norm.weight", "F32", 1 + 0.1 * rng.standard_normal(N_EMBD))
    for layer in range(N_LAYER):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{norm}.weight", "F32", 1 + 0.1 * rng.standard_normal(N_EMBD))
        for name, (rows, columns, gain) in SHAPES.items():
            add(f"blk.{layer}.{name}.weight", TYPES[layer][name], gain / columns**0.5 * rng.standard_normal((rows, columns)))
    return tensors


def byte_tokens():
    """Printable stand-ins of the bytes in byte-level vocabularies, and one merged token."""
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b != 173]
    hidden = [b for b in range(256) if b not in visible]
    names = [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in range(256)]
    return names + [names[0] + names[1]], [names[0] + " " + names[1]]


def add_byte_tokenizer(w):
    tokens, merges = byte_tokens()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    w.add_token_merges(merges)
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)
    w.add_add_bos_token(False)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_model(path, tensors):
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tiny")
    w.add_description(f"random weights, seed {SEED}")
    w.add_context_length(N_CTX)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(N_LAYER)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_head_count_kv(N_KV_HEAD)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_layer_norm_rms_eps(RMS_EPS)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_rope_freq_base(ROPE_BASE)
    add_byte_tokenizer(w)
    for name, (kind, stored, _) in tensors.items():
        w.add_tensor(name, stored, raw_dtype=kind)
    finish(w)


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + RMS_EPS) * weight


def rotate(x):
    """x [T][heads][D]: pair (2i, 2i+1) of token p turned by p * base^(-2i/D)."""
    angle = np.arange(len(x))[:, None] * ROPE_BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None, :]
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
    return out


def through_int4(x):
    """Encode and decode as compress/codec/int/card.md says: asymmetric, 4 bits, a group = one token of one head."""
    half = lambda v: v.astype(np.float16).astype(np.float64)
    z = half(x.min(-1, keepdims=True))
    s = half((x.max(-1, keepdims=True) - x.min(-1, keepdims=True)) / 15)
    return z + s * np.clip(np.rint((x - z) / s), 0, 15)


def forward(tensors, tokens, window=None, cached=lambda x: x):
    """Logits [T][vocab]; keys after RoPE and values [layer][T][kv heads][D]; queries. window: (sinks, newest tokens seen)."""
    weight = lambda name: tensors[name + ".weight"][2]
    n = len(tokens)
    query, key = np.arange(n)[:, None], np.arange(n)[None, :]
    seen = key <= query
    if window is not None:
        seen &= (key < window[0]) | (key > query - window[1])
    x = weight("token_embd")[tokens]
    keys, values, queries = [], [], []
    for layer in range(N_LAYER):
        of = lambda name: weight(f"blk.{layer}.{name}")
        h = rms_norm(x, of("attn_norm"))
        q = rotate((h @ of("attn_q").T).reshape(n, N_HEAD, HEAD_DIM))
        k = rotate((h @ of("attn_k").T).reshape(n, N_KV_HEAD, HEAD_DIM))
        v = (h @ of("attn_v").T).reshape(n, N_KV_HEAD, HEAD_DIM)
        keys.append(k)
        values.append(v)
        queries.append(q)
        attended = np.empty_like(q)
        for head in range(N_HEAD):
            kv_head = head // (N_HEAD // N_KV_HEAD)
            score = np.where(seen, q[:, head] @ cached(k)[:, kv_head].T / HEAD_DIM**0.5, -np.inf)
            p = np.exp(score - score.max(-1, keepdims=True))
            attended[:, head] = p / p.sum(-1, keepdims=True) @ cached(v)[:, kv_head]
        x = x + attended.reshape(n, -1) @ of("attn_output").T
        h = rms_norm(x, of("ffn_norm"))
        gate = h @ of("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ of("ffn_up").T)) @ of("ffn_down").T
    return rms_norm(x, weight("output_norm")) @ weight("token_embd").T, np.array(keys), np.array(values), np.array(queries)


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def look_back(tensors, prompt, behind, sources=None):
    """[layer][head][token behind][source]: attention of the tokens behind a prompt to the prompt's tokens and to each other; of the former only to
    `sources`. And values [layer][T][kv heads][D]."""
    n = len(prompt)
    sources = np.arange(n) if sources is None else sources
    _, keys, values, queries = forward(tensors, np.concatenate([prompt, behind]))
    columns = np.concatenate([sources, np.arange(n, n + len(behind))])
    seen = columns[None, :] <= np.arange(n, n + len(behind))[:, None]
    kv_head = np.arange(N_HEAD) // (N_HEAD // N_KV_HEAD)
    score = np.einsum("lqhd,lkhd->lhqk", queries[:, n:], keys[:, columns][:, :, kv_head]) / HEAD_DIM**0.5
    return softmax(np.where(seen, score, -np.inf)), values


def grouped(x):
    """Query heads of a kv head in an axis of their own."""
    return x.reshape(x.shape[0], N_KV_HEAD, N_HEAD // N_KV_HEAD, *x.shape[2:])


def oracle_scores(tensors, prompt, following):
    return grouped(look_back(tensors, prompt, following)[0][..., :len(prompt)].mean(2)).mean(2)


def kvzip_scores(tensors, prompt):
    score = np.zeros((N_LAYER, N_KV_HEAD, len(prompt)))
    for first in range(0, len(prompt), PART):
        part = prompt[first:first + PART]
        request = list(REQUESTS[first > 0].encode()) + (list(prompt[first - LEAD:first]) if first else []) + [10]
        sinks = np.arange(min(SINKS, first))
        sources = np.concatenate([sinks, np.arange(first, first + len(part))]).astype(int)
        p, _ = look_back(tensors, prompt, np.concatenate([request, part]).astype(int), sources)
        score[:, :, first:first + len(part)] = grouped(p[..., len(sinks):len(sources)].max(2)).max(2)
    return score


def best(score, n):
    """Positions of the n largest, ascending, and the smallest distance from a kept to a dropped score."""
    order = np.argsort(-score, axis=-1, kind="stable")
    in_order = np.take_along_axis(score, order, -1)
    return np.sort(order[..., :n], -1), (in_order[..., n - 1] - in_order[..., n]).min()


def eviction_loss(tensors, prompt, following, kept):
    """mass lost and output error [layer][kv head] of the following tokens, when head h of a layer keeps kept[layer][h]."""
    p, values = look_back(tensors, prompt, following)
    stays = np.zeros((N_LAYER, N_KV_HEAD, len(prompt) + len(following)), bool)
    stays[..., len(prompt):] = True
    np.put_along_axis(stays, kept, True, -1)
    p, stays = grouped(p), stays[:, :, None, None]
    mass = np.where(stays, 0, p).sum(-1).mean((2, 3))
    less = np.where(stays, p, 0)
    output = lambda weight: np.einsum("lhgqk,lkhd->lhgqd", weight, values)
    whole = output(p)
    wrong = output(less / less.sum(-1, keepdims=True)) - whole
    return mass, np.sqrt((wrong**2).sum((2, 3, 4)) / (whole**2).sum((2, 3, 4)))


def write_witness_answers(path, tensors):
    tokens = np.random.default_rng(SEED + 1).integers(1, 256, N_TOKENS)
    prompt, following = tokens[:N_PROMPT], tokens[N_PROMPT:-1] # the last token predicts nothing that is scored
    parts = ["/* Who looks back at the first tokens of tiny_answers.h, by a float64 pass over data/models/tiny.gguf. Written by scripts/make_tiny_model.py. */\n",
             f"enum {{ WITNESS_TOKENS = {N_TOKENS}, WITNESS_PROMPT = {N_PROMPT}, WITNESS_KEPT = {N_KEPT}, WITNESS_STREAMS = {N_LAYER * N_KV_HEAD} }};\n"
             f"#define WITNESS_KVZIP \"kvzip(chunk={PART},lead={LEAD},sink={SINKS})\"\n",
             c_array(f"int32_t witness_token[{N_TOKENS}]", tokens, "%d"),
             "/* By layer and kv head: scores of the prompt's tokens, the best of them, what the others cost the tokens behind the prompt. */\n"]
    for name, score in ("oracle", oracle_scores(tensors, prompt, following)), ("kvzip", kvzip_scores(tensors, prompt)):
        kept, gap = best(score, N_KEPT)
        mass, error = eviction_loss(tensors, prompt, following, kept)
        print(f"{name}: cuts at least {gap:.1e} wide, mass lost {mass.mean():.3f}, output error {error.mean():.3f}", file=sys.stderr)
        flat = lambda x: x.reshape(N_LAYER * N_KV_HEAD, -1)
        parts += [c_array(f"float {name}_score[WITNESS_STREAMS][{N_PROMPT}]", flat(score), "%.9g"),
                  c_array(f"uint32_t {name}_kept[WITNESS_STREAMS][{N_KEPT}]", flat(kept), "%d"),
                  c_array(f"float {name}_mass_lost[WITNESS_STREAMS]", mass.ravel(), "%.9g"),
                  c_array(f"float {name}_output_error[WITNESS_STREAMS]", error.ravel(), "%.9g")]
    path.write_text("\n".join(parts))


def greedy(tensors, prompt, n):
    """n continuations by the largest logit, and the smallest distance from the largest to the second."""
    tokens, gap = list(prompt), np.inf
    for _ in range(n):
        logits = forward(tensors, np.array(tokens))[0][-1]
        second, first = np.sort(logits)[-2:]
        gap = min(gap, first - second)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt):], gap


def c_array(declaration, values, form):
    """A C array of one dimension, or of two with a brace a row."""
    values = np.asarray(values)
    if values.ndim == 2:
        body = ",\n".join("{" + textwrap.fill(", ".join(form % v for v in row), 130) + "}" for row in values)
    else:
        body = textwrap.fill(", ".join(form % v for v in values), 130)
    return f"static const {declaration} = {{\n{body}}};\n"


def write_answers(path, tensors):
    tokens = np.random.default_rng(SEED + 1).integers(1, 256, N_TOKENS)
    logits, keys, values, _ = forward(tensors, tokens)
    windowed = forward(tensors, tokens, window=(SINK, WINDOW))[0]
    int4 = forward(tensors, tokens[:max(INT4_ROWS) + 1], cached=through_int4)[0]
    continuation, gap = greedy(tensors, tokens[:N_GREEDY_PROMPT], N_GREEDY)
    print(f"{len(set(continuation))} different tokens of {N_GREEDY}, smallest gap {gap:.3f}; of logits up to {abs(logits).max():.2f} the window "
          f"moves some by {abs(windowed[-1] - logits[-1]).max():.2f}, int4 by {abs(int4[62] - logits[62]).max():.2f}", file=sys.stderr)
    rows = lambda name, n: f"float {name}[{n}][{N_VOCAB}]"
    of_last = lambda x: x[:, -1].reshape(N_LAYER, -1)
    parts = [
        "/* What a float64 forward pass makes of data/models/tiny.gguf. Written by scripts/make_tiny_model.py. */\n",
        "enum { TINY_TOKENS = %d, TINY_VOCAB = %d, TINY_LAYERS = %d, TINY_KV_HEADS = %d, TINY_HEAD_DIM = %d };\n"
        % (N_TOKENS, N_VOCAB, N_LAYER, N_KV_HEAD, HEAD_DIM),
        c_array(f"int32_t tiny_token[{N_TOKENS}]", tokens, "%d"),
        "/* Logits after the tokens at these positions. */\n",
        c_array(f"uint32_t tiny_row[{len(ROWS)}]", ROWS, "%d"), c_array(rows("tiny_logits", len(ROWS)), logits[list(ROWS)], "%.9g"),
        f"/* The same with --kv \"sink={SINK} window={WINDOW}\". */\n#define TINY_WINDOW \"sink={SINK} window={WINDOW}\"\n",
        c_array(f"uint32_t tiny_window_row[{len(WINDOW_ROWS)}]", WINDOW_ROWS, "%d"),
        c_array(rows("tiny_window_logits", len(WINDOW_ROWS)), windowed[list(WINDOW_ROWS)], "%.9g"),
        "/* The same with every key and value through int4 (protocol p1). */\n",
        c_array(f"uint32_t tiny_int4_row[{len(INT4_ROWS)}]", INT4_ROWS, "%d"),
        c_array(rows("tiny_int4_logits", len(INT4_ROWS)), int4[list(INT4_ROWS)], "%.9g"),
        f"/* The most likely continuation of the first {N_GREEDY_PROMPT} tokens. */\n",
        f"enum {{ TINY_PROMPT = {N_GREEDY_PROMPT}, TINY_GREEDY = {N_GREEDY} }};\n",
        c_array(f"int32_t tiny_greedy[{N_GREEDY}]", continuation, "%d"),
        "/* Key after RoPE and value of the last token: [layer][kv head * head dimension]. */\n",
        c_array(f"float tiny_key[{N_LAYER}][{N_KV_HEAD * HEAD_DIM}]", of_last(keys), "%.9g"),
        c_array(f"float tiny_value[{N_LAYER}][{N_KV_HEAD * HEAD_DIM}]", of_last(values), "%.9g"),
    ]
    path.write_text("\n".join(parts))


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    tensors = make_tensors()
    write_model(root / "data/models/tiny.gguf", tensors)
    write_answers(root / "data/golden/tiny_answers.h", tensors)
    write_witness_answers(root / "data/golden/tiny_witness_answers.h", tensors)


if __name__ == "__main__":
    main()
