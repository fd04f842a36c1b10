#!/usr/bin/env python3
"""Roofline of a bench run: operations a byte of every kernel against its operations a second, under the device's measured read
bandwidth and multiply-add rate.

    build/kvlab bench -m M.gguf -p 512 -n 32 -d 4096 --kernels -o runs/x.h5
    experiments/figures/roofline.py runs/x.h5 -o roofline.svg
    experiments/figures/roofline.py experiments/e91_cpu_roofline --run 427c846c1680901f -o roofline.svg    of what is kept of a run: runs.csv, kernels.csv

A mark is a kernel in a phase, its area the share of the phase's kernel time. Prefill reads a weight once for many tokens and lies on the
right, decode on the left. Needs matplotlib, for run files h5py too (Debian: python3-matplotlib, python3-h5py). After S. Williams, A. Waterman and
D. Patterson, "Roofline: an insightful visual performance model for multicore architectures", Communications of the ACM 52(4), 2009.
"""
import argparse
import csv
import math
import os
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402

# Colours of Okabe and Ito, told apart by people of any colour vision; prefill and decode differ in shape as well.
PREFILL, DECODE = "o", "s"
COLOURS = {PREFILL: ["#0072B2", "#009E73", "#56B4E9"], DECODE: ["#D55E00", "#CC79A7", "#E69F00"]}
WHOLE_AREA = 2600  # square points of a mark that stands for all of a phase's time
LEAST_SHARE = 0.002  # of a phase's time: less gets no mark
NUMBERS = ("ns_sum", "bytes", "flops")  # of a kernel in a phase
GAP = 3  # pixels around a label that stay free


# ---- what the file says ----

def texts(column):
    return [row.tobytes().rstrip(b"\0").decode() for row in column[:]]


def attributes(group):
    return {key: value.decode() if isinstance(value, bytes) else value for key, value in group.attrs.items()}


def read_run(path):
    """({attribute}, {phase: [(kernel, ns, bytes, operations)]} in the file's order), attributes by their names in runs.csv"""
    import h5py
    with h5py.File(path) as file:
        if "kernels/ns_sum" not in file:
            sys.exit(f"roofline: {path} has no kernel times; kvlab bench --kernels makes such a run file")
        table = file["kernels"]
        n = int(table["committed"][()])
        rows = zip(texts(table["phase"])[:n], texts(table["name"]), *(table[key][:n].astype(float) for key in NUMBERS))
        return {f"{group}_{key}": value for group in ("device", "config") for key, value in attributes(file[group]).items()}, phases_of(rows)


def read_tables(folder, run):
    """The same of what an experiment keeps of a run."""
    def rows(name):
        with open(os.path.join(folder, name), newline="") as file:
            return [row for row in csv.DictReader(file) if row["run"] == run]
    found = rows("runs.csv")
    kernels = [(row["phase"], row["name"], *(float(row[key]) for key in NUMBERS)) for row in rows("kernels.csv")]
    if not found or not kernels:
        sys.exit(f"roofline: {folder} has no kernels of a run {run}")
    return found[0], phases_of(kernels)


def phases_of(rows):
    phases = {}
    for phase, name, *numbers in rows:
        phases.setdefault(phase, []).append((name.removeprefix("kvl_"), *numbers))
    return phases


class Mark:
    def __init__(self, phase, name, share, intensity, rate):
        self.phase, self.name, self.share, self.x, self.y = phase, name, share, intensity, rate

    def size(self, shape):
        """As scatter() wants it: the square of a circle's diameter, the square of a square's side."""
        return WHOLE_AREA * self.share * (4 / math.pi if shape == PREFILL else 1)


def split_kernels(phases):
    """(marks, the largest first; for the others, which state no operations, {phase: [(share, name)]})"""
    marks, others = [], {}
    for phase, kernels in phases.items():
        total = sum(ns for _, ns, _, _ in kernels)
        for name, ns, n_bytes, flops in kernels:
            share = ns / total
            if share < LEAST_SHARE:
                continue
            if n_bytes > 0 and flops > 0:
                marks.append(Mark(phase, name, share, flops / n_bytes, flops / ns))
            else:
                others.setdefault(phase, []).append((share, name))
    return sorted(marks, key=lambda mark: -mark.share), others


