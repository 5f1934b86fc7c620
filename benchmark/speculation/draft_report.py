"""Puts the gains of `draft_forecast` into words: predicted beside measured, how often drafts were
right, and how many texts tell the gain of a kind to a tenth."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median, stdev

from benchmark.speculation.draft_gains import Measured, Predicted, ratio
from benchmark.support.dated_result import markdown_table

WANTED_ERROR = 0.1


def errors(measured: Measured, predicted: Predicted) -> dict[str, float]:
    """By how much the gain of each load is missed, over both halves, and that of all texts shared
    by several clients."""
    found = {
        load: predicted.gain(load) / median(measured.gains(load)) - 1.0 for load in measured.loads
    }
    shared = ratio(predicted.shared) / median(measured.shared_gains) - 1.0
    return found | {_shared_name(measured): shared}


def texts_needed(seconds: Sequence[tuple[float, float]]) -> int:
    """The number of texts whose gain together has a standard error of a tenth.

    That of a ratio of sums: sqrt(n var(off - gain on)) / sum(on) for n texts (Cochran, Sampling
    Techniques, 6.4).

    Args:
        seconds: of each text without drafts and with them.
    """
    gain = ratio(map(sum, zip(*seconds, strict=True)))
    spread = stdev(off - gain * on for off, on in seconds)
    return max(1, math.ceil((spread / fmean(on for _, on in seconds) / gain / WANTED_ERROR) ** 2))


def gain_table(measured: Measured, predicted: Mapping[str, Predicted]) -> str:
    """Markdown: the gain of each load, its halves and all clients, and each prediction of it.

    Args:
        predicted: by how it was predicted.
    """
    rows: list[list[str]] = []

    def add(load: str, gains: Sequence[float], told: Iterable[float]) -> None:
        middle = median(gains)
        cells = [(f"{one:.2f}", f"{one / middle - 1.0:+.1%}") for one in told]
        gain = f"{middle:.2f} ({min(gains):.2f} to {max(gains):.2f})"
        rows.append([load, gain, *chain.from_iterable(cells)])

    for load in measured.loads:
        for at, half in enumerate(measured.halves):
            told = [ratio(one.halves[at][load]) for one in predicted.values()]
            add(f"{load}: half {at + 1}", half.gains(load), told)
        add(f"{load}: both", measured.gains(load), [one.gain(load) for one in predicted.values()])
    shared = [ratio(one.shared) for one in predicted.values()]
    add(_shared_name(measured), measured.shared_gains, shared)
    heads = [part for how in predicted for part in (f"predicted {how}", "error")]
    return markdown_table(["load", "gain, measured", *heads], rows)


def acceptance_table(measured: Measured) -> str:
    """Markdown: how often drafts were right, and the texts needed, by load."""
    heads = ["load", "draft found", "right after a wrong one", "after 1 right", "2", "3", "10"]
    heads.append("texts for a standard error of a tenth")
    rows = []
    for load in measured.loads:
        found = [text.acceptance for half in measured.halves for text in half.texts[load]]
        chances = (fmean(one.chance(run) for one in found) for run in (0, 1, 2, 3, 10))
        cells = [f"{chance:.0%}" for chance in chances]
        seconds = [one for half in measured.halves for one in half.seconds[load][0]]
        needed = str(texts_needed(seconds))
        rows.append([load, f"{fmean(one.found for one in found):.0%}", *cells, needed])
    return markdown_table(heads, rows)


def _shared_name(measured: Measured) -> str:
    kinds = list(measured.loads)
    kind = "all kinds" if len(kinds) > 1 else kinds[0].rpartition(", ")[0]
    return f"{kind}, {measured.clients} clients"
