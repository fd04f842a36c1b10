#!/usr/bin/env python3
"""Verdicts on the signs of quantization papers, from the run files of this folder's grids.

    experiments/e05_quant_signs/signs.py             runs/e05_quant_signs -> runs.csv, chunks.csv, signs.csv, signs.md (asks kvlab for all statistics and bytes)
    experiments/e05_quant_signs/signs.py --figure    signs.csv, runs.csv -> signs.svg (needs matplotlib)

A sign says that one cache has a lower KLD to f16 than another one. Pairs that lack a run are left out and named on stderr.
"""
import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
root = here.parent.parent
sys.path.append(str(here.parent))
from run_files import run_files_in  # noqa: E402

MODEL = root / "data/models/SmolLM2-135M-Instruct.Q4_1.gguf"
LEAST_RATIO = 0.05  # that the figure shows
EQUAL = 1.01  # "equal bytes": the better cache reserves at most this much of the other one's


def kivi(axis, bits, group=32):
    options = ([axis] if axis else []) + [f"bits={bits}"] + ([f"group={group}"] if group != 32 else [])
    return f"kivi({','.join(options)},residual=0)"


def sides(k, v, rest=""):
    return f"k={k} v={v} {rest}".strip()


def keys(codec, rest=""):
    return sides(codec, "f16", rest)


def gear(bits, outliers):
    return keys(f"gear(bits={bits},block=256,rank=0,outliers={outliers})", "rope=pre")


def kvquant(bits, outliers=None, table=""):
    form = f"kvquant{bits}" if outliers is None else f"kvquant(bits={bits},outliers={outliers}) rope=pre sink=1"
    return f"{form} table=runs/e05_tables/kvquant{bits}{table}.h5"


def kivi_with(options, group=32):
    return f"kivi(bits=2,{f'group={group},' if group != 32 else ''}residual=0,{options})"


def both(codec):
    return sides(codec, codec)


BOTH = {(k, v): sides(kivi(k, 2), kivi(v, 2)) for k in ("channel", "token") for v in ("channel", "token")}
BOTH["channel", "token"] = sides(kivi("", 2), kivi("", 2))
MORE_BITS = sides("int3", kivi("token", 2))  # keys by token that may cost what keys by channel and their exact rows cost
FINER = {bits: sides(kivi("", bits, 128), f"int{bits}(group=32)", "rope=pre sink=1") for bits in (2, 3)}
TAIL = "int2(group=32) tail=128"
TURBO = {sketch: f"k=turboquant(bits=3{sketch}) v=turboquant(bits=2) rot=random" for sketch in ("", ",sketch=sign")}
GEAR = {"low rank": "gear(outliers=0)", "outliers": "gear(rank=0)", "low rank and outliers": "gear"}
GEAR_BYTES = {"low rank": sides(kivi("", 3), "int3"), "outliers": sides(kivi("", 3), kivi("", 2)), "low rank and outliers": sides(kivi("", 4), kivi("", 3))}
THINK = {ratio: keys(f"think(ratio={ratio})" if ratio else "think") for ratio in ("0.2", "", "0.6")}

