#!/usr/bin/env python3
"""Pages that the last queries read where they choose (Quest), and their outputs, computed naively in numpy: tests/policy/page_answers.h.

Shares no code with kvlab; inputs and RoPE are those of make_decode_answers.py. Needs numpy.
"""
import numpy as np

from make_decode_answers import DIM, GROUP, HEADS, TOKENS, floats, inputs, rope, softmax


def answer(size, budget, sink, join):
    """The last token's queries bound what they can score on each whole page by the least and the largest value of its keys' channels. They read the pages
    with the highest bounds, the first tokens, and those behind the last whole page."""
    q, k, v = inputs()
    t = TOKENS - 1
    whole = (t - sink) // size  # before the last token
    rest = [*range(sink), *range(sink + whole * size, TOKENS)]
    wanted = min(whole, max(0, budget - len(rest)) // size)
    picked, out = [], []
    for h in range(HEADS):
        keys, query = rope(k[:, h], np.arange(TOKENS)), rope(q[t, h], t)
        page = keys[sink:sink + whole * size].reshape(whole, size, DIM)
        bound = np.maximum(query[:, None] * page.min(axis=1), query[:, None] * page.max(axis=1)).sum(axis=2)  # [G][pages]
        worth = bound.max(axis=0) if join == "max" else bound.sum(axis=0)
        picked.append(sorted(sorted(range(whole), key=lambda i: (-worth[i], i))[:wanted]))
        read = sorted(rest + [sink + i * size + j for i in picked[-1] for j in range(size)])
        out.append(softmax(query @ keys[read].T / np.sqrt(DIM)) @ v[read, h])
    return picked, np.concatenate([o.reshape(-1) for o in out])


CASES = [
    ("f32 read=pages(tokens=32)", 16, 32, 0, "max"),
    ("f32 read=pages(tokens=45,gqa=sum)", 16, 45, 0, "sum"),
    ("f32 sink=3 read=pages(tokens=40)", 16, 40, 3, "max"),
    ("f32 read=pages(tokens=10)", 16, 10, 0, "max"),  # less than what is always read
]


def main():
    print("/* Made by scripts/make_page_answers.py. */")
    print(f"enum {{ PAGE_TOKENS = {TOKENS}, PAGE_HEADS = {HEADS}, PAGE_GROUP = {GROUP}, PAGE_DIM = {DIM} }};")
    print("static const struct page_answer {\n    const char *spec;\n    uint32_t n_pages, page[PAGE_HEADS][PAGE_TOKENS / 16];")
    print("    float out[PAGE_HEADS * PAGE_GROUP * PAGE_DIM]; /* of the last token's queries */\n} page_answers[] = {")
    for spec, *case in CASES:
        picked, out = answer(*case)
        print(f'    {{"{spec}",\n     {len(picked[0])},')
        print("     {" + ", ".join("{" + (", ".join(map(str, p)) or "0") + "}" for p in picked) + "},")
        print(floats(out))
    print("};")


main()
