#!/usr/bin/env python3
"""What reading few pages costs, against the newest tokens, fewer bits and an oracle: the run files of grid.yaml as tables.

    experiments/e21_quest/pages.py             runs/e21_quest -> caches.csv, pages.csv, pages.md (needs numpy, scipy)
    experiments/e21_quest/pages.py --figure    caches.csv -> pages.svg (needs matplotlib too)
    --runs runs/e21_large --out experiments/e21_quest/large    the same of large.yaml
"""
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import paired  # noqa: E402

DENSE = " @0-1 keep=none budget=none"
TOKENS = (64, 128, 256, 512)
PAGES = {n: f"read=pages(tokens={n},dense=2)" for n in TOKENS}
NEWEST = {n: f"keep=streaming(sink=4) budget=uniform(tokens={n}) when=full{DENSE}" for n in TOKENS}
ORACLE = {n: f"keep=oracle budget=uniform(tokens={n}){DENSE}" for n in TOKENS}
OTHER = {"gqa=sum": "read=pages(tokens=128,dense=2,gqa=sum)", "no dense layers": "read=pages(tokens=128)", "int4 and pages": "int4 read=pages(tokens=128,dense=2)"}
# kind -> {tokens read, or what it is: spec}, colour and shape of the figure
KINDS = {"pages": (PAGES, "#0072B2", "o-"), "recency": (NEWEST, "black", "s--"), "oracle": (ORACLE, "#009E73", "*:"),
         "quantized": ({width: width for width in ("int8", "int4")}, "#D55E00", "P:"), "pages, other": (OTHER, "#56B4E9", "^")}
# (A, B): the KLD of A less that of B
PAIRS = [*[(PAGES[n], NEWEST[n]) for n in TOKENS], *[(PAGES[n], ORACLE[n]) for n in TOKENS], (OTHER["gqa=sum"], PAGES[128]), (OTHER["no dense layers"], PAGES[128]),
         (PAGES[256], "int8"), (PAGES[128], "int4")]


def summaries(runs):
    for kind, (specs, _, _) in KINDS.items():
        for what, spec in specs.items():
            if spec not in runs:
                print(f"no run yet: {kind}, {what}", file=sys.stderr)
                continue
            run, facts = runs[spec], runs[spec]["facts"]
            windows = paired.common_windows(run)
            kld, same = (paired.interval(paired.column(run, name, windows)) for name in ("kld", "same_top1"))
            yield {"run": run["run"], "kind": kind, "tokens": what, "kv": spec, "windows": len(windows), **{f"kld_{k}": kld[k] for k in ("mean", "low", "high")},
                   "kld_half": kld["high"] - kld["mean"], "same_top1": same["mean"], "same_top1_half": same["high"] - same["mean"], "read_bytes": int(facts["memory_token_read_bytes"]),
                   "resident_bytes": int(facts["memory_resident_bytes"])}


def write_table(path, summary, rows):
    lines = ["<!-- pages.py writes these tables -->", "KLD to f16 that reads all, nats a token, with its 95 % t-interval over windows. Read: bytes of the newest token's attention; held: resident bytes.", "",
             "| cache | tokens read | windows | KLD | same top-1 | read | held |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {row['kind']} | {row['tokens']} | {row['windows']} | {row['kld_mean']:.4f} [{row['kld_low']:.4f}, {row['kld_high']:.4f}] | {row['same_top1']:.3f} +- {row['same_top1_half']:.3f} | {row['read_bytes']:,} | "
              f"{row['resident_bytes']:,} |" for row in summary]
    lines += ["", *paired.differences_table(rows)]
    path.write_text("\n".join(lines) + "\n")


def draw(args):
    summary = paired.read_csv(args.out / "caches.csv")
    figure, panels = paired.new_figure(12, 4.6, columns=2, sharey=True)
    for axes, measure, label in zip(panels, ("read_bytes", "resident_bytes"), ("MB that a token's attention reads", "MB held")):
        for kind, (_, colour, shape) in KINDS.items():
            own = sorted((row for row in summary if row["kind"] == kind), key=lambda row: int(row[measure]))
            if own:
                x, y = [int(row[measure]) * 1e-6 for row in own], [float(row["kld_mean"]) for row in own]
                axes.errorbar(x, y, [[m - float(row["kld_low"]) for m, row in zip(y, own)], [float(row["kld_high"]) - m for m, row in zip(y, own)]], fmt=shape, color=colour,
                              markersize=5, linewidth=1, capsize=2, label=kind if kind in ("pages", "pages, other") else f"{kind} (control)")
                place = {"xytext": (-5, -9), "ha": "right"} if kind == "pages, other" else {"xytext": (5, 4)}
                for row, point in zip(own, zip(x, y)):
                    axes.annotate(re.sub(" and pages", "", row["tokens"]), point, textcoords="offset points", fontsize=7, **place)
        axes.set(xlabel=label, yscale="log", xlim=(0, 1.08 * axes.get_xlim()[1]))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("KLD to f16 that reads all, nats a token (95 %)")
    panels[1].legend(fontsize=8)
    paired.save_figure(figure, args.figure_path or args.out / "pages.svg", "experiments/e21_quest/pages.py --figure")


def main():
    args = paired.parse_arguments(__doc__, HERE, "runs/e21_quest", "pages.svg")
    if args.figure or args.figure_path:
        return draw(args)
    runs = paired.read_runs(args.kvlab, args.runs)
    summary, rows = list(summaries(runs)), paired.differences(runs, PAIRS)
    paired.write_csv(args.out / "caches.csv", summary)
    paired.write_csv(args.out / "pages.csv", rows)
    write_table(args.out / "pages.md", summary, rows)


if __name__ == "__main__":
    main()
