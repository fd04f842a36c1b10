#!/usr/bin/env python3
"""Roofline of a bench run file: every kernel's operations per byte against its operations per second, under the device's measured
read bandwidth and multiply-add rate.

    build/kvlab bench -m M.gguf -p 512 -n 32 -d 4096 --kernels -o runs/x.h5
    python3 experiments/figures/roofline.py runs/x.h5 -o roofline.svg

A disc is a kernel in a phase, its area the share of the phase's kernel time. Prefill reuses every weight for many tokens and lies on the
right, decode on the left. Needs h5py and matplotlib. After S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual
performance model for multicore architectures", Communications of the ACM 52(4), 2009.
"""
import argparse
import os
import sys

import h5py
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402

# Colours of Okabe and Ito, which people with any colour vision can tell apart; dark ones, and shapes differ as well.
STYLES = {"prefill": ("#0072B2", "o"), "decode": ("#D55E00", "D")}
SPARE = ["#009E73", "#CC79A7", "#000000", "#56B4E9"]
AREA = 2600  # points squared of a disc that stands for all of a phase's time
LEAST_SHARE = 0.002  # of the phase's time: less is not worth a mark


def text(column):
    return [row.tobytes().rstrip(b"\0").decode() for row in column[:]]


def read_kernels(path):
    """The device's attributes, the run's title, and {phase: [kernel]} in the file's order."""
    with h5py.File(path) as file:
        if "kernels" not in file or "read_gbps" not in file["device"].attrs:
            sys.exit(f"roofline: {path} has no kernel times; make it with: kvlab bench --kernels")
        device = {key: value.decode() if isinstance(value, bytes) else value for key, value in file["device"].attrs.items()}
        config = {key: value.decode() if isinstance(value, bytes) else value for key, value in file["config"].attrs.items()}
        table = file["kernels"]
        n = int(table["committed"][()])
        columns = {key: table[key][:n] for key in ("ns_sum", "bytes", "flops")}
        phases = {}
        for i, (phase, name) in enumerate(list(zip(text(table["phase"]), text(table["name"])))[:n]):
            phases.setdefault(phase, []).append({"name": name.removeprefix("kvl_"), **{key: float(column[i]) for key, column in columns.items()}})
    return device, config, phases


def points_of(phases):
    """Kernels with stated work, and for each phase the share of its time that the others take."""
    points, unstated = [], {}
    for phase, kernels in phases.items():
        total = sum(kernel["ns_sum"] for kernel in kernels)
        for kernel in kernels:
            share = kernel["ns_sum"] / total
            if kernel["flops"] > 0 and kernel["bytes"] > 0:
                if share >= LEAST_SHARE:
                    points.append({"phase": phase, "name": kernel["name"], "share": share, "x": kernel["flops"] / kernel["bytes"],
                                   "y": kernel["flops"] / kernel["ns_sum"]})
            else:
                unstated.setdefault(phase, []).append((share, kernel["name"]))
    return sorted(points, key=lambda p: -p["share"]), unstated


def style_of(phases):
    """{phase: (colour, marker)}: blue circles for the first prefill, orange diamonds for the first decode."""
    styles, taken, spare = {}, set(), iter(SPARE * len(phases))
    for phase in phases:
        kind = "prefill" if phase.startswith("pp") else "decode"
        colour, marker = STYLES[kind]
        styles[phase] = (colour if kind not in taken else next(spare), marker)
        taken.add(kind)
    return styles


def limits(values, below, above):
    return min(values) / below, max(values) * above


