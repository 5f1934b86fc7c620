"""The figures of returning turns: medians, ratios and the tables of a dated result.

Pure functions of what the clients saw, and of the sizes that were planned.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.support.dated_result import markdown_table
from benchmark.support.serving_report import Spread, spread
from benchmark.tiers.turn_clients import AnsweredTurn, Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRun:
    """One run of one engine; `store_mib` lay in its store at the end. `revisit` is the one turn
    more of every session, after a restart or on a second replica, by `revisited_by`."""

    engine: str
    round: int
    answers: Answers
    store_mib: float
    revisit: Answers | None = None
    revisited_by: str = ""

    @property
    def all_turns(self) -> tuple[AnsweredTurn, ...]:
        return self.answers.turns + (self.revisit.turns if self.revisit else ())


@dataclass(frozen=True, slots=True)
class Ttft:
    """Milliseconds to the first token; nan of no turns."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, turns: Iterable[AnsweredTurn]) -> "Ttft":
        times_ms = [one.ttft_ms for one in turns]
        if not times_ms:
            return cls(*[float("nan")] * 3)
        p50, p99 = np.percentile(times_ms, (50, 99))
        return cls(float(np.mean(times_ms)), float(p50), float(p99))


def returning_ttft(run: TurnRun) -> Ttft:
    return Ttft.of(one for one in run.answers.turns if one.is_returning)


def first_ttft(run: TurnRun) -> Ttft:
    return Ttft.of(one for one in run.answers.turns if not one.is_returning)


def tokens_per_s(run: TurnRun) -> float:
    """Prompts and answers, whether computed or found."""
    return sum(len(one.transcript) for one in run.answers.turns) / run.answers.duration_s


def p99_gap_ms(run: TurnRun) -> float:
    """Between two tokens of one answer."""
    return float(np.percentile([gap for one in run.answers.turns for gap in one.gaps_ms], 99))


def found_share(turns: Sequence[AnsweredTurn], tier: str | None = None) -> float:
    """The share of the prompts' tokens that were not computed: all, or by the server's account the
    tokens from `tier`."""
    found = [one.cached_details.get(tier, 0) if tier else one.cached_tokens for one in turns]
    return sum(found) / sum(len(one.prompt) for one in turns)


def kept_share(before: Answers, after: Answers, page_size: int) -> float:
    """The share of each session's whole pages, computed when `before` ended, that `after` found.
    The last token of an answer is drawn and not computed."""
    transcripts = before.transcripts
    there = {
        session: (len(said) - 1) // page_size * page_size for session, said in transcripts.items()
    }
    found = sum(min(one.cached_tokens, there[one.session]) for one in after.turns)
    return found / sum(there.values())


def equal_answers(run: TurnRun, other: TurnRun) -> tuple[int, int]:
    """The number of turns with the same answer in both runs, and of those with the same prompt."""
    others = {(one.session, one.turn): one for one in other.all_turns}
    pairs = [(one, others[one.session, one.turn]) for one in run.all_turns]
    same = [(one, twin) for one, twin in pairs if one.prompt == twin.prompt]
    return sum(one.output == twin.output for one, twin in same), len(same)


def turn_table(runs: Sequence[TurnRun]) -> str:
    """Markdown: one row an engine, medians with extremes over the rounds."""
    heads = ["engine", "rounds", "returning turns: mean TTFT ms", "p50", "p99"]
    heads += ["first turns: mean TTFT ms", "p50", "p99", "total tok/s", "p99 between tokens ms"]
    heads += ["prompt tokens found", "in the store", "store MiB"]
    rows = []
    for engine in dict.fromkeys(run.engine for run in runs):
        own = [run for run in runs if run.engine == engine]
        returning, first = [returning_ttft(run) for run in own], [first_ttft(run) for run in own]
        cells: list[Spread | str] = []
        for ttfts in (returning, first):
            cells += _ttft_cells(ttfts)
        cells += [spread([tokens_per_s(run) for run in own])]
        cells += [spread([p99_gap_ms(run) for run in own])]
        cells += [_percent([found_share(run.answers.turns) for run in own])]
        cells += [_percent([found_share(run.answers.turns, "storage") for run in own])]
        cells += [spread([run.store_mib for run in own])]
        rows.append([engine, str(len(own)), *map(str, cells)])
    return markdown_table(heads, rows)


