#!/usr/bin/env python3
"""Do the costs of evicting and of quantizing add? KLD of both at once against the sum of each alone, paired by window, and the front of compositions.

    experiments/e23_additivity/additivity.py             runs/e22_ranking, e23_additivity, e23_decode -> caches.csv, additivity.csv, additivity.md (needs numpy, scipy)
    experiments/e23_additivity/additivity.py --figure    caches.csv, additivity.csv -> additivity.svg (needs matplotlib too)
"""
import csv
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import paired  # noqa: E402

LATENTS = ("latent(rank=64,of=int4) rot=hadamard", "k=int8 v=latent(rank=48,of=int8)", "latent(rank=48)")
SNAPKV = "keep=snapkv(window=32,kernel=7,pool=max) budget=uniform(removed=0.5)"
# where tokens are evicted -> what their scores read, evictions, quantizations
SETTINGS = {
    "prompt": ({"snapkv": ("exact", SNAPKV), "streaming": ("position", "keep=streaming budget=uniform(removed=0.5)"),
                "knorm": ("exact", "keep=knorm budget=uniform(removed=0.5)")}, ("int8", "int4", "int2", "kivi(residual=0)", "int4 rot=hadamard", *LATENTS)),
    "decode": ({name: (source, f"keep={name} budget=uniform(tokens=96) when=full") for name, source in
                (("tova", "used"), ("h2o", "used"), ("streaming", "position"))}, ("int8", "int4", "int2")),
}
ORDER = {("prompt", "exact"): "evicted by exact scores, then encoded", ("prompt", "position"): "evicted by position, then encoded",
         ("decode", "used"): "encoded, then evicted by scores of codes", ("decode", "position"): "encoded, then evicted by position"}


def judge(runs):
    """A row for each composition that ran, of KLD(A then B) - KLD(A) - KLD(B)."""
    rows = []
    for setting, (evictions, codecs) in SETTINGS.items():
        for codec in codecs:
            for name, (source, evicts) in evictions.items():
                both, alone = runs[setting].get(f"{codec} {evicts}"), [runs[setting].get(evicts), runs[setting].get(codec)]
                if both is None or None in alone:
                    print(f"no run yet: {setting}, {codec}, {name}", file=sys.stderr)
                    continue
                windows = paired.common_windows(both, *alone)
                kld = [paired.column(run, "kld", windows) for run in (both, *alone)]
                more = paired.interval(kld[0] - kld[1] - kld[2])
                rows.append({"setting": setting, "order": ORDER[setting, source], "eviction": name, "codec": codec, "windows": len(windows), "kld_both": kld[0].mean(),
                             "kld_both_half": half(kld[0]), "kld_eviction": kld[1].mean(), "kld_codec": kld[2].mean(), "kld_sum_half": half(kld[1] + kld[2]),
                             "ratio": kld[0].mean() / (kld[1].mean() + kld[2].mean()), **more, "run": both["run"]})
    paired.add_holm(rows)
    for row in rows:
        row["verdict"] = "not resolved" if row["p_holm"] >= 0.05 else "more than the sum" if row["mean"] > 0 else "less than the sum"
    return rows


def half(x):
    found = paired.interval(x)
    return found["high"] - found["mean"]


def summaries(runs):
    """Everything that ran behind a prompt, over the windows that all have."""
    windows = paired.common_windows(*runs.values())
    for spec, run in runs.items():
        kld, delta = paired.interval(paired.column(run, "kld", windows)), paired.column(run, "nll", windows) - paired.column(run, "nll_base", windows)
        delta = paired.interval(delta)
        yield {"kv": spec, "run": run["run"], "windows": len(windows), "resident_bytes": int(run["facts"]["memory_resident_bytes"]),
               "slack_bytes": int(run["facts"]["memory_slack_bytes"]), **{f"kld_{k}": kld[k] for k in ("mean", "low", "high")},
               **{f"delta_{k}": delta[k] for k in ("mean", "low", "high")}, "kld_half": kld["high"] - kld["mean"], "kind": kind_of(spec), "on_front": ""}


def front(rows):
    """Those that none undercuts in bytes and KLD; the oracle is not among them."""
    best = []
    for row in sorted((row for row in rows if kind_of(row["kv"]) != "oracle"), key=lambda row: (int(row["resident_bytes"]), float(row["kld_mean"]))):
        if not best or float(row["kld_mean"]) < float(best[-1]["kld_mean"]):
            best.append(row)
    return best


def write_table(path, summary, rows):
    lines = ["<!-- additivity.py writes these tables -->",
             f"A: eviction, B: codec, KLD to the whole f16 cache, nats a token; the difference is KLD(A, B) - KLD(A) - KLD(B) by window with its 95 % t-interval, p adjusted "
             f"over the {len(rows)} rows (Holm).", "",
             "| order | A | B | windows | KLD(A) | KLD(B) | sum | KLD(A, B) | ratio | difference | p | |", "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    lines += [f"| {row['order']} | {row['eviction']} | {row['codec']} | {row['windows']} | {row['kld_eviction']:.4f} | {row['kld_codec']:.4f} | "
              f"{row['kld_eviction'] + row['kld_codec']:.4f} | {row['kld_both']:.4f} | {row['ratio']:.3f} | {paired.show(row)} | {row['p_holm']:.2g} | {row['verdict']} |" for row in rows]
    lines += ["", f"The front of bytes and KLD among {len(summary)} caches, behind prompts of 448 tokens, {summary[0]['windows']} windows; MiB: resident at the end of a window of 512.", "",
              "| kv | MiB | KLD | nll - full |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| `{row['kv']}` | {row['resident_bytes'] / 2**20:.2f} | {row['kld_mean']:.4f} [{row['kld_low']:.4f}, {row['kld_high']:.4f}] | {row['delta_mean']:+.4f} |"
              for row in front(summary)]
    path.write_text("\n".join(lines) + "\n")


