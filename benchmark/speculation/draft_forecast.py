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
follows from how much they differ. Requests have no grammar here: what a schema forces
counts as guesses, right as often as it was.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from benchmark.speculation.draft_gains import (
    Half,
    Measured,
    Predicted,
    Text,
    measured_from,
    recorded,
)
from benchmark.speculation.draft_report import acceptance_table, errors, gain_table
from benchmark.support.command import Command, Options, Report, at_least_one
from benchmark.support.dated_result import read_record
from benchmark.support.paths import RESULTS
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.args.scheduling_args import draft_tokens_of
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.calibration import FittedCosts
from sgl_pipeline.simulator.pipeline_costs import SimulatedLink
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy

MEASURED = RESULTS / "2026-11-26_2104_draft_speed.json"
MOST_ERROR = 0.1
POOL_TOKENS = 32_768
BY_TEXT, BY_OTHERS = "by text", "by other texts"
# The texts of each client, in their order, by load.
Loads = dict[str, list[list[Text]]]


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
        texts=[gain_table(measured, predicted), acceptance_table(measured)],
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


if __name__ == "__main__":
    sys.exit(main())
