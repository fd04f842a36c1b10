#!/usr/bin/env python3
"""Fills the generated tables of compress/README.md: what `kvlab plugins --md` prints, between the markers plugins:begin and plugins:end.

Usage: scripts/make_compress_readme.py [build/kvlab]
"""
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


table = subprocess.run([program, "plugins", "--md"], capture_output=True, text=True, check=True).stdout
readme.write_text(fill(readme.read_text(), "plugins", table))
