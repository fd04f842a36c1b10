#!/usr/bin/env python3
"""Attention's time of every codec against f16's: compress/speed.csv (scripts/make_compress_readme.py makes a table of it).

A decode step behind a synthetic cache; the time is the median launch of kvl_attend. f16 and the codec are run in turns, and the figure is the
median over the turns of their ratio, so that a machine that does other things too gives the same answer. Rows of the file that are not measured stay.
A codec that learns its table from a text gets one of a window of it; its time does not depend on what it learned. One that learns from the prompt
takes the synthetic cache for it.
Usage: scripts/codec_speed.py [--rounds N] [--depths 4096,32768] [--model M.gguf] [--text T] [--program build/kvlab] [--csv FILE] [SPEC...]
"""
import argparse
import csv
import json
import re
import statistics
import subprocess
from pathlib import Path

root = Path(__file__).resolve().parent.parent
SPECS = ["f32", "int8", "int4", "int3", "int2", "int2(group=32)", "kivi", "kivi(bits=4)", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl",
         "fp8_e4m3", "fp8_e5m2", "gear", "gear(bits=4)", "turboquant2", "turboquant3", "turboquant4",
         "k=turboquant(bits=3,sketch=sign) v=turboquant(bits=2) rot=random", "k=think v=f16", "int4 rot=hadamard", "int2 rot=hadamard", "int4 rope=pre"]  # fmt: skip
TABLED = ["kvquant(bits=3)", "kvquant2", "kvquant3", "kvquant4"]  # need table=


def with_table(args, spec):
    """The spec with a table, which is made unless it is there."""
    path = args.tables / f"{re.sub('[^0-9a-z]+', '_', spec)}.h5"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([args.program, "calibrate", "-m", args.model, "-f", args.text, "--chunks", "1", "--quiet", "--for", spec, "-o", path],
                       stdout=subprocess.DEVNULL, check=True)  # fmt: skip
    return f"{spec} table={path}"


def attend_ns(args, spec, depth):
    command = [args.program, "bench", "-m", args.model, "-p", "0", "-n", "8", "-d", str(depth), "--synthetic", "--kernels", "--json", "-r", "1",
               "--warmup", "0", "--allow-long", "--quiet", "--no-run-file", "--kv", with_table(args, spec) if spec in TABLED else spec]  # fmt: skip
    row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)[0]
    kernels = {k["name"]: k["ns_median"] for k in row["kernels"]}
    return kernels["kvl_attend"], row["bytes_per_token"], row["device"]


def read(path):
    """{(depth, spec): row}"""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        return {(int(row["depth"]), row["kv"]): row for row in csv.DictReader(file)}


def measure(args):
    rows = read(args.csv)
    for depth in args.depths:
        for spec in args.specs:
            turns = [(attend_ns(args, "f16", depth), attend_ns(args, spec, depth)) for _ in range(args.rounds)]
            ratio = statistics.median(codec[0] / base[0] for base, codec in turns)
            base_ns = min(base[0] for base, _ in turns)
            rows[depth, spec] = {"kv": spec, "depth": depth, "bytes_per_token": turns[0][1][1], "ratio_to_f16": f"{ratio:.2f}",
                                 "f16_us": f"{base_ns / 1000:.0f}", "rounds": args.rounds, "device": turns[0][1][2]}  # fmt: skip
            print(rows[depth, spec], flush=True)
            write(args.csv, rows)


def write(path, rows):
    known = {spec: place for place, spec in enumerate(SPECS + TABLED)}
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0], known.get(key[1], len(known))))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, ordered[0], lineterminator="\n")
        table.writeheader()
        table.writerows(ordered)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", type=lambda text: [int(d) for d in text.split(",")], default=[4096, 32768])
    parser.add_argument("--model", default=root / "data/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--text", default=root / "data/text/wiki.test.raw", help="that tables are learned from")
    parser.add_argument("--tables", type=Path, default=root / "build/codec_speed", help="folder of the tables; those that are there are kept")
    parser.add_argument("--program", default=root / "build/kvlab")
    parser.add_argument("--csv", type=Path, default=root / "compress/speed.csv")
    parser.add_argument("specs", nargs="*", default=SPECS + TABLED)
    args = parser.parse_args()
    measure(args)


if __name__ == "__main__":
    main()
