"""The gain of a store of any speed: by bandwidth, by the wait for it, by its policies."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, change, distinct, load_panels, select
from benchmark.figures.stores import (
    BUSY_SHAREGPT,
    HOST_MEMORY,
    MOONCAKE,
    SHAREGPT,
    served,
)
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.experiment import SERVER_RULES
from sgl_pipeline.simulator.virtual_store import StoreCosts

# GB/s of each stage, for reads and writes: a slow network to host memory.
SPEEDS = (0.03, 0.1, 0.3, 1.0, 3.0, 20.79)
# A disk of 1 GB/s for each stage, saved to at the server's default rate.
DISK = 1.0
BEST_EFFORT = TierRules(wait_policy="best_effort")
SYSTEMS = (
    *(("timeout", SERVER_RULES, speed) for speed in SPEEDS),
    *(("best_effort", BEST_EFFORT, speed) for speed in SPEEDS[::2]),
)
POLICIES = {
    "write_through_selective": TierRules(write_policy="write_through_selective"),
    "write_back": TierRules(write_policy="write_back"),
    "look-ahead 8": TierRules(look_ahead=8),
    "look-ahead 1": TierRules(look_ahead=1),
}
STYLE = {
    "timeout": {"color": "#0072B2", "marker": "o"},
    "best_effort": {"color": "#D55E00", "marker": "s"},
}
COLUMNS = (
    ("cache_hit_share", "prompt tokens not computed"),
    ("ttft_ms", "mean TTFT (ms)"),
    ("ttft_p99_ms", "p99 TTFT (ms)"),
    ("total_tokens_per_s", "tokens/s, prompts included"),
)


def compute(options: Options) -> list[Row]:
    rows = []
    for load in (SHAREGPT, BUSY_SHAREGPT, MOONCAKE):
        workload = load.requests(options)
        setting = {"load": load.name, "gb_per_s": 0.0}
        rows.append(setting | {"system": "pool"} | served(load.cluster(), workload))
        systems = list(SYSTEMS)
        if load is BUSY_SHAREGPT:
            systems += [(name, rules, DISK) for name, rules in POLICIES.items()]
        for system, rules, speed in systems:
            row = served(load.cluster(_store(speed), rules), workload)
            rows.append(setting | {"system": system, "gb_per_s": speed} | row)
    return rows


def _store(gb_per_s: float) -> StoreCosts:
    """As fast both ways; host memory is saved to as fast as it goes, all else at the server's
    default rate."""
    if gb_per_s == SPEEDS[-1]:
        return HOST_MEMORY
    return replace(
        HOST_MEMORY,
        read_bytes_per_s=gb_per_s * 1e9,
        write_bytes_per_s=gb_per_s * 1e9,
        save_bytes_per_s=StoreConfig().save_bytes_per_s,
        latency_s=1e-3,
    )


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    panels = load_panels(rows, canvas, COLUMNS, x_label="GB/s of each stage", inches=(15, 3.4))
    for load, column, panel in panels:
        (pool,) = select(rows, load=load, system="pool")
        for system, style in STYLE.items():
            points = select(rows, load=load, system=system)
            speeds = [row["gb_per_s"] for row in points]
            panel.plot(speeds, [row[column] for row in points], label=system, **style)
        panel.axhline(pool[column], color="#999999", linestyle="--", label="pool alone")
        panel.set_xscale("log")


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (load,) in distinct(rows, "load"):
        (pool,) = select(rows, load=load, system="pool")
        lines.append(
            f"{load}, the pool alone: {pool['cache_hit_share']:.1%} of prompt tokens spared, mean "
            f"TTFT {pool['ttft_ms']:.0f} ms, p99 {pool['ttft_p99_ms']:.0f} ms, "
            f"{pool['total_tokens_per_s']:.0f} tokens/s"
        )
        stores = (row for row in select(rows, load=load) if row is not pool)
        lines += [_store_line(load, row, pool) for row in stores]
    return lines


def _store_line(load: str, row: Row, pool: Row) -> str:
    return (
        f"{load}, {row['gb_per_s']:g} GB/s, {row['system']}: {row['cache_hit_share']:.1%} spared, "
        f"{row['loaded_share']:.1%} by loads; mean TTFT {change(row, pool, 'ttft_ms')}, p99 "
        f"{change(row, pool, 'ttft_p99_ms')}, tokens/s {change(row, pool, 'total_tokens_per_s')}"
    )


FIGURE = Figure(
    name="store_speed",
    title="A store by its speed, Llama-3.1-70B on four A100",
    claim="HiCache (K6, K7): up to 6 times the throughput and TTFT -80 %; in a coding "
    "agent's sessions hits 40 to 80 %, TTFT -56 %, throughput doubled.",
    assumptions="KV pool of 120,000 tokens for ShareGPT, a quarter of what the cards hold; its "
    "sessions begin at 0.5/s with pauses of 60 s on average between turns, busy at 4/s with 20 s. "
    "Mooncake's trace at 0.2/s, with all of the cards' room. A store without bounds, empty at "
    "first. Below 20.79 GB/s, which is host memory over PCIe, a stage saves at most 268 MB/s, the "
    "server's default, and 1 ms passes before each answer and transfer. Loads and saves cost the "
    "steps nothing. timeout and best_effort are the server's --hicache-storage-prefetch-policy; "
    "the other rows are timeout at 1 GB/s with one rule changed from write_through and a "
    "look-ahead of 64.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
