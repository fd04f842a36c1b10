"""What all figures of experiments share. Needs matplotlib."""
import os
from pathlib import Path

# Colours of Okabe and Ito, told apart by people of any colour vision.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def new_figure(*size, columns=1, rows=1, **more):
    """(figure, axes) of `size` inches; the same input gives the same file."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams["svg.hashsalt"] = "kvlab"
    return plt.subplots(rows, columns, figsize=size, layout="constrained", **more)


def save_figure(figure, path, command):
    """With the one command that makes it again printed under it. The path's ending chooses the format."""
    figure.supxlabel(command, fontsize=7, family="monospace")
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None, dpi=110)
