"""Fits the simulator to our server on this machine, and checks what it then predicts.

    python -m benchmark.forecasts.calibrate --trace-path build/calibration.jsonl

Run by hand, some four minutes a round. Two kinds of loads take turns on one server. The trace of
the first kind is what `python -m sgl_pipeline.simulator run --calibrate FILE --pool-tokens N`
reads. The others, of other lengths and rates, are checks: each is simulated with the arrivals and
lengths that its own trace recorded, and with a fit that has seen nothing of it, only the first kind
of the same round: the speed of a shared machine drifts. Medians over the rounds are compared. The
machine must be quiet: the share of the processors that other processes took is printed. What a
neighbor on the same host takes cannot be seen; so each prediction is made a second time with one
number of the predicted run, how much slower its steps were than the fit says, which leaves the
error that is the simulator's own.

Two comparisons are made: the scheduler's own figures (trace against simulated trace), and the
clients', whose TTFT holds the front besides (HTTP, tokenizer, detokenizer). The front's share is
the mean difference of the two in those calibration loads of the round whose requests come all at
once, or one by one, as those of the predicted load do.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise, zip_longest
from pathlib import Path

from benchmark.models.make_model import PRESETS
from benchmark.support.command import Command, Options, Report, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine, running
from benchmark.support.loads import Load, WrittenLoad, filler_texts, scaled_trace, write_workload
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, MeasuredLoad, make_model, measure
from benchmark.support.other_work import ProcessorTimes
from benchmark.support.paths import SCRATCH
from benchmark.support.recorded_run import (
    RunFigures,
    recorded_requests,
    run_figures,
    slowness_of,
    write_steps,
)
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import MeasuredPipeline, simulate
from sgl_pipeline.simulator.workload import SimulatedRequest

POOL_TOKENS = 32_768
WARM_UP = Load(num_requests=24, input_tokens=256, output_tokens=24, seed=7)
# From a queue that is never empty down to requests that are alone; prompts of 8 to 512 tokens, and
# some long ones, which tell what attention to a long context costs.
CALIBRATION_LOADS = (
    Load(num_requests=40, input_tokens=384, output_tokens=48, seed=2),
    Load(num_requests=40, input_tokens=64, output_tokens=64, seed=3),
    Load(num_requests=32, input_tokens=256, output_tokens=48, seed=4, requests_per_s=2.5),
    Load(num_requests=16, input_tokens=512, output_tokens=24, seed=5, requests_per_s=1.2),
    Load(num_requests=10, input_tokens=2048, output_tokens=48, seed=6, range_ratio=0.8),
)
CHECK_RATES = (2.0, 4.0, float("inf"))
CHECK_REQUESTS = 48


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of one load: what it was in round `r`, its prediction, and the prediction for a
    machine as fast as it was in that run."""

    load: str
    figure: str
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    predicted_at_speed: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median prediction's excess over the median measurement, as a share of it."""
        return _excess(self.predicted, self.measured)

    @property
    def error_at_speed(self) -> float:
        return _excess(self.predicted_at_speed, self.measured)


def _excess(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return statistics.median(predicted) / statistics.median(measured) - 1.0


@dataclass(frozen=True, slots=True)
class Round:
    """The runs of a round, and the pipeline as its calibration loads show it."""

    calibration: tuple[MeasuredLoad, ...]
    checked: tuple[MeasuredLoad, ...]
    pipeline: MeasuredPipeline

    def front_ms(self, at_once: bool) -> float:
        """The time of a first token outside the scheduler, on average over the calibration loads
        whose requests come all at once, or one by one."""
        return statistics.fmean(
            one.run.metrics["mean_ttft_ms"] - run_figures(one.records).mean_ttft_ms
            for load, one in zip(CALIBRATION_LOADS, self.calibration, strict=True)
            if _at_once(load) == at_once
        )


def _at_once(load: Load | WrittenLoad) -> bool:
    return load.requests_per_s == float("inf")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31900)
    command.add("--trace-path", type=Path, default=SCRATCH / "calibration.jsonl")
    return command.run(_calibrate, argv)


