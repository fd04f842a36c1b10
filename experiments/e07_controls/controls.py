#!/usr/bin/env python3
"""Recency and an oracle at the bytes of e05's integers: the run files of grid.yaml and e05's windows as tables.

    experiments/e07_controls/controls.py             runs/e07_controls, ../e05_quant_signs/{runs,chunks}.csv -> controls.csv, controls.md (needs numpy, scipy)
    experiments/e07_controls/controls.py --figure    controls.csv -> controls.svg (needs matplotlib too)
"""
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import paired  # noqa: E402

E05 = HERE.parent / "e05_quant_signs"
MODEL = "data/models/SmolLM2-135M-Instruct.Q4_1.gguf"
SINKS, WINDOW, CONTEXT = 4, 512, 4096
SHARES = {"q8_0": 17 / 32, "int4": 9 / 32, "int3": 7 / 32, "int2": 5 / 32}  # of 16 bits, in bytes


def specs(kind, share, tokens):
    """The cache that keeps this share of a context of so many tokens."""
    return f"sink={SINKS} window={int(share * tokens) - SINKS}" if kind == "recency" else f"keep=oracle budget=uniform(kept={share})"


def resident_bytes(kvlab, spec):
    """As a decoding cache holds them behind CONTEXT tokens, a token at a time."""
    command = [kvlab, "plan", "-m", MODEL, "--ctx", str(CONTEXT), "--protocol", "p4", "--json", "--kv", spec]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=paired.ROOT).stdout)["resident_bytes"]


def uniform_windows():
    """{codec: (run, {window: KLD})} of e05."""
    run_of = {row["kv"]: row["run"] for row in paired.read_csv(E05 / "runs.csv")}
    found = {codec: (run_of[codec], {}) for codec in SHARES}
    for row in paired.read_csv(E05 / "chunks.csv"):
        for run, windows in found.values():
            if row["run"] == run:
                windows[float(row["chunk"])] = float(row["kld"])
    return found


def judge(kvlab, runs):
    rows, uniform = [], uniform_windows()
    for kind in ("recency", "oracle"):
        for codec, share in SHARES.items():
            run = runs.get(specs(kind, share, WINDOW))
            if run is None:
                print(f"no run yet: {kind}, {codec}", file=sys.stderr)
                continue
            against, windows = uniform[codec]
            kld = {window[0]: row["kld"] for window, row in run["rows"].items()}
            common = sorted(kld.keys() & windows.keys())
            own, less = paired.interval([kld[w] for w in common]), paired.interval([kld[w] - windows[w] for w in common])
            rows.append({"run": run["run"], "control": kind, "codec": codec, "share": share, "kv": specs(kind, share, WINDOW), "windows": len(common),
                         "resident_bytes_4096": resident_bytes(kvlab, specs(kind, share, CONTEXT)), "kld": own["mean"], "kld_half": own["high"] - own["mean"],
                         "kld_uniform": sum(windows[w] for w in common) / len(common), "uniform_run": against, **{k: less[k] for k in ("mean", "low", "high", "p")}})
    paired.add_holm(rows)
    for row in rows:
        row["verdict"] = "not resolved" if row["p_holm"] >= 0.05 else "less" if row["mean"] < 0 else "more"
    return rows


def write_table(path, rows):
    lines = ["<!-- controls.py writes this table -->", f"KLD to f16, nats a token, 95 % t-interval over windows; the difference to integers of equal bytes is paired by window, p adjusted (Holm, {len(rows)} rows).", "",
             "| control | tokens kept | MiB at 4096 | windows | KLD | integers | difference | p | loses |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    lines += [f"| {row['control']} | {int(row['share'] * 32)}/32 | {row['resident_bytes_4096'] / 2**20:.2f} | {row['windows']} | {row['kld']:.4f} +- {row['kld_half']:.4f} | {row['codec']}: {row['kld_uniform']:.4f} | "
              f"{paired.show(row)} | {row['p_holm']:.2g} | {row['verdict']} |" for row in rows]
    path.write_text("\n".join(lines) + "\n")


def draw(args):
    rows = paired.read_csv(args.out / "controls.csv")
    figure, axes = paired.new_figure(7, 4.4)
    for kind, colour, shape in (("recency", "black", "s--"), ("oracle", "#009E73", "*:")):
        own = [row for row in rows if row["control"] == kind]
        axes.errorbar([int(row["resident_bytes_4096"]) / 2**20 for row in own], [float(row["kld"]) for row in own], [float(row["kld_half"]) for row in own], fmt=shape, color=colour,
                      capsize=2, linewidth=1, label={"recency": "4 sinks and the newest tokens", "oracle": "oracle: tokens that will be looked at"}[kind])
    own = [row for row in rows if row["control"] == "recency"]
    axes.plot([int(row["resident_bytes_4096"]) / 2**20 for row in own], [float(row["kld_uniform"]) for row in own], "P-", color="#D55E00", linewidth=1, label="all tokens as integers")
    for row in own:
        axes.annotate(row["codec"], (int(row["resident_bytes_4096"]) / 2**20, float(row["kld_uniform"])), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(yscale="log", xlabel="MiB resident at 4096 tokens", ylabel="KLD to f16, nats a token (95 %)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    paired.save_figure(figure, args.figure_path or args.out / "controls.svg", "experiments/e07_controls/controls.py --figure")


def main():
    args = paired.parse_arguments(__doc__, HERE, "runs/e07_controls", "controls.svg")
    if args.figure or args.figure_path:
        return draw(args)
    rows = judge(args.kvlab, paired.read_runs(args.kvlab, args.runs))
    paired.write_csv(args.out / "controls.csv", rows)
    write_table(args.out / "controls.md", rows)


if __name__ == "__main__":
    main()