def ratio_table(runs: Sequence[TurnRun], against: str, *, with_reuse: bool) -> str:
    """Markdown: what each engine gains over `against` in the same round, and what is wanted of an
    engine with tiers beside one without; empty for one engine."""
    heads = ["engine", "", f"beside {against}", "wanted"]
    measures: list[tuple[str, Callable[[TurnRun, TurnRun], float], str]] = []
    if with_reuse:
        measures += [("mean TTFT of returning turns, times shorter", _times_shorter, ">= 3")]
    wanted = ">= 1.5" if with_reuse else ">= 0.98"
    measures += [
        ("total tok/s", lambda run, other: tokens_per_s(run) / tokens_per_s(other), wanted)
    ]
    gaps = ("p99 between tokens", lambda run, other: p99_gap_ms(run) / p99_gap_ms(other), "<= 1.05")
    measures += [gaps]
    rows = []
    for engine, pairs in paired(runs, against).items():
        for name, ratio, wanted in measures:
            rows.append([engine, name, _ratios([ratio(*pair) for pair in pairs]), wanted])
        equal, same = np.sum([equal_answers(*pair) for pair in pairs], axis=0)
        rows.append(
            [engine, "answers to equal prompts that are equal", f"{equal} of {same}", "all"]
        )
    return markdown_table(heads, rows) if rows else ""


def revisit_table(runs: Sequence[TurnRun], page_size: int) -> str:
    """Markdown: what was kept for one turn more of every session; empty where there was none."""
    heads = ["engine", "then", "rounds", "pages kept (wanted: >= 95 %)", "prompt tokens found"]
    heads += ["in the store", "mean TTFT ms", "p50", "p99"]
    rows = []
    visited = [run for run in runs if run.revisit is not None]
    for engine in dict.fromkeys(run.engine for run in visited):
        own = [run for run in visited if run.engine == engine]
        after = [run.revisit for run in own if run.revisit is not None]
        kept = [
            kept_share(run.answers, one, page_size) for run, one in zip(own, after, strict=True)
        ]
        cells = [_percent(kept), _percent([found_share(one.turns) for one in after])]
        cells += [_percent([found_share(one.turns, "storage") for one in after])]
        ttfts = [Ttft.of(one.turns) for one in after]
        cells += _ttft_cells(ttfts)
        rows.append([engine, own[0].revisited_by, str(len(own)), *cells])
    return markdown_table(heads, rows) if rows else ""


def paired(runs: Sequence[TurnRun], against: str) -> dict[str, list[tuple[TurnRun, TurnRun]]]:
    """The runs of each other engine, each with that of `against` in its round."""
    others = {run.round: run for run in runs if run.engine == against}
    pairs: dict[str, list[tuple[TurnRun, TurnRun]]] = {}
    for run in runs:
        if run.engine != against:
            pairs.setdefault(run.engine, []).append((run, others[run.round]))
    return pairs


def record_of(run: TurnRun) -> dict[str, Any]:
    """For the result's JSON file: every turn, without its tokens."""
    columns = ["session", "turn", "prompt_tokens", "ttft_ms", "cached_tokens", "cached_details"]
    return {
        "engine": run.engine,
        "round": run.round,
        "duration_s": round(run.answers.duration_s, 3),
        "tokens_per_s": round(tokens_per_s(run), 1),
        "p99_gap_ms": round(p99_gap_ms(run), 2),
        "store_mib": round(run.store_mib, 1),
        "revisited_by": run.revisited_by,
        "turn_columns": columns,
        "turns": [
            (
                one.session,
                one.turn,
                len(one.prompt),
                round(one.ttft_ms, 1),
                one.cached_tokens,
                dict(one.cached_details),
            )
            for one in run.all_turns
        ],
    }


def _ttft_cells(ttfts: Sequence[Ttft]) -> list[str]:
    """Mean, p50 and p99; empty where there were no such turns."""
    columns = [[getattr(one, name) for one in ttfts] for name in Ttft.__slots__]
    return ["" if np.isnan(column[0]) else str(spread(column)) for column in columns]


def _times_shorter(run: TurnRun, other: TurnRun) -> float:
    return returning_ttft(other).mean / returning_ttft(run).mean


def _ratios(values: Sequence[float]) -> str:
    middle, low, high = np.median(values), min(values), max(values)
    return f"{middle:.3f}" if low == high else f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _percent(shares: Sequence[float]) -> str:
    return f"{spread([100 * share for share in shares])} %"
