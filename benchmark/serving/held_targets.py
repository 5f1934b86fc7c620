"""Are `--target-tpot-ms` and `--target-ttft-ms` held as load rises, on a server and simulated?

    python -m benchmark.serving.held_targets
    python -m benchmark.serving.held_targets --tpot-ms 50 --ttft-ms 1000 --rates 1,2,3 --seconds 30

Run by hand, some seven minutes on two cores. A server with `--policy throttle-time` is started for
each target, and one without any. Each gets two loads that are not counted, by which its policy
learns what steps take, and then Poisson arrivals at rising rates. The simulator serves what each
server served, at the moments at which it came: its steps take what those of the server without a
target took, times how much slower this server's were, which leaves the policy and the queues to it.

Latencies are the scheduler's own: a first token counts from the request's arrival there, TPOT is a
request's mean. A target is missed by a step where `TokenBudget.missed` names it, because not even
the least prefill (TPOT) or the most (TTFT) would meet it as the policy predicts.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from benchmark.serving.held_targets_plot import draw
from benchmark.serving.reached_targets import POLICY, Reached, Setting
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.loads import Load
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import (
    DEFAULT_PRESET,
    make_model,
    measure,
    take_requests,
    trace_of,
)
from benchmark.support.other_work import ProcessorTimes
from benchmark.support.paths import SCRATCH
from benchmark.support.recorded_run import recorded_requests, run_figures, slowness_of
from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.goodput import RequestLatency, goodput
from sgl_pipeline.records.trace import StepRecord, TraceWriter
from sgl_pipeline.simulator.experiment import MeasuredPipeline, simulate

POOL_TOKENS = 32_768
# A split that was measured anew by each start could differ between the servers.
ENGINE = f"ours --pp 2 --pp-layer-partition 9,7 --max-total-tokens {POOL_TOKENS}"
# Steps of all sizes, and enough of them: the policy is in force after the first fit.
WARM_UPS = (
    Load(num_requests=16, input_tokens=384, output_tokens=32, seed=7),
    Load(num_requests=16, input_tokens=128, output_tokens=128, requests_per_s=1.5, seed=8),
)
FEWEST_REQUESTS = 8


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31900)
    add = command.add
    add("--model", default=DEFAULT_PRESET, help="a preset of benchmark.models.make_model")
    add("--tpot-ms", type=_numbers, default="40,80", help="targets, a server each")
    add("--ttft-ms", type=_numbers, default="500,1000", help="targets, a server each")
    add("--rates", type=_numbers, default="1,2,3", help="requests a second, rising")
    add("--seconds", type=at_least_one, default=12, help="of arrivals at each rate")
    add("--input-tokens", type=at_least_one, default=256, help="most of a prompt; a quarter least")
    add("--output-tokens", type=at_least_one, default=64, help="most of an answer, likewise")
    return command.run(_measure, argv)


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _measure(options: Options) -> Report:
    settings = [Setting()]
    settings += [Setting(tpot_ms=ms) for ms in options.tpot_ms]
    settings += [Setting(ttft_ms=ms) for ms in options.ttft_ms]
    loads = _loads(options)
    served: dict[Setting, list[StepRecord]] = {}
    taken_by_others: dict[str, str] = {}
    with progress(len(settings), "servers") as bar:
        for setting in settings:
            served[setting], share = _serve(setting, loads, options)
            taken_by_others[setting.name] = f"{share:.0%}"
            say(f"{setting.name}: served, others took {share:.0%} of the processors")
            bar.update()
    pipeline = _fitted(served[Setting()])
    reached = []
    for setting, records in served.items():
        simulated = _simulate(pipeline, setting, records)
        for source, steps in (("server", records), ("simulator", simulated)):
            reached += reached_by_load(setting, source, steps, loads)
    return Report(
        name="held_targets",
        texts=[targets_table(reached)],
        facts={
            "model": {options.model: f"{ENGINE} --policy {POLICY}"},
            "load": {
                "tokens in": f"up to {options.input_tokens}, a quarter at least",
                "tokens out": f"up to {options.output_tokens}, a quarter at least",
                "Poisson req/s": ", ".join(f"{rate:g}" for rate in options.rates),
                "prefix caches": "off",
            },
            "processors taken by others": taken_by_others,
        },
        record={"reached": [asdict(one) for one in reached]},
        problems=[
            f"{one.setting.name}, {one.source}, {one.rate_per_s:g} req/s: only "
            f"{one.by_time_share:.0%} of the steps were limited by time"
            for one in reached
            if one.by_time_share < 1.0
        ],
        draw=partial(draw, reached),
    )


def _loads(options: Options) -> list[Load]:
    return [
        Load(
            num_requests=max(FEWEST_REQUESTS, round(rate * options.seconds)),
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            requests_per_s=rate,
            seed=seed,
        )
        for seed, rate in enumerate(options.rates, 11)
    ]


def _serve(
    setting: Setting, loads: Sequence[Load], options: Options
) -> tuple[list[StepRecord], float]:
    """All steps of a server with these targets, those of the warm-ups first, and the share of the
    processors that other processes took meanwhile."""
    model = make_model(options.model)
    text = f"{ENGINE} --policy {POLICY} {setting.flags}"
    engine = parse_engine(text, model, options.port, SCRATCH, usable_cores())
    with running(engine, SCRATCH / "held_targets.log") as server:
        assert server is not None
        before = ProcessorTimes.now(server)
        measure(engine, model, [*WARM_UPS, *loads], round_number=1)
        return trace_of(engine), before.others_share(ProcessorTimes.now(server))


def _fitted(records: Sequence[StepRecord]) -> MeasuredPipeline:
    """The pipeline as the server without a target shows it."""
    path = SCRATCH / "held_targets_fit.jsonl"
    writer = TraceWriter(path)
    for record in records:
        writer.write(record)
    writer.close()
    return MeasuredPipeline(trace_path=str(path), pool_tokens=POOL_TOKENS)


def _simulate(
    pipeline: MeasuredPipeline, setting: Setting, records: Sequence[StepRecord]
) -> list[StepRecord]:
    """The steps in which a pipeline as slow as that server serves what that server did."""
    machine = replace(pipeline, slowness=slowness_of(records, pipeline.costs()))
    scheduling = SchedulingArgs(radix_cache=False)
    simulation = simulate(machine, setting.throttle, scheduling, recorded_requests(records))
    return [step.record for step in simulation.steps]


def reached_by_load(
    setting: Setting, source: str, records: Sequence[StepRecord], loads: Sequence[Load]
) -> list[Reached]:
    """The result of each load, which came one after the other, after the warm-ups."""
    rest = iter(records)
    take_requests(rest, sum(load.num_requests for load in WARM_UPS))
    return [
        _reached(setting, source, load.requests_per_s, take_requests(rest, load.num_requests))
        for load in loads
    ]


def _reached(
    setting: Setting, source: str, rate_per_s: float, records: Sequence[StepRecord]
) -> Reached:
    ended = [request for record in records for request in record.ended]
    latencies = [
        RequestLatency.of(one.first_token_ms, one.total_ms, one.output_tokens) for one in ended
    ]
    (tpot_p50_ms, tpot_p95_ms), (ttft_p50_ms, ttft_p95_ms) = (
        np.percentile(values, (50, 95)).tolist()
        for values in (
            [one.tpot_ms for one in latencies if one.tpot_ms is not None],
            [one.ttft_ms for one in latencies],
        )
    )
    return Reached(
        setting=setting,
        source=source,
        rate_per_s=rate_per_s,
        tpot_p50_ms=tpot_p50_ms,
        tpot_p95_ms=tpot_p95_ms,
        ttft_p50_ms=ttft_p50_ms,
        ttft_p95_ms=ttft_p95_ms,
        tokens_per_s=run_figures(records).total_tokens_per_s,
        missed_steps={
            target: float(np.mean([record.missed_target == target for record in records]))
            for target in ("TPOT", "TTFT")
        },
        late_requests=1.0 - goodput(latencies, setting.target),
        by_time_share=float(np.mean([record.budget_ms is not None for record in records])),
    )


def targets_table(reached: Sequence[Reached]) -> str:
    """Markdown: a row for each target, rate and source."""
    heads = ["target", "req/s", "", "TPOT ms p50, p95", "TTFT ms p50, p95"]
    heads += ["steps that miss it", "requests beyond it", "total tok/s"]
    rows = []
    for one in reached:
        target = "TPOT" if one.setting.tpot_ms is not None else "TTFT"
        has_target = bool(one.setting.flags)
        rows.append(
            [
                one.setting.name,
                f"{one.rate_per_s:g}",
                one.source,
                f"{one.tpot_p50_ms:.0f}, {one.tpot_p95_ms:.0f}",
                f"{one.ttft_p50_ms:.0f}, {one.ttft_p95_ms:.0f}",
                f"{one.missed_steps[target]:.0%}" if has_target else "",
                f"{one.late_requests:.0%}" if has_target else "",
                f"{one.tokens_per_s:.0f}",
            ]
        )
    return markdown_table(heads, rows)


if __name__ == "__main__":
    sys.exit(main())
