"""Computes, draws and records figures: `python -m benchmark.figures rates bubble_causes`.

Writes `<date>_<time>_figure_<name>.svg`, `.json` (every row behind it; `.json.gz` above 200 KB) and
`.md` (setting, claim and what the numbers say) into `benchmark/results/`. Everything in them is
simulated.
"""

import argparse
import importlib
import pkgutil
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas

import benchmark.figures
from benchmark.figures.figure import Figure, Options, Row
from benchmark.figures.style import PLOT_STYLE
from benchmark.support.dated_result import read_record, write_record
from benchmark.support.machine import describe_machine, describe_software
from benchmark.support.paths import RESULTS


def known_figures() -> dict[str, Figure]:
    """Every file of the folder that has a FIGURE, by the figure's name."""
    modules = (
        importlib.import_module(f"benchmark.figures.{found.name}")
        for found in pkgutil.iter_modules(benchmark.figures.__path__)
        if not found.name.startswith("_")
    )
    figures = [module.FIGURE for module in modules if hasattr(module, "FIGURE")]
    return {figure.name: figure for figure in figures}


def make(figure: Figure, options: Options, folder: Path) -> Path:
    """Computes and writes one figure; returns the path of its text."""
    started_s = time.monotonic()
    rows = figure.compute(options)
    stem = folder / f"{datetime.now(UTC):%Y-%m-%d_%H%M}_figure_{figure.name}"
    record = {
        "figure": figure.name,
        "command": shlex.join(["python", "-m", "benchmark.figures", *sys.argv[1:]]),
        "machine": describe_machine(),
        "software": describe_software(),
        "seconds": round(time.monotonic() - started_s, 1),
        "rows": rows,
    }
    return draw_again(write_record(stem, record))


def draw_again(path: Path) -> Path:
    """Makes picture and text from the rows in `path`; returns the path of the text."""
    record = read_record(path)
    figure = known_figures()[record["figure"]]
    stem = path.name.partition(".json")[0]
    with rc_context(PLOT_STYLE):
        canvas = Canvas(layout="constrained")
        figure.draw(record["rows"], canvas)
        canvas.suptitle(f"{figure.title} (simulated)")
        canvas.savefig(path.with_name(f"{stem}.svg"), metadata={"Date": None})
    text = path.with_name(f"{stem}.md")
    text.write_text(_text(figure, record, path.name))
    return text


def _text(figure: Figure, record: Row, recorded: str) -> str:
    """The Markdown page of the rows in the file named `recorded`."""
    stem = recorded.partition(".json")[0]
    says = "\n".join(f"- {line}" for line in figure.conclude(record["rows"]))
    assumed = f"\nAssumed: {figure.assumptions}\n" if figure.assumptions else ""
    return (
        f"# {figure.title}\n\n![{figure.title}]({stem}.svg)\n\n"
        "Simulated: the real scheduler and policies in virtual time, stage times from published "
        "kernel measurements\n(`sgl_pipeline/simulator/data/README.md`). No GPU ran.\n"
        f"{assumed}\nThe paper: {figure.claim}\n\nOurs:\n{says}\n\n"
        f"`{record['command']}` ({record['seconds']:.0f} s); rows, machine and versions in "
        f"`{recorded}`.\n"
    )


def main() -> int:
    figures = known_figures()
    parser = argparse.ArgumentParser(prog="benchmark.figures", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(figures)}, or all",
    )
    parser.add_argument(
        "--redraw", type=Path, metavar="JSON", help="draw a recorded figure again, compute nothing"
    )
    parser.add_argument("--trace", help="a CSV of your own in place of the figure's workloads")
    parser.add_argument("--requests", type=int, default=1000, help="of each workload")
    parser.add_argument("--seed", type=int, default=0, help="of the Poisson arrivals")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.redraw is not None:
        print(draw_again(arguments.redraw))
        return 0
    if not arguments.names or set(arguments.names) - {*figures, "all"}:
        parser.error(f"name figures of {', '.join(figures)}, or all")
    options = Options(trace=arguments.trace, num_requests=arguments.requests, seed=arguments.seed)
    names = list(figures) if "all" in arguments.names else arguments.names
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {figures[name].title}", file=sys.stderr)
        print(make(figures[name], options, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