# (sign, axis and group, bits, better, other, other at equal bytes if `other` is smaller, marks)
SIGNS = [
    ("K channel, V token < K channel, V channel", "32 tokens or channels", 2, BOTH["channel", "token"], BOTH["channel", "channel"], None, ""),
    ("K channel, V token < K token, V token", "32 tokens or channels", 2, BOTH["channel", "token"], BOTH["token", "token"], MORE_BITS, ""),
    ("K channel, V channel < K token, V token", "32 tokens or channels", 2, BOTH["channel", "channel"], BOTH["token", "token"], MORE_BITS, ""),
    ("K channel, V channel < K token, V channel", "32 tokens or channels", 2, BOTH["channel", "channel"], BOTH["token", "channel"], MORE_BITS, ""),
    ("KIVI-2 as published < K token, V token, same tail", "32, tail 128", 2, "kivi2", TAIL, None, ""),
    *[(f"V alone < K alone, {name}", where, bits, sides("f16", codec), keys(codec), None, "")
      for name, codec, where, bits in (("int4", "int4", "64 channels", 4), ("int3", "int3", "64 channels", 3), ("int2", "int2", "64 channels", 2),
                                       ("q4_0", "q4_0", "32 channels", 4), ("kivi by token", kivi("token", 2), "32 channels", 2),
                                       ("kivi by channel", kivi("channel", 2), "32 tokens", 2))],
    ("K 4 bits, V 2 < K 2 bits, V 4", "64 channels", "4, 2", sides("int4", "int2"), sides("int2", "int4"), None, ""),
    *[(f"Hadamard < none, {spec}", where, bits, f"{spec} rot=hadamard", spec, None, "")
      for spec, where, bits in (("int4", "64 channels", 4), ("int3", "64 channels", 3), ("int2", "64 channels", 2), ("int4(group=32)", "32 channels", 4),
                                ("int3(group=32)", "32 channels", 3))],
    ("Hadamard < none, kivi by token", "32 channels", 2, kivi("token", 2) + " rot=hadamard", BOTH["token", "token"], None, ""),
    *[(f"Hadamard, 64 channels < none, 32 channels, int{bits}", "channels", bits, f"int{bits} rot=hadamard", other, None, "")
      for bits, other in ((4, "int4(group=32)"), (3, "int3(group=32)"), (2, BOTH["token", "token"]))],
    *[("Hadamard < none, K by channel", "32 tokens", bits, keys(kivi("", bits), "rot=hadamard"), keys(kivi("channel" if bits == 2 else "", bits)), None, "open")
      for bits in (4, 3, 2)],
    *[("K before RoPE < after", f"{group} tokens", 3, keys(kivi("", 3, group), "rope=pre"), keys(kivi("", 3, group)), None, "oracle" if group == 512 else "")
      for group in (512, 128, 32)],
    *[("K after RoPE, finer group < before, coarser", f"{fine} and {coarse} tokens", 3, keys(kivi("", 3, fine)), keys(kivi("", 3, coarse), "rope=pre"), None,
       "oracle" if coarse == 512 else "") for fine, coarse in ((128, 512), (32, 128))],
    *[("outliers 0.8 % < none, K", "256 tokens, before RoPE", bits, gear(bits, 1), gear(bits, 0), keys(kivi("", bits, 128), "rope=pre"), "") for bits in (3, 2)],
    *[("K finer group < outliers 0.8 %", "128 and 256 tokens", bits, keys(kivi("", bits, 128), "rope=pre"), gear(bits, 1), None, "") for bits in (3, 2)],
    *[("outliers 1 % < none, kvquant", "K channel, V token", bits, kvquant(bits), kvquant(bits, 0, "_0"), FINER[bits], "") for bits in (3, 2)],
    *[("kvquant 1 % < K 128 tokens, V 32 channels", "K channel, V token", bits, kvquant(bits), FINER[bits], None, "") for bits in (3, 2)],
    *[("table from scored tokens < from others, kvquant", "K channel, V token", bits, kvquant(bits, table="_oracle"), kvquant(bits), None, "oracle")
      for bits in (3, 2)],
    ("korder=hf < gguf, kivi by token", "32 channels", 2, BOTH["token", "token"] + " korder=hf", BOTH["token", "token"], None, ""),
    ("korder=hf < gguf, q4_0", "32 channels", 4, "q4_0 korder=hf", "q4_0", None, ""),
    ("korder=hf < gguf, q4_0 K alone", "32 channels", 4, keys("q4_0", "korder=hf"), keys("q4_0"), None, ""),
    *[(f"clip at 0.95 < none, int{bits}", "64 channels", bits, f"int{bits}(clip=0.95)", f"int{bits}", None, "open") for bits in (4, 3, 2)],
    *[(f"best clip of a group < none, int{bits}", "64 channels", bits, f"int{bits}(clip=0.5,search=8)", f"int{bits}", None, "") for bits in (4, 3, 2)],
    ("best clip of a group < none, kivi", "32 tokens or channels", 2, both(kivi_with("clip=0.5,search=8")), BOTH["channel", "token"], None, ""),
    *[(f"scales fp16 < fp8 e4m3, {name}", "32", bits, fp16, fp8, fp8_finer, "")
      for name, bits, fp16, fp8, fp8_finer in (
          ("int4", 4, "int4(group=32)", "int4(group=32,scale=e4m3)", None), ("int3", 3, "int3(group=32)", "int3(group=32,scale=e4m3)", None),
          ("int2", 2, BOTH["token", "token"], "int2(group=32,scale=e4m3)", None),
          ("kivi", 2, BOTH["channel", "token"], both(kivi_with("scale=e4m3")), both(kivi_with("scale=e4m3", 16))))],
    *[(f"scales fp8 e4m3, 32 channels < fp16, 64, int{bits}", "channels", bits, f"int{bits}(group=32,scale=e4m3)", f"int{bits}", None, "") for bits in (4, 3, 2)],
    ("scales fp8 e4m3, group 16 < fp16, 32, kivi", "tokens or channels", 2, both(kivi_with("scale=e4m3", 16)), BOTH["channel", "token"], None, ""),
    *[(f"clip at 0.95 < none, int{bits} with Hadamard", "64 channels", bits, f"quarot{bits}", f"int{bits} rot=hadamard", None, "open") for bits in (4, 3, 2)],
    ("K 4 bits, V 2 < K 2 bits, V 4, Hadamard", "64 channels", "4, 2", sides("int4", "int2", "rot=hadamard"), sides("int2", "int4", "rot=hadamard"), None, ""),
    *[(f"turboquant < Hadamard, int{bits}", "64 channels", bits, f"turboquant{bits}", f"int{bits} rot=hadamard", None, "") for bits in (4, 3, 2)],
    ("turboquant, K 3 bits, V 2 < kivi", "64 channels; 32", "3, 2; 2", TURBO[""], BOTH["channel", "token"], None, ""),
    ("turboquant K 3 bits < 2 bits and sketch", "64 channels", 3, TURBO[""], TURBO[",sketch=sign"], None, ""),
    *[(f"{part} < none, gear", "64 tokens or channels", 2, spec, "gear(rank=0,outliers=0)", GEAR_BYTES[part], "") for part, spec in GEAR.items()],
    ("gear < kivi", "64; 32", 2, GEAR["low rank and outliers"], BOTH["channel", "token"], GEAR_BYTES["low rank and outliers"], ""),
    ("think without 0.4 < without 0.6", "448 tokens, then 64", 16, THINK[""], THINK["0.6"], None, ""),
    ("int8 K < think without 0.4", "448 tokens, then 64", "8; 16", keys("int8"), THINK[""], None, ""),
    ("scales fp8 e4m3 < e5m2, int3", "32 channels", 3, "int3(group=32,scale=e4m3)", "int3(group=32,scale=e5m2)", None, ""),
]


