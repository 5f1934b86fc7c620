"""Measuring competitors in turns, and what one core of this machine can do at most.

CPU time of one thread is counted, so that other work
on the machine costs all competitors alike; it still slows them, so quote ratios.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmark.support.dated_result import markdown_table
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels

Row = dict[str, Any]


def take_turns(competitors: Mapping[str, Callable[[], object]], rounds: int) -> Row:
    """`median_and_spread` of the CPU time of each. One uncounted round comes first."""
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for counted in range(-1, rounds):
        for name, call in competitors.items():
            start = time.thread_time()
            call()
            if counted >= 0:
                times[name].append((time.thread_time() - start) * 1e3)
    row: Row = {}
    for name, measured in times.items():
        row |= median_and_spread(name, measured)
    return row


def median_and_spread(name: str, times: Sequence[float]) -> Row:
    """`name_ms` the median of milliseconds, `name_spread` its relative interquartile range."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {f"{name}_ms": middle, f"{name}_spread": (high - low) / middle}


def read_bytes_per_ms(rounds: int) -> float:
    """The rate at which one core reads memory: a sum over 256 MiB.

    Code that asks for memory ahead can be some 20 % faster than this.
    """
    numbers = torch.ones(64 * 2**20)
    return numbers.nbytes / take_turns({"sum": numbers.sum}, rounds)["sum_ms"]


def flops_per_ms(kernels: LayerKernels, dtype: torch.dtype, rounds: int) -> float:
    """The rate of one core in a large matrix product of `kernels`, of random numbers."""
    linear = kernels.linear(torch.randn(4096, 1024).to(dtype))
    row = take_turns({"product": partial(linear, torch.randn(512, 1024).to(dtype))}, rounds)
    return 2 * 512 * 4096 * 1024 / row["product_ms"]


def row_table(table: Sequence[Row]) -> str:
    """Markdown, times to three digits, spreads in per cent."""
    rows = [
        [
            f"{value:.0%}"
            if name.endswith("_spread")
            else f"{value:.3g}"
            if isinstance(value, float)
            else str(value)
            for name, value in row.items()
        ]
        for row in table
    ]
    return markdown_table(list(table[0]), rows)
