#!/usr/bin/env python3
"""Divergence and NLL of latents of SmolLM2-135M, controls, and the model converted to latent attention.

    run.py [--program build/kvlab] [--work DIR]     runs the rows that have no run file yet (--work: tables and converted models), then collects
    run.py --collect                                runs/e31_latent -> latent.csv (windows), caches.csv, runs.csv; rows without a run file stay (needs h5py, scipy)
    run.py --table                                  verdicts of why.md from latent.csv
    run.py --figure                                 caches.csv -> latent.svg (needs matplotlib)
"""
import argparse
import csv
import math
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
MODEL, TEXT, RESULTS = "data/models/SmolLM2-135M-Instruct.Q4_1.gguf", "data/text/wiki.test.raw", HERE / "latent.csv"
TOKENS = 256  # of a window; its second half is scored
WINDOWS = ["--chunks", "16"]

TABLES = {"one": "latent rope=pre", "three": "latent(heads=3) rope=pre", "post": "latent", "shared": "latent(heads=3,layers=5) rope=pre"}
RANKS = (16, 24, 32, 40, 48, 56, 64)
# row: (spec, table)
LATENTS = {f"rank {rank}": (f"latent(rank={rank}) rope=pre", "one") for rank in RANKS} | {
    "spread 32": ("latent(rank=32,spread) rope=pre", "one"),
    "spread 48": ("latent(rank=48,spread) rope=pre", "one"),
    "energy 0.9": ("latent(energy=0.9) rope=pre", "one"),
    "energy 0.99": ("latent(energy=0.99) rope=pre", "one"),
    "heads 3, rank 96": ("latent(rank=96,heads=3) rope=pre", "three"),
    "heads 3, rank 144": ("latent(rank=144,heads=3) rope=pre", "three"),
    "keys 32": ("k=latent(rank=32) v=f16 rope=pre", "one"),
    "values 32": ("k=f16 v=latent(rank=32) rope=pre", "one"),
    "post 32": ("latent(rank=32)", "post"),
    "post 64": ("latent(rank=64)", "post"),
    "rank 64 int8": ("latent(rank=64,of=int8) rot=hadamard rope=pre", "one"),
    "rank 64 int4": ("latent(rank=64,of=int4) rot=hadamard rope=pre", "one"),
    "rank 64 int3": ("latent(rank=64,of=int3) rot=hadamard rope=pre", "one"),
    "rank 48 int8": ("latent(rank=48,of=int8) rot=hadamard rope=pre", "one"),
}
# 32, 64 and 96 numbers a token, layer and side: of five layers together, and of each alone under the same protocol
SHARED = {f"five layers, rank {5 * rank}": (f"latent(rank={5 * rank},heads=3,layers=5) rope=pre", "shared") for rank in (32, 64, 96)} | {
    f"one layer, rank {rank}": (f"latent(rank={rank},heads=3) rope=pre tail=1", "three") for rank in (32, 64, 96)}
QUANTIZED = {name: (f"{name} rope=pre", None) for name in ("int8", "int4", "int3", "int2")} | {
    f"{name} hadamard": (f"{name} rot=hadamard rope=pre", None) for name in ("int8", "int4", "int3", "int2")}
# Controls that keep this share of the tokens in 16 bits: the bytes of ranks 48, 32, 16 and of 4, 3 and 2 bits
SHARES = {"3/4": 192, "1/2": 128, "9/32": 72, "1/4": 64, "7/32": 56, "5/32": 40}
RECENCY = {f"recency {share}": (f"sink=4 window={tokens - 4}", None) for share, tokens in SHARES.items()}
ORACLE = {f"oracle {share}": (f"keep=oracle budget=uniform(kept={tokens / TOKENS:g})", None) for share, tokens in SHARES.items()}
CACHES = LATENTS | QUANTIZED | RECENCY | ORACLE | SHARED
HALVES = ORACLE | SHARED # the first half of a window is compressed at its end, the second scored
# row: options of to_mla.py. 384 elements a token and layer before, 192 of the family's MHA (e30), whose text is the Bible's last part
CONVERTED = {
    "mla 64+320": "--components 1", "mla 64+256": "--components 1 --rank 256", "mla 64+192": "--components 1 --rank 192",
    "mla 64+128": "--components 1 --rank 128", "mla 128+256": "--components 2", "mla 128+128": "--components 2 --rank 128",
    "pairs 96+288": "--frequencies 16", "pairs 96+160": "--frequencies 16 --rank 160",
}
FAMILY = {"family": None, "family 16+176": "--components 1", "family 16+80": "--components 1 --rank 80", "family 16+48": "--components 1 --rank 48",
          "family 16+16": "--components 1 --rank 16"}