def kvlab(args, *words):
    return subprocess.run([args.kvlab, *words], capture_output=True, text=True, check=True, cwd=root).stdout


def read_runs(args):
    """{spec: row of runs.csv}; a spec that ran twice counts with more windows."""
    columns = {"kv": "config_kv_given", "ctx": "config_n_ctx", "windows": "quality_n_chunks", "kld": "quality_kld_mean", "kld_se_chunk": "quality_kld_se_chunk",
               "same_top1": "quality_same_top1", "ppl": "quality_ppl", "overflow": "quality_outlier_overflow", "device": "config_device", "git": "git"}
    files = run_files_in(args.runs)
    runs = {}
    for number, wide in enumerate(csv.DictReader(kvlab(args, "log", "export", "--csv", *files).splitlines())):
        row = {"run": Path(wide["file"]).stem} | {name: wide[column] for name, column in columns.items()} | {"number": number}
        if wide["status"] == "complete" and int(row["windows"]) > int(runs.get(row["kv"], {"windows": 0})["windows"]):
            runs[row["kv"]] = row
    for row in runs.values():
        row["resident_bytes_4096"] = json.loads(kvlab(args, "plan", "-m", str(MODEL), "--ctx", "4096", "--json", "--kv", row["kv"]))["resident_bytes"]
    chunks = list(csv.DictReader(kvlab(args, "log", "export", "--csv", "--table", "quality", *files).splitlines()))
    by_number = {row.pop("number"): row for row in runs.values()}
    chunks = [c for c in chunks if int(c["run"]) in by_number]
    write_csv(args.out / "chunks.csv", [{"run": by_number[int(c["run"])]["run"]} | {name: c[name] for name in ("chunk", "kld", "nll", "nll_base", "same_top1")} for c in chunks])
    for row in runs.values():
        same = [float(c["same_top1"]) for c in chunks if by_number[int(c["run"])] is row]
        row["same_top1_se_chunk"] = statistics.stdev(same) / len(same) ** 0.5
    write_csv(args.out / "runs.csv", list(runs.values()))
    for c in chunks:
        by_number[int(c["run"])].setdefault("chunks", {})[c["chunk"]] = float(c["kld"])
    return runs


