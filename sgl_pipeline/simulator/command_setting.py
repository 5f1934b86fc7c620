"""The setting of a simulation, from the command line's flags (`setting_flags.py`): the parts that
the simulator is made of.
"""

import argparse
from pathlib import Path
from random import Random

from sgl_pipeline.args import MigrationArgs, SchedulingArgs, require
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.host_network import read_host_network
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.draft_flags import acceptance_of, simulated_draft_tokens
from sgl_pipeline.simulator.experiment import Cluster, MeasuredPipeline
from sgl_pipeline.simulator.migration_setup import Migration
from sgl_pipeline.simulator.traces import load_trace, shared_prefixes
from sgl_pipeline.simulator.virtual_store import StoreCosts
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals, scaled_arrivals


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
