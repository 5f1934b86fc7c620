"""Measures the CPU kernels of a stage against plain torch and against what the machine can do.

    python -m benchmark.kernels.kernels_cpu --dtype float32

Competitors take turns within each round, on one thread, and CPU time is counted (`turns.py`); quote
the ratios, not the milliseconds. The columns `compiled` are `--stage-kernels cpu`, `onednn` is what
`--stage-kernels torch` multiplies with, `plain` is F.linear.

Sizes are those of the 0.27b preset (hidden 1024, 16 query and 8 KV heads of 64, 3072 inner), with
`--against-torch` those of two matrices of Qwen3-4B.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmark.kernels.stage_step import (
    competitors,
    measure_operations,
    measure_quantized_steps,
    measure_steps,
)
from benchmark.support.command import Command, Options, Report
from benchmark.support.turns import (
    Row,
    flops_per_ms,
    in_huge_pages,
    read_bytes_per_ms,
    row_table,
    take_turns,
)
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES, encode
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import torch_linear
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix
from sgl_pipeline.pp_runner.weights.rounding import to_fp8, to_int4, to_int8

NUM_LAYERS = 8  # of one stage: together they do not fit the caches
HIDDEN, INNER = 1024, 3072
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 8, 64, 16
MATRICES = {  # name: (out, in)
    "qkv": ((QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "output": (HIDDEN, QUERY_HEADS * HEAD_DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
MATRICES_OF_4B = {"output": (2560, 4096), "down": (2560, 9728)}
WEIGHTS_PER_LAYER = sum(rows * columns for rows, columns in MATRICES.values())

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


def measure_linear(dtype: torch.dtype, rounds: int) -> list[Row]:
    """All matrices of a stage: ours, oneDNN's, F.linear, and the limit of memory or arithmetic."""
    weights = {
        name: [(torch.randn(shape) / 32).to(dtype) for _ in range(NUM_LAYERS)]
        for name, shape in MATRICES.items()
    }
    compiled, onednn = (
        {name: [kernels.linear(weight) for weight in copies] for name, copies in weights.items()}
        for kernels in competitors().values()
    )
    plain = {
        name: [partial(F.linear, weight=weight) for weight in copies]
        for name, copies in weights.items()
    }
    num_weights = NUM_LAYERS * WEIGHTS_PER_LAYER
    reading_ms = num_weights * dtype.itemsize / read_bytes_per_ms(rounds)
    rate = max(flops_per_ms(kernels, dtype, rounds) for kernels in competitors().values())

    def run(linears: Mapping[str, Sequence[Linear]], inputs: Tensors) -> None:
        for layer in range(NUM_LAYERS):
            for name in MATRICES:
                linears[name][layer](inputs[name])

    kinds: dict[str, Mapping[str, Sequence[Linear]]] = {
        "compiled": compiled,
        "onednn": onednn,
        "plain": plain,
    }
    table = []
    for num_rows in (1, 4, 8, 16, 32, 64, 128, 256, 512):
        inputs = {
            name: torch.randn(num_rows, shape[1]).to(dtype) for name, shape in MATRICES.items()
        }
        calls: dict[str, Callable[[], object]] = {
            kind: partial(run, linears, inputs) for kind, linears in kinds.items()
        }
        row = take_turns(calls, rounds)
        row["compiled_to_onednn"] = row["compiled_ms"] / row["onednn_ms"]
        row["limit_ms"] = max(reading_ms, 2 * num_rows * num_weights / rate)
        table.append({"rows": num_rows, **row})
    return table


def measure_quantized(rounds: int) -> list[Row]:
    """All matrices of a stage by rows: bf16 and each kind of quantized weights, with the GB/s of
    weights and scales, and the billions of multiplications and additions a second."""
    kernels = CompiledKernels(load_cpu_kernels())
    matrices = [torch.randn(shape).bfloat16() for shape in MATRICES.values()] * NUM_LAYERS
    kinds: dict[str, Callable[[torch.Tensor], Matrix]] = {
        "bf16": torch.Tensor.clone,
        "int8": to_int8,
        "fp8": lambda matrix: to_fp8(matrix, matrix.shape[1]),
        "int4": lambda matrix: to_int4(matrix, 128),
        "int4_int8_rows": lambda matrix: replace(to_int4(matrix, 128), rounds_rows=True),
    }
    linears: dict[str, list[Linear]] = {}
    num_bytes: dict[str, int] = {}
    for kind, quantize in kinds.items():
        weights = [quantize(matrix) for matrix in matrices]
        num_bytes[kind] = sum(weight.nbytes for weight in weights)
        linears[kind] = [kernels.linear(weight) for weight in weights]

    def run(kind: str, inputs: Sequence[torch.Tensor]) -> None:
        for linear, rows in zip(linears[kind], inputs, strict=True):
            linear(rows)

    table = []
    for num_rows in (1, 4, 16, 64, 256):
        inputs = [torch.randn(num_rows, matrix.shape[1]).bfloat16() for matrix in matrices]
        row = take_turns({kind: partial(run, kind, inputs) for kind in kinds}, rounds)
        for kind in kinds:
            row[f"{kind}_GBps"] = num_bytes[kind] / row[f"{kind}_ms"] / 1e6
            row[f"{kind}_GOPps"] = 2e-6 * num_rows * NUM_LAYERS * WEIGHTS_PER_LAYER
            row[f"{kind}_GOPps"] /= row[f"{kind}_ms"]
        table.append({"rows": num_rows, **row})
    return table


