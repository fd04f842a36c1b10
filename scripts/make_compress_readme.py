#!/usr/bin/env python3
"""Fills the generated tables of compress/README.md: what `kvlab plugins --md` prints, and compress/speed.csv (scripts/codec_speed.py), between the
markers plugins:begin and plugins:end, speed:begin and speed:end.

Usage: scripts/make_compress_readme.py [build/kvlab]
"""
import csv
import re
import subprocess
import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
program = sys.argv[1] if len(sys.argv) > 1 else root / "build/kvlab"
readme = root / "compress/README.md"


def fill(text, name, table):
    found = re.search(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", text, re.S)
    assert found, f"{readme} has no markers {name}:begin and {name}:end"
    return text[: found.end(1)] + table + text[found.start(2) :]


def speed_table(path):
    rows = list(csv.DictReader(open(path)))
    depths = sorted({int(row["depth"]) for row in rows})
    ratio = {(row["kv"], int(row["depth"])): row["ratio_to_f16"] for row in rows}
    size = {row["kv"]: row["bytes_per_token"] for row in rows}
    lines = ["| kv | bytes a token | " + " | ".join(f"{depth} tokens" for depth in depths) + " |", "| --- " * (2 + len(depths)) + "|"]
    lines += [f"| {kv} | {size[kv]} | " + " | ".join(ratio.get((kv, depth), "") for depth in depths) + " |" for kv in size]
    return "\n".join(lines) + "\n"


plugins = subprocess.run([program, "plugins", "--md"], capture_output=True, text=True, check=True).stdout
readme.write_text(fill(fill(readme.read_text(), "plugins", plugins), "speed", speed_table(root / "compress/speed.csv")))
