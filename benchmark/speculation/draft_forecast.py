"""Predicts by the simulator what drafts gain, and holds that against what was measured.

    python -m benchmark.speculation.draft_forecast
    python -m benchmark.speculation.draft_forecast --traces OFF.jsonl,ON.jsonl

Without traces it repeats the newest result, which has all that a prediction needs: seconds on any
machine, and no server. The traces are those of `benchmark.speculation.draft_speed`'s servers
(build/bench/trace_31700.jsonl and trace_31701.jsonl), `--measured` is its result. Step times are
fitted to the first counted round of both; how often drafts are right is counted with one client.
From these the simulator, whose scheduler is the server's, serves the same requests with drafts and
without. The gain is predicted twice: from the acceptance of each text, and as if all of a kind had
the same, which is as much as a user may know.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmark.speculation.traced_drafts import (
    acceptance_of,
    drafts_apart,
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
from sgl_pipeline.records.trace import read_trace
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.calibration import FittedCosts, fit_records
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink
from sgl_pipeline.simulator.virtual_drafts import DraftAcceptance
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy

MEASURED = RESULTS / "2026-11-26_2104_draft_speed.json"
MOST_ERROR = 0.1
POOL_TOKENS = 32_768


class Text(msgspec.Struct, frozen=True):
    """A request, and the acceptance of its drafts."""

    prompt_tokens: int
    output_tokens: int
    acceptance: DraftAcceptance


class TextKind(msgspec.Struct, frozen=True):
    """Requests of one kind, and the acceptance of the drafts of all of them."""

    texts: list[Text]
    acceptance: DraftAcceptance

    def alike(self) -> "TextKind":
        """The same requests with the kind's acceptance."""
        same = [msgspec.structs.replace(one, acceptance=self.acceptance) for one in self.texts]
        return TextKind(same, self.acceptance)