def measure_against_torch(rounds: int) -> list[Row]:
    """Two matrices of Qwen3-4B by rows: the compiled products with weights that are
    expanded on the way, the products of plain torch, and the compiled ones in bf16."""
    kernels = CompiledKernels(load_cpu_kernels())
    matrices = [torch.randn(shape).bfloat16() for shape in MATRICES_OF_4B.values()]
    kinds: dict[str, Callable[[torch.Tensor], Matrix]] = {
        "fp8": lambda matrix: to_fp8(matrix, matrix.shape[1]),
        "fp8_of_128": lambda matrix: to_fp8(matrix, 128),
        "int4_of_128": lambda matrix: to_int4(matrix, 128),
    }
    linears = {"bf16": [kernels.linear(matrix) for matrix in matrices]}
    for kind, quantize in kinds.items():
        weights = [quantize(matrix) for matrix in matrices]
        linears[kind] = [kernels.linear(weight) for weight in weights]
        linears[f"{kind}_torch"] = [torch_linear(weight) for weight in weights]

    def run(kind: str, inputs: Sequence[torch.Tensor]) -> None:
        for linear, rows in zip(linears[kind], inputs, strict=True):
            linear(rows)

    table = []
    for num_rows in (1, 16, 64, 512):
        inputs = [torch.randn(num_rows, matrix.shape[1]).bfloat16() for matrix in matrices]
        row = take_turns({kind: partial(run, kind, inputs) for kind in linears}, rounds)
        for kind in kinds:
            row[f"{kind}_to_torch"] = row[f"{kind}_ms"] / row[f"{kind}_torch_ms"]
        table.append({"rows": num_rows, **row})
    return table


def measure_attention(dtype: torch.dtype, rounds: int) -> list[Row]:
    """One layer's attention: the compiled kernels, the torch backend, reading the keys, and the
    compiled kernels on codes of 8 bits."""
    shape = AttentionShape(
        num_query_heads=QUERY_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        page_size=PAGE_SIZE,
        dtype=dtype,
        device=torch.device("cpu"),
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
        step = partial(attend_step, layout=layout, query=query)
        backends = {
            "cpu": partial(step, CpuAttention(shape, kernels), layers=layers),
            "torch": partial(step, TorchAttention(shape), layers=layers),
        }
        for name, coded_dtype in CODED_DTYPES.items():
            coded = [
                (encode(keys, coded_dtype), encode(values, coded_dtype)) for keys, values in layers
            ]
            backend = CpuAttention(replace(shape, coded_dtype=coded_dtype), kernels)
            backends[f"cpu_{name}"] = partial(step, backend, layers=coded)
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
    """Attends as a stage does in a step: one plan for all of its layers."""
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


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=15)
    what = command.exclusive()
    what("--dtype", choices=["bfloat16", "float32"], help="(default: bfloat16)")
    what("--quantized", action="store_true", help="the quantized products only")
    what("--against-torch", action="store_true", help="FP8 and 4 bits against plain torch only")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    in_huge_pages(__spec__.name)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if options.against_torch:
        tables = {"two matrices of Qwen3-4B, quantized": measure_against_torch(options.rounds)}
    elif options.quantized:
        tables = {
            "steps of a stage, quantized": measure_quantized_steps(options.rounds),
            f"matrices of {NUM_LAYERS} layers, quantized": measure_quantized(options.rounds),
        }
    else:
        tables = _tables_of(options.dtype or "bfloat16", options.rounds)
    return Report(
        name="kernels_cpu",
        texts=[f"{title}\n\n{row_table(table)}" for title, table in tables.items()],
        facts={"figures": {"medians": f"of {options.rounds} rounds, CPU time of one thread"}},
        record={"tables": tables},
    )


def _tables_of(name: str, rounds: int) -> dict[str, list[Row]]:
    dtype: torch.dtype = getattr(torch, name)
    matrices = f"{NUM_LAYERS} layers, {name}"
    return {
        f"steps of a stage, {name}": measure_steps(dtype, rounds),
        f"operations of {matrices}": measure_operations(dtype, rounds),
        f"matrices of {matrices}": measure_linear(dtype, rounds),
        f"attention of {matrices}": measure_attention(dtype, rounds),
    }


if __name__ == "__main__":
    sys.exit(main())
