#!/usr/bin/env python3
"""Write data/golden/tokenizer_answers.h: what llama.cpp and Jinja make of hard texts with SmolLM2's vocabulary.

usage: make_tokenizer_answers.py SmolLM2-135M-Instruct.Q4_1.gguf data/golden/tokenizer_answers.h

Needs llama-cpp-python and jinja2. Every pre-tokenizer is asked with the same vocabulary: the model's metadata are copied
into a file without tensors, with another tokenizer.ggml.pre.
"""
import os
import struct
import sys
import tempfile

import jinja2
import llama_cpp

PRE = ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"]

TEXTS = [
    "Hello, world! The quick brown fox.",
    " ",
    "\n",
    "  two  spaces\t\ttabs \n\n\n lines\r\n\r\n  end   ",
    "I'm you're we've he'd they'll it's DON'T I'LL 'S ''s 'sample",
    "2024-01-31 1234567 3.14159  42 x2y \u0663\u0664\u0665 \u2167 x\u00b2",
    "!!! ???...---=== $5+6<7>^~|` (a) [b] {c} \u00abd\u00bb \u201cq\u201d",
    "na\u00efve caf\u00e9 e\u0301clair \u00c5ngstr\u00f6m \u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03ac",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 ok\U0001f44d\U0001f3fd!\U0001f1eb\U0001f1f7",
    "a\u00a0b\u2003c\u3000d\u0085e\u180ef\u200bg\u2028h \u00a0 i",
    "a  \u0085b  \u00a0c  \u180ed  \u2003e  \u200bf",
    "int main(void)\n{\n    return x->y[3] != 0x1F; /* no */\n}\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_end|><|endoftext|> <|im_end",
    "a" * 50 + " " * 20 + "=" * 30 + "\n" * 9,
    "\0 nul\0\x01\x7f",
    "\u017f's \u212aelvin 'll\u017f",
]

CHATS = [
    [("user", "What is 2+2?")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", " Hello. "), ("user", "Bye\n")],
    [],
]

HEAD = """/* Answers of llama.cpp (llama-cpp-python {version}) and Jinja for {model}.
 * Written by scripts/make_tokenizer_answers.py. */
#ifndef KVL_TOKENIZER_ANSWERS_H
#define KVL_TOKENIZER_ANSWERS_H
#include "tokenizer.h"

"""

TOKENS_HEAD = """static const struct token_answer {
    const char *pre;
    bool special;
    const char *text;
    size_t size;
    const int32_t *ids;
    size_t n;
} token_answers[] = {
"""

CHATS_HEAD = """};

static const struct chat_answer {
    const struct kvl_chat_message *messages;
    size_t n;
    const char *text;
} chat_answers[] = {
"""


def take(data, at, form):
    return struct.unpack_from("<" + form, data, at)[0], at + struct.calcsize("<" + form)


def skip_value(data, at, kind):
    """The offset behind a metadata value (GGUF specification: 8 = string, 9 = array)."""
    if kind == 8:
        size, at = take(data, at, "Q")
        return at + size
    if kind == 9:
        inner, at = take(data, at, "I")
        count, at = take(data, at, "Q")
        for _ in range(count):
            at = skip_value(data, at, inner)
        return at
    return at + {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]


def string(text):
    return struct.pack("<Q", len(text)) + text


def with_pre(data, pre):
    """The metadata of a GGUF file as a file without tensors, its tokenizer.ggml.pre replaced."""
    count, at = take(data, 16, "Q")
    out = bytearray(data[:8] + struct.pack("<Q", 0) + data[16:24])
    for _ in range(count):
        start = at
        size, at = take(data, at, "Q")
        key = data[at:at + size]
        kind, at = take(data, at + size, "I")
        at = skip_value(data, at, kind)
        changed = string(key) + struct.pack("<I", 8) + string(pre.encode())
        out += changed if key == b"tokenizer.ggml.pre" else data[start:at]
    return bytes(out) + bytes(-len(out) % 32)


def literal(text):
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\?' else "\\%03o" % b for b in text) + '"'


def token_rows(data):
    for pre in PRE:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "vocabulary.gguf")
            with open(path, "wb") as file:
                file.write(with_pre(data, pre))
            model = llama_cpp.Llama(model_path=path, vocab_only=True, verbose=False)
            for text in TEXTS:
                for special in (False, True) if "<|" in text else (False,):
                    raw = text.encode()
                    ids = model.tokenize(raw, add_bos=False, special=special)
                    yield '    {"%s", %s, %s, %d,\n     (const int32_t[]){%s}, %d},\n' % (
                        pre, str(special).lower(), literal(raw), len(raw), ", ".join(map(str, ids)), len(ids))


def chat_rows(model_path):
    template = llama_cpp.Llama(model_path=model_path, vocab_only=True, verbose=False).metadata["tokenizer.chat_template"]
    rendered = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    for chat in CHATS:
        text = rendered.render(messages=[{"role": r, "content": c} for r, c in chat], add_generation_prompt=True)
        messages = ", ".join("{%s, %s}" % (literal(r.encode()), literal(c.encode())) for r, c in chat) or "{NULL, NULL}"
        yield "    {(const struct kvl_chat_message[]){%s}, %d,\n     %s},\n" % (messages, len(chat), literal(text.encode()))


def main():
    model_path, out_path = sys.argv[1:]
    with open(model_path, "rb") as file:
        data = file.read()
    with open(out_path, "w") as out:
        out.write(HEAD.format(version=llama_cpp.__version__, model=os.path.basename(model_path)))
        out.write(TOKENS_HEAD)
        out.writelines(token_rows(data))
        out.write(CHATS_HEAD)
        out.writelines(chat_rows(model_path))
        out.write("};\n\n#endif\n")


if __name__ == "__main__":
    main()
