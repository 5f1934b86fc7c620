"""One server beside its simulation: `capacity.py` calibrates and checks the loads with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmark.support.command import say
from benchmark.support.engine import Engine
from benchmark.support.measured_runs import trace_of
from benchmark.support.paths import SCRATCH
from benchmark.support.recorded_run import slowness_of, write_steps
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.capacity.curve import Estimate, capacity, capacity_ratio
from sgl_pipeline.capacity.load import CapacityLoad, LengthRange
from sgl_pipeline.capacity.load_client import LoadClient
from sgl_pipeline.capacity.measured import MeasuredServer
from sgl_pipeline.capacity.predicted import Predicted, pace
from sgl_pipeline.capacity.rate_trial import RateTrial, Round, Serve
from sgl_pipeline.capacity.result import RateRow, rate_rows
from sgl_pipeline.capacity.search import search_rates
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.experiment import MeasuredPipeline

POOL_TOKENS = 32_768
# A split that was measured anew by each start would make results of two starts hard to compare.
ENGINE = f"ours --pp 2 --policy throttle --pp-layer-partition 9,7 --max-total-tokens {POOL_TOKENS}"
NEEDED_SHARE = 0.9
# Tokens in and out at most, requests, and requests a second (infinity: all at once): steps of all
# sizes, from a queue that is never empty to requests that are alone; decodes as wide as those of
# the longest answers below, for a wide step need not take what narrow ones promise. In the stream
# of the third line requests come and end all the time, as they do near a capacity: what the front
# and the clients do for them takes the stages' cores, in a burst only at its start. It is much like
# the second of LOADS, which so is no load that the fit knows nothing of.
CALIBRATION = (
    (384, 48, 32, float("inf")),
    (48, 64, 128, float("inf")),
    (64, 96, 160, 16.0),
    (256, 48, 24, 2.5),
    (1024, 24, 8, 0.8),
)
WARM_UP = (256, 24, 16, float("inf"))
# With requests enough to arrive for longer than one of them stays.
LOADS = {
    "256 in, 64 out": (LengthRange(input_tokens=256, output_tokens=64, ratio=0.25), 100),
    "48 in, 128 out": (LengthRange(input_tokens=48, output_tokens=128, ratio=0.25), 200),
    "768 in, 24 out": (LengthRange(input_tokens=768, output_tokens=24, ratio=0.25), 40),
}
# Of what 90 % of requests get alone.
TTFT_FACTOR, TPOT_FACTOR = 4.0, 2.5
ALONE = 8
# Of both sides' search: by steps of a fifth, between whose goodputs a line is drawn. A finer one
# would take minutes more, and the line is good to a few percent.
FACTOR, TOLERANCE = 1.2, 0.21
SLOWER = 1.05
PREDICTED, AT_PACE, MEASURED = "predicted", "predicted at the runs' pace", "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One load: its target, and its capacity in requests a second: predicted, predicted at the pace
    of the measured runs, and measured.

    `ratio` and `ratio_at_pace` are the predicted ones as multiples of the measured one, by the same
    requests; `slower_share` is what is left of the prediction on a machine that is SLOWER times as
    slow. At the measured capacity a round arrives within `arrives_s`, and a request stays `stays_s`
    on average. `front_ms` is what a first token takes beside the scheduler, in a request alone.
    `trials` are those of each side.
    """

    load: str
    target: LatencyTarget
    predicted: Estimate
    at_pace: Estimate
    measured: Estimate
    ratio: Estimate
    ratio_at_pace: Estimate
    slowness: float
    slower_share: float
    arrives_s: float
    stays_s: float
    front_ms: float
    trials: dict[str, list[RateRow]]


