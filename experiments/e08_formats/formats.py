#!/usr/bin/env python3
"""Number formats for keys and values at their bytes, paired by window: the run files of grid.yaml as tables.

    experiments/e08_formats/formats.py             runs/e08_formats -> formats.csv, pairs.csv, formats.md (needs numpy, scipy)
    experiments/e08_formats/formats.py --figure    formats.csv, ../e07_controls/controls.csv -> formats.svg (needs matplotlib too)
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import paired  # noqa: E402

CONTROLS = HERE.parent / "e07_controls/controls.csv"
FORMATS = ("int8", "q8_0", "fp8_e4m3", "fp8_e5m2", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "int4(group=32)", "int4")
# (A, B): the KLD of A less that of B
PAIRS = [("q8_0", "int8"), ("fp8_e4m3", "int8"), ("fp8_e5m2", "fp8_e4m3"), ("q5_1", "q5_0"), ("q4_1", "q4_0"), ("iq4_nl", "q4_0"), ("int4(group=32)", "q4_1"), ("int4", "q4_0"),
         ("q5_1", "fp8_e5m2"), ("q5_0", "fp8_e5m2"), ("iq4_nl", "int4")]


def summaries(runs):
    for name in FORMATS:
        if name not in runs:
            print(f"no run yet: {name}", file=sys.stderr)
            continue
        run, facts = runs[name], runs[name]["facts"]
        windows = paired.common_windows(run)
        kld, same = (paired.interval(paired.column(run, name, windows)) for name in ("kld", "same_top1"))
        delta = paired.interval(paired.column(run, "nll", windows) - paired.column(run, "nll_base", windows))
        yield {"run": run["run"], "format": name, "bytes_per_token": int(facts["memory_bytes_per_token"]), "windows": len(windows), **{f"kld_{k}": kld[k] for k in ("mean", "low", "high")},
               "kld_half": kld["high"] - kld["mean"], "nll_more": delta["mean"], "nll_half": delta["high"] - delta["mean"], "same_top1": same["mean"], "same_top1_half": same["high"] - same["mean"]}


def write_table(path, summary, rows):
    lines = ["<!-- formats.py writes these tables -->", "KLD to f16 and nll minus that of f16, nats a token, with 95 % t-intervals over windows. Bytes a token: all layers, keys and values.", "",
             "| format | bytes a token | windows | KLD | nll - f16 | same top-1 |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| `{row['format']}` | {row['bytes_per_token']:,} | {row['windows']} | {row['kld_mean']:.5f} +- {row['kld_half']:.5f} | {row['nll_more']:+.5f} +- {row['nll_half']:.5f} | {row['same_top1']:.3f} +- {row['same_top1_half']:.3f} |"
              for row in summary]
    lines += ["", *paired.differences_table(rows, 5)]
    path.write_text("\n".join(lines) + "\n")


def draw(args):
    formats = paired.read_csv(args.out / "formats.csv")
    controls = paired.read_csv(CONTROLS)
    figure, axes = paired.new_figure(7.5, 4.8)
    whole = 23040  # bytes a token in 16 bits, of which the controls keep a share of the tokens
    for kind, colour, shape in (("recency", "black", "s--"), ("oracle", "#009E73", "*:")):
        own = [row for row in controls if row["control"] == kind]
        axes.errorbar([float(row["share"]) * whole for row in own], [float(row["kld"]) for row in own], [float(row["kld_half"]) for row in own], fmt=shape, color=colour, capsize=2, linewidth=1,
                      label=f"{kind} (control)")
    for row in formats:
        x, y = int(row["bytes_per_token"]), float(row["kld_mean"])
        axes.errorbar(x, y, [[y - float(row["kld_low"])], [float(row["kld_high"]) - y]], fmt="P" if row["format"].startswith("int") else "o",
                      color="#D55E00" if row["format"].startswith("int") else "#0072B2", capsize=2, linewidth=1,
                      label={"int8": "integers, one or two groups a head (control)", "q8_0": "other formats"}.get(row["format"]))
        axes.annotate(row["format"], (x, y), xytext=(6, 8 if "(" in row["format"] else 0), textcoords="offset points", fontsize=8, va="center")
    axes.set(yscale="log", xlabel="bytes a token (of 23,040 in 16 bits)", ylabel="KLD to f16, nats a token (95 %)")
    axes.margins(x=0.1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    paired.save_figure(figure, args.figure_path or args.out / "formats.svg", "experiments/e08_formats/formats.py --figure")


def main():
    args = paired.parse_arguments(__doc__, HERE, "runs/e08_formats", "formats.svg")
    if args.figure or args.figure_path:
        return draw(args)
    runs = paired.read_runs(args.kvlab, args.runs)
    summary, rows = list(summaries(runs)), paired.differences(runs, PAIRS)
    paired.write_csv(args.out / "formats.csv", summary)
    paired.write_csv(args.out / "pairs.csv", rows)
    write_table(args.out / "formats.md", summary, rows)


if __name__ == "__main__":
    main()
