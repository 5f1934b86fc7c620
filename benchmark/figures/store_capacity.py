"""Hits and first tokens against the room of a store in host memory, by what makes room there."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, change, distinct, load_panels, select
from benchmark.figures.stores import (
    HOST_MEMORY,
    KV_BYTES_PER_TOKEN,
    MOONCAKE,
    SHAREGPT,
    distinct_tokens,
    served,
)
from sgl_pipeline.simulator.virtual_store import Eviction

# The room of the store over the keys and values of all distinct tokens of the load.
SHARES: tuple[tuple[Eviction, tuple[float, ...]], ...] = (
    ("lru", (0.1, 0.25, 0.5, 1.0)),
    ("fifo", (0.1, 0.25)),
)
STYLE = {
    "lru": {"color": "#0072B2", "marker": "o"},
    "fifo": {"color": "#D55E00", "marker": "s"},
}
COLUMNS = (("cache_hit_share", "prompt tokens not computed"), ("ttft_ms", "mean TTFT (ms)"))


def compute(options: Options) -> list[Row]:
    rows = []
    for load in (SHAREGPT, MOONCAKE):
        workload = load.requests(options)
        tokens = distinct_tokens(workload)
        pool = load.cluster()
        setting = {
            "load": load.name,
            "distinct_tokens": tokens,
            "pool_tokens": pool.kv_pool_tokens(),
            "share": 0.0,
        }
        rows.append(setting | {"system": "recompute"} | served(pool, workload, reuses=False))
        rows.append(setting | {"system": "pool"} | served(pool, workload))
        for system, shares in SHARES:
            for share in shares:
                capacity = share * tokens * KV_BYTES_PER_TOKEN
                store = replace(HOST_MEMORY, capacity_bytes=capacity, eviction=system)
                row = served(load.cluster(store), workload)
                rows.append(setting | {"system": system, "share": share} | row)
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    panels = load_panels(
        rows,
        canvas,
        COLUMNS,
        x_label="room of the store / all distinct keys and values",
        inches=(10, 3.6),
    )
    for load, column, panel in panels:
        for system, style in STYLE.items():
            points = select(rows, load=load, system=system)
            shares = [row["share"] for row in points]
            panel.plot(shares, [row[column] for row in points], label=system, **style)
        for system, dashes in (("pool", "--"), ("recompute", ":")):
            (row,) = select(rows, load=load, system=system)
            panel.axhline(row[column], color="#999999", linestyle=dashes, label=system)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (load,) in distinct(rows, "load"):
        (recompute,) = select(rows, load=load, system="recompute")
        (pool,) = select(rows, load=load, system="pool")
        times = pool["distinct_tokens"] / pool["pool_tokens"]
        lines.append(
            f"{load}: {pool['distinct_tokens']} distinct tokens, {times:.1f} times the pool. The "
            f"pool alone spares "
            f"{pool['cache_hit_share']:.0%} of prompt tokens; mean TTFT "
            f"{recompute['ttft_ms']:.0f} ms when all is computed, {pool['ttft_ms']:.0f} ms with it"
        )
        stores = (row for row in select(rows, load=load) if row["system"] in STYLE)
        lines += [_store_line(load, row, pool, recompute) for row in stores]
    return lines


def _store_line(load: str, row: Row, pool: Row, recompute: Row) -> str:
    return (
        f"{load}, {row['system']}, room for {row['share']:.0%}: {row['cache_hit_share']:.1%} "
        f"spared, {row['loaded_share']:.1%} by loads; against the pool alone mean TTFT "
        f"{change(row, pool, 'ttft_ms')} ({change(row, recompute, 'ttft_ms')} against computing "
        f"all), p99 {change(row, pool, 'ttft_p99_ms')}, tokens/s "
        f"{change(row, pool, 'total_tokens_per_s')}"
    )


FIGURE = Figure(
    name="store_capacity",
    title="A store in host memory by its room, Llama-3.1-70B on four A100",
    claim="CachedAttention (K1 to K5): 86 to 89 % of hits and TTFT -61 to -87 % against "
    "computing all, from 128 GB of DRAM and 10 TB of SSD; hits 86 % with the queue's own order, "
    "58 % with LRU, 48 % with FIFO; room for 10 % of the sessions of an hour gives 51 % of hits, "
    "for 25 % 98 %.",
    assumptions="KV pool of 120,000 tokens for ShareGPT, a quarter of what the cards hold; its "
    "sessions begin at 0.5/s with pauses of 60 s on average between turns. Mooncake's trace at "
    "0.2/s, with all of the cards' room. Loads and saves take 20.79 GB/s of PCIe for each card, "
    "beside the steps and at no cost to them. The store is empty at first, so that the first turn "
    "of every session misses.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