def _calibrate(options: Options) -> Report:
    model = make_model(DEFAULT_PRESET)
    text = f"ours --pp 2 --policy throttle --max-total-tokens {POOL_TOKENS}"
    engine = parse_engine(text, model, options.port, SCRATCH, usable_cores())
    checks, rounds = _check_loads(), list[Round]()
    with (
        running(engine, SCRATCH / "calibrate.log") as server,
        progress(options.rounds, "rounds") as bar,
    ):
        assert server is not None
        measure(engine, model, [WARM_UP], round_number=0)
        before = ProcessorTimes.now(server)
        for number in range(options.rounds):
            rounds.append(_measure_round(engine, model, checks, number))
            bar.update()
        others = f"{before.others_share(ProcessorTimes.now(server)):.0%}"
    loads = chain.from_iterable(one.calibration for one in rounds)
    write_steps(options.trace_path, chain.from_iterable(load.records for load in loads))
    say(f"Written: {options.trace_path}")
    results = list(chain.from_iterable(_check(load, n, rounds) for n, load in enumerate(checks)))
    return Report(
        name="calibration",
        texts=[
            check_table(results),
            _fit_table(rounds),
            f"Other processes took {others} of the processors; predictions need a quiet machine.",
        ],
        facts={"model": {DEFAULT_PRESET: text}, "processors": {"taken by others": others}},
        record={"checks": [asdict(check) for check in results]},
    )


def _measure_round(
    engine: Engine, model: Path, checks: Sequence[WrittenLoad], number: int
) -> Round:
    turns = zip_longest(CALIBRATION_LOADS, checks)
    loads = [load for turn in turns for load in turn if load is not None]
    measured = dict(zip(loads, measure(engine, model, loads, number), strict=True))
    calibration = tuple(measured[load] for load in CALIBRATION_LOADS)
    path = SCRATCH / f"calibration_round_{number}.jsonl"
    write_steps(path, chain.from_iterable(load.records for load in calibration))
    print(f"round {number + 1} is measured", flush=True)
    pipeline = MeasuredPipeline(trace_path=str(path), pool_tokens=POOL_TOKENS)
    return Round(calibration, tuple(measured[load] for load in checks), pipeline)


def _check_loads() -> list[WrittenLoad]:
    """Other lengths than those of the fit, at several rates."""
    path = SCRATCH / "calibration_check.jsonl"
    requests = scaled_trace("sharegpt", CHECK_REQUESTS, scale=0.5, max_output_tokens=96)
    write_workload(requests, path, filler_texts(PRESETS[DEFAULT_PRESET].vocab_size))
    return [
        WrittenLoad(path=path, num_requests=CHECK_REQUESTS, requests_per_s=rate, seed=seed)
        for seed, rate in enumerate(CHECK_RATES, 11)
    ]


def _check(load: WrittenLoad, number: int, rounds: Sequence[Round]) -> list[Check]:
    """Holds the predictions for a check load against its runs in all rounds."""
    figures = [
        compare(one.checked[number], one.pipeline, one.front_ms(_at_once(load))) for one in rounds
    ]
    return [
        Check(
            f"{load.requests_per_s:g} req/s",
            name,
            *zip(*(one[name] for one in figures), strict=True),
        )
        for name in figures[0]
    ]


def compare(
    measured: MeasuredLoad, pipeline: MeasuredPipeline, front_ms: float
) -> dict[str, tuple[float, float, float]]:
    """The figures of a run: measured, predicted, and predicted for a machine of its speed."""
    slowness = slowness_of(measured.records, pipeline.costs())
    requests = recorded_requests(measured.records)
    of_run = _of_run(measured)
    first, second = (
        _of_prediction(_predict(machine, requests), front_ms)
        for machine in (pipeline, replace(pipeline, slowness=slowness))
    )
    return {figure: (value, first[figure], second[figure]) for figure, value in of_run.items()}


