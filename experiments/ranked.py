"""Caches that lost tokens at a prompt's end, ranked: their losses, and differences to controls at equal bytes, paired by window. Needs numpy and scipy; the figure matplotlib too."""
import sys
from dataclasses import dataclass
from pathlib import Path

import paired

REMOVED = (0.5, 0.75)
QUANTIZED = {0.5: "int8 @22-29 v=int4", 0.75: "k=int4 v=int3"}  # at the end of the context: 11,472 and 5,760 bytes a token, 11,520 and 5,760 when evicted
BINS = ("nll_1_16", "nll_17_64")
COLOURS = {"recency": "black", "quantized": "#D55E00", "oracle": "#009E73", "random": "#999999"}


def write_table(path, summary, rows):
    mib = lambda n: f"{int(n) / 2**20:.2f}"
    lines = ["<!-- ranking.py writes these tables -->",
             f"nll - nll of the whole cache ({summary[0]['nll_base']:.4f}), by window. Intervals are 95 % t-intervals over windows, +- half of them. MiB: resident at the end of a window of 512 tokens.", "",
             "| removed | policy | MiB | nll - full | KLD | same top-1 | nll, tokens 1-16 | 17-64 |", "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {row['removed']} | {row['name']} | {mib(row['resident_bytes'])} | {row['delta_mean']:+.4f} [{row['delta_low']:+.4f}, {row['delta_high']:+.4f}] | "
              f"{row['kld_mean']:.4f} [{row['kld_low']:.4f}, {row['kld_high']:.4f}] | "
              + " | ".join(f"{row[name]:.3f} +- {row[name + '_half']:.3f}" for name in ("same_top1", *BINS)) + " |" for row in summary]
    lines += ["", f"A - B, paired by window; p adjusted over the table (Holm, {len(rows)} rows, each measure for itself). Negative: A is better.", "",
              "| removed | A - B | windows | nll | p | | KLD | p | |", "| ---: | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |"]
    cell = lambda row, m: (f"{row[m + '_mean']:+.4f} [{row[m + '_low']:+.4f}, {row[m + '_high']:+.4f}] | {row[m + '_p_holm']:.2g} | {row[m + '_verdict']}")
    lines += [f"| {row['removed']} | {row['a']} - {row['b']} | {row['windows']} | {cell(row, 'nll')} | {cell(row, 'kld')} |" for row in rows]
    path.write_text("\n".join(lines) + "\n")


def beside(row, summary):
    """Caches of equal bytes stand side by side: how far from the middle, in MiB."""
    same = [other["name"] for other in summary if other["removed"] == row["removed"] != "" and other["name"] != "quantized"]
    return 0.11 * (same.index(row["name"]) - (len(same) - 1) / 2) if row["name"] in same else 0.0


