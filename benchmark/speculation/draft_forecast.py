"""Predicts by the simulator what drafts gain, and holds that against what was measured.

    python -m benchmark.speculation.draft_forecast
    python -m benchmark.speculation.draft_forecast --traces OFF.jsonl,ON.jsonl

Without traces it repeats the newest result, which has all that a prediction needs: two minutes on
any machine, and no server. The traces are those of `benchmark.speculation.draft_speed`'s servers
(build/bench/trace_31700.jsonl and trace_31701.jsonl), `--measured` is its result.

Nothing is predicted from itself. The texts of a kind are cut into halves with as many of each of
its forms, and what is known of one half predicts the other: step times are fitted to the first
round of its texts. How often drafts are right is counted in the texts that are predicted, which is
how a user's own text is predicted, and in those of the other half whose answers are about as long,
each in turn, which is how a new text of a known kind is: an answer that is in a loop, where drafts
are right, does not end by itself. From these the simulator, whose scheduler is the server's, serves
the requests with drafts and without. What all texts gain with several clients is told from steps of
the first round, and held against the others. How many texts tell the gain of a kind to a tenth
follows from how much they differ.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, TypeVar

import msgspec

from benchmark.speculation.traced_drafts import (
    by_text,
    drafts_apart,
    elapsed_s,
    lone_requests,
    mean_gap_s,
    runs_by_load,
)
from benchmark.support.command import Command, Options, Report, at_least_one
from benchmark.support.dated_result import markdown_table, read_record
from benchmark.support.paths import RESULTS
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.args.scheduling_args import draft_tokens_of
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.records.trace import StepRecord, read_trace
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.calibration import FittedCosts, fit_records
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink
from sgl_pipeline.simulator.virtual_drafts import DraftAcceptance, acceptance_of
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy

MEASURED = RESULTS / "2026-11-26_2104_draft_speed.json"
MOST_ERROR = 0.1
WANTED_ERROR = 0.1
POOL_TOKENS = 32_768
BY_TEXT, BY_OTHERS = "by text", "by other texts"
T = TypeVar("T")
# The texts of each client, in their order, by load.
Loads = dict[str, list[list["Text"]]]


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
        return [_ratio(map(sum, zip(*texts, strict=True))) for texts in self.seconds[load]]


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
        return [_ratio(map(sum, zip(*one, *other, strict=True))) for one, other in rounds]


class Predicted(msgspec.Struct, frozen=True):
    """Seconds without drafts and with them: of each load and half, and of all texts with several
    clients."""

    halves: tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]
    shared: tuple[float, float]

    def gain(self, load: str) -> float:
        """The gain of all texts of a load."""
        return _ratio(map(sum, zip(*(half[load] for half in self.halves), strict=True)))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 1 where a gain is missed by more than a tenth, although it is known
    how often the drafts were right."""
    command = Command(__spec__.name, __doc__)
    command.add("--traces", help="OFF,ON: of draft_speed's two servers (default: repeat a result)")
    command.add("--measured", type=Path, default=MEASURED, help="draft_speed's result")
    command.add("--rounds", type=at_least_one, default=16, help="simulated rounds (default: 16)")
    return command.run(_predict, argv)


def _predict(options: Options) -> Report:
    if options.traces is None:
        measured = recorded(newest_result())
    else:
        off, on = options.traces.split(",")
        measured = measured_from(Path(off), Path(on), read_record(options.measured))
    predicted = {
        how: prediction(measured, options.rounds, own_acceptance=how == BY_TEXT)
        for how in (BY_TEXT, BY_OTHERS)
    }
    return Report(
        name="draft_forecast",
        texts=[_gain_table(measured, predicted), _acceptance_table(measured)],
        facts={"Simulation": {"rounds": str(options.rounds), "measured": options.measured.stem}},
        record={
            "measured": msgspec.to_builtins(measured),
            "predicted": msgspec.to_builtins(predicted),
        },
        problems=[
            f"{load}: predicted {error:+.1%} of the measured gain"
            for load, error in errors(measured, predicted[BY_TEXT]).items()
            if abs(error) > MOST_ERROR
        ],
    )


def newest_result() -> Path:
    """The newest result of this benchmark. Raises ConfigurationError where there is none."""
    found = sorted(RESULTS.glob("*_draft_forecast.json*"))
    if not found:
        raise ConfigurationError("there is no result yet; name --traces")
    return found[-1]