def _of_run(measured: MeasuredLoad) -> dict[str, float]:
    metrics = measured.run.metrics
    clients = (metrics["total_throughput"], metrics["mean_ttft_ms"], metrics["mean_tpot_ms"])
    return _named(run_figures(measured.records), clients)


def _of_prediction(figures: RunFigures, front_ms: float) -> dict[str, float]:
    ttft_ms = figures.mean_ttft_ms + front_ms
    return _named(figures, (figures.total_tokens_per_s, ttft_ms, figures.mean_tpot_ms))


def _named(figures: RunFigures, clients: tuple[float, float, float]) -> dict[str, float]:
    """The figures as the table calls them; `clients` are throughput, TTFT and TPOT at the front."""
    named = {
        "total tok/s": figures.total_tokens_per_s,
        "mean TTFT ms": figures.mean_ttft_ms,
        "mean TPOT ms": figures.mean_tpot_ms,
    }
    named |= {f"client: {name}": value for name, value in zip(named, clients, strict=True)}
    for stage, share in enumerate(figures.idle_shares):
        named[f"idle % of stage {stage}"] = share * 100
    return named


def _predict(pipeline: MeasuredPipeline, requests: Sequence[SimulatedRequest]) -> RunFigures:
    scheduling = SchedulingArgs(radix_cache=False)
    simulation = simulate(pipeline, ThrottleArgs(policy="throttle"), scheduling, requests)
    return run_figures([step.record for step in simulation.steps])


def check_table(checks: Sequence[Check]) -> str:
    """Markdown: one row for each figure of each load, medians with the least and the largest."""
    rows = [
        [
            *(one.load, one.figure, _spread(one.measured), _spread(one.predicted)),
            *(f"{one.error:+.1%}", f"{one.error_at_speed:+.1%}"),
        ]
        for one in checks
    ]
    heads = ["load", "figure", "measured", "predicted", "error", "error at the run's own speed"]
    return markdown_table(heads, rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _fit_table(rounds: Sequence[Round]) -> str:
    """Markdown: what the fits say of each stage and of the hosts."""
    rows = []
    for number, one in enumerate(rounds, 1):
        costs = one.pipeline.costs()
        for stage, (fit, error) in enumerate(zip(costs.stages, costs.errors, strict=True)):
            layer, tail = fit.costs.layer, fit.costs.tail
            points = zip(layer.rows.rows, layer.rows.times_ms, strict=True)
            slopes_ms = [(y - x) / (b - a) for (a, x), (b, y) in pairwise(points)]
            slopes = " ".join(f"{slope * 1e3:.0f}" for slope in (*slopes_ms, layer.rows.row_ms))
            attended = f"{layer.prefill_attended_ms * 1e6:.0f} ns, {tail.row_ms * 1e3:.0f} us"
            base = f"{layer.rows.times_ms[0]:.2f} ms"
            rows.append([f"{number}", f"{stage}", base, slopes, attended, f"{error:.1%}"])
    heads = ["round", "stage", "base", "us a row beyond each knot", "attended token, sample"]
    host, link = costs.host, costs.link
    text = (
        f"In the last round: a decision "
        f"{_by_token(host.schedule_step_s, host.schedule_chunk_s)}, from a step to the next one's "
        f"inputs {_by_token(host.prepare_step_s, host.prepare_chunk_s)}, from a result to the next "
        f"decision {_by_token(host.result_step_s, host.result_token_s)}; a hop "
        f"{link.latency_s * 1e3:.2f} ms, an order's way and a result's way back together "
        f"{host.transit_s * 1e3:.2f} ms; the "
        f"front's share of TTFT {one.front_ms(False):.1f} ms, {one.front_ms(True):.1f} ms where "
        "all requests come at once."
    )
    return markdown_table([*heads, "mean error of a step"], rows) + "\n\n" + text


def _by_token(base_s: float, token_s: float) -> str:
    return f"{base_s * 1e3:.2f} ms and {token_s * 1e6:.1f} us a token"


if __name__ == "__main__":
    sys.exit(main())
