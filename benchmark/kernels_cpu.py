"""Measures the CPU kernels of one layer against plain torch and against what the machine can do.

Run by hand, `python -m benchmark.kernels_cpu [--dtype float32] [--json FILE]`; nothing imports it.
Competitors take turns within each round, on one thread, and CPU time is counted, so that other
work on the machine costs them alike; quote the ratios, not the milliseconds.

Sizes are those of the 0.27b preset (hidden 1024, 16 query and 8 KV heads of 64, 3072 inner).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.attention.backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.linear import Linear
from sgl_pipeline.pp_runner.step_inputs import PagedLayout

NUM_LAYERS = 8  # of one stage: together they do not fit the caches
HIDDEN, INNER = 1024, 3072
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 8, 64, 16
MATRICES = {  # name: (out, in)
    "qkv": ((QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "output": (HIDDEN, QUERY_HEADS * HEAD_DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
WEIGHTS_PER_LAYER = sum(rows * columns for rows, columns in MATRICES.values())

Row = dict[str, Any]
Tensors = Mapping[str, torch.Tensor]
Case = tuple[str, Sequence[tuple[int, int]]]  # name, and (start, length) of each chunk
ATTENTION_CASES: list[Case] = [
    ("1 decode, context 256", [(255, 1)]),
    ("8 decodes, context 256", [(255, 1)] * 8),
    ("32 decodes, context 256", [(255, 1)] * 32),
    ("8 decodes, context 2048", [(2047, 1)] * 8),
    ("prefill 256", [(0, 256)]),
    ("prefill 256 after 1024", [(1024, 256)]),
    ("prefill 1083", [(0, 1083)]),
    ("7 prefills of 155", [(0, 155)] * 7),
    ("16 decodes and prefill 128", [(255, 1)] * 16 + [(0, 128)]),
]


def take_turns(competitors: Mapping[str, Callable[[], object]], rounds: int) -> Row:
    """Milliseconds of CPU time of each: `name_ms` the median, `name_spread` its relative
    interquartile range. One uncounted round comes first."""
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for counted in range(-1, rounds):
        for name, call in competitors.items():
            start = time.thread_time()
            call()
            if counted >= 0:
                times[name].append((time.thread_time() - start) * 1e3)
    row: Row = {}
    for name, measured in times.items():
        low, middle, high = statistics.quantiles(measured, n=4)
        row[f"{name}_ms"] = middle
        row[f"{name}_spread"] = (high - low) / middle
    return row


def read_bytes_per_ms(rounds: int) -> float:
    """How fast one core reads memory: a sum over 256 MiB."""
    numbers = torch.ones(64 * 2**20)
    return numbers.nbytes / take_turns({"sum": numbers.sum}, rounds)["sum_ms"]


def flops_per_ms(dtype: torch.dtype, rounds: int) -> float:
    """What one core computes in a large matrix product of `dtype`."""
    linear = Linear(torch.ones(4096, 1024, dtype=dtype))
    row = take_turns({"product": partial(linear, torch.ones(512, 1024, dtype=dtype))}, rounds)
    return 2 * 512 * 4096 * 1024 / row["product_ms"]


def measure_linear(dtype: torch.dtype, rounds: int) -> list[Row]:
    """All matrices of a stage: F.linear, `Linear`, and the limit of memory or arithmetic."""
    weights = {
        name: [(torch.randn(shape) / 32).to(dtype) for _ in range(NUM_LAYERS)]
        for name, shape in MATRICES.items()
    }
    packed = {name: [Linear(weight) for weight in copies] for name, copies in weights.items()}
    num_weights = NUM_LAYERS * WEIGHTS_PER_LAYER
    reading_ms = num_weights * dtype.itemsize / read_bytes_per_ms(rounds)
    rate = flops_per_ms(dtype, rounds)

    def run_plain(inputs: Tensors) -> None:
        for layer in range(NUM_LAYERS):
            for name in MATRICES:
                F.linear(inputs[name], weights[name][layer])

    def run_packed(inputs: Tensors) -> None:
        for layer in range(NUM_LAYERS):
            for name in MATRICES:
                packed[name][layer](inputs[name])

    table = []
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 256):
        inputs = {
            name: torch.randn(num_rows, shape[1]).to(dtype) for name, shape in MATRICES.items()
        }
        row = take_turns(
            {"plain": partial(run_plain, inputs), "packed": partial(run_packed, inputs)}, rounds
        )
        row["packed_to_plain"] = row["packed_ms"] / row["plain_ms"]
        row["limit_ms"] = max(reading_ms, 2 * num_rows * num_weights / rate)
        table.append({"rows": num_rows, **row})
    return table


def measure_attention(dtype: torch.dtype, rounds: int) -> list[Row]:
    """One layer's attention: the compiled kernels, the torch backend, and reading the keys."""
    shape = AttentionShape(
        QUERY_HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        HEAD_DIM**-0.5,
        dtype,
        torch.device("cpu"),
    )
    kernels = load_cpu_kernels()
    rate = read_bytes_per_ms(rounds)
    table = []
    for name, chunks in ATTENTION_CASES:
        layout = random_layout(chunks)
        page_shape = (layout.page_indices.numel(), PAGE_SIZE, KV_HEADS, HEAD_DIM)
        layers = [
            (torch.randn(page_shape).to(dtype), torch.randn(page_shape).to(dtype))
            for _ in range(NUM_LAYERS)
        ]
        query = torch.randn(sum(n for _, n in chunks), QUERY_HEADS, HEAD_DIM).to(dtype)
        step = partial(attend_step, layout=layout, query=query, layers=layers)
        backends = {
            "cpu": partial(step, CpuAttention(shape, kernels)),
            "torch": partial(step, TorchAttention(shape)),
        }
        row = take_turns(backends, rounds)
        row["cpu_to_torch"] = row["cpu_ms"] / row["torch_ms"]
        kv_bytes = 2 * int(layout.kv_lengths.sum()) * KV_HEADS * HEAD_DIM * dtype.itemsize
        row["reading_ms"] = NUM_LAYERS * kv_bytes / rate
        table.append({"step": name, **row})
    return table


