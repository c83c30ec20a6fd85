"""Draw the pictures of README and of the documentation: `python docs/images/draw.py`.

The library draws layouts and masks. The picture of measured speed shows the committed results of
the benchmark of strategies.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from seqpar import Layout
from seqpar.layout.masks.mask import UNLIMITED, Mask
from seqpar.layout.plot import plot_layouts, plot_masks

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks/results/amd-epyc-2-cores/strategies.json"
RANKS = 4
COLOURS = {  # of a contender's bars, and of the numbers on them
    "ring": ("#4477aa", "white"),
    "all_gather": ("#66ccee", "black"),
    "ulysses": ("#228833", "white"),
    "all-to-all by hand": ("#bbbbbb", "black"),
    "ring-attention-pytorch": ("#777777", "black"),
}


def draw_layouts() -> None:
    """Draw a packed batch of three documents on four ranks, under three layouts."""
    cu_seqlens = [0, 512, 1280, 2560]
    layouts = {
        "contiguous": Layout.contiguous(cu_seqlens, RANKS),
        "zigzag": Layout.zigzag(cu_seqlens, RANKS),
        "striped": Layout.striped(cu_seqlens, RANKS, stripe=64),
    }
    plot_layouts(layouts, HERE / "layouts.png")


def draw_masks() -> None:
    """Draw what the options of a call let a query see, on a zigzag layout."""
    layout = Layout.zigzag([0, 48, 120, 240], RANKS)
    masks = {
        "causal": Mask(UNLIMITED, 0),
        "causal, window (24, 0)": Mask(24, 0),
        "causal, prefixes of 24": Mask(UNLIMITED, 0, (24, 24, 24)),
        "not causal": Mask(UNLIMITED, UNLIMITED),
    }
    plot_masks(masks, layout, HERE / "masks.png")


def draw_strategies() -> None:
    """Draw the speed of two ranks over SDPA's in one process with the same number of threads."""
    ratios = json.loads(RESULTS.read_text())["ratio_to_sdpa"]
    passes = ("forward", "forward+backward")
    groups = [f"{dtype}/{direction}" for dtype in ("fp32", "bf16") for direction in passes]
    figure = Figure(figsize=(9, 3), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for i, (name, (colour, text)) in enumerate(COLOURS.items()):
        places = [group + 0.17 * (i - 2) for group in range(len(groups))]
        speeds = [ratios.get(f"{group}/{name}", 0) for group in groups]
        axes.bar(places, speeds, 0.15, label=name, color=colour)
        for place, speed in zip(places, speeds, strict=True):
            label, height = (
                f"{speed:.2f}" if speed else "raises",
                0.85 if speed > 0.5 else speed + 0.03,
            )
            axes.text(place, height, label, ha="center", color=text, fontsize=8)
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.set_xticks(
        range(len(groups)), [group.replace("/", ", ").replace("+", " + ") for group in groups]
    )
    axes.set_ylabel("speed (SDPA = 1)")
    axes.set_ylim(0, 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLOURS), frameon=False, fontsize=9)
    figure.savefig(HERE / "strategies.png", dpi=180)


if __name__ == "__main__":
    draw_layouts()
    draw_masks()
    draw_strategies()
