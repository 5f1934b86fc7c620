"""Fits the simulator to our server on this machine, and checks what it then predicts.

    python -m benchmark.calibrate --trace-path build/calibration.jsonl

Run by hand. Two kinds of loads take turns on one server, since whatever else runs on the machine
changes with time. The trace of the first kind is what
`python -m sgl_pipeline.simulator run --calibrate FILE --pool-tokens N` reads. The others, of other
lengths and rates, are checks: each is simulated with the arrivals and lengths that its own trace
recorded and with the fit, which has seen nothing of them. The machine must be quiet: the share of
the processors that other processes took is printed.

Two comparisons are made: the scheduler's own figures (trace against simulated trace), and the
clients', whose TTFT holds the front besides (HTTP, tokenizer, detokenizer). The front's share is
the mean difference of the two in the calibration loads, added to every prediction as a constant.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, zip_longest
from pathlib import Path

from benchmark.bench_serving import DEFAULT_PRESET, SCRATCH, MeasuredLoad, make_model, measure
from benchmark.dated_result import markdown_table, save_result
from benchmark.engines import parse_engine, running
from benchmark.loads import Load, WrittenLoad, scaled_trace, write_workload
from benchmark.machine import usable_cores
from benchmark.make_model import PRESETS
from benchmark.other_work import ProcessorTimes
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import SglPipelineError
from sgl_pipeline.simulator.calibration import FittedCosts
from sgl_pipeline.simulator.experiment import MeasuredPipeline, simulate
from sgl_pipeline.simulator.recorded_run import recorded_requests, run_figures
from sgl_pipeline.trace import StepRecord, TraceWriter

POOL_TOKENS = 32_768
WARM_UP = Load(num_requests=24, input_tokens=256, output_tokens=24, seed=7)
# From a queue that is never empty down to requests that are alone; prompts from 8 to 512 tokens.
CALIBRATION_LOADS = (
    Load(num_requests=40, input_tokens=384, output_tokens=48, seed=2),
    Load(num_requests=40, input_tokens=64, output_tokens=64, seed=3),
    Load(num_requests=32, input_tokens=256, output_tokens=48, seed=4, requests_per_s=2.5),
    Load(num_requests=16, input_tokens=512, output_tokens=24, seed=5, requests_per_s=1.2),
)
CHECK_RATES = (2.0, 4.0, float("inf"))
CHECK_REQUESTS = 48


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of one load, measured and predicted."""

    load: str
    figure: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The prediction's excess over the measurement, as a share of it."""
        return self.predicted / self.measured - 1.0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 after an error that was printed."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.calibrate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace-path", type=Path, default=SCRATCH / "calibration.jsonl")
    parser.add_argument("--port", type=int, default=31900, help="loopback port of the server")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(argv)
    try:
        _calibrate(options)
    except SglPipelineError as error:
        print(f"calibrate: error: {error}", file=sys.stderr)
        return 1
    return 0


def _calibrate(options: argparse.Namespace) -> None:
    SCRATCH.mkdir(parents=True, exist_ok=True)
    model = make_model(DEFAULT_PRESET)
    text = f"ours --pp 2 --max-total-tokens {POOL_TOKENS}"
    engine = parse_engine(text, model, options.port, SCRATCH, usable_cores())

    checks = _check_loads()
    taking_turns = chain.from_iterable(zip_longest(CALIBRATION_LOADS, checks))
    with running(engine, SCRATCH / "calibrate.log") as server:
        assert server is not None
        loads, before = [WARM_UP, *filter(None, taking_turns)], ProcessorTimes.now(server)
        measured = measure(engine, model, loads, round_number=1)[1:]
        others = f"{before.others_share(ProcessorTimes.now(server)):.0%}"
    calibration, checked = measured[0::2], measured[1::2]
    _write_trace(options.trace_path, [record for one in calibration for record in one.records])
    front_ms = statistics.fmean(map(front_ttft_ms, calibration))
    pipeline = MeasuredPipeline(trace_path=str(options.trace_path), pool_tokens=POOL_TOKENS)
    print(f"Written: {options.trace_path}", flush=True)

    results: list[Check] = []
    for load, one in zip(checks, checked, strict=True):
        results += compare(f"{load.requests_per_s:g} req/s", one, pipeline, front_ms)
    tables = [check_table(results), _fit_table(pipeline.costs(), calibration, front_ms)]
    print("\n" + "\n\n".join(tables))
    print(f"\nOther processes took {others} of the processors; predictions need a quiet machine.")
    if not options.no_save:
        facts = {"model": {DEFAULT_PRESET: text}, "processors": {"taken by others": others}}
        record = {"checks": [asdict(check) for check in results]}
        stem = save_result("calibrate", "calibration", facts, record, tables)
        print(f"\nWritten: {stem}.md and .json")


