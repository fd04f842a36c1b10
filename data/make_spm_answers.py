#!/usr/bin/env python3
"""Writes data/golden/spm_answers.h: what llama.cpp makes of hard texts with the vocabularies of data/models/arch_gemma3.gguf (no space in front) and
arch_mistral.gguf (one).

usage: data/make_spm_answers.py > data/golden/spm_answers.h      (needs llama-cpp-python, and what make_arch_models.py needs)
"""
import pathlib
import sys
import tempfile
import gguf
import llama_cpp
import make_arch_models

TEXTS = [
    "hello the land", " the  hell   and", "  ", " ", "\n", "a\nb\n\n\nc", "thethe theta t tt ttt ssss sssss", "\u65e5\u672c\u8a9e \u65e5\u65e5\u672c", "caf\u00e9 \u00e9\u00e9",
    "<b>the</b><b> an</b>", "<eos>hello<bos> the<eos>", "<0x41> \u2581the", "Zz\tQ\0x", "in an on\r\n  er",
    "ander the landing   and an ending of the lolling sand",
]


def literal(text):
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\?' else "\\%03o" % b for b in text) + '"'


def rows(arch):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "vocabulary.gguf"
        w = gguf.GGUFWriter(path, "llama")  # llama.cpp wants an architecture that it knows
        make_arch_models.add_tokenizer(w, arch)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
        for text in TEXTS:
            for special in (False, True) if "<" in text else (False,):
                raw = text.encode()
                ids = model.tokenize(raw, add_bos=False, special=special)
                yield '    {"%s", %s, %s, %d,\n     (const int32_t[]){%s}, %d},\n' % (
                    arch, str(special).lower(), literal(raw), len(raw), ", ".join(map(str, ids)), len(ids))


def main():
    out = sys.stdout
    out.write(f"/* Answers of llama.cpp (llama-cpp-python {llama_cpp.__version__}) with the vocabularies of data/models/arch_*.gguf.\n"
              " * Written by data/make_spm_answers.py. */\n")
    out.write("static const struct spm_answer {\n    const char *arch;\n    bool special;\n    const char *text;\n    size_t size;\n"
              "    const int32_t *ids;\n    size_t n;\n} spm_answers[] = {\n")
    for arch in make_arch_models.SPM:
        out.writelines(rows(arch))
    out.write("};\n")


main()
