"""The figures of prefill and decode apart beside one pipeline: ratios within a round, and tables.

Pure functions of what the clients saw.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmark.disaggregation.mixed_clients import Answered
from benchmark.support.dated_result import markdown_table
from benchmark.support.serving_report import Spread, spread

APART, TOGETHER = "apart", "together"
ALL_KINDS = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """One load on one set-up; `busy` is the share of the load's `seconds` in which each core had
    something to do, of whatever process."""

    setup: str
    load: str
    round: int
    seconds: float
    answers: tuple[Answered, ...]
    busy: tuple[float, ...]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(one.place.kind for one in self.answers))


class Figure(NamedTuple):
    """A measure of one load: of one kind of requests, or of all of them."""

    load: str
    kind: str
    name: str


TTFT_P50, TTFT_P99 = "TTFT p50 ms", "TTFT p99 ms"
GAP_P50, GAP_P99 = "between tokens p50 ms", "between tokens p99 ms"
TPOT_P50 = "TPOT p50 ms"
TOTAL_RATE, OUTPUT_RATE = "tokens/s in and out", "tokens/s out"
# Of these more is better.
RATES = (TOTAL_RATE, OUTPUT_RATE)


def figures(run: LoadRun) -> dict[Figure, float]:
    """All measures of a run. Tokens and the times between them count within the load's seconds; a
    prompt counts where its first token does. Times are between parts of a stream, which have a
    token each but may come in bursts; a TPOT is the mean of an answer."""
    found: dict[Figure, float] = {}
    for kind in run.kinds:
        answers = [one for one in run.answers if one.place.kind == kind]
        ttfts_ms = [1e3 * (one.moments_s[0] - one.sent_s) for one in answers]
        gaps_ms = [
            1e3 * (later - earlier)
            for one in answers
            for earlier, later in pairwise(one.moments_s)
            if later <= run.seconds
        ]
        tpots_ms = [_tpot_ms(one) for one in answers if len(one.moments_s) > 1]
        for values, names in (
            (ttfts_ms, (TTFT_P50, TTFT_P99)),
            (gaps_ms, (GAP_P50, GAP_P99)),
            (tpots_ms, (TPOT_P50,)),
        ):
            if values:
                percentiles = np.percentile(values, (50, 99)).tolist()
                for name, value in zip(names, percentiles, strict=False):
                    found[Figure(run.load, kind, name)] = value
    tokens_out = sum(_tokens_until(one, run.seconds) for one in run.answers)
    tokens_in = sum(one.input_tokens for one in run.answers if one.moments_s[0] <= run.seconds)
    found[Figure(run.load, ALL_KINDS, TOTAL_RATE)] = (tokens_in + tokens_out) / run.seconds
    found[Figure(run.load, ALL_KINDS, OUTPUT_RATE)] = tokens_out / run.seconds
    return found


def _tpot_ms(one: Answered) -> float:
    return 1e3 * (one.moments_s[-1] - one.moments_s[0]) / (one.tokens[-1] - one.tokens[0])


def _tokens_until(one: Answered, moment_s: float) -> int:
    return max(
        (n for at, n in zip(one.moments_s, one.tokens, strict=True) if at <= moment_s), default=0
    )


def by_figure(runs: Iterable[LoadRun], setup: str) -> dict[Figure, dict[int, float]]:
    """The values of each measure of a set-up, by round."""
    found: dict[Figure, dict[int, float]] = defaultdict(dict)
    for run in runs:
        if run.setup == setup:
            for figure, value in figures(run).items():
                found[figure][run.round] = value
    return found


def ratios(runs: Sequence[LoadRun]) -> dict[Figure, list[float]]:
    """Apart, as a multiple of together, of each round that has both."""
    apart, together = by_figure(runs, APART), by_figure(runs, TOGETHER)
    return {
        figure: [values[one] / together[figure][one] for one in values if one in together[figure]]
        for figure, values in apart.items()
        if figure in together
    }


def figure_table(runs: Sequence[LoadRun]) -> str:
    """Markdown: medians over the rounds, with the smallest and the largest."""
    heads = ["load", "requests", "", TOGETHER, APART, f"{APART} / {TOGETHER}, each round"]
    heads += ["median (min to max)"]
    apart, together = by_figure(runs, APART), by_figure(runs, TOGETHER)
    rows = []
    for figure, values in ratios(runs).items():
        cells: list[Spread | str] = [
            spread(list(one[figure].values())) for one in (together, apart)
        ]
        cells += [", ".join(f"{one:.2f}" for one in values), ratio_text(values)]
        rows.append([*figure, *map(str, cells)])
    return markdown_table(heads, rows)


def ratio_text(values: Sequence[float]) -> str:
    return f"{np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def busy_table(runs: Sequence[LoadRun]) -> str:
    """Markdown: how busy the cores were, medians over the rounds."""
    rows = []
    for load in dict.fromkeys(run.load for run in runs):
        for setup in (TOGETHER, APART):
            own = [run.busy for run in runs if (run.load, run.setup) == (load, setup)]
            if own:
                rows.append([load, setup, *(f"{share:.0%}" for share in np.median(own, axis=0))])
    num_cores = len(runs[0].busy)
    return markdown_table(["load", "", *(f"core {core} busy" for core in range(num_cores))], rows)


class Equality(NamedTuple):
    """Answers to the same request by both set-ups, as far as both go, and their tokens."""

    answers: int
    tokens: int
    unequal: list[str]


def compare_answers(runs: Sequence[LoadRun]) -> Equality:
    """Greedy tokens of every request that both were asked. How many a client asks, and how far its
    last answer goes, depends on the answers' speed."""
    outputs = {
        setup: {one.place: one.output for run in runs if run.setup == setup for one in run.answers}
        for setup in (APART, TOGETHER)
    }
    num_tokens, unequal = 0, []
    both = sorted(outputs[APART].keys() & outputs[TOGETHER].keys())
    for place in both:
        pairs = [*zip(outputs[APART][place], outputs[TOGETHER][place], strict=False)]
        num_tokens += len(pairs)
        if any(one != other for one, other in pairs):
            unequal.append(str(place))
    return Equality(len(both), num_tokens, unequal)


def record_of(run: LoadRun) -> dict[str, Any]:
    """For the result's JSON file: the figures, and each request without its tokens."""
    return {
        "setup": run.setup,
        "load": run.load,
        "round": run.round,
        "seconds": run.seconds,
        "busy": [round(share, 3) for share in run.busy],
        "figures": [[*figure, round(value, 2)] for figure, value in figures(run).items()],
        "request_columns": ["kind", "client", "number", "sent_s", "ttft_ms", "last_s", "tokens"],
        "requests": [
            [
                one.place.kind,
                one.place.client,
                one.place.number,
                round(one.sent_s, 3),
                round(1e3 * (one.moments_s[0] - one.sent_s), 1),
                round(one.moments_s[-1], 3),
                len(one.output),
            ]
            for one in run.answers
        ],
    }
