#!/usr/bin/env python3
"""Bytes of runs.csv against the formula, written down here once more: layers x kv heads x (bytes of a key + bytes of a value). Exit code 1 if a cell differs."""
import csv
import sys
from pathlib import Path

LAYERS, HEADS, DIM = 30, 3, 64
# Bytes of a row of 64 channels: codes and scales.
INTEGER = {f"int{bits}": (DIM * bits // 8, 4) for bits in (8, 4, 3, 2)}  # a scale and a zero point of 16 bits for the whole row
GGML = {"q8_0": (32, 2), "q5_1": (20, 4), "q5_0": (20, 2), "q4_1": (16, 4), "q4_0": (16, 2), "iq4_nl": (16, 2)}  # of each 32 channels
ROW = {"f32": (4 * DIM, 0), "f16": (2 * DIM, 0), "fp8_e4m3": (DIM, 2), "fp8_e5m2": (DIM, 2)} | INTEGER | {name: (2 * codes, 2 * scale) for name, (codes, scale) in GGML.items()}


def main():
    rows = list(csv.DictReader(open(Path(__file__).parent / "runs.csv")))
    wrong = 0
    for row in rows:
        kv, n = row["config_kv_given"], int(row["config_n_ctx"])
        codes, scale = (2 * LAYERS * HEADS * size for size in ROW[kv])
        wanted = {"memory_bytes_per_token": codes + scale, "memory_payload_bytes": n * codes, "memory_scale_bytes": n * scale,
                  "memory_plan_resident_bytes": int(row["memory_resident_bytes"]),
                  "memory_resident_bytes": n * (codes + scale) + int(row["memory_index_bytes"])}
        for name, value in wanted.items():
            if int(row[name]) != value:
                wrong += 1
                print(f"{kv}, {n} tokens: {name} is {row[name]}, wanted {value}")
    print(f"{len(rows)} cells, {wrong} differences")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