def compare(args, runs, better, other):
    """The paired difference of KLD, better - other, as `kvlab log diff` has it."""
    a, b = (runs[spec] for spec in (other, better))
    found = json.loads(kvlab(args, "log", "diff", "--json", *(str(args.runs / f"{row['run']}.h5") for row in (a, b))))["quality"]["kld"]
    words = {"lower": "holds", "higher": "reversed"}
    common = [(b["chunks"][chunk], a["chunks"][chunk]) for chunk in a["chunks"] if chunk in b["chunks"]]
    mean_b, mean_a = (statistics.fmean(column) for column in zip(*common))
    return {"run": f"{b['run']} {a['run']}", "better": better, "other": other, "kld_better": mean_b, "kld_other": mean_a, "difference": found["difference"], "low": found["low"],
            "high": found["high"], "windows": found["n"], "bytes_better": b["resident_bytes_4096"], "bytes_other": a["resident_bytes_4096"],
            "verdict": words.get(found["verdict"], found["verdict"])}


def judge(args, runs):
    rows, none = [], dict.fromkeys(["run", "better", "other", "kld_better", "kld_other", "difference", "low", "high", "windows", "bytes_better", "bytes_other"], "")
    for sign, where, bits, better, other, larger, marks in SIGNS:
        missing = [spec for spec in (better, other) if spec not in runs]
        if missing:
            print(f"no run yet, left out: {sign}, {bits} bits: {missing}", file=sys.stderr)
            continue
        head = {"sign": sign, "where": where, "bits": bits, "marks": marks}
        rows.append(head | {"as": "paper"} | compare(args, runs, better, other))
        equal = rows[-1]
        if equal["bytes_better"] > EQUAL * equal["bytes_other"]:
            equal = compare(args, runs, better, larger) if larger in runs else none
        fits = equal["better"] and equal["bytes_better"] <= EQUAL * equal["bytes_other"]
        unfair = fits and equal["verdict"] == "reversed" and equal["bytes_other"] > EQUAL * equal["bytes_better"]
        rows.append(head | equal | {"as": "equal bytes"} | ({} if fits else none | {"verdict": "no pair"}) | ({"verdict": "reversed by more bytes"} if unfair else {}))
    return rows


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def write_table(path, rows):
    mib = lambda n: f"{int(n) / 2**20:.2f}"
    def cells(row):
        if row["verdict"] == "no pair":
            return "no pair | | | "
        against = f" `{row['other']}`" if row["as"] == "equal bytes" and row["other"] != paper["other"] else ""
        interval = f" [{row['low']:+.4f}, {row['high']:+.4f}]" if row["low"] is not None else ""
        return (f"**{row['verdict']}**{against} | {row['kld_better']:.4f} / {row['kld_other']:.4f} | {row['difference']:+.4f}{interval}, {row['windows']} | "
                f"{mib(row['bytes_better'])} / {mib(row['bytes_other'])}")
    lines = ["<!-- signs.py writes this table -->",
             "A < B: A has the lower KLD. Differences are A - B, paired by window, with the 95 % interval and the number of windows. MiB: resident at 4096 tokens.", "",
             "| sign | group | bits | | verdict | KLD A / B | difference | MiB A / B |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for paper, equal in zip(rows[::2], rows[1::2]):
        mark = f" ({paper['marks']})" if paper["marks"] else ""
        lines.append(f"| {paper['sign']}{mark} | {paper['where']} | {paper['bits']} | paper | {cells(paper)} |")
        same = equal["other"] == paper["other"]
        lines.append(f"| | | | equal bytes | **{equal['verdict']}** (same pair) | | | |" if same else f"| | | | equal bytes | {cells(equal)} |")
    path.write_text("\n".join(lines) + "\n")


def draw(args):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams["svg.hashsalt"] = "e05"
    rows = [row for row in csv.DictReader(open(args.out / "signs.csv")) if row["verdict"] != "no pair"]
    runs = list(csv.DictReader(open(args.out / "runs.csv")))
    labels = list(dict.fromkeys((row["sign"], row["bits"]) + ((row["where"],) if "RoPE" in row["sign"] else ()) for row in rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(16, 0.27 * len(labels) + 1.6), width_ratios=(1, 1.1), layout="constrained")
    for kind, shape, colour, shift in (("paper", "o", "#0072B2", -0.14), ("equal bytes", "s", "#D55E00", 0.14)):
        for n, row in enumerate(r for r in rows if r["as"] == kind):
            y = labels.index((row["sign"], row["bits"]) + ((row["where"],) if "RoPE" in row["sign"] else ())) + shift
            ratio = lambda column: max(1 + float(row[column]) / float(row["kld_other"]), LEAST_RATIO)
            left.plot(ratio("difference"), y, shape, color=colour, markersize=5, label=f"as: {kind}" if n == 0 else None)
            if row["low"]:
                left.plot([ratio(end) for end in ("low", "high")], [y, y], color=colour, linewidth=1.5)
    left.axvline(1, color="black", linewidth=0.8)
    left.set_yticks(range(len(labels)), [", ".join((*label[:1], f"{label[1]} bits", *label[2:])) for label in labels], fontsize=8)
    left.set_ylim(len(labels) - 0.5, -0.5)
    left.set_xscale("log")
    left.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    left.grid(axis="x", alpha=0.3)
    left.set_xlabel("KLD of A / KLD of B, with the 95 % interval of the paired difference; left of 1: A is better (at the edge: less)")
    left.legend(loc="lower right")

    whole = [run for run in runs if "f16" not in run["kv"].replace("=", " ").split() and run["ctx"] == "512"]
    points = sorted(((int(run["resident_bytes_4096"]) / 2**20, float(run["kld"]), float(run["kld_se_chunk"]), run["kv"].split(" table=")[0]) for run in whole))
    best = [p for i, p in enumerate(points) if all(p[1] < q[1] for q in points[:i])]
    right.errorbar([p[0] for p in points], [p[1] for p in points], [p[2] for p in points], fmt="o", color="#0072B2", markersize=4, linewidth=1)
    right.step([p[0] for p in best], [p[1] for p in best], where="post", color="#D55E00", linewidth=1)
    controls = here.parent / "e07_controls/controls.csv"
    for kind, style, colour in (("recency", "s:", "black"), ("oracle", "*:", "#009E73")):
        own = [row for row in csv.DictReader(open(controls)) if row["control"] == kind] if controls.exists() else []
        right.errorbar([int(row["resident_bytes_4096"]) / 2**20 for row in own], [float(row["kld"]) for row in own], fmt=style, color=colour, linewidth=1, label=f"control: {kind} (e07)")
    uniform = [p for p in points if p[3] in ("int8", "int4", "int3", "int2")]
    right.plot([p[0] for p in uniform], [p[1] for p in uniform], ":", color="#0072B2", linewidth=1, label="control: integers, one group a head")
    right.legend(fontsize=8)
    for x, y, _, name in best + [p for p in uniform if p not in best]:  # the others are in signs.md
        k, _, v = name.replace(",residual=0", "").removeprefix("k=").partition(" v=")
        right.annotate(f"{k} {v.removeprefix(k)}" if v.startswith(k) else f"{k} | {v}" if v else k, (x, y), xytext=(4, 2), textcoords="offset points", fontsize=8)
    right.set_yscale("log")
    right.margins(x=0.1)
    right.set_xlabel("MiB resident at 4096 tokens (keys | values)")
    right.set_ylabel("KLD to f16, nats a token (error: windows)")
    right.grid(alpha=0.3)
    figure.supxlabel("experiments/e05_quant_signs/signs.py --figure", fontsize=7, family="monospace")
    figure.savefig(args.out / "signs.svg", metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlab", default=root / "build/kvlab")
    parser.add_argument("--runs", type=Path, default=root / "runs/e05_quant_signs", help="folder of the run files")
    parser.add_argument("--out", type=Path, default=here, help="folder of what is written, and what the figure is drawn from")
    parser.add_argument("--figure", action="store_true", help="draw signs.svg from the tables")
    args = parser.parse_args()
    if args.figure:
        return draw(args)
    runs = read_runs(args)
    rows = judge(args, runs)
    write_csv(args.out / "signs.csv", rows)
    write_table(args.out / "signs.md", rows)


if __name__ == "__main__":
    main()