class CapacityBench:
    """The server, and its fit.

    Args:
        server_pid: of its main process.
        scale: multiplies the numbers of requests.
        num_rounds: at each rate.
        vocab_size: of its model.
    """

    def __init__(
        self, engine: Engine, server_pid: int, scale: float, num_rounds: int, vocab_size: int
    ) -> None:
        self._engine = engine
        self._server_pid = server_pid
        self._scale = scale
        self._num_rounds = num_rounds
        self._client = LoadClient(engine.base_url, vocab_size, None)
        self._num_steps = 0

    def calibrate(self) -> MeasuredPipeline:
        """The pipeline as the calibration loads show it."""
        self._run(*WARM_UP)
        self._new_steps()
        for shape in CALIBRATION:
            self._run(*shape)
        path = SCRATCH / "capacity_fit.jsonl"
        write_steps(path, self._new_steps())
        return MeasuredPipeline(trace_path=str(path), pool_tokens=POOL_TOKENS)

    def check(self, name: str, pipeline: MeasuredPipeline) -> Checked:
        """Predicts and measures one load."""
        lengths, usual = LOADS[name]
        num_requests = max(ALONE, round(usual * self._scale))
        load = CapacityLoad(source=lengths, num_requests=num_requests, seed=36)
        server = MeasuredServer(self._engine.base_url, self._client, load, pid=self._server_pid)
        alone = server.alone(ALONE)
        target = target_of(alone)
        predicted = Predicted(
            pipeline=pipeline,
            throttle=ThrottleArgs(policy="throttle"),
            scheduling=SchedulingArgs(radix_cache=False),
            load=load,
        )
        _, front_ms = pace(predicted.alone(ALONE), alone)
        predicted = predicted.at_pace(1.0, front_ms)
        guess_per_s = _capacity(self._search(predicted.serve, target, 1.0, 2.0), target).value
        self._new_steps()
        measured = self._search(server.serve, target, guess_per_s)
        slowness = slowness_of(self._new_steps(), pipeline.costs())
        first, second, slower = (
            self._search(predicted.at_pace(slow, front_ms).serve, target, guess_per_s)
            for slow in (1.0, slowness, SLOWER)
        )
        found = [_capacity(one, target) for one in (first, second, measured, slower)]
        ratios = [capacity_ratio(one, measured, target, NEEDED_SHARE) for one in (first, second)]
        sides = {PREDICTED: first, AT_PACE: second, MEASURED: measured}
        return Checked(
            load=name,
            target=target,
            predicted=found[0],
            at_pace=found[1],
            measured=found[2],
            ratio=ratios[0],
            ratio_at_pace=ratios[1],
            slowness=slowness,
            slower_share=found[3].value / found[0].value,
            arrives_s=load.requests(found[2].value, 0)[-1].arrival_s,
            stays_s=mean_stay_s(load, measured, found[2].value),
            front_ms=front_ms,
            trials={side: rate_rows(trials, target) for side, trials in sides.items()},
        )

    def _search(
        self, serve: Serve, target: LatencyTarget, guess_per_s: float, factor: float = FACTOR
    ) -> list[RateTrial]:
        return search_rates(
            serve,
            target,
            NEEDED_SHARE,
            num_rounds=self._num_rounds,
            guess_per_s=guess_per_s,
            factor=factor,
            tolerance=TOLERANCE,
            on_trial=partial(_say_trial, target),
        )

    def _run(
        self, input_tokens: int, output_tokens: int, num_requests: int, rate_per_s: float
    ) -> None:
        lengths = LengthRange(input_tokens=input_tokens, output_tokens=output_tokens, ratio=0.25)
        load = CapacityLoad(source=lengths, num_requests=num_requests, seed=input_tokens)
        self._client.serve(load.requests(rate_per_s, 0))

    def _new_steps(self) -> list[StepRecord]:
        """The steps since the last call."""
        steps = trace_of(self._engine)
        before, self._num_steps = self._num_steps, len(steps)
        return steps[before:]


def target_of(alone: Round) -> LatencyTarget:
    """The targets, from what requests get alone; whole milliseconds."""
    served = [one for one in alone.latencies if one is not None]
    ttft_ms = np.percentile([one.ttft_ms for one in served], 90)
    tpot_ms = np.percentile([one.tpot_ms for one in served if one.tpot_ms is not None], 90)
    return LatencyTarget(
        ttft_ms=float(np.ceil(TTFT_FACTOR * ttft_ms)), tpot_ms=float(np.ceil(TPOT_FACTOR * tpot_ms))
    )


def mean_stay_s(load: CapacityLoad, trials: Sequence[RateTrial], rate_per_s: float) -> float:
    """The seconds from a request's arrival to its last token, in the trial next to that rate."""
    trial = min(trials, key=lambda one: abs(one.rate_per_s - rate_per_s))
    stays_ms = [
        one.ttft_ms + (one.tpot_ms or 0.0) * (asked.output_tokens - 1)
        for number, each in enumerate(trial.rounds)
        for asked, one in zip(load.requests(trial.rate_per_s, number), each.latencies, strict=True)
        if one is not None
    ]
    return float(np.mean(stays_ms)) * 1e-3


def _capacity(trials: Sequence[RateTrial], target: LatencyTarget) -> Estimate:
    return capacity(trials, target, NEEDED_SHARE)


def _say_trial(target: LatencyTarget, trial: RateTrial) -> None:
    say(f"  {trial.rate_per_s:.2f} req/s: {trial.goodput(target):.0%}")
