"""Gains of drafts: as measured on `draft_speed`'s servers, by their traces or an older result, and
as predicted.

The texts of a kind are cut into halves with as many of each of its forms: what is known of one half
predicts the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmark.speculation.prompts import PROMPTS_EACH
from benchmark.speculation.traced_drafts import (
    by_text,
    drafts_apart,
    elapsed_s,
    lone_requests,
    mean_gap_s,
    runs_by_load,
)
from benchmark.support.dated_result import read_record
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.records.trace import StepRecord, read_trace
from sgl_pipeline.simulator.calibration import fit_records
from sgl_pipeline.simulator.pipeline_costs import HostCosts
from sgl_pipeline.simulator.virtual_drafts import DraftAcceptance, acceptance_of

T = TypeVar("T")


class Text(msgspec.Struct, frozen=True):
    """A request, and the acceptance of its drafts."""

    prompt_tokens: int
    output_tokens: int
    acceptance: DraftAcceptance


class Half(msgspec.Struct, frozen=True):
    """Half of the texts of each load with one client.

    `seconds` are those of each text without drafts and with them, by load, round and text. `costs`
    and `host` are fitted to the first of these rounds, and to that of the shared load.
    """

    costs: StepCosts
    host: HostCosts
    texts: dict[str, list[Text]]
    seconds: dict[str, list[list[tuple[float, float]]]]

    def gains(self, load: str) -> list[float]:
        """The time of all texts without drafts over that with, of each round."""
        return [ratio(map(sum, zip(*texts, strict=True))) for texts in self.seconds[load]]


class Measured(msgspec.Struct, frozen=True):
    """All that a prediction needs, and the gains that it is held against.

    `gap_s` passes between an answer and the client's next request. `clients` share the texts of all
    loads; `shared_gains` are those of the rounds after the first.
    """

    halves: tuple[Half, Half]
    gap_s: float
    clients: int
    shared_gains: list[float]

    @property
    def loads(self) -> list[str]:
        return list(self.halves[0].texts)

    def gains(self, load: str) -> list[float]:
        """The gain of all texts, of each round."""
        rounds = zip(*(half.seconds[load] for half in self.halves), strict=True)
        return [ratio(map(sum, zip(*one, *other, strict=True))) for one, other in rounds]


class Predicted(msgspec.Struct, frozen=True):
    """Seconds without drafts and with them: of each load and half, and of all texts with several
    clients."""

    halves: tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]
    shared: tuple[float, float]

    def gain(self, load: str) -> float:
        """The gain of all texts of a load."""
        return ratio(map(sum, zip(*(half[load] for half in self.halves), strict=True)))


def recorded(path: Path) -> Measured:
    """The measurements that a result was predicted from."""
    return msgspec.convert(read_record(path)["measured"], Measured)


def measured_from(off: Path, on: Path, speed: Mapping[str, Any]) -> Measured:
    """The measurements in the traces of two servers and in `draft_speed`'s record of their runs.

    Raises ConfigurationError for loads that `lone_and_shared` refuses, fewer than two rounds, and
    servers of several stages.
    """
    totals: dict[str, dict[tuple[str, int], float]] = {}
    for drafts, load, number, run_s, _ in speed["runs"]:
        totals.setdefault(load, {})[drafts, number] = run_s
    rounds = max(number for _, number in next(iter(totals.values())))
    if rounds < 2:
        raise ConfigurationError(
            "draft_speed measured one round; a forecast is fitted to the first and held against "
            "the others"
        )
    lone, shared = lone_and_shared(list(totals))
    sizes = dict.fromkeys(lone, PROMPTS_EACH) | {shared: PROMPTS_EACH * len(lone)}
    plain, drafted = (
        runs_by_load([drafts_apart(one) for one in read_trace(path)], sizes, rounds)
        for path in (off, on)
    )
    loads = {load: (plain[load], drafted[load]) for load in lone}
    all_texts = [*plain[shared][0], *drafted[shared][0]]
    return Measured(
        halves=(half_of(0, loads, all_texts), half_of(1, loads, all_texts)),
        gap_s=mean_gap_s(plain[lone[0]][0]),
        clients=_clients_of(shared),
        shared_gains=[
            totals[shared]["off", number] / totals[shared]["on", number]
            for number in range(2, rounds + 1)
        ],
    )


def lone_and_shared(loads: Sequence[str]) -> tuple[list[str], str]:
    """The loads of one client, and the last of `loads`: of several, who ask each prompt once.

    Raises ConfigurationError where `loads` are others.
    """
    *lone, shared = loads
    is_lone = all(_clients_of(load) == 1 for load in lone)
    if not is_lone or not 1 < _clients_of(shared) <= PROMPTS_EACH * len(lone):
        raise ConfigurationError(
            f"draft_speed measured {'; '.join(loads)}; a forecast is of one client for each kind, "
            "and of several, at most one for each prompt: --clients 1,8"
        )
    return lone, shared


def _clients_of(load: str) -> int:
    """The number of clients in the name that `draft_speed` gives a load."""
    return int(load.rpartition(", ")[2].split()[0])


def texts_of_half(number: int, texts: Sequence[T]) -> list[T]:
    """The first and the fourth of each four, or the others: a kind's prompts have two forms in
    turn, and drafts gain more with one of them."""
    return [one for at, one in enumerate(texts) if (at % 4 in (1, 2)) == bool(number)]


def half_of(
    number: int,
    loads: Mapping[str, tuple[Sequence[Sequence[StepRecord]], Sequence[Sequence[StepRecord]]]],
    shared: Sequence[StepRecord],
) -> Half:
    """One half of the texts.

    Raises ConfigurationError for steps of several stages.

    Args:
        number: 0 or 1.
        loads: the steps of each load's rounds without drafts, and with them.
        shared: steps of several clients, which the costs are fitted to as well.
    """
    fitted_to, texts, seconds = list(shared), {}, {}
    for load, servers in loads.items():
        # Of each server, by round and text.
        plain, drafted = ([texts_of_half(number, by_text(run)) for run in runs] for runs in servers)
        fitted_to += chain.from_iterable((*plain[0], *drafted[0]))
        requests = [next(lone_requests(text)) for run in drafted for text in run]
        of_all = acceptance_of(one.runs for one in requests)
        texts[load] = [
            Text(one.prompt_tokens, one.output_tokens, acceptance_of([one.runs], of_all))
            for one in requests[: len(drafted[0])]
        ]
        seconds[load] = [
            [(elapsed_s(off), elapsed_s(on)) for off, on in zip(*runs, strict=True)]
            for runs in zip(plain, drafted, strict=True)
        ]
    fitted = fit_records(fitted_to, "the first round", is_robust=True)
    if len(fitted.stages) != 1:
        raise ConfigurationError(
            f"the servers had {len(fitted.stages)} stages; a forecast is of one: draft_speed --pp 1"
        )
    return Half(fitted.stages[0].costs, fitted.host, texts, seconds)


def ratio(off_and_on_s: Iterable[float]) -> float:
    """The gain of drafts: seconds without them over those with."""
    off_s, on_s = off_and_on_s
    return off_s / on_s
