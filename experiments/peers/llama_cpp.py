#!/usr/bin/env python3
"""Times llama.cpp the way llama-bench does: prefill, decode, and decode behind a filled cache. One JSON line a sample on stdout.

Runs under the Python that setup.sh prints. Every decoded token computes its logits and is waited for.
"""
import argparse
import ctypes
import json
import os
import random
import sys
import time

# This file's name must not hide the package's.
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
import llama_cpp as ll  # noqa: E402

CACHE_TYPES = {"f16": ll.GGML_TYPE_F16, "q8_0": ll.GGML_TYPE_Q8_0, "q4_0": ll.GGML_TYPE_Q4_0}
WARM_TOKENS = 4


@ll.llama_log_callback
def silent(level, text, data):
    pass


class Session:
    def __init__(self, model, n_ctx, cache, threads):
        params = ll.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = CACHE_TYPES[cache]
        self.context = ll.llama_init_from_model(model, params)
        if not self.context:
            sys.exit(f"llama_cpp.py: no context of {n_ctx} tokens with a cache of {cache}")
        self.memory = ll.llama_get_memory(self.context)
        self.n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        self.draw = random.Random(0)

    def cut(self, n):
        """Forgets what comes after the first n tokens."""
        if not ll.llama_memory_seq_rm(self.memory, 0, n, -1):
            sys.exit(f"llama_cpp.py: the cache can't be cut to {n} tokens")

    def advance(self, n, piece):
        while n > 0:
            count = min(n, piece)
            tokens = (ll.llama_token * count)(*(self.draw.randrange(self.n_vocab) for _ in range(count)))
            if ll.llama_decode(self.context, ll.llama_batch_get_one(tokens, count)) != 0:
                sys.exit("llama_cpp.py: llama_decode failed")
            ll.llama_synchronize(self.context)
            n -= count

    def close(self):
        ll.llama_free(self.context)


def time_test(session, n, piece, depth, repetitions):
    """Nanoseconds of each repetition; the first pass warms up."""
    session.cut(0)
    session.advance(depth, 512)
    samples = []
    for i in range(repetitions + 1):
        start = time.monotonic_ns()
        session.advance(n if i > 0 or piece > 1 else WARM_TOKENS, piece)
        if i > 0:
            samples.append(time.monotonic_ns() - start)
        session.cut(depth)
    return samples


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--cache", choices=CACHE_TYPES, default="f16")
    parser.add_argument("--tests", default="pp512,tg128,tg32@d4096", help="like kvlab bench names them")
    parser.add_argument("-r", "--repetitions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    tests = []
    for name in args.tests.split(","):
        length, _, depth = name.partition("@d")
        tests.append((name, length[:2], int(length[2:]), int(depth or 0)))

    ll.llama_log_set(silent, ctypes.c_void_p(0))
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(args.model.encode(), ll.llama_model_default_params())
    if not model:
        sys.exit(f"llama_cpp.py: can't load {args.model}")
    system = ll.llama_print_system_info().decode().strip()
    for name, kind, n, depth in tests:
        session = Session(model, depth + n, args.cache, args.threads)
        for ns in time_test(session, n, 1 if kind == "tg" else 512, depth, args.repetitions):
            print(json.dumps({"program": "llama.cpp", "cache": args.cache, "test": name, "n_tokens": n, "ns": ns, "system": system}), flush=True)
        session.close()
    ll.llama_model_free(model)


if __name__ == "__main__":
    main()