FAMILY_MODEL, FAMILY_TEXT = "data/models/family-mha.gguf", "data/text/kjv.txt"
FAMILY_WINDOWS = ["-c", "512", "--chunks", "64", "--first-chunk", "7700"]
ROWS = [*CACHES, *CONVERTED, *FAMILY]


def output(command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"run.py: exit code {done.returncode} of {' '.join(map(str, command))}")
    return done.stdout


def table_of(args, name):
    path = args.work / f"{name}.h5"
    if not path.exists():
        output([args.program, "calibrate", "-m", MODEL, "-f", TEXT, "-c", 512, "--chunks", 8, "--first-chunk", 140, "--for", TABLES[name], "-o", path])
    return path


def moments_of(args, model, text):
    path, tokens = (args.work / f"{Path(model).stem}{ending}" for ending in ("-moments.npz", "-tokens.txt"))
    if not tokens.exists():
        tokens.write_text(output([args.program, "tokenize", "-m", model, "-f", text]))
    if not path.exists():
        output([sys.executable, HERE / "to_mla.py", model, "--moments", path, "--tokens", tokens])
    return path


def converted_model(args, row):
    """A new file, or the model itself for the row that converts nothing."""
    model, text = (FAMILY_MODEL, FAMILY_TEXT) if row in FAMILY else (MODEL, TEXT)
    options = (CONVERTED | FAMILY)[row]
    if options is None:
        return model
    path = args.work / f"{row.replace(' ', '_').replace('+', '_')}.gguf"
    output([sys.executable, HERE / "to_mla.py", model, path, "--moments", moments_of(args, model, text), *options.split()])
    return path


def run_file(args, row):
    return args.output / f"{row.translate(str.maketrans(' +/', '_--', ','))}.h5"


def share_of(row):
    """Of a window's tokens, those that the cache keeps."""
    return SHARES[row.split()[1]] / TOKENS if row in RECENCY | ORACLE else 1


