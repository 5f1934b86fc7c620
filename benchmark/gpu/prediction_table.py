"""Holds the predictions of `predictions.py` against what a run measured.

A prediction is written down before the run and says by itself where its measured value comes from;
nothing is filled in by hand. What the run did not measure stays `not run`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmark.support.dated_result import markdown_table

Row = Mapping[str, Any]
Kind = Literal["floor", "estimate", "at least", "at most"]


class NotRunError(Exception):
    """Raised when a run holds no such row, or nothing in its column."""


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of a run by table, as the parts book them."""

    tables: Mapping[str, Sequence[Row]]

    def number(self, table: str, column: str, **where: str | int) -> float:
        """The column of the first row whose other columns are as `where` says.

        Raises NotRunError.
        """
        for row in self.tables.get(table, ()):
            if all(row[name] == value for name, value in where.items()):
                if row[column] is None:
                    break
                return float(row[column])
        raise NotRunError(f"{table}: {where}")


Measure = Callable[[Found], float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expectation of a number before it is measured.

    Attributes:
        low, high: the expected range in `unit`; equal where a single value was predicted.
        kind: `floor` cannot be beaten at the assumed rates, `estimate` is what is expected, and
            `at least` and `at most` are aims.
        source: where the expectation comes from.
        measure: gives the measured value; raises NotRunError.
    """

    what: str
    low: float
    high: float
    unit: str
    kind: Kind
    source: str
    measure: Measure

    def measured(self, found: Found) -> float | None:
        """The measured value in `unit`; None where the run has not got it."""
        try:
            return self.measure(found)
        except NotRunError:
            return None

    def ratio(self, measured: float) -> float:
        """Measured over predicted, the middle of the range."""
        return measured / ((self.low + self.high) / 2)

    def verdict(self, measured: float) -> str:
        """Says if an aim was met, or if an estimated range holds the value; a floor has no
        verdict."""
        if self.kind == "at least":
            return "met" if measured >= self.low else "missed"
        if self.kind == "at most":
            return "met" if measured <= self.high else "missed"
        if self.low < self.high:
            return "within" if self.low <= measured <= self.high else "outside"
        return ""


def record(predictions: Sequence[Prediction], found: Found) -> list[dict[str, Any]]:
    """Every prediction with its measured value, for the JSON file."""
    return [
        {
            "what": each.what,
            "low": each.low,
            "high": each.high,
            "unit": each.unit,
            "kind": each.kind,
            "source": each.source,
            "measured": each.measured(found),
        }
        for each in predictions
    ]


def text(predictions: Sequence[Prediction], found: Found, card: str) -> str:
    """The table of predictions for the Markdown file. `card` is the one that they are for."""
    heads = ["what", "kind", "predicted", "measured", "ratio", "", "source"]
    lines = [_cells(each, each.measured(found)) for each in predictions]
    names = {str(row["name"]) for row in found.tables.get("card", ())}
    texts = ["## Predicted and measured", markdown_table(heads, lines)]
    if names - {card}:
        texts.insert(1, f"The predictions are for {card}; this is {', '.join(names)}.")
    return "\n\n".join(texts)


def digest(paths: Sequence[Path]) -> str:
    """The SHA-256 of the files of predictions, one after the other (`cat ... | sha256sum`): which
    version of them the run was held against."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _cells(each: Prediction, measured: float | None) -> list[str]:
    predicted = f"{each.low:.3g}"
    if each.high != each.low:
        predicted += f" to {each.high:.3g}"
    cells = ["not run", "", ""]
    if measured is not None:
        value, ratio = f"{measured:.3g} {each.unit}", f"{each.ratio(measured):.2f}"
        cells = [value, ratio, each.verdict(measured)]
    return [each.what, each.kind, f"{predicted} {each.unit}", *cells, each.source]
