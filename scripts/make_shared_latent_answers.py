#!/usr/bin/env python3
"""Outputs of the last token where layers share latents (xKV), computed naively in numpy: tests/kernel/shared_latent_answers.h.

Shares no code with kvlab; RoPE is that of make_decode_answers.py. Needs numpy.
Usage: scripts/make_shared_latent_answers.py > tests/kernel/shared_latent_answers.h
"""
import numpy as np

from make_decode_answers import floats, softmax
from make_decode_answers import rope as turn

LAYERS, TOKENS, HEADS, GROUP, DIM = 4, 30, 2, 2, 16


def inputs():
    """q [L][T][H][G][D], k and v [L][T][H][D]"""
    j = np.arange(LAYERS * TOKENS * HEADS * GROUP * DIM, dtype=np.float64)
    q = (3.0 * np.sin(0.37 * j + 0.1)).astype(np.float32).reshape(LAYERS, TOKENS, HEADS, GROUP, DIM)
    j = np.arange(LAYERS * TOKENS * HEADS * DIM, dtype=np.float64)
    k = (2.0 * np.sin(0.73 * j * (1.0 + 0.001 * (j % 7)))).astype(np.float32).reshape(LAYERS, TOKENS, HEADS, DIM)
    return q.astype(np.float64), k.astype(np.float64), np.cos(0.51 * j).astype(np.float32).reshape(k.shape).astype(np.float64)


def shared(x, side, rank, layers, heads):
    """Rows [L][T][H][D] as the latents of `layers` layers and `heads` heads give them back."""
    out = np.empty_like(x)
    width, stream = layers * heads * DIM, 0
    for l in range(0, LAYERS, layers):
        for h in range(0, HEADS, heads):
            directions = (0.3 * np.sin(0.11 * np.arange(width * width) + 0.7 * stream + 1.9 * side)).astype(np.float32).astype(np.float64).reshape(width, width)[:rank]
            rows = x[l : l + layers, :, h : h + heads].transpose(1, 0, 2, 3).reshape(TOKENS, width)
            again = rows @ directions.T @ directions
            out[l : l + layers, :, h : h + heads] = again.reshape(TOKENS, layers, heads, DIM).transpose(1, 0, 2, 3)
            stream += 1
    return out


def answer(rank, layers, heads, pre, sink, tails):
    """Of the last token: it reads the first tokens and the newest ones as they were, its own among these, all others from latents."""
    q, k, v = inputs()
    positions = np.arange(TOKENS)[None, :, None]
    keys = turn(k, positions)
    old = [turn(shared(k, 0, rank, layers, heads), positions) if pre else shared(keys, 0, rank, layers, heads), shared(v, 1, rank, layers, heads)]
    for side, exact in enumerate((keys, v)):
        stays = np.arange(TOKENS)[:, None, None] < sink
        stays |= np.arange(TOKENS)[:, None, None] >= TOKENS - tails[side]
        old[side] = np.where(stays, exact, old[side])
    out = np.empty((LAYERS, HEADS, GROUP, DIM))
    for l in range(LAYERS):
        for h in range(HEADS):
            out[l, h] = softmax(turn(q[l, -1, h], TOKENS - 1) @ old[0][l, :, h].T / np.sqrt(DIM)) @ old[1][l, :, h]
    return out.reshape(-1)


CASES = [
    ("latent(rank=16,layers=2,of=f32) table=answers", 1, (16, 2, 1, False, 0, (1, 1))),
    ("latent(rank=24,layers=2,heads=2,of=f32) rope=pre sink=2 ktail=3 vtail=4 table=answers", 13, (24, 2, 2, True, 2, (3, 4))),
    ("latent(rank=40,layers=4,of=f32) rope=pre table=answers", 29, (40, 4, 1, True, 0, (1, 1))),
]


def main():
    print("/* Made by scripts/make_shared_latent_answers.py. */\n#include <stdint.h>")
    print(f"enum {{ SHARED_LAYERS = {LAYERS}, SHARED_TOKENS = {TOKENS}, SHARED_HEADS = {HEADS}, SHARED_GROUP = {GROUP}, SHARED_DIM = {DIM} }};")
    print("static const struct shared_answer {\n    const char *spec;\n    uint32_t n_prompt;")
    print("    float out[SHARED_LAYERS * SHARED_HEADS * SHARED_GROUP * SHARED_DIM]; /* of the last token */\n} shared_answers[] = {")
    for spec, n_prompt, case in CASES:
        print(f'    {{"{spec}",\n     {n_prompt},')
        print(floats(answer(*case)))
    print("};")


if __name__ == "__main__":
    main()