def styles_of(phases):
    """{phase: (colour, shape)}"""
    styles = {}
    for phase in phases:
        shape = PREFILL if phase.startswith("pp") else DECODE
        rank = sum(taken == shape for _, taken in styles.values())
        styles[phase] = (COLOURS[shape][rank % len(COLOURS[shape])], shape)
    return styles


# ---- boxes in pixels: (left, bottom, right, top) ----

def around(x, y, half_width, half_height):
    return x - half_width, y - half_height, x + half_width, y + half_height


def overlap(a, b):
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


class Figure:
    def __init__(self, peaks, marks, styles):
        self.read, self.peak = peaks
        self.ridge = self.peak / self.read
        self.marks, self.styles = marks, styles
        self.figure, self.axes = plt.subplots(figsize=(10, 6.6), dpi=120)
        self.taken = []  # boxes that labels keep clear of
        self.set_axes()

    def set_axes(self):
        axes, xs, ys = self.axes, [mark.x for mark in self.marks] + [self.ridge], [mark.y for mark in self.marks] + [self.peak]
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(min(xs) / 4, max(xs) * 6)
        axes.set_ylim(min(ys) / 6, max(ys) * 3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:.0e}"))
        axes.grid(True, which="major", color="0.9", linewidth=0.7, zorder=0)
        axes.set_xlabel("arithmetic intensity, operations per byte worked through")
        axes.set_ylabel("GFLOP/s")

    def roof(self, x):
        return min(x * self.read, self.peak)

    def draw_roof(self):
        left, right = self.axes.get_xlim()
        self.axes.plot([left, self.ridge, right], [self.roof(x) for x in (left, self.ridge, right)], color="black", linewidth=1.6, zorder=2)
        self.axes.axvline(self.ridge, color="0.6", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)

    def draw_marks(self):
        for phase, (colour, shape) in self.styles.items():
            mine = [mark for mark in self.marks if mark.phase == phase]
            x, y = [mark.x for mark in mine], [mark.y for mark in mine]
            self.axes.scatter(x, y, s=[mark.size(shape) for mark in mine], marker=shape, color=colour, alpha=0.45, edgecolors=colour, zorder=3)
            self.axes.scatter(x, y, s=5, color="black", zorder=4)
            self.axes.scatter([], [], s=90, marker=shape, color=colour, alpha=0.7, label=phase)
        self.axes.legend(loc="lower right", frameon=False, title="area: share of the phase's kernel time")

    # Labels are placed when everything else is, because they depend on pixels.

    def pixels(self, x, y):
        return self.axes.transData.transform((x, y))

    def extent(self, artist):
        return tuple(artist.get_window_extent(self.figure.canvas.get_renderer()).extents)

    def mark_box(self, mark):
        half = math.sqrt(mark.size(self.styles[mark.phase][1])) / 2 * self.figure.dpi / 72 + 2
        return around(*self.pixels(mark.x, mark.y), half, half)

    def reserve(self):
        left, right = self.axes.get_xlim()
        line = [left * (right / left) ** (i / 150) for i in range(151)]
        self.taken = [around(*self.pixels(x, self.roof(x)), 4, 4) for x in line] + [self.mark_box(mark) for mark in self.marks]
        self.taken.append(self.extent(self.axes.get_legend()))

    def label_roof(self):
        (_, right), (bottom, _) = self.axes.get_xlim(), self.axes.get_ylim()
        flat = self.axes.annotate(f"multiply-add {self.peak:,.0f} GFLOP/s", (right, self.peak), xytext=(-6, 5), textcoords="offset points",
                                  ha="right", va="bottom", fontsize=11)
        balance = self.axes.annotate(f"{self.ridge:.3g} a byte", (self.ridge, bottom), xytext=(4, 5), textcoords="offset points", fontsize=10,
                                     color="0.35")
        self.taken += [self.extent(flat), self.extent(balance)]
        self.label_slope()

    def label_slope(self):
        """Along the slope, above it, where it hides the least."""
        low, high = max(self.axes.get_xlim()[0], self.axes.get_ylim()[0] / self.read), self.ridge
        (x0, y0), (x1, y1) = self.pixels(low, self.roof(low)), self.pixels(high, self.roof(high))
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        tries = []
        for i in range(3, 9):
            x = low * (high / low) ** (i / 10)
            label = self.axes.annotate(f"read {self.read:,.0f} GB/s", (x, self.roof(x)), xytext=(-5, 5), textcoords="offset points",
                                       rotation=angle, rotation_mode="anchor", ha="center", va="bottom", fontsize=11)
            box = self.extent(label)
            tries.append((sum(overlap(box, self.mark_box(mark)) for mark in self.marks), abs(i - 5), i, label, box))
        best = min(tries)
        for one in tries:
            if one is not best:
                one[3].remove()
        self.taken.append(best[4])

    def label_marks(self):
        for mark in self.marks:
            colour = self.styles[mark.phase][0]
            label = self.axes.annotate(f"{mark.name} {100 * mark.share:.1f} %", (mark.x, mark.y), xytext=(0, 0), textcoords="offset pixels",
                                       ha="center", va="center", fontsize=11, color=colour, zorder=5,
                                       bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                                       arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0})
            left, bottom, right, top = self.extent(label)
            _, ring, offset, box = min(self.places(mark, (right - left) / 2 + GAP, (top - bottom) / 2 + GAP))
            label.set_position(offset)
            label.arrow_patch.set_visible(ring > 0)
            self.taken.append(box)

    def places(self, mark, half_width, half_height):
        """(cost, ring, offset from the mark, box) of the places around a mark: free ones near to it and to its right are the best."""
        left, bottom, right, top = self.extent(self.axes)
        x, y = self.pixels(mark.x, mark.y)
        own = self.mark_box(mark)
        for ring in range(9):
            for step in range(32):
                turn = 2 * math.pi * step / 32
                reach = (own[2] - own[0]) / 2 + 18 * ring
                offset = math.cos(turn) * (reach + half_width), math.sin(turn) * (reach + half_height)
                box = around(x + offset[0], y + offset[1], half_width, half_height)
                hidden = sum(overlap(box, other) for other in self.taken)
                outside = box[0] < left or box[1] < bottom or box[2] > right or box[3] > top
                yield hidden + 1e6 * outside + 8 * ring * ring + 5 * (1 - math.cos(turn)), ring, offset, box