def evaluate(args, row):
    """The row's run file. Oracles need tokens that follow, and latents that layers share a prompt: the first half of the window is compressed at its end, the second
    is scored as in all other rows; beside shared latents one token at a time, whose own key and value stay exact."""
    half = str(TOKENS // 2)
    window = ["--protocol", "compress-then-score", "--context", half, "--score", half] if row in HALVES else ["-c", str(TOKENS)]
    window += ["--ubatch", "1"] if row in SHARED else []
    windows = FAMILY_WINDOWS if row in FAMILY else [*window, *WINDOWS]
    rest = ["-f", FAMILY_TEXT if row in FAMILY else TEXT, *windows, "--quiet", "-o", run_file(args, row)]
    if row in CACHES:
        spec, table = CACHES[row]
        return output([args.program, "eval", "kld", "-m", MODEL, *rest, "--base-logits", args.work / "base", "--kv", spec + (f" table={table_of(args, table)}" if table else "")])
    output([args.program, "eval", "ppl", "-m", converted_model(args, row), *rest])


def read_results():
    rows = {}
    if RESULTS.exists():
        with open(RESULTS, newline="") as file:
            for line in csv.DictReader(file):
                rows.setdefault(line["row"], []).append(line)
    return rows


def run(args):
    args.work.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        path = run_file(args, row)
        if args.match in row and not path.exists() and not Path(f"{path}.part").exists(): # another run.py may be at work
            evaluate(args, row)
            print(row, file=sys.stderr)


def collect(args):
    """latent.csv has a line a window; those of rows that have a run file now are replaced."""
    import paired
    found = paired.read_runs(args.program, args.output, key=lambda facts: Path(facts["file"]).stem)
    rows = read_results()
    for row in ROWS:
        run = found.get(run_file(args, row).stem)
        if run:
            kv = CACHES[row][0] if row in CACHES else (CONVERTED | FAMILY)[row]
            rows[row] = [{"run": run["run"], "row": row, "kv": kv, "bytes_per_token": int(float(run["facts"]["memory_bytes_per_token"]) * share_of(row)),
                          "chunk": int(window["chunk"]), **{name: window.get(name, "") for name in ("kld", "nll", "nll_base")}} for window in run["rows"].values()]
    paired.write_csv(RESULTS, [line for row in ROWS for line in rows.get(row, [])])
    paired.write_csv(HERE / "caches.csv", summaries())
    files = [str(args.output / f"{run['run']}.h5") for run in found.values()]
    subprocess.run([sys.executable, HERE.parent / "collect.py", HERE.name, "-f", *files], check=True)


def kind_of(row):
    kinds = {"latent": LATENTS, "quantized": QUANTIZED, "recency": RECENCY, "oracle": ORACLE, "shared": SHARED, "converted": CONVERTED, "family": FAMILY}
    return next(kind for kind, rows in kinds.items() if row in rows)


def summaries():
    """A row a cache: means over windows with their standard errors; nll above that of f16 in the same window."""
    rows = read_results()
    base = {line["chunk"]: float(line["nll_base"]) for lines in rows.values() for line in lines if line["nll_base"] and line["row"] not in HALVES}
    family = {line["chunk"]: float(line["nll"]) for line in rows.get("family", [])}
    out = []
    for row in [row for row in ROWS if row in rows]:
        lines, before = rows[row], family if row in FAMILY else base
        above = [float(line["nll"]) - float(line["nll_base"] or before[line["chunk"]]) for line in lines]
        kld = mean_and_error(column(lines, "kld")) if column(lines, "kld") else ("", "")
        out.append({"run": lines[0]["run"], "row": row, "kind": kind_of(row), "kv": lines[0]["kv"], "bytes_per_token": int(float(lines[0]["bytes_per_token"])), "windows": len(lines),
                    **dict(zip(("kld", "kld_se"), kld)), **dict(zip(("above", "above_se"), mean_and_error(above)))})
    return out


def column(lines, name):
    return [float(line[name]) for line in lines if line[name] != ""]


def mean_and_error(values):
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def print_table():
    found = summaries()
    print("| row | bytes a token | mean KLD to f16 | NLL above f16's | windows |\n| --- | ---: | ---: | ---: | ---: |")
    for row in found:
        kld = f"{row['kld']:.4f} +- {row['kld_se']:.4f}" if row["kld"] != "" else ""
        print(f"| {row['row']} | {row['bytes_per_token']} | {kld} | {row['above']:.4f} +- {row['above_se']:.4f} | {row['windows']} |")
    print("\nA rank and the next larger one: KLD of the larger less that of the smaller, paired by window")
    rows = read_results()
    measured = [rank for rank in RANKS if f"rank {rank}" in rows]
    for low, high in zip(measured, measured[1:]):
        pair = [column(rows[f"rank {rank}"], "kld") for rank in (low, high)]
        mean, error = mean_and_error([b - a for a, b in zip(*pair)])
        print(f"{low} -> {high}: {mean:+.4f} +- {error:.4f}: {'does not rise' if mean <= 2 * error else 'RISES'}")


SERIES = [("latent, f16 numbers: rank 16 to 64 of 64", [f"rank {rank}" for rank in RANKS], "o-", "#0072B2"),
          ("ranks spread over layers", ["spread 32", "spread 48"], "s", "#56B4E9"),
          ("three heads together", ["heads 3, rank 96", "heads 3, rank 144"], "^", "#009E73"),
          ("all 64 directions, codes of 3, 4, 8 bits, Hadamard", ["rank 64 int3", "rank 64 int4", "rank 64 int8"], "D-", "#CC79A7"),
          ("no projection, codes of 2, 3, 4, 8 bits, Hadamard", [f"int{bits} hadamard" for bits in (2, 3, 4, 8)], "x--", "#E69F00"),
          ("five layers and their heads together (behind a half window)", [row for row in SHARED if "five" in row], "v-", "#882255"),
          ("each layer's heads together (behind a half window)", [row for row in SHARED if "one" in row], "<:", "#332288"),
          ("control: uniform quantization, 2, 3, 4, 8 bits", [f"int{bits}" for bits in (2, 3, 4, 8)], "P:", "#D55E00"),
          ("control: recency, 4 sinks and the newest tokens", list(RECENCY), "s:", "#000000"),
          ("control: oracle (of a compressed half window)", list(ORACLE), "*:", "#777777")]


def figure():
    import drawing
    with open(HERE / "caches.csv", newline="") as file:
        caches = {row["row"]: row for row in csv.DictReader(file)}
    fig, ax = drawing.new_figure(7.5, 5)
    for label, names, style, colour in SERIES:
        points = sorted([float(caches[name][column]) for column in ("bytes_per_token", "kld", "kld_se")] for name in names if name in caches)
        if points:
            x, y, error = zip(*points)
            ax.errorbar(x, y, [2 * e for e in error], fmt=style, color=colour, markersize=5, linewidth=1, capsize=2, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [3600, 5760, 8640, 11520, 17280, 23040]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("bytes a token of the context (f16: 23,040); without the directions themselves")
    ax.set_ylabel("mean KLD to f16, nats (bars: 2 standard errors)")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=7, loc="lower left")
    drawing.save_figure(fig, HERE / "latent.svg", "experiments/e31_latent/run.py --figure")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/kvlab")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "latent")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / HERE.name, help="folder of the run files")
    parser.add_argument("--match", default="", help="rows that contain this text only")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", action="store_true")
    args = parser.parse_args()
    if args.table:
        return print_table()
    if args.figure:
        return figure()
    if not args.collect:
        run(args)
    collect(args)


if __name__ == "__main__":
    main()