def recorded(path: Path) -> Measured:
    """The measurements that a result was predicted from."""
    return msgspec.convert(read_record(path)["measured"], Measured)


def measured_from(off: Path, on: Path, speed: Mapping[str, Any]) -> Measured:
    """The measurements in the traces of two servers and in `draft_speed`'s record of their runs."""
    totals: dict[str, dict[tuple[str, int], float]] = {}
    for drafts, load, number, run_s, _ in speed["runs"]:
        totals.setdefault(load, {})[drafts, number] = run_s
    rounds = max(number for _, number in next(iter(totals.values())))
    *lone, shared = totals
    sizes = dict.fromkeys(lone, 8) | {shared: 8 * len(lone)}
    plain, drafted = (
        runs_by_load([drafts_apart(one) for one in read_trace(path)], sizes, rounds)
        for path in (off, on)
    )
    loads = {load: (plain[load], drafted[load]) for load in lone}
    all_texts = [*plain[shared][0], *drafted[shared][0]]
    return Measured(
        halves=(half_of(0, loads, all_texts), half_of(1, loads, all_texts)),
        gap_s=mean_gap_s(plain[lone[0]][0]),
        clients=int(shared.split(", ")[1].split()[0]),
        shared_gains=[
            totals[shared]["off", number] / totals[shared]["on", number]
            for number in range(2, rounds + 1)
        ],
    )


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
    return Half(fitted.stages[0].costs, fitted.host, texts, seconds)


def prediction(measured: Measured, rounds: int, *, own_acceptance: bool) -> Predicted:
    """The seconds of each half, from the step times of the other one, over so many simulated
    rounds.

    Args:
        own_acceptance: drafts are right as often as in the same text; otherwise as often as in one
            of `alike` of the other half, in each round another one.
    """

    def texts_of(number: int, load: str, turn: int) -> list[Text]:
        texts, others = (measured.halves[at].texts[load] for at in (number, 1 - number))
        if own_acceptance:
            return texts
        chosen = [alike(one, others) for one in texts]
        return [
            msgspec.structs.replace(one, acceptance=known[(at + turn) % len(known)].acceptance)
            for at, (one, known) in enumerate(zip(texts, chosen, strict=True))
        ]

    def lone(number: int, turn: int) -> Loads:
        return {load: [texts_of(number, load, turn)] for load in measured.loads}

    def shared(turn: int) -> Loads:
        both = [
            [*chain.from_iterable(zip(*(texts_of(at, load, turn) for at in (0, 1)), strict=True))]
            for load in measured.loads
        ]
        in_turn = [*chain.from_iterable(zip(*both, strict=True))]
        return {"": [in_turn[at :: measured.clients] for at in range(measured.clients)]}

    first, second = (
        simulated_s(measured.halves[1 - at], measured.gap_s, partial(lone, at), rounds)
        for at in (0, 1)
    )
    (of_all,) = simulated_s(measured.halves[0], measured.gap_s, shared, rounds).values()
    return Predicted((first, second), of_all)


def alike(text: Text, others: Sequence[Text]) -> list[Text]:
    """The texts among `others` whose output is nearest to that of `text` in length."""

    def distance(other: Text) -> int:
        return abs(other.output_tokens - text.output_tokens)

    least = min(map(distance, others))
    return [other for other in others if distance(other) == least]


def simulated_s(
    known: Half, gap_s: float, loads_of: Callable[[int], Loads], rounds: int
) -> dict[str, tuple[float, float]]:
    """The seconds of all rounds of each load, on a server without drafts and on one with, whose
    step times are those of `known`. Texts are drawn anew in each round; before the first, the
    server learns what its steps take."""
    off, on = (_served(known, gap_s, loads_of, rounds, most) for most in (0, draft_tokens_of(None)))
    return {load: (off[load], on[load]) for load in off}


def _served(
    known: Half, gap_s: float, loads_of: Callable[[int], Loads], rounds: int, draft_tokens: int
) -> dict[str, float]:
    pipeline, ids = _pipeline(known, draft_tokens), TokenIds()
    seconds = dict.fromkeys(loads_of(0), 0.0)
    for turn in range(1 + rounds):
        for load, clients in loads_of(turn).items():
            asked = [_client(texts, ids, gap_s) for texts in clients]
            taken_s = _served_s(pipeline, asked)
            seconds[load] += taken_s if turn else 0.0
    return seconds