class Measured(msgspec.Struct, frozen=True):
    """All that a prediction needs, and the gains that it is held against.

    `gains` are with drafts over without, of each round, by load: each of the `kinds` by one client,
    then all of them by `clients`. `gap_s` passes between an answer and the client's next request.
    """

    costs: StepCosts
    host: HostCosts
    gap_s: float
    kinds: dict[str, TextKind]
    clients: int
    gains: dict[str, list[float]]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 1 where a gain is missed by more than a tenth."""
    command = Command(__spec__.name, __doc__)
    command.add("--traces", help="OFF,ON: of draft_speed's two servers (default: repeat a result)")
    command.add("--measured", type=Path, default=MEASURED, help="draft_speed's result")
    command.add("--rounds", type=at_least_one, default=4, help="simulated rounds (default: 4)")
    return command.run(_predict, argv)


def _predict(options: Options) -> Report:
    if options.traces is None:
        measured = recorded(newest_result())
    else:
        off, on = options.traces.split(",")
        measured = measured_from(Path(off), Path(on), read_record(options.measured))
    predicted = predicted_gains(measured, options.rounds)
    kinds = {load: kind.alike() for load, kind in measured.kinds.items()}
    by_kind = predicted_gains(msgspec.structs.replace(measured, kinds=kinds), options.rounds)
    return Report(
        name="draft_forecast",
        texts=[_gain_table(measured, predicted, by_kind), _acceptance_table(measured.kinds)],
        facts={"Simulation": {"rounds": str(options.rounds), "measured": options.measured.stem}},
        record={
            "measured": msgspec.to_builtins(measured),
            "predicted": predicted,
            "by_kind": by_kind,
        },
        problems=[
            f"{load}: predicted {error:+.1%} of the measured gain"
            for load, error in _errors(measured, predicted).items()
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
    seconds: dict[str, dict[tuple[str, int], float]] = {}
    for drafts, load, number, run_s, _ in speed["runs"]:
        seconds.setdefault(load, {})[drafts, number] = run_s
    rounds = max(number for _, number in next(iter(seconds.values())))
    *lone, shared = seconds
    sizes = dict.fromkeys(lone, 8) | {shared: 8 * len(lone)}
    plain, drafted = (
        runs_by_load([drafts_apart(one) for one in read_trace(path)], sizes, rounds)
        for path in (off, on)
    )
    first = chain.from_iterable(runs[0] for of in (plain, drafted) for runs in of.values())
    fitted = fit_records([*first], f"{off} and {on}", is_robust=True)
    kinds = {}
    for load in lone:
        requests = [*chain.from_iterable(map(lone_requests, drafted[load]))]
        of_kind = acceptance_of(requests)
        texts = [
            Text(one.prompt_tokens, one.output_tokens, acceptance_of([one], of_kind))
            for one in requests[: sizes[load]]
        ]
        kinds[load] = TextKind(texts, of_kind)
    return Measured(
        costs=fitted.stages[0].costs,
        host=fitted.host,
        gap_s=mean_gap_s(plain[lone[0]][0]),
        kinds=kinds,
        clients=int(shared.split(", ")[1].split()[0]),
        gains={
            load: [of["off", number] / of["on", number] for number in range(1, rounds + 1)]
            for load, of in seconds.items()
        },
    )


def predicted_gains(measured: Measured, rounds: int) -> dict[str, float]:
    """The time of each load without drafts over that with, over so many simulated rounds. Texts are
    drawn anew in each; before the first, a server learns what its steps take."""
    off, on = (simulated_s(measured, rounds, most) for most in (0, draft_tokens_of(None)))
    return {load: off[load] / on[load] for load in off}


def simulated_s(measured: Measured, rounds: int, draft_tokens: int) -> dict[str, float]:
    """The seconds of all rounds of each load on one server."""
    pipeline = _pipeline(measured, draft_tokens)
    ids, seconds = TokenIds(), dict.fromkeys(measured.gains, 0.0)
    for number in range(1 + rounds):
        for load, clients in zip(measured.gains, _loads(measured, ids), strict=True):
            taken_s = _served_s(pipeline, clients)
            seconds[load] += taken_s if number else 0.0
    return seconds


def _pipeline(measured: Measured, draft_tokens: int) -> VirtualPipeline:
    args = SchedulingArgs(radix_cache=False, draft_tokens=draft_tokens)
    scheduler = StepScheduler(
        args,
        make_policy(ThrottleArgs(policy="throttle")),
        num_pages=POOL_TOKENS // args.page_size,
        num_stages=1,
        context_length=POOL_TOKENS,
    )
    costs = FittedCosts(
        stages=(StepPredictor(measured.costs),),
        noise=((1.0,),),
        link=SimulatedLink(),
        host=measured.host,
        errors=(0.0,),
    )
    return VirtualPipeline(scheduler, costs, StepForecast(StagePlan(0, costs.layer_counts)))


def _loads(measured: Measured, ids: TokenIds) -> Iterable[list[SimulatedRequest]]:
    """The clients of each load, each as a chain of its requests."""
    kinds = [
        [
            SimulatedRequest(
                arrival_s=0.0,
                prompt=(ids.fresh(text.prompt_tokens),),
                output=ids.fresh(text.output_tokens),
                think_s=measured.gap_s,
                acceptance=text.acceptance,
            )
            for text in kind.texts
        ]
        for kind in measured.kinds.values()
    ]
    yield from ([SimulatedRequest.chain(of_kind)] for of_kind in kinds)
    in_turn = [*chain.from_iterable(zip(*kinds, strict=True))]
    yield [SimulatedRequest.chain(in_turn[n :: measured.clients]) for n in range(measured.clients)]


def _served_s(pipeline: VirtualPipeline, clients: Sequence[SimulatedRequest]) -> float:
    """Seconds until all requests of `clients`, who come when all else has ended, have ended."""
    served = pipeline.clients.served
    began_s = max((one.finished_s or 0.0 for one in served), default=0.0)
    num_before = len(served)
    pipeline.run([replace(one, arrival_s=began_s) for one in clients])
    return max(one.finished_s or 0.0 for one in served[num_before:]) - began_s


def _errors(measured: Measured, predicted: Mapping[str, float]) -> dict[str, float]:
    return {load: predicted[load] / median(gains) - 1.0 for load, gains in measured.gains.items()}


def _gain_table(
    measured: Measured, predicted: Mapping[str, float], by_kind: Mapping[str, float]
) -> str:
    errors, errors_by_kind = _errors(measured, predicted), _errors(measured, by_kind)
    rows = [
        [
            load,
            f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})",
            *(f"{predicted[load]:.2f}", f"{errors[load]:+.1%}"),
            *(f"{by_kind[load]:.2f}", f"{errors_by_kind[load]:+.1%}"),
        ]
        for load, gains in measured.gains.items()
    ]
    heads = ["load", "gain, measured", "predicted by text", "error", "by kind", "error"]
    return markdown_table(heads, rows)


def _acceptance_table(kinds: Mapping[str, TextKind]) -> str:
    heads = ["load", "draft found", "right after a wrong one", "after 1 right", "2", "3", "10"]
    rows = [
        [
            load,
            f"{kind.acceptance.found:.0%}",
            *(f"{kind.acceptance.chance(run):.0%}" for run in (0, 1, 2, 3, 10)),
        ]
        for load, kind in kinds.items()
    ]
    return markdown_table(heads, rows)


if __name__ == "__main__":
    sys.exit(main())
