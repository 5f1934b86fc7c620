"""The setting of a simulation on the command line: pipeline, scheduling, requests and latencies.

The flags come first, then what each part of the simulator is made from.
"""

import argparse
from pathlib import Path
from random import Random

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
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.host_network import read_host_network
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.draft_flags import (
    acceptance_of,
    add_draft_flags,
    simulated_draft_tokens,
)
from sgl_pipeline.simulator.experiment import LINKS, SERVER_RULES, Cluster, MeasuredPipeline
from sgl_pipeline.simulator.fleet_command import positive
from sgl_pipeline.simulator.kernel_costs import DEVICES
from sgl_pipeline.simulator.migration_setup import Migration
from sgl_pipeline.simulator.models import KV_CACHE_DTYPES, MODELS, QUANTIZATIONS
from sgl_pipeline.simulator.traces import SHIPPED, load_trace, shared_prefixes
from sgl_pipeline.simulator.virtual_store import StoreCosts
from sgl_pipeline.simulator.workload import (
    SimulatedRequest,
    poisson_arrivals,
    scaled_arrivals,
)

DEFAULT_POLICIES = (ThrottleArgs().policy, "throttle", "sarathi")


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is simulated."""
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
    parser.add_argument(
        "--policy",
        type=_policies,
        default=DEFAULT_POLICIES,
        help=f"one or more, separated by commas (default: {','.join(DEFAULT_POLICIES)}, the first "
        "of which is the server's)",
    )
    parser.add_argument(
        "--trace",
        default="azure_conv",
        help=f"a shipped trace ({', '.join(SHIPPED)}) or a CSV with the columns input_tokens, "
        "output_tokens and perhaps arrival_s",
    )
    parser.add_argument(
        "--requests", type=int, help="requests of the trace to take, from its start"
    )
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
    parser.add_argument(
        "--max-overtakes",
        type=int,
        default=SchedulingArgs().max_overtakes,
        help="with --schedule-policy lpm or dfs-weight, as the server's flag",
    )
    parser.add_argument("--max-running-requests", type=int, default=1024)
    parser.add_argument(
        "--max-mamba-cache-size",
        type=int,
        default=SchedulingArgs().num_state_slots,
        help="state slots, of which each running request owns one and cached prefixes take the "
        "rest, as the server's flag; 0: the model has no states",
    )
    parser.add_argument(
        "--mamba-track-interval",
        type=int,
        help="tokens after which decodes leave snapshots of their states, as the server's flag",
    )
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
        "--state-mib",
        type=positive,
        metavar="MIB",
        help="of a request in each of three layers of four, which take them along when they move; "
        "with --max-mamba-cache-size",
    )
    parser.add_argument(
        "--forecast",
        choices=("tables", "online"),
        default="tables",
        help="planner and policy predict by costs fitted beforehand to the tables, or to the "
        "steps that they see",
    )
    add_draft_flags(parser)
    _add_store(parser)
    parser.add_argument(
        "--target-ttft-ms", "--ttft-ms", type=positive, help="limits of goodput: first token"
    )
    parser.add_argument(
        "--target-tpot-ms", "--tpot-ms", type=positive, help="and mean time per further token"
    )


def _add_store(parser: argparse.ArgumentParser) -> None:
    """A store beyond the KV pool, and the server's rules of its use."""
    parser.add_argument(
        "--store-capacity-gb",
        type=positive,
        metavar="GB",
        help="size of a store of pages beyond the pool, empty at first; without it there is none",
    )
    parser.add_argument(
        "--store-read-gb-per-s",
        type=positive,
        default=2.0,
        metavar="GB",
        help="read by each stage, beside what it writes",
    )
    parser.add_argument(
        "--store-write-gb-per-s", type=positive, default=1.0, metavar="GB", help="by each stage"
    )
    parser.add_argument(
        "--store-save-gb-per-s",
        type=positive,
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


def _policies(text: str) -> tuple[str, ...]:
    policies = tuple(text.split(","))
    if unknown := set(policies) - set(POLICIES):
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(POLICIES)}"
        )
    return policies


def workload_of(options: argparse.Namespace, rate_per_s: float) -> list[SimulatedRequest]:
    """The requests, which arrive at that rate; inf: all at once."""
    requests = load_trace(options.trace, options.requests)
    if options.hit_rate:
        requests = shared_prefixes(requests, options.hit_rate, options.sharing_requests)
    acceptance = acceptance_of(options)
    requests = [request.with_acceptance(acceptance) for request in requests]
    if options.arrivals == "recorded":
        return scaled_arrivals(requests, rate_per_s)
    return poisson_arrivals(requests, rate_per_s, Random(options.seed))


def scheduling_of(options: argparse.Namespace) -> SchedulingArgs:
    """The rules of the scheduler, apart from its throttle."""
    return SchedulingArgs(
        page_size=options.page_size,
        schedule_policy=options.schedule_policy,
        max_overtakes=options.max_overtakes,
        max_running_requests=options.max_running_requests,
        num_state_slots=options.max_mamba_cache_size,
        track_interval=options.mamba_track_interval,
        radix_cache=not options.disable_radix_cache,
        extra_steps_in_flight=options.extra_steps_in_flight,
        draft_tokens=simulated_draft_tokens(options),
    )


def pipeline_of(options: argparse.Namespace) -> Cluster | MeasuredPipeline:
    """The pipeline that serves them.

    Raises ConfigurationError for flags that exclude each other.
    """
    if options.calibrate is not None:
        require(options.pool_tokens is not None, "--calibrate needs --pool-tokens")
        require(options.hosts is None, "--calibrate brings its own links; leave out --hosts")
        require(
            options.migration == "off",
            "layers cannot move in a recorded pipeline, whose trace has no times of single layers; "
            "use --migration without --calibrate",
        )
        require(
            options.store_capacity_gb is None,
            "a recorded pipeline's trace does not have the size of its pages; use "
            "--store-capacity-gb without --calibrate",
        )
        return MeasuredPipeline(
            trace_path=options.calibrate,
            pool_tokens=options.pool_tokens,
            forecast=options.forecast,
        )
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
    require(
        options.state_mib is None or (options.max_mamba_cache_size > 0 and args.mode != "off"),
        "--state-mib does nothing without --migration auto and --max-mamba-cache-size",
    )
    return Migration(args=args, state_bytes=round((options.state_mib or 0) * 2**20))


def _store(options: argparse.Namespace) -> StoreCosts | None:
    if options.store_capacity_gb is None:
        return None
    require(options.store_latency_ms >= 0, "--store-latency-ms must not be below 0")
    require(
        not options.max_mamba_cache_size,
        "a store keeps pages and no states; use --store-capacity-gb without --max-mamba-cache-size",
    )
    return StoreCosts(
        capacity_bytes=options.store_capacity_gb * 1e9,
        read_bytes_per_s=options.store_read_gb_per_s * 1e9,
        write_bytes_per_s=options.store_write_gb_per_s * 1e9,
        save_bytes_per_s=options.store_save_gb_per_s * 1e9,
        latency_s=options.store_latency_ms * 1e-3,
    )


def target_of(options: argparse.Namespace) -> LatencyTarget | None:
    """The latencies that requests should have; None where neither is limited."""
    limits = {"ttft_ms": options.target_ttft_ms, "tpot_ms": options.target_tpot_ms}
    named = {name: ms for name, ms in limits.items() if ms is not None}
    return LatencyTarget(**named) if named else None
