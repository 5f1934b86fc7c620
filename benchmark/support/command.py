"""The skeleton of a benchmark's command: its flags, its error line, its report and its exit code.

    def main(argv: list[str] | None = None) -> int:
        command = Command(__spec__.name, __doc__, rounds=3, port=31900)
        command.add("--clients", type=int, default=8)
        return command.run(_measure, argv)

`_measure` takes the parsed options and returns a `Report`. Where it takes longer than a minute it
shows its `progress`; lines beside a bar are said by `say`.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.support.dated_result import file_of, save_result
from benchmark.support.paths import RESULTS, SCRATCH
from sgl_pipeline.errors import SglPipelineError

_EXIT_INTERRUPTED = 130
_PROBLEMS_SHOWN = 20

Options = argparse.Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a command.

    Args:
        name: of the result's files, after their date.
        texts: tables and remarks in Markdown; printed, and in the result's page.
        facts: groups of facts that the result's page and record show.
        record: goes to the result's JSON file alone.
        problems: what must not have happened, a line each: any makes the exit code 1.
        draw: draws the result's plot, an SVG file, to a path.
    """

    name: str
    texts: Sequence[str]
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()
    draw: Callable[[Path], None] | None = None


class Command:
    """`python -m <module>`, with `--rounds` and `--port` where they have a default.

    Args:
        module: the caller's `__spec__.name`.
        description: the caller's docstring, which is what `--help` shows.
        saves: its reports are saved, unless `--no-save`.
        folder: where they are saved.
    """

    def __init__(
        self,
        module: str,
        description: str | None,
        *,
        rounds: int | None = None,
        port: int | None = None,
        saves: bool = True,
        folder: Path = RESULTS,
    ) -> None:
        self._module = module
        self._folder = folder
        self._parser = argparse.ArgumentParser(
            prog=f"python -m {module}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add = self._parser.add_argument
        if rounds is not None:
            text = f"counted runs of each (default: {rounds})"
            self.add("--rounds", type=at_least_one, default=rounds, help=text)
        if port is not None:
            text = f"loopback port of the servers (default: {port})"
            self.add("--port", type=int, default=port, help=text)
        if saves:
            self.add("--no-save", action="store_true", help="print only")
        else:
            self._parser.set_defaults(no_save=True)

    def exclusive(self) -> Callable[..., argparse.Action]:
        """`add` for a group of flags of which at most one may be given; two are refused by
        name."""
        return self._parser.add_mutually_exclusive_group().add_argument

    def run(
        self, measure: Callable[[Options], Report | None], argv: Sequence[str] | None = None
    ) -> int:
        """Measures, prints and saves. Returns the exit code: 0, 1 for problems or after an error
        that was printed, 130 after Ctrl-C."""
        options = self._parser.parse_args(argv)
        name = self._module.rpartition(".")[2]
        SCRATCH.mkdir(parents=True, exist_ok=True)
        try:
            report = measure(options)
        except SglPipelineError as error:
            print(f"{name}: error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{name}: interrupted; nothing is saved", file=sys.stderr)
            return _EXIT_INTERRUPTED
        if report is None:
            return 0
        print("\n" + "\n\n".join(filter(None, report.texts)))
        for problem in report.problems[:_PROBLEMS_SHOWN]:
            print(f"FAILED: {problem}")
        if not options.no_save:
            self._save(report)
        return 1 if report.problems else 0

    def _save(self, report: Report) -> None:
        texts = [*report.texts, "\n".join(f"- FAILED: {problem}" for problem in report.problems)]
        stem = save_result(
            self._module, report.name, report.facts, report.record, texts, self._folder
        )
        if report.draw is not None:
            report.draw(file_of(stem, ".svg"))
        endings = ".md, .json and .svg" if report.draw is not None else ".md and .json"
        print(f"\nWritten: {stem}{endings}")


def at_least_one(text: str) -> int:
    """A flag's number that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of a flag that lists some of `known`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is unknown; choose from {', '.join(known)}"
            )
        return names

    return parse


def progress(total: int, what: str) -> "tqdm[Any]":
    """A bar on a terminal, and nothing where standard error is none; `update` it."""
    return tqdm(total=total, unit=f" {what}", disable=None, leave=False, dynamic_ncols=True)


def say(line: str) -> None:
    """A line on standard output, above the bar where there is one."""
    tqdm.write(line)
    sys.stdout.flush()