def note_of(others):
    if not others:
        return ""
    return "No mark, because they state no operations: " + "; ".join(
        f"{phase} " + ", ".join(f"{name} {100 * share:.1f} %" for share, name in sorted(kernels, reverse=True)) for phase, kernels in others.items())


def draw(source, facts, phases, output):
    marks, others = split_kernels(phases)
    peaks = [float(facts.get(f"device_{name}") or 0) for name in ("read_gbps", "fma_gflops")]
    if not marks:
        sys.exit(f"roofline: no kernel of {source} states its operations and bytes")
    if min(peaks) <= 0:
        sys.exit(f"roofline: {source} has no measured peaks of its device")
    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "kvlab"})
    plot = Figure(peaks, marks, styles_of(phases))
    above = [mark for mark in marks if mark.y > 1.1 * plot.roof(mark.x)]
    if above:
        print(f"roofline: {', '.join(sorted({mark.name for mark in above}))} above the roof: caches feed them, or the peaks were measured while "
              "something else ran", file=sys.stderr)
    plot.draw_roof()
    plot.draw_marks()
    plot.axes.set_title(f'{facts["config_model"]}, --kv "{facts["config_kv_given"]}"\n{facts["config_device"]}', loc="left", fontsize=12)
    plot.figure.text(0.012, 0.036, note_of(others), fontsize=9, color="0.35")
    plot.figure.text(0.988, 0.012, f"experiments/figures/roofline.py {source} -o {output}", fontsize=7, family="monospace", ha="right")
    plot.figure.tight_layout(rect=(0, 0.055, 1, 1))
    plot.figure.canvas.draw()
    plot.reserve()
    plot.label_roof()
    plot.label_marks()
    plot.figure.savefig(output, metadata={"Date": None} if output.endswith(".svg") else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="run file of kvlab bench --kernels, or with --run the folder of an experiment")
    parser.add_argument("--run", help="name of a run in its runs.csv and kernels.csv")
    parser.add_argument("-o", "--output", required=True, help="figure: .svg, .png or .pdf")
    args = parser.parse_args()
    if not os.path.exists(args.source):
        sys.exit(f"roofline: there is no {args.source}; of what an experiment keeps of its runs: --run")
    if os.path.isdir(args.source) != bool(args.run):
        sys.exit("roofline: --run goes with the folder of an experiment, and a folder needs it")
    if args.run:
        return draw(f"{args.source} --run {args.run}", *read_tables(args.source, args.run), args.output)
    return draw(args.source, *read_run(args.source), args.output)


if __name__ == "__main__":
    main()
