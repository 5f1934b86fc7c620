"""Is the capacity that the simulator predicts the one that a server has?

    python -m benchmark.forecasts.capacity
    python -m benchmark.forecasts.capacity --rounds 2

Run by hand on a quiet machine, some five minutes, with two rounds nine. One server is recorded
under calibration loads, from which its step times are fitted. Then, for each of three loads that
the fit has not seen, the highest rate with 90 % goodput is searched twice: in the simulator, and
with real requests, the same ones at the same moments, from the same guess by the same rule. The
interval of an error is of pairs: a sample draws the same requests on both sides. Targets are
multiples of what a request of the load gets alone, since a machine's pace differs from hour to
hour.

A load must arrive for longer than its requests stay, else its rate is that of a burst, and depends
on their number. `--scale` multiplies the numbers of requests.

Calibration and measurement lie minutes apart, so the prediction is made a second time with one
number of the measured runs: how much slower their steps were than the fit says (`slowness_of`).
That leaves the error that is the simulator's own. How much a capacity depends on the pace is shown
as its loss on a machine that is 5 % slower. A first token takes the front's milliseconds besides,
which are what a request alone takes longer than simulated.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from benchmark.models.make_model import PRESETS
from benchmark.support.command import Command, Options, Report, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model, trace_of
from benchmark.support.other_work import ProcessorTimes
from benchmark.support.paths import SCRATCH
from benchmark.support.recorded_run import slowness_of
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.capacity.curve import Estimate, capacity, capacity_ratio
from sgl_pipeline.capacity.load import CapacityLoad, LengthRange
from sgl_pipeline.capacity.load_client import LoadClient
from sgl_pipeline.capacity.measured import MeasuredServer
from sgl_pipeline.capacity.predicted import Predicted, pace
from sgl_pipeline.capacity.rate_trial import RateTrial, Round, Serve
from sgl_pipeline.capacity.search import search_rates
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.records.trace import StepRecord, TraceWriter
from sgl_pipeline.simulator.experiment import MeasuredPipeline

POOL_TOKENS = 32_768
# A split that was measured anew by each start would make results of two starts hard to compare.
ENGINE = f"ours --pp 2 --policy throttle --pp-layer-partition 9,7 --max-total-tokens {POOL_TOKENS}"
NEEDED_SHARE = 0.9
# Tokens in and out at most, requests, and requests a second (infinity: all at once): steps of all
# sizes, from a queue that is never empty to requests that are alone; decodes as wide as those of
# the longest answers below, for a wide step need not take what narrow ones promise.
CALIBRATION = (
    (384, 48, 32, float("inf")),
    (48, 64, 128, float("inf")),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One load: its target, and its capacity in requests a second: predicted, predicted at the pace
    of the measured runs, and measured.

    `ratio` and `ratio_at_pace` are the predicted ones as multiples of the measured one, by the same
    requests; `slower_share` is what is left of the prediction on a machine that is SLOWER times as
    slow. At the measured capacity a round arrives within `arrives_s`, and a request stays `stays_s`
    on average.
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


class _Bench:
    """The server, and its fit."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine = engine
        self._options = options
        self._client = LoadClient(engine.base_url, PRESETS[DEFAULT_PRESET].vocab_size, None)
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
        num_requests = max(ALONE, round(usual * self._options.scale))
        load = CapacityLoad(source=lengths, num_requests=num_requests, seed=36)
        server = MeasuredServer(self._engine.base_url, self._client, load)
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
        )

    def _search(
        self, serve: Serve, target: LatencyTarget, guess_per_s: float, factor: float = FACTOR
    ) -> list[RateTrial]:
        return search_rates(
            serve,
            target,
            NEEDED_SHARE,
            num_rounds=self._options.rounds,
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


def target_of(alone: Round) -> LatencyTarget:
    """The targets, from what requests get alone; whole milliseconds."""
    served = [one for one in alone.latencies if one is not None]
    ttft_ms = np.percentile([one.ttft_ms for one in served], 90)
    tpot_ms = np.percentile([one.tpot_ms for one in served if one.tpot_ms is not None], 90)
    return LatencyTarget(
        ttft_ms=float(np.ceil(TTFT_FACTOR * ttft_ms)), tpot_ms=float(np.ceil(TPOT_FACTOR * tpot_ms))
    )


def write_steps(path: Path, steps: Sequence[StepRecord]) -> None:
    """As `--trace-path` would have written them."""
    writer = TraceWriter(path)
    for step in steps:
        writer.write(step)
    writer.close()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=1, port=31900)
    command.add("--scale", type=float, default=1.0, help="of the numbers of requests (default: 1)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    model = make_model(DEFAULT_PRESET)
    engine = parse_engine(ENGINE, model, options.port, SCRATCH, usable_cores())
    checked = []
    with running(engine, SCRATCH / "capacity.log") as server, progress(4, "loads") as progress_bar:
        assert server is not None
        before = ProcessorTimes.now(server)
        bench = _Bench(engine, options)
        pipeline = bench.calibrate()
        progress_bar.update()
        for name in LOADS:
            say(f"{name}:")
            checked.append(bench.check(name, pipeline))
            say(f"  {table([checked[-1]]).splitlines()[-1]}")
            progress_bar.update()
        others = f"{before.others_share(ProcessorTimes.now(server)):.0%}"
    errors = ", ".join(f"{one:.1%}" for one in pipeline.costs().errors)
    return Report(
        name="capacity",
        texts=[
            table(checked),
            f"Goodput {NEEDED_SHARE:.0%}; intervals are 95 %, of a bootstrap over the requests"
            f"{' and rounds' if options.rounds > 1 else ''}, those of errors by pairs. "
            f"Mean error of the fit's step times: {errors}. Other processes took {others} of the "
            "processors.",
        ],
        facts={
            "model": {DEFAULT_PRESET: ENGINE},
            "load": {
                "requests a round": f"{options.scale:g} times "
                f"{', '.join(str(number) for _, number in LOADS.values())}; "
                f"{options.rounds} rounds at each rate",
                "targets": f"{TTFT_FACTOR:g} times the TTFT and {TPOT_FACTOR:g} times the TPOT "
                "within which 90 % of requests are alone",
                "prefix caches": "off",
            },
            "processors": {"taken by others": others},
        },
        record={"checked": [msgspec.to_builtins(one) for one in checked]},
    )


def table(checked: Sequence[Checked]) -> str:
    """Markdown: a row for each load."""
    heads = ["load, at most", "TTFT, TPOT within ms", "measured req/s", "predicted", "error"]
    heads += ["predicted at the runs' pace", "error", "slowness", "with 5 % slower steps"]
    heads += ["arrives, stays s"]
    rows = [
        [
            one.load,
            f"{one.target.ttft_ms:.0f}, {one.target.tpot_ms:.0f}",
            *(str(one.measured), str(one.predicted), _excess(one.ratio)),
            *(str(one.at_pace), _excess(one.ratio_at_pace), f"{one.slowness:.2f}"),
            f"{one.slower_share - 1.0:+.0%}",
            f"{one.arrives_s:.0f}, {one.stays_s:.1f}",
        ]
        for one in checked
    ]
    return markdown_table(heads, rows)


def _excess(ratio: Estimate) -> str:
    value, low, high = (one - 1.0 for one in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.1%} ({low:+.0%} to {high:+.0%})"


if __name__ == "__main__":
    sys.exit(main())