@dataclass
class Ranking:
    """An experiment: its folder has grid.yaml and gets windows.csv, caches.csv, ranking.csv, ranking.md and ranking.svg."""
    folder: Path
    policies: dict  # name -> score, budget, options of the budget by what is removed
    pairs: list  # (better, other) at each budget, names of policies or "quantized": the family over which Holm adjusts
    widths: tuple = ()  # all tokens in fewer bits, at no budget

    def spec_of(self, name, removed):
        if name == "quantized":
            return QUANTIZED[removed]
        score, budget, options = self.policies[name]
        return f"keep={score} budget={budget}(removed={removed:g}{options.get(removed, '')})"

    def compare(self, runs, removed):
        """Rows a - b; negative: a is better. Pairs that lack a run are named on stderr."""
        for a, b in self.pairs:
            pair = [runs.get(self.spec_of(name, removed)) for name in (a, b)]
            if None in pair:
                print(f"no run yet: {a} - {b}, {removed:g} removed", file=sys.stderr)
                continue
            windows = paired.common_windows(*pair)
            nll, kld = (paired.interval(paired.column(pair[0], name, windows) - paired.column(pair[1], name, windows)) for name in ("nll", "kld"))
            yield {"removed": removed, "a": a, "b": b, "windows": len(windows), **{f"nll_{k}": nll[k] for k in ("mean", "low", "high", "p")},
                   **{f"kld_{k}": kld[k] for k in ("mean", "low", "high", "p")}, "run": pair[0]["run"], "against": pair[1]["run"]}

    def judge(self, runs):
        rows = [row for removed in REMOVED for row in self.compare(runs, removed)]
        for measure in ("nll", "kld"):
            paired.add_holm(rows, f"{measure}_p", f"{measure}_p_holm")
            for row in rows:
                row[f"{measure}_verdict"] = paired.verdict(row["windows"], row[f"{measure}_mean"], row[f"{measure}_p_holm"])
        return rows

    def named_specs(self):
        """(name, removed or "", spec) of everything in the figure."""
        yield from ((name, removed, self.spec_of(name, removed)) for removed in REMOVED for name in (*self.policies, "quantized"))
        yield from ((width, "", width) for width in self.widths)

    def summaries(self, runs):
        for name, removed, spec in self.named_specs():
            if spec not in runs:
                continue
            run, facts = runs[spec], runs[spec]["facts"]
            windows = paired.common_windows(run)
            base = paired.column(run, "nll_base", windows)
            delta, kld = paired.interval(paired.column(run, "nll", windows) - base), paired.interval(paired.column(run, "kld", windows))
            others = {name: paired.interval(paired.column(run, name, windows)) for name in ("same_top1", *BINS)}
            yield {"name": name, "removed": removed, "kv": spec, "run": run["run"], "windows": len(windows), "resident_bytes": int(facts["memory_resident_bytes"]),
                   "slack_bytes": int(facts["memory_slack_bytes"]), "nll_base": base.mean(), **{f"delta_{k}": delta[k] for k in ("mean", "low", "high")}, "delta_half": delta["high"] - delta["mean"],
                   **{f"kld_{k}": kld[k] for k in ("mean", "low", "high")}, "kld_half": kld["high"] - kld["mean"],
                   **{name: x["mean"] for name, x in others.items()}, **{f"{name}_half": x["high"] - x["mean"] for name, x in others.items()}}

    def draw(self, args):
        number = lambda row, *names: [float(row[name]) for name in names]
        summary = paired.read_csv(args.out / "caches.csv")
        rows = [row for row in paired.read_csv(args.out / "ranking.csv") if row["b"] == "recency"]
        figure, (left, right) = paired.new_figure(14, 6, columns=2, width_ratios=(1.25, 1))
        markers, drawn = {"0.5": "o", "0.75": "s", "": "D"}, set()
        for row in summary:
            if row["name"] == "int2":
                continue  # far above everything: in the table
            (mean, low, high), kind = number(row, "delta_mean", "delta_low", "delta_high"), "quantized" if row["removed"] == "" else row["name"]
            x = int(row["resident_bytes"]) / 2**20 + beside(row, summary)
            label = {"recency": "recency (control)", "quantized": "quantized (control)", "oracle": "oracle (ceiling)"}.get(kind, kind if kind == "random" else "policies")
            left.errorbar(x, mean, [[mean - low], [high - mean]], fmt=markers[row["removed"]], color=COLOURS.get(kind, "#0072B2"), markersize=5, linewidth=1, capsize=2,
                          label=None if label in drawn else label)
            left.annotate(row["name"], (x, high), xytext=(0, 3), textcoords="offset points", fontsize=7, rotation=90, ha="center")
            drawn.add(label)
        left.axhline(0, color="black", linewidth=0.6)
        left.margins(y=0.15)
        left.set(xlabel="MiB resident at the end of a window of 512 tokens; scores of equal bytes side by side", ylabel="nll - nll of the whole cache, nats a token (95 %)",
                 title="circles: half of the tokens removed, squares: three quarters, diamonds: none")
        left.legend(loc="upper right", fontsize=8)
        left.grid(alpha=0.3)
        names = list(dict.fromkeys(row["a"] for row in rows))
        for removed, shape, shift, filled in (("0.5", "o", -0.13, "full"), ("0.75", "s", 0.13, "none")):
            for row in (row for row in rows if row["removed"] == removed):
                y, colour = names.index(row["a"]) + shift, COLOURS.get(row["a"], "#0072B2")
                mean, low, high = number(row, "nll_mean", "nll_low", "nll_high")
                right.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt=shape, fillstyle=filled, color=colour, markersize=5, linewidth=1, capsize=2)
                if row["nll_verdict"] == "not resolved":
                    right.annotate("not resolved", (high, y), xytext=(5, -3), textcoords="offset points", fontsize=7, color="grey")
        right.axvline(0, color="black", linewidth=0.8)
        right.set_yticks(range(len(names)), names)
        right.invert_yaxis()
        right.set(xlabel=f"nll - nll of recency, paired by window ({rows[0]['windows']}), 95 %", title="left of 0: better than the sinks and the newest tokens")
        right.grid(axis="x", alpha=0.3)
        path = args.figure_path or args.out / "ranking.svg"
        paired.save_figure(figure, path, f"experiments/{self.folder.name}/ranking.py --figure")

    def main(self, about):
        args = paired.parse_arguments(about, self.folder, f"runs/{self.folder.name}", "ranking.svg")
        if args.figure or args.figure_path:
            return self.draw(args)
        runs = paired.read_runs(args.kvlab, args.runs)
        summary, rows = list(self.summaries(runs)), self.judge(runs)
        known = {row["run"] for row in summary}
        paired.write_csv(args.out / "windows.csv", [{"run": run["run"], "chunk": int(row["chunk"]), **{name: row[name] for name in ("nll", "nll_base", "kld")}}
                                                    for run in runs.values() if run["run"] in known for row in run["rows"].values()])
        paired.write_csv(args.out / "caches.csv", summary)
        paired.write_csv(args.out / "ranking.csv", rows)
        write_table(args.out / "ranking.md", summary, rows)