def kind_of(spec):
    """Groups of the figure: what tokens cost, and the controls that figures of evictions show."""
    if "latent(" in spec:
        return "latent, both" if "keep=" in spec else "latent"
    if not spec.startswith("keep="):
        return "both" if "keep=" in spec else "quantized"
    return {"keep=streaming": "recency", "keep=oracle": "oracle"}.get(spec.split()[0], "evicted")


COLOURS = {"evicted": "#56B4E9", "recency": "black", "oracle": "#CC79A7", "quantized": "#D55E00", "both": "#009E73", "latent": "#999999", "latent, both": "#E69F00"}
MARKERS = {"snapkv": "o", "streaming": "s", "knorm": "^", "tova": "D", "h2o": "v"}


def draw(args):
    rows, summary = (list(csv.DictReader(open(args.out / name))) for name in ("additivity.csv", "caches.csv"))
    figure, (left, right) = paired.new_figure(14, 6, columns=2)
    drawn = set()
    for row in rows:
        x, y = float(row["kld_eviction"]) + float(row["kld_codec"]), float(row["kld_both"])
        label = f"{row['eviction']}, {'prompt end' if row['setting'] == 'prompt' else 'while decoding'}"
        left.errorbar(x, y, xerr=float(row["kld_sum_half"]), yerr=float(row["kld_both_half"]), fmt=MARKERS[row["eviction"]], fillstyle="full" if row["setting"] == "prompt" else "none",
                      color={"prompt": "#0072B2", "decode": "#D55E00"}[row["setting"]], markersize=5, linewidth=0.8, label=None if label in drawn else label)
        drawn.add(label)
        left.annotate(row["codec"].replace("(residual=0)", ""), (x, y), xytext=(4, -7), textcoords="offset points", fontsize=6)
    ends = [f(f(*axis) for axis in (left.get_xlim(), left.get_ylim())) for f in (min, max)]
    low = 0.8 * min(float(row["kld_both"]) for row in rows)
    left.plot([low, ends[1]], [low, ends[1]], color="black", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="KLD(eviction) + KLD(codec), nats a token", ylabel="KLD(both), nats a token", title="on the line: costs add (95 % over windows)")
    left.legend(fontsize=8)
    left.grid(alpha=0.3, which="both")
    for kind, colour in COLOURS.items():
        points = [row for row in summary if kind_of(row["kv"]) == kind]
        if not points:
            continue
        mean = [float(row["kld_mean"]) for row in points]
        right.errorbar([int(row["resident_bytes"]) / 2**20 for row in points], mean, [[m - float(row["kld_low"]) for m, row in zip(mean, points)],
                       [float(row["kld_high"]) - m for m, row in zip(mean, points)]], fmt="o", color=colour, markersize=4, linewidth=0.8, label=kind)
    best = front(summary)
    right.step([int(row["resident_bytes"]) / 2**20 for row in best], [float(row["kld_mean"]) for row in best], where="post", color="grey", linewidth=0.8)
    for row in best:
        name = row["kv"].replace("(window=32,kernel=7,pool=max)", "").replace("keep=", "").replace(" budget=uniform(removed=", " -").replace("(residual=0)", "").rstrip(")")
        right.annotate(name, (int(row["resident_bytes"]) / 2**20, float(row["kld_mean"])), xytext=(5, 4), textcoords="offset points", fontsize=7)
    right.set(yscale="log", xlabel="MiB resident at the end of a window (512 tokens)", ylabel="KLD to the whole cache, nats a token (95 %)", title="bytes and cost; the line is the front")
    right.legend(fontsize=8)
    right.grid(alpha=0.3, which="both")
    path = args.figure_path or args.out / "additivity.svg"
    paired.save_figure(figure, path, "experiments/e23_additivity/additivity.py --figure")


def main():
    args = paired.parse_arguments(__doc__, HERE, "runs", "additivity.svg")
    if args.figure or args.figure_path:
        return draw(args)
    without_table = lambda facts: re.sub(r" table=\S+", "", facts["config_kv_given"])
    runs = {"prompt": paired.read_runs(args.kvlab, args.runs / "e22_ranking", args.runs / "e23_additivity", key=without_table), "decode": paired.read_runs(args.kvlab, args.runs / "e23_decode")}
    rows, summary = judge(runs), list(summaries(runs["prompt"]))
    for row in front(summary):
        row["on_front"] = "yes"
    paired.write_csv(args.out / "caches.csv", summary)
    paired.write_csv(args.out / "additivity.csv", rows)
    write_table(args.out / "additivity.md", summary, rows)


if __name__ == "__main__":
    main()
