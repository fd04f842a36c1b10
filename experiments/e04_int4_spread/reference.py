#!/usr/bin/env python3
"""spread.py's windows by Hugging Face transformers in float32, keys (after RoPE) and values through the same codes: the reference of the root README's table.

    experiments/e04_int4_spread/reference.py [M.gguf [ids.txt]] [--chunks 40]        runs/e04_int4_spread/transformers-*.h5

Needs torch and transformers besides what spread.py needs.
"""
import os

import torch
import transformers
from spread import CACHES, measure, parse_arguments

NAME = f"transformers {transformers.__version__}"


class Reference:
    def __init__(self, path):
        self.store = None
        transformers.AttentionInterface.register("stored", self.attend)
        folder, file = os.path.split(os.path.abspath(path))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="stored").eval()

    def attend(self, module, query, key, value, mask, scaling, **_):
        key, value = (torch.from_numpy(self.store(x.numpy())) for x in (key, value))
        read = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return read.transpose(1, 2), None

    @torch.no_grad()
    def log_probabilities(self, ids, store):
        self.store = store
        logits = self.model(torch.from_numpy(ids)[None], use_cache=False, logits_to_keep=len(ids) - len(ids) // 2).logits
        return logits[0, :-1].double().log_softmax(-1).numpy()


def main():
    args = parse_arguments(__doc__).parse_args()
    reference = Reference(args.model)
    measure(args, "transformers", [(NAME, reference.log_probabilities, kv) for kv in CACHES])


if __name__ == "__main__":
    main()