def front_ttft_ms(measured: MeasuredLoad) -> float:
    """What a first token takes outside the scheduler, on average."""
    return measured.run.metrics["mean_ttft_ms"] - run_figures(measured.records).mean_ttft_ms


def _check_loads() -> list[WrittenLoad]:
    """Other lengths than those of the fit, at several rates."""
    path = SCRATCH / "calibration_check.jsonl"
    requests = scaled_trace("sharegpt", CHECK_REQUESTS, scale=0.5, max_output_tokens=96)
    write_workload(requests, path, PRESETS[DEFAULT_PRESET].vocab_size)
    return [
        WrittenLoad(path=path, num_requests=CHECK_REQUESTS, requests_per_s=rate, seed=seed)
        for seed, rate in enumerate(CHECK_RATES, 11)
    ]


def _write_trace(path: Path, records: Sequence[StepRecord]) -> None:
    writer = TraceWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def compare(
    load: str, measured: MeasuredLoad, pipeline: MeasuredPipeline, front_ms: float
) -> list[Check]:
    """Simulates the recorded requests of a run and holds the figures against it."""
    simulation = simulate(
        pipeline,
        ThrottleArgs(),
        SchedulingArgs(radix_cache=False),
        recorded_requests(measured.records),
    )
    predicted = run_figures([step.record for step in simulation.steps])
    figures, clients = run_figures(measured.records), measured.run.metrics
    pairs = {
        "total tok/s": (figures.total_tokens_per_s, predicted.total_tokens_per_s),
        "mean TTFT ms": (figures.mean_ttft_ms, predicted.mean_ttft_ms),
        "mean TPOT ms": (figures.mean_tpot_ms, predicted.mean_tpot_ms),
        "client: total tok/s": (clients["total_throughput"], predicted.total_tokens_per_s),
        "client: mean TTFT ms": (
            clients["mean_ttft_ms"],
            predicted.mean_ttft_ms + front_ms,
        ),
        "client: mean TPOT ms": (clients["mean_tpot_ms"], predicted.mean_tpot_ms),
    }
    for stage, idle in enumerate(zip(figures.idle_shares, predicted.idle_shares, strict=True)):
        pairs[f"idle % of stage {stage}"] = (idle[0] * 100, idle[1] * 100)
    return [Check(load, figure, *values) for figure, values in pairs.items()]


def check_table(checks: Sequence[Check]) -> str:
    """Markdown: one row for each figure of each load."""
    rows = [
        [one.load, one.figure, f"{one.measured:.1f}", f"{one.predicted:.1f}", f"{one.error:+.1%}"]
        for one in checks
    ]
    return markdown_table(["load", "figure", "measured", "predicted", "error"], rows)


def _fit_table(costs: FittedCosts, calibration: Sequence[MeasuredLoad], front_ms: float) -> str:
    """Markdown: what the fit says of each stage and of the hosts."""
    num_steps = sum(len(one.records) for one in calibration)
    host = costs.host
    rows = [
        [
            f"stage {stage}",
            f"{fit.base_s * 1e3:.2f} ms",
            " ".join(f"{slope * 1e6:.0f}" for slope in accumulate(fit.slopes_s)),
            f"{fit.attended_s * 1e9:.0f} ns, {fit.sample_s * 1e6:.0f} us",
            f"{error:.1%}",
        ]
        for stage, (fit, error) in enumerate(zip(costs.stages, costs.errors, strict=True))
    ]
    heads = ["fit", "base", "us a row beyond each knot", "attended token, sample", "mean error"]
    text = (
        f"Fitted to {num_steps} steps. Scheduling {host.schedule_step_s * 1e3:.2f} ms, results "
        f"{host.result_step_s * 1e3:.2f} ms, preparing {host.prepare_step_s * 1e3:.2f} ms a step; "
        f"a hop {costs.link.latency_s * 1e3:.2f} ms; the front's share of TTFT "
        f"{front_ms:.1f} ms."
    )
    return markdown_table(heads, rows) + "\n\n" + text


if __name__ == "__main__":
    sys.exit(main())