def draw_roof(axes, device):
    read, peak = float(device["read_gbps"]), float(device["fma_gflops"])
    ridge = peak / read
    left, right = axes.get_xlim()
    axes.plot([left, ridge, right], [left * read, peak, peak], color="black", linewidth=1.6, zorder=2)
    axes.axvline(ridge, color="0.6", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    return ridge


def label_roof(axes, device, ridge):
    """Above the lines; the slope's text runs along it."""
    read, peak = float(device["read_gbps"]), float(device["fma_gflops"])
    (left, right), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    low = max(left, bottom / read)
    at = (low ** 0.55) * (ridge ** 0.45)
    to_pixels = axes.transData.transform
    (x0, y0), (x1, y1) = to_pixels((low, low * read)), to_pixels((ridge, peak))
    import math
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    slope = axes.annotate(f"read {read:,.0f} GB/s", (at, at * read), xytext=(-6, 6), textcoords="offset points", rotation=angle, rotation_mode="anchor",
                          ha="center", va="bottom", fontsize=11)
    flat = axes.annotate(f"multiply-add {peak:,.0f} GFLOP/s", (right, peak), xytext=(-6, 5), textcoords="offset points", ha="right", va="bottom", fontsize=11)
    balance = axes.annotate(f"{ridge:.3g} FLOP/byte", (ridge, bottom), xytext=(4, 5), textcoords="offset points", ha="left", va="bottom", fontsize=10, color="0.35")
    return [slope, flat, balance]


def box_overlap(a, b):
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def roof_boxes(axes, device, ridge):
    """The roof's lines as a string of small boxes, for labels to keep clear of."""
    read, peak = float(device["read_gbps"]), float(device["fma_gflops"])
    left, right = axes.get_xlim()
    boxes = []
    for i in range(121):
        x = left * (right / left) ** (i / 120)
        px, py = axes.transData.transform((x, min(x * read, peak)))
        boxes.append((px - 5, py - 5, px + 5, py + 5))
    return boxes


def place_labels(figure, axes, points, taken, styles):
    """Each label at the free place nearest to its mark: larger marks choose first."""
    import math
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    marks = []
    for point in points:
        x, y = axes.transData.transform((point["x"], point["y"]))
        r = math.sqrt(AREA * point["share"] / math.pi) * scale + 2
        marks.append((x - r, y - r, x + r, y + r))
    for point, mark in zip(points, marks):
        colour = styles[point["phase"]][0]
        label = axes.annotate(f'{point["name"]} {100 * point["share"]:.1f} %', (point["x"], point["y"]), xytext=(0, 0), textcoords="offset pixels",
                              ha="center", va="center", fontsize=11, color=colour, zorder=5,
                              arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0})
        size = label.get_window_extent(renderer)
        w, h = size.width / 2 + 3, size.height / 2 + 3
        cx, cy, r = (mark[0] + mark[2]) / 2, (mark[1] + mark[3]) / 2, (mark[2] - mark[0]) / 2
        best = None
        for ring in range(9):
            for step in range(24):
                turn = 2 * math.pi * step / 24
                # Just outside the mark: an ellipse whose axes are the mark's radius and half of the label.
                x = cx + math.cos(turn) * (r + w + ring * 14 * scale)
                y = cy + math.sin(turn) * (r + h + ring * 14 * scale)
                box = (x - w, y - h, x + w, y + h)
                outside = box[0] < frame.x0 or box[2] > frame.x1 or box[1] < frame.y0 or box[3] > frame.y1
                cost = sum(box_overlap(box, other) for other in taken + marks) + (1e6 if outside else 0) + 4 * ring * ring + 6 * (1 - math.cos(turn))
                if best is None or cost < best[0]:
                    best = (cost, x, y, box, ring)
        _, x, y, box, ring = best
        label.set_position((x - cx, y - cy))
        if ring < 2:
            label.arrow_patch.set_visible(False)
        taken.append(box)


def draw(path, output):
    device, config, phases = read_kernels(path)
    points, unstated = points_of(phases)
    if not points:
        sys.exit(f"roofline: no kernel of {path} states its work")
    styles = style_of(phases)
    ridge = float(device["fma_gflops"]) / float(device["read_gbps"])

    plt.rcParams.update({"font.size": 12, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(10, 6.6), dpi=120)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*limits([p["x"] for p in points] + [ridge], 3, 5))
    axes.set_ylim(*limits([p["y"] for p in points] + [float(device["fma_gflops"])], 5, 2.5))
    axes.grid(True, which="major", color="0.9", linewidth=0.7, zorder=0)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.set_xlabel("arithmetic intensity, FLOP per byte worked through")
    axes.set_ylabel("GFLOP/s")
    draw_roof(axes, device)
    for phase, (colour, marker) in styles.items():
        mine = [p for p in points if p["phase"] == phase]
        axes.scatter([p["x"] for p in mine], [p["y"] for p in mine], s=[AREA * p["share"] for p in mine], marker=marker, color=colour, alpha=0.45,
                     edgecolors=colour, linewidths=1.2, zorder=3)
        axes.scatter([p["x"] for p in mine], [p["y"] for p in mine], s=6, color="black", zorder=4)
        axes.scatter([], [], s=90, marker=marker, color=colour, alpha=0.7, label=phase)
    axes.legend(loc="lower right", frameon=False, title="area: share of the phase's kernel time")
    axes.set_title(f'{config["model"]}, --kv "{config["kv_given"]}", {device["name"]}', loc="left", fontsize=12)
    notes = [f'{phase}: {", ".join(f"{name} {100 * share:.1f} %" for share, name in sorted(rest, reverse=True) if share >= LEAST_SHARE)}'
             for phase, rest in unstated.items() if max(rest)[0] >= LEAST_SHARE]
    if notes:
        figure.text(0.012, 0.012, "not drawn, no operations stated: " + "; ".join(notes), fontsize=9, color="0.35")
    figure.tight_layout(rect=(0, 0.03 if notes else 0, 1, 1))
    figure.canvas.draw()
    texts = label_roof(axes, device, ridge)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    taken = [t.get_window_extent(renderer).extents for t in texts + [axes.get_legend()]] + roof_boxes(axes, device, ridge)
    place_labels(figure, axes, points, taken, styles)
    figure.savefig(output, metadata={"Date": None} if output.endswith(".svg") else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", help="of kvlab bench --kernels")
    parser.add_argument("-o", "--output", required=True, help="figure: .svg, .png or .pdf")
    args = parser.parse_args()
    if not os.path.exists(args.run_file):
        sys.exit(f"roofline: there is no {args.run_file}")
    draw(args.run_file, args.output)


if __name__ == "__main__":
    main()
