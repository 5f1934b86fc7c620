"""Draws what `held_targets.py` measured: latency against load, a line for each target.

Solid lines are the server, dashed ones the simulator; a target is a dotted line of its color.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.figures.style import PALETTE, PLOT_STYLE
from benchmark.serving.reached_targets import Reached, Setting

LINES = {"server": "-", "simulator": "--"}
# The latency of each row, and the target of each column.
LATENCIES = {"TPOT": "tpot_p95_ms", "TTFT": "ttft_p95_ms"}
TARGETS = {"TPOT": "tpot_ms", "TTFT": "ttft_ms"}


def draw(reached: Sequence[Reached], path: Path) -> None:
    """Writes an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(PLOT_STYLE):
        canvas = Figure(figsize=(9, 6.5), layout="constrained")
        panels = canvas.subplots(2, 2, sharex=True, squeeze=False)
        for column, target in enumerate(TARGETS):
            shown = _settings(reached, target)
            for row, latency in enumerate(LATENCIES):
                axes = panels[row][column]
                _draw_panel(axes, reached, shown, target, latency)
                axes.set(ylabel=f"{latency}, p95 of requests (ms)", ylim=(0, None))
            panels[0][column].set_title(f"--target-{target.lower()}-ms", fontsize=10)
            panels[1][column].set_xlabel("requests/s")
            panels[0][column].legend(fontsize=8)
        canvas.savefig(path)


def _settings(reached: Sequence[Reached], target: str) -> list[Setting]:
    """The settings with this target, after the one without any."""
    settings = dict.fromkeys(one.setting for one in reached)
    return [one for one in settings if not one.flags or getattr(one, TARGETS[target]) is not None]


def _draw_panel(
    axes: Any,
    reached: Sequence[Reached],
    settings: Sequence[Setting],
    target: str,
    latency: str,
) -> None:
    for setting, color in zip(settings, ("#999999", *PALETTE), strict=False):
        target_ms = getattr(setting, TARGETS[target])
        name = "no target" if target_ms is None else f"{target_ms:g} ms"
        for source, style in LINES.items():
            points = [one for one in reached if (one.setting, one.source) == (setting, source)]
            axes.plot(
                [one.rate_per_s for one in points],
                [getattr(one, LATENCIES[latency]) for one in points],
                style,
                color=color,
                marker="o",
                markersize=4,
                label=f"{name}, {source}",
            )
        if target_ms is not None and latency == target:
            axes.axhline(target_ms, color=color, linestyle=":", linewidth=1.2)
