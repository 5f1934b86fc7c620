"""Draws the README's plot, and prints its table, from the comparisons with vLLM in `results/`.

    python -m benchmark.pictures.readme_plot       # writes docs/throughput.svg

It takes every `against_peers` record outside `results/archive` that has both engines with two
stages and no prefix caches, and pools the rounds of a load. A ratio is that of two runs of a round.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.figures.style import PALETTE, PLOT_STYLE
from benchmark.support.command import Command, Options, Report
from benchmark.support.dated_result import markdown_table, read_record
from benchmark.support.paths import DOCS, RESULTS

TARGET = DOCS / "throughput.svg"
OURS, PEER = "ours --pp 2", "vllm --pp 2"
# As `against_peers.LOADS` names them, and the README in words.
LOADS = {
    "offline": "64 requests at once, 256 tokens in, up to 64 out",
    "online": "the same requests at 3 a second",
    "decode-heavy": "32 in, 256 out",
    "prefill-heavy": "1024 in, 8 out",
}
COLUMNS = {
    "total_throughput": "tokens/s",
    "mean_ttft_ms": "mean TTFT",
    "p99_ttft_ms": "p99 TTFT",
    "mean_tpot_ms": "mean TPOT",
    "p99_tpot_ms": "p99 TPOT",
}
PANELS = {
    "tokens/s: right is better": ("total_throughput",),
    "TTFT: left is better": ("mean_ttft_ms", "p99_ttft_ms"),
    "TPOT: left is better": ("mean_tpot_ms", "p99_tpot_ms"),
}
# Readable on a white page and on a dark one; the background is transparent.
INK = "#777777"

Ratios = Mapping[str, Mapping[str, Sequence[float]]]


def measured_ratios(folder: Path = RESULTS) -> Ratios:
    """Ours over vLLM's, a value for each round, by load and by column."""
    records = [read_record(path) for path in sorted(folder.glob("*_against_peers.json*"))]
    return {
        load: {
            column: [ratio for record in records for ratio in _ratios(record, load, column)]
            for column in COLUMNS
        }
        for load in LOADS
    }


def _ratios(record: Mapping[str, Any], load: str, column: str) -> Iterator[float]:
    if not all("prefix caches off" in text for text in record["model"].values()):
        return
    by_run = {
        (run["engine"], run["round"]): run["metrics"][column]
        for run in record["runs"].get(load, ())
    }
    for engine, number in by_run:
        if engine == OURS and (PEER, number) in by_run:
            yield by_run[OURS, number] / by_run[PEER, number]


def ratio_table(ratios: Ratios) -> str:
    """The README's table: medians over the rounds."""
    rows = [
        [LOADS[load], *(f"{statistics.median(values):.2f}" for values in columns.values())]
        for load, columns in ratios.items()
    ]
    return markdown_table(["load", *COLUMNS.values()], rows)


def draw(ratios: Ratios, canvas: Figure) -> None:
    """A dot for the median of a load's rounds, with a line from the smallest to the largest."""
    panels = canvas.subplots(1, len(PANELS), sharey=True)
    for panel, (title, columns) in zip(panels, PANELS.items(), strict=True):
        for number, column in enumerate(columns):
            _draw_column(panel, ratios, column, number)
        _dress(panel, title)
    panels[0].set_yticks(range(len(ratios)), list(ratios))
    panels[0].invert_yaxis()
    panels[-1].legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper right")


def _draw_column(panel: Axes, ratios: Ratios, column: str, number: int) -> None:
    color = PALETTE[number]
    label = COLUMNS[column].split()[0]
    for place, columns in enumerate(ratios.values()):
        values = columns[column]
        median, height = statistics.median(values), place + 0.3 * number
        panel.plot([min(values), max(values)], [height] * 2, color=color, linewidth=2)
        panel.plot(median, height, "os"[number], color=color, label=label if not place else None)
        panel.annotate(
            f"{median:.2f}",
            (median, height),
            (0, 5 if not number else -12),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )


def _dress(panel: Axes, title: str) -> None:
    panel.set_title(title, color=INK, fontsize=10)
    panel.set_xlabel("ours / vLLM (1 = the same)", color=INK, fontsize=9)
    panel.set_xscale("log", base=2)
    panel.set_xticks([0.25, 0.5, 1, 2], ["0.25", "0.5", "1", "2"])
    panel.set_xlim(0.18, 2.8)
    panel.minorticks_off()
    panel.axvline(1.0, color=INK, linewidth=1)
    panel.margins(y=0.2)
    panel.tick_params(colors=INK, labelsize=9)
    panel.patch.set_alpha(0.0)
    for side, spine in panel.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(INK)


def save_plot(ratios: Ratios, path: Path) -> None:
    """Writes the plot; its description is the table."""
    with rc_context(PLOT_STYLE):
        canvas = Figure(figsize=(9, 3.4), layout="constrained")
        canvas.patch.set_alpha(0.0)
        draw(ratios, canvas)
        canvas.savefig(path, metadata={"Date": None, "Description": ratio_table(ratios)})


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return Command(__spec__.name, __doc__, saves=False).run(_draw, argv)


def _draw(options: Options) -> Report:
    ratios = measured_ratios()
    save_plot(ratios, TARGET)
    return Report(name=TARGET.stem, texts=[ratio_table(ratios)])


if __name__ == "__main__":
    sys.exit(main())
