"""`python -m sgl_pipeline.simulator`: what a pipeline would do, on the command line.

`run` compares policies over request rates on a trace; `tune` searches for the policy parameters
that carry the highest rate within a latency target. Everything printed is simulated.
"""

import argparse
import math
import sys
from pathlib import Path

import msgspec

from sgl_pipeline.args import ThrottleArgs, require
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.trace import TraceWriter
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.simulator.climb import Trial
from sgl_pipeline.simulator.command_setting import (
    pipeline_of,
    scheduling_of,
    target_of,
    workload_of,
)
from sgl_pipeline.simulator.experiment import Cluster, MeasuredPipeline, simulate
from sgl_pipeline.simulator.fleet_command import FleetCommand, add_fleet_flags, show_progress
from sgl_pipeline.simulator.setting_flags import add_setting_flags
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import Summary, summarize
from sgl_pipeline.simulator.tune import search, server_flags


def main(arguments: list[str] | None = None) -> int:
    """Entry of the command; the exit code is 0, or 2 when it cannot be done as asked."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except ConfigurationError as error:
        print(f"simulator: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    """One row for each policy and rate."""
    pipeline, target = pipeline_of(options), target_of(options)
    if options.pd is not None:
        if not isinstance(pipeline, Cluster):
            raise ConfigurationError("a recorded pipeline is mixed; use --pd without --calibrate")
        require(
            options.draft_acceptance is None,
            "drafts are not simulated with prefill and decode apart; use --draft-acceptance "
            "without --pd",
        )
        require(
            not options.max_mamba_cache_size,
            "only pages go from server to server, and no states; use --max-mamba-cache-size "
            "without --pd",
        )
        run = FleetCommand(options, pipeline, scheduling_of(options), target)
        for policy in options.policy:
            for rate in options.rate:
                run.row(ThrottleArgs(policy=policy), rate, workload_of(options, rate))
        return 0
    print(_describe(options, pipeline))
    print(_HEADER)
    for policy in options.policy:
        for rate in options.rate:
            simulation = _simulate(options, pipeline, ThrottleArgs(policy=policy), rate)
            summary = summarize(simulation, target)
            print(_row(policy, rate, summary), flush=True)
            for move in simulation.moves:
                print(_move_row(move), flush=True)
            if options.draft_acceptance is not None:
                print(_draft_row(simulation), flush=True)
            if simulation.tier is not None:
                print(_store_row(simulation.tier, summary), flush=True)
            _write(options, policy, rate, simulation, summary)
    return 0


def _tune(options: argparse.Namespace) -> int:
    """Each trial, then the best flags."""
    pipeline, target = pipeline_of(options), target_of(options)
    require(target is not None, "tune needs --target-ttft-ms, --target-tpot-ms or both")
    print(_describe(options, pipeline))

    def attainment(throttle: ThrottleArgs, rate_per_s: float) -> float:
        simulation = _simulate(options, pipeline, throttle, rate_per_s)
        return summarize(simulation, target).target_share or 0.0

    for policy in options.policy:
        best: Trial[float] | None = None
        for trial in search(ThrottleArgs(policy=policy), attainment, options.needed_share):
            best = trial if best is None or trial.score > best.score else best
            print(f"{trial.score:8.2f} req/s  {' '.join(server_flags(trial.throttle))}")
            require(best.score < math.inf, "all requests at once meet the target; use more")
        assert best is not None
        print(f"best of {policy}: {best.score:.2f} req/s with")
        print("  " + " ".join(server_flags(best.throttle)), flush=True)
    return 0


def _simulate(
    options: argparse.Namespace,
    pipeline: Cluster | MeasuredPipeline,
    throttle: ThrottleArgs,
    rate_per_s: float,
) -> Simulation:
    workload = workload_of(options, rate_per_s)
    progress = show_progress(f"{throttle.policy} at {rate_per_s:g} req/s", len(workload))
    return simulate(pipeline, throttle, scheduling_of(options), workload, progress)


def _describe(options: argparse.Namespace, pipeline: Cluster | MeasuredPipeline) -> str:
    if isinstance(pipeline, Cluster):
        quantized = "" if pipeline.quantization == "none" else f" in {pipeline.quantization}"
        if pipeline.kv_cache_dtype != "auto":
            quantized += f" with KV in {pipeline.kv_cache_dtype}"
        what = (
            f"{pipeline.model}{quantized} on {pipeline.num_stages} x {pipeline.device} over "
            f"{options.hosts or pipeline.link}, "
            f"layers {pipeline.layers}"
        )
    else:
        errors = ", ".join(f"{error:.1%}" for error in pipeline.costs().errors)
        what = f"the pipeline of {pipeline.trace_path} (mean error of step times: {errors})"
    return (
        f"simulated: {what}, KV pool {pipeline.kv_pool_tokens()} tokens; "
        f"{options.requests or 'all'} requests of {options.trace}, {options.arrivals} arrivals"
    )


_HEADER = (
    "policy             req/s  out tok/s  TTFT mean/p99 ms  TPOT mean/p99 ms  E2E mean ms"
    "  bubbles   hits  goodput"
)


def _row(policy: str, rate: float, summary: Summary) -> str:
    goodput = "-" if summary.target_share is None else f"{summary.target_share:.1%}"
    return (
        f"{policy:17} {rate:6g} {summary.output_tokens_per_s:10.0f} "
        f"{summary.ttft_ms.mean:9.0f} {summary.ttft_ms.p99:7.0f} "
        f"{summary.tpot_ms.mean:9.1f} {summary.tpot_ms.p99:7.1f} {summary.e2e_ms.mean:12.0f} "
        f"{summary.bubble_share:8.1%} {summary.cache_hit_share:6.1%} {goodput:>8}"
    )


def _move_row(move: MoveRecord) -> str:
    before, after = (",".join(map(str, counts)) for counts in (move.before, move.after))
    megabytes = (move.copied_bytes + move.patched_bytes) / 1e6
    return (
        f"    layers {before} to {after} from {move.began_s:.1f} s on: {move.outcome}, "
        f"{megabytes:.0f} MB of KV and states, a step waited {move.wait_ms:.1f} ms"
    )


def _draft_row(simulation: Simulation) -> str:
    records = [step.record for step in simulation.steps]
    drafted = sum(record.draft_tokens for record in records)
    accepted = sum(record.accepted_draft_tokens for record in records)
    decodes = sum(record.decodes for record in records)
    return (
        f"    drafts: {accepted} of {drafted} tokens right; a decode gave "
        f"{1 + accepted / max(1, decodes):.2f} tokens"
    )


def _store_row(tier: TierCounts, summary: Summary) -> str:
    missed = ", ".join(f"{tokens} {reason}" for reason, tokens in tier.unfulfilled.items())
    return (
        f"    store: {summary.loaded_share:.1%} of prompt tokens loaded, "
        f"{tier.loaded_tokens} tokens in all, {tier.saved_tokens} saved, "
        f"{tier.unsaved_tokens} evicted unsaved; found and not loaded: {missed or 'none'}"
    )


def _write(
    options: argparse.Namespace, policy: str, rate: float, simulation: Simulation, summary: Summary
) -> None:
    """The files asked for: a JSON line for each run, the step records of the last one."""
    if options.json is not None:
        line = msgspec.json.encode({"policy": policy, "rate_per_s": rate, "summary": summary})
        with Path(options.json).open("ab") as file:
            file.write(line + b"\n")
    if options.trace_path is not None:
        writer = TraceWriter(options.trace_path)
        for step in simulation.steps:
            writer.write(step.record)
        writer.close()


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="sgl_pipeline.simulator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="compare policies over request rates")
    run.set_defaults(command=_run)
    run.add_argument("--rate", type=_rates, default=(4.0,), help="requests a second: 2,4,8 or inf")
    add_fleet_flags(run.add_argument_group("prefill and decode apart"))
    run.add_argument("--json", help="appends one JSON line for each row to this file")
    run.add_argument("--trace-path", help="writes the step records of the last row to this file")
    tune = commands.add_parser("tune", help="search for the policy's best parameters")
    tune.set_defaults(command=_tune)
    tune.add_argument(
        "--needed-share", type=float, default=0.9, help="of requests that must meet the target"
    )
    for command in (run, tune):
        add_setting_flags(command)
    return parser


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"rates are numbers or inf, got {text}") from None
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"rates must be above 0, got {text}")
    return rates


if __name__ == "__main__":
    sys.exit(main())
