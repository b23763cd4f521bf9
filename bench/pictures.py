"""Curves as SVG, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator

INK: Final = "#7d8590"  # as far from white as from black
CURVE: Final = "#2f81f7"


def draw(path: Path, name: str, points: Mapping[int, Mapping[str, float]]) -> None:
    """One panel for each figure, all over the same sizes; both axes are logarithmic, so that a straight rise is a power."""
    titles = list(next(iter(points.values())))
    matplotlib.rcParams.update({"svg.hashsalt": "rocketlet", "svg.fonttype": "none", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(titles), figsize=(3.4 * len(titles), 2.6), squeeze=False)
    for panel, title in zip(panels[0], titles, strict=True):
        panel.plot(list(points), [figures[title] for figures in points.values()], color=CURVE, marker="o", markersize=4)
        panel.set_xscale("log")
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, high / 100), high * 2)  # a level curve looks level
        panel.set_title(title, color=INK, fontsize=9)
        panel.set_xlabel(name, color=INK)
        panel.tick_params(which="both", colors=INK)
        panel.grid(visible=True, color=INK, alpha=0.25, linewidth=0.5)
        panel.xaxis.set_major_locator(LogLocator(numticks=12))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        panel.minorticks_off()
        for spine in panel.spines.values():
            spine.set_color(INK)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
