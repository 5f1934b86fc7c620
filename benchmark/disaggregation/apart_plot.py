"""Draws what `apart_or_together.py` measured: apart as a multiple of together, by load and measure.

A dot is a round, a bar the median; beyond 1 apart has the larger number, which is the better one
of tokens/s alone.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log2
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.disaggregation.apart_report import RATES, Figure
from benchmark.figures.style import PALETTE, PLOT_STYLE

_LATENCY, _RATE = PALETTE[1], PALETTE[0]
_ROW_INCHES = 0.24


def draw(ratios: Mapping[Figure, Sequence[float]], cpu: str, path: Path) -> None:
    """Writes an SVG with a panel for each load."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    loads = list(dict.fromkeys(figure.load for figure in ratios))
    rows = [[figure for figure in ratios if figure.load == load] for load in loads]
    heights = [len(row) for row in rows]
    with matplotlib.rc_context(PLOT_STYLE):
        size = (8.0, 1.6 + _ROW_INCHES * sum(heights) + 0.3 * len(loads))
        canvas = Canvas(figsize=size, layout="constrained")
        panels = canvas.subplots(len(loads), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, load, shown in zip(panels[:, 0], loads, rows, strict=True):
            _draw_panel(axes, load, {figure: ratios[figure] for figure in shown})
        ticks = powers_of_two([one for values in ratios.values() for one in values])
        panels[-1, 0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panels[-1, 0].minorticks_off()
        panels[-1, 0].set_xlabel("apart / together, each round; bars: medians")
        canvas.suptitle(
            f"Prefill and decode apart beside one pipeline, two cores of {cpu}", fontsize=10
        )
        canvas.savefig(path)


def powers_of_two(values: Sequence[float]) -> list[float]:
    """Powers that `values` lie between. A 0, as of tokens that came in bursts, has no place."""
    shown = [one for one in values if one > 0]
    first, last = floor(log2(min(shown))), ceil(log2(max(shown)))
    return [2.0**power for power in range(first, last + 1)]


def _draw_panel(axes: Any, load: str, shown: Mapping[Figure, Sequence[float]]) -> None:
    for row, (figure, values) in enumerate(shown.items()):
        color = _RATE if figure.name in RATES else _LATENCY
        axes.plot(values, [row] * len(values), "o", color=color, markersize=4, alpha=0.6)
        axes.plot([float(np.median(values))], [row], "|", color=color, markersize=14, mew=2)
    axes.axvline(1.0, color="#999999", linewidth=1.0)
    axes.set_xscale("log")
    axes.set_yticks(
        range(len(shown)), [f"{figure.kind}: {figure.name}" for figure in shown], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_title(load, fontsize=9, loc="left")