def attend_step(
    backend: AttentionBackend,
    layout: PagedLayout,
    query: torch.Tensor,
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """What a stage does in a step: one plan for all of its layers."""
    backend.plan(layout)
    for key_pages, value_pages in layers:
        backend.attend(query, key_pages, value_pages)


def random_layout(chunks: Sequence[tuple[int, int]]) -> PagedLayout:
    """The layout of `chunks` on shuffled pages, none of which is shared."""
    lengths = torch.tensor([length for _, length in chunks])
    ends = torch.tensor([start + length for start, length in chunks])
    page_counts = (ends + PAGE_SIZE - 1) // PAGE_SIZE
    zero = torch.zeros(1, dtype=torch.int64)
    return PagedLayout(
        page_size=PAGE_SIZE,
        num_decodes=int((lengths == 1).sum()),
        query_indptr=torch.cat((zero, lengths.cumsum(0))).int(),
        page_indptr=torch.cat((zero, page_counts.cumsum(0))).int(),
        page_indices=torch.randperm(int(page_counts.sum())).int(),
        last_page_lengths=(ends - (page_counts - 1) * PAGE_SIZE).int(),
        kv_lengths=ends.int(),
    )


def print_table(title: str, table: Sequence[Row]) -> None:
    """Markdown, times to three digits, spreads in per cent."""
    columns = list(table[0])
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in table:
        cells = [
            f"{value:.0%}"
            if name.endswith("_spread")
            else f"{value:.3g}"
            if isinstance(value, float)
            else str(value)
            for name, value in row.items()
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Reads the flags, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each number")
    parser.add_argument("--json", type=Path, help="also write the tables here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, args.dtype)
    tables = {
        f"matrices of {NUM_LAYERS} layers, {args.dtype}": measure_linear(dtype, args.rounds),
        f"attention of {NUM_LAYERS} layers, {args.dtype}": measure_attention(dtype, args.rounds),
    }
    for title, table in tables.items():
        print_table(title, table)
    if args.json is not None:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**about, "tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