def _pipeline(known: Half, draft_tokens: int) -> VirtualPipeline:
    args = SchedulingArgs(radix_cache=False, draft_tokens=draft_tokens)
    scheduler = StepScheduler(
        args,
        make_policy(ThrottleArgs(policy="throttle")),
        num_pages=POOL_TOKENS // args.page_size,
        num_stages=1,
        context_length=POOL_TOKENS,
    )
    costs = FittedCosts(
        stages=(StepPredictor(known.costs),),
        noise=((1.0,),),
        link=SimulatedLink(),
        host=known.host,
        errors=(0.0,),
    )
    return VirtualPipeline(scheduler, costs, StepForecast(StagePlan(0, costs.layer_counts)))


def _client(texts: Sequence[Text], ids: TokenIds, gap_s: float) -> SimulatedRequest:
    """Asks for one text after the other."""
    return SimulatedRequest.chain(
        [
            SimulatedRequest(
                arrival_s=0.0,
                prompt=(ids.fresh(text.prompt_tokens),),
                output=ids.fresh(text.output_tokens),
                think_s=gap_s,
                acceptance=text.acceptance,
            )
            for text in texts
        ]
    )


def _served_s(pipeline: VirtualPipeline, clients: Sequence[SimulatedRequest]) -> float:
    """Seconds until all requests of `clients`, who come when all else has ended, have ended."""
    served = pipeline.clients.served
    began_s = max((one.finished_s or 0.0 for one in served), default=0.0)
    num_before = len(served)
    pipeline.run([replace(one, arrival_s=began_s) for one in clients])
    return max(one.finished_s or 0.0 for one in served[num_before:]) - began_s


def errors(measured: Measured, predicted: Predicted) -> dict[str, float]:
    """By how much the gain of each load is missed, over both halves, and that of all texts shared
    by several clients."""
    found = {
        load: predicted.gain(load) / median(measured.gains(load)) - 1.0 for load in measured.loads
    }
    shared = _ratio(predicted.shared) / median(measured.shared_gains) - 1.0
    return found | {_shared_name(measured): shared}


def texts_needed(seconds: Sequence[tuple[float, float]]) -> int:
    """The number of texts whose gain together has a standard error of a tenth.

    That of a ratio of sums: sqrt(n var(off - gain on)) / sum(on) for n texts (Cochran, Sampling
    Techniques, 6.4).

    Args:
        seconds: of each text without drafts and with them.
    """
    gain = _ratio(map(sum, zip(*seconds, strict=True)))
    spread = stdev(off - gain * on for off, on in seconds)
    return max(1, math.ceil((spread / fmean(on for _, on in seconds) / gain / WANTED_ERROR) ** 2))


def _shared_name(measured: Measured) -> str:
    return f"all kinds, {measured.clients} clients"


def _ratio(off_and_on_s: Iterable[float]) -> float:
    off_s, on_s = off_and_on_s
    return off_s / on_s


def _gain_table(measured: Measured, predicted: Mapping[str, Predicted]) -> str:
    rows: list[list[str]] = []

    def add(load: str, gains: Sequence[float], told: Iterable[float]) -> None:
        middle = median(gains)
        cells = [(f"{one:.2f}", f"{one / middle - 1.0:+.1%}") for one in told]
        gain = f"{middle:.2f} ({min(gains):.2f} to {max(gains):.2f})"
        rows.append([load, gain, *chain.from_iterable(cells)])

    for load in measured.loads:
        for at, half in enumerate(measured.halves):
            told = [_ratio(one.halves[at][load]) for one in predicted.values()]
            add(f"{load}: half {at + 1}", half.gains(load), told)
        add(f"{load}: both", measured.gains(load), [one.gain(load) for one in predicted.values()])
    shared = [_ratio(one.shared) for one in predicted.values()]
    add(_shared_name(measured), measured.shared_gains, shared)
    heads = [part for how in predicted for part in (f"predicted {how}", "error")]
    return markdown_table(["load", "gain, measured", *heads], rows)


def _acceptance_table(measured: Measured) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
