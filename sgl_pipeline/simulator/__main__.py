"""`python -m sgl_pipeline.simulator`: what a pipeline would do, on the command line.

`run` compares policies over request rates on a trace; `tune` searches for the policy parameters
that carry the highest rate within a latency target. Everything printed is simulated.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec

from sgl_pipeline.args import (
    MIGRATION_WEIGHTS,
    POLICIES,
    SCHEDULE_POLICIES,
    MigrationArgs,
    SchedulingArgs,
    ThrottleArgs,
    require,
)
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.args.tier_args import PREFETCH_POLICIES, WRITE_POLICIES
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_network import read_host_network
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.trace import TraceWriter
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.climb import Trial
from sgl_pipeline.simulator.experiment import (
    LINKS,
    SERVER_RULES,
    Cluster,
    MeasuredPipeline,
    simulate,
)
from sgl_pipeline.simulator.kernel_costs import DEVICES
from sgl_pipeline.simulator.migration_setup import Migration
from sgl_pipeline.simulator.models import KV_CACHE_DTYPES, MODELS, QUANTIZATIONS
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import LatencyTarget, Summary, summarize
from sgl_pipeline.simulator.traces import SHIPPED, load_trace, shared_prefixes
from sgl_pipeline.simulator.tune import search, server_flags
from sgl_pipeline.simulator.virtual_store import StoreCosts
from sgl_pipeline.simulator.workload import (
    SimulatedRequest,
    poisson_arrivals,
    scaled_arrivals,
)
from sgl_pipeline.status_line import StatusLine, bar

PROGRESS_INTERVAL_S = 0.5


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
    pipeline, target = _pipeline(options), _target(options)
    print(_describe(options, pipeline))
    print(_HEADER)
    for policy in options.policy:
        for rate in options.rate:
            simulation = _simulate(options, pipeline, ThrottleArgs(policy=policy), rate)
            summary = summarize(simulation, target)
            print(_row(policy, rate, summary), flush=True)
            for move in simulation.moves:
                print(_move_row(move), flush=True)
            if simulation.tier is not None:
                print(_store_row(simulation.tier, summary), flush=True)
            _write(options, policy, rate, simulation, summary)
    return 0


def _tune(options: argparse.Namespace) -> int:
    """Each trial, then the best flags."""
    pipeline, target = _pipeline(options), _target(options)
    require(target is not None, "tune needs --target-ttft-ms and --target-tpot-ms")
    print(_describe(options, pipeline))

    def attainment(throttle: ThrottleArgs, rate_per_s: float) -> float:
        simulation = _simulate(options, pipeline, throttle, rate_per_s)
        return summarize(simulation, target).target_share or 0.0

    for policy in options.policy:
        best: Trial[float] | None = None
        for trial in search(ThrottleArgs(policy=policy), attainment, options.needed_share):
            best = trial if best is None or trial.score > best.score else best
            print(f"{trial.score:8.2f} req/s  {' '.join(server_flags(trial.throttle))}")
        assert best is not None
        require(best.score < math.inf, "all requests at once meet the target; use more")
        print(f"best of {policy}: {best.score:.2f} req/s with")
        print("  " + " ".join(server_flags(best.throttle)), flush=True)
    return 0


def _simulate(
    options: argparse.Namespace,
    pipeline: Cluster | MeasuredPipeline,
    throttle: ThrottleArgs,
    rate_per_s: float,
) -> Simulation:
    workload = _workload(options, rate_per_s)
    scheduling = SchedulingArgs(
        page_size=options.page_size,
        schedule_policy=options.schedule_policy,
        max_running_requests=options.max_running_requests,
        radix_cache=not options.disable_radix_cache,
        extra_steps_in_flight=options.extra_steps_in_flight,
    )
    label = f"{throttle.policy} at {rate_per_s:g} req/s"
    return simulate(pipeline, throttle, scheduling, workload, _progress(label, len(workload)))


def _workload(options: argparse.Namespace, rate_per_s: float) -> list[SimulatedRequest]:
    requests = load_trace(options.trace, options.requests)
    if options.hit_rate:
        requests = shared_prefixes(requests, options.hit_rate, options.sharing_requests)
    if options.arrivals == "recorded":
        return scaled_arrivals(requests, rate_per_s)
    return poisson_arrivals(requests, rate_per_s, Random(options.seed))


def _pipeline(options: argparse.Namespace) -> Cluster | MeasuredPipeline:
    if options.calibrate is not None:
        require(options.pool_tokens is not None, "--calibrate needs --pool-tokens")
        require(options.hosts is None, "--calibrate brings its own links; leave out --hosts")
        require(
            options.migration == "off",
            "layers cannot move in a recorded pipeline, whose trace tells no layer from another; "
            "use --migration without --calibrate",
        )
        require(
            options.store_capacity_gb is None,
            "a recorded pipeline's trace does not tell the size of its pages; use "
            "--store-capacity-gb without --calibrate",
        )
        return MeasuredPipeline(trace_path=options.calibrate, pool_tokens=options.pool_tokens)
    hosts = None if options.hosts is None else read_host_network(Path(options.hosts))
    require(
        hosts is None or options.pp is None,
        "--hosts says how many stages there are; leave out --pp",
    )
    num_stages = 4 if options.pp is None else options.pp
    return Cluster(
        pool_tokens=options.pool_tokens,
        hosts=hosts,
        split="even" if hosts is None else "auto",
        model=options.model,
        device=options.device,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        link=options.link,
        num_stages=num_stages if hosts is None else hosts.num_stages,
        memory_share=options.mem_fraction_static,
        migration=_migration(options),
        forecast=options.forecast,
        store=_store(options),
        tier_rules=TierRules(
            write_policy=options.hicache_write_policy,
            wait_policy=options.hicache_storage_prefetch_policy,
        ),
    )


def _migration(options: argparse.Namespace) -> Migration:
    args = MigrationArgs(
        mode=options.migration,
        spare_layers=options.migration_spare_layers,
        weights=options.migration_weights,
        window_steps=options.migration_window,
    )
    return Migration(args=args)


def _store(options: argparse.Namespace) -> StoreCosts | None:
    if options.store_capacity_gb is None:
        return None
    require(options.store_latency_ms >= 0, "--store-latency-ms must not be below 0")
    return StoreCosts(
        capacity_bytes=options.store_capacity_gb * 1e9,
        read_bytes_per_s=options.store_read_gb_per_s * 1e9,
        write_bytes_per_s=options.store_write_gb_per_s * 1e9,
        save_bytes_per_s=options.store_save_gb_per_s * 1e9,
        latency_s=options.store_latency_ms * 1e-3,
    )


def _target(options: argparse.Namespace) -> LatencyTarget | None:
    if options.target_ttft_ms is None or options.target_tpot_ms is None:
        return None
    return LatencyTarget(ttft_ms=options.target_ttft_ms, tpot_ms=options.target_tpot_ms)


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
    "  bubbles   hits  target"
)


def _row(policy: str, rate: float, summary: Summary) -> str:
    target = "-" if summary.target_share is None else f"{summary.target_share:.1%}"
    return (
        f"{policy:17} {rate:6g} {summary.output_tokens_per_s:10.0f} "
        f"{summary.ttft_ms.mean:9.0f} {summary.ttft_ms.p99:7.0f} "
        f"{summary.tpot_ms.mean:9.1f} {summary.tpot_ms.p99:7.1f} {summary.e2e_ms.mean:12.0f} "
        f"{summary.bubble_share:8.1%} {summary.cache_hit_share:6.1%} {target:>7}"
    )


def _move_row(move: MoveRecord) -> str:
    before, after = (",".join(map(str, counts)) for counts in (move.before, move.after))
    megabytes = (move.copied_bytes + move.patched_bytes) / 1e6
    return (
        f"    layers {before} to {after} from {move.began_s:.1f} s on: {move.outcome}, "
        f"{megabytes:.0f} MB of KV, a step waited {move.wait_ms:.1f} ms"
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


def _progress(label: str, num_requests: int) -> Callable[[int, float], None]:
    """Keeps one line of the terminal up to date."""
    line = StatusLine(interval_s=PROGRESS_INTERVAL_S)

    def show(num_finished: int, now_s: float) -> None:
        whole = bar(num_finished, num_requests)
        line.show(f"{label}: {whole} requests, {now_s:.0f} s simulated")
        if num_finished == num_requests:
            line.clear()

    return show


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="sgl_pipeline.simulator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="compare policies over request rates")
    run.set_defaults(command=_run)
    run.add_argument("--rate", type=_rates, default=(4.0,), help="requests a second: 2,4,8 or inf")
    run.add_argument("--json", help="appends one JSON line for each row to this file")
    run.add_argument("--trace-path", help="writes the step records of the last row to this file")
    tune = commands.add_parser("tune", help="search for the policy's best parameters")
    tune.set_defaults(command=_tune)
    tune.add_argument(
        "--needed-share", type=float, default=0.9, help="of requests that must meet the target"
    )
    for command in (run, tune):
        _add_setting(command)
    return parser


def _add_setting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="Qwen2.5-32B", choices=MODELS)
    parser.add_argument("--device", default="a100-40g-pcie", choices=DEVICES)
    parser.add_argument(
        "--quantization",
        default="none",
        choices=QUANTIZATIONS,
        help="of the layers' weights, as the server's flag; fp8 on cards with a table of it",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="of keys and values, as the server's flag; fp8_e4m3 on cards with a table of it",
    )
    parser.add_argument("--link", default="net73", choices=LINKS)
    parser.add_argument("--pp", type=int, help="pipeline stages, a card each; by default 4")
    parser.add_argument(
        "--hosts",
        metavar="FILE",
        help="JSON of hosts in order and the links between them (sgl_pipeline/host_network.py); "
        "--link joins the cards of one host",
    )
    parser.add_argument("--extra-steps-in-flight", type=int, default=0)
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="take the step times from a trace of our server (--trace-path), not from model, "
        "device and link",
    )
    parser.add_argument("--pool-tokens", type=int, help="tokens that the KV pool holds")
    parser.add_argument("--mem-fraction-static", type=float, default=0.9)
    parser.add_argument("--policy", type=_policies, default=("throttle", "sarathi"))
    parser.add_argument(
        "--trace",
        default="azure_conv",
        help=f"a shipped trace ({', '.join(SHIPPED)}) or a CSV with the columns input_tokens, "
        "output_tokens and perhaps arrival_s",
    )
    parser.add_argument("--requests", type=int, help="take the first so many of the trace")
    parser.add_argument("--arrivals", choices=("poisson", "recorded"), default="poisson")
    parser.add_argument("--seed", type=int, default=0, help="of the Poisson arrivals")
    parser.add_argument(
        "--hit-rate", type=float, default=0.0, help="share of each prompt that others have too"
    )
    parser.add_argument(
        "--sharing-requests", type=int, default=16, help="requests that share one prefix"
    )
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--schedule-policy", choices=SCHEDULE_POLICIES, default="fcfs")
    parser.add_argument("--max-running-requests", type=int, default=1024)
    parser.add_argument("--disable-radix-cache", action="store_true")
    defaults = MigrationArgs()
    parser.add_argument(
        "--migration",
        choices=("off", "auto"),
        default=defaults.mode,
        help="whether the planner moves layers between stages while requests run",
    )
    parser.add_argument("--migration-window", type=int, default=defaults.window_steps)
    parser.add_argument("--migration-spare-layers", type=int, default=defaults.spare_layers)
    parser.add_argument("--migration-weights", choices=MIGRATION_WEIGHTS, default=defaults.weights)
    parser.add_argument(
        "--forecast",
        choices=("tables", "online"),
        default="tables",
        help="planner and policy predict by costs fitted beforehand to the tables, or to the "
        "steps that they see",
    )
    _add_store(parser)
    parser.add_argument("--target-ttft-ms", type=float)
    parser.add_argument("--target-tpot-ms", type=float)


def _add_store(parser: argparse.ArgumentParser) -> None:
    """A store beyond the KV pool, and the server's rules of its use."""
    parser.add_argument(
        "--store-capacity-gb",
        type=_positive,
        metavar="GB",
        help="keep pages in a store of so many GB, empty at first; without it there is none",
    )
    parser.add_argument(
        "--store-read-gb-per-s",
        type=_positive,
        default=2.0,
        metavar="GB",
        help="read by each stage, beside what it writes",
    )
    parser.add_argument(
        "--store-write-gb-per-s", type=_positive, default=1.0, metavar="GB", help="by each stage"
    )
    parser.add_argument(
        "--store-save-gb-per-s",
        type=_positive,
        default=StoreConfig().save_bytes_per_s / 1e9,
        metavar="GB",
        help="most that a stage saves, as the server's save_bytes_per_s",
    )
    parser.add_argument(
        "--store-latency-ms",
        type=float,
        default=1.0,
        metavar="MS",
        help="before an answer of the store and before the first byte of a transfer",
    )
    parser.add_argument(
        "--hicache-write-policy",
        choices=WRITE_POLICIES,
        default=SERVER_RULES.write_policy,
        help="when a page is saved, as the server's flag",
    )
    parser.add_argument(
        "--hicache-storage-prefetch-policy",
        choices=PREFETCH_POLICIES,
        default=SERVER_RULES.wait_policy,
        help="how long a request waits for a load, as the server's flag",
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"rates are numbers or inf, got {text}") from None
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"rates must be above 0, got {text}")
    return rates


def _policies(text: str) -> tuple[str, ...]:
    policies = tuple(text.split(","))
    if unknown := set(policies) - set(POLICIES):
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(POLICIES)}"
        )
    return policies


if __name__ == "__main__":
    sys.exit(main())
