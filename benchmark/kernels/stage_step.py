"""Whole steps of a CPU stage, and each of its layers' operations: compiled, torch, and the limit.

Called by `kernels_cpu.py`. The stage is the last one of two of the 0.27b preset with dummy weights,
8 layers and the head; both competitors use the compiled attention. Never starts a process.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from benchmark.models.make_model import PRESETS
from benchmark.models.quantize_model import GROUP_SIZE, quantization_config
from benchmark.support.turns import Row, flops_per_ms, read_bytes_per_ms, take_turns
from sgl_pipeline.pp_runner.attention.attention_backend import StageAttention
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    HeadNorms,
    LayerKernels,
    RmsNorm,
    Rotation,
)
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.recorded_layers import RecordedLayers
from sgl_pipeline.pp_runner.step_layers import EagerLayers, StepLayers
from sgl_pipeline.pp_runner.weights.quantization_config import (
    W4A8_INT8,
    W8A8_INT8,
    choose_quantization,
    read_quantization,
)
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

CPU = torch.device("cpu")
PRESET = PRESETS["0.27b"]
LAYERS = range(PRESET.num_hidden_layers // 2, PRESET.num_hidden_layers)
PAGE_SIZE = 16
STEPS = {  # (start, length) of each chunk
    "1 decode": [(200, 1)],
    "8 decodes": [(200, 1)] * 8,
    "32 decodes": [(200, 1)] * 32,
    "16 decodes, 70 prefill tokens": [(200, 1)] * 16 + [(130, 70)],
    "16 decodes, 240 prefill tokens": [(200, 1)] * 16 + [(0, 240)],
}
OPERATION_ROWS = (32, 256)


def competitors() -> dict[str, LayerKernels]:
    """Both leaves, the compiled one first."""
    return {"compiled": CompiledKernels(load_cpu_kernels()), "torch": TorchKernels()}


def measure_steps(dtype: torch.dtype, rounds: int) -> list[Row]:
    """Steps of the stage with head, without sampling; the limit is that of reading weights and keys
    once, or of the products' arithmetic."""
    stages = {name: _StageUnderTest(kernels, dtype) for name, kernels in competitors().items()}
    stage = next(iter(stages.values()))
    spec = stage.spec
    bytes_per_ms = read_bytes_per_ms(rounds)
    rate = max(flops_per_ms(kernels, dtype, rounds) for kernels in competitors().values())
    head_weights = spec.vocab_size * spec.hidden_size
    layer_weights = stage.weight_bytes // dtype.itemsize - head_weights
    table = []
    for name, chunks in STEPS.items():
        inputs = random_inputs(chunks)
        hidden = torch.randn(inputs.num_tokens, spec.hidden_size).to(dtype)
        turns = {kind: partial(each.step, inputs, hidden) for kind, each in stages.items()}
        turns["by_kernels"] = partial(stage.step_by_kernels, inputs, hidden)
        row = take_turns(turns, rounds)
        row["compiled_to_torch"] = row["compiled_ms"] / row["torch_ms"]
        row["compiled_to_by_kernels"] = row["compiled_ms"] / row["by_kernels_ms"]
        kv_numbers = 2 * len(LAYERS) * int(inputs.layout.kv_lengths.sum())
        kv_numbers *= spec.num_kv_heads * spec.head_dim
        numbers = layer_weights + head_weights + kv_numbers
        products = inputs.num_tokens * layer_weights + len(chunks) * head_weights
        row["limit_ms"] = max(numbers * dtype.itemsize / bytes_per_ms, 2 * products / rate)
        table.append({"step": name, **row})
    return table


def measure_quantized_steps(rounds: int) -> list[Row]:
    """The same steps in bf16 with weights of 16 bits and of each kind that is quantized: int8 with
    the head, 4 bits in groups of 128 without, and for int8 rows with the head in int8."""
    plain = read_preset(torch.bfloat16)
    head = plain.names.head
    int4 = read_quantization(quantization_config("pack-quantized", GROUP_SIZE), head)
    specs = {
        "bf16": plain,
        "int8": replace(plain, quantization=choose_quantization(W8A8_INT8, None, head)),
        "int4": replace(plain, quantization=int4),
        "int4_int8_rows": replace(plain, quantization=choose_quantization(W4A8_INT8, int4, head)),
    }
    kernels = CompiledKernels(load_cpu_kernels())
    stages = {kind: _StageUnderTest(kernels, torch.bfloat16, spec) for kind, spec in specs.items()}
    table = []
    for name, chunks in STEPS.items():
        inputs = random_inputs(chunks)
        hidden = torch.randn(inputs.num_tokens, plain.hidden_size).bfloat16()
        turns = {kind: partial(stage.step, inputs, hidden) for kind, stage in stages.items()}
        for kind, stage in stages.items():
            turns[f"{kind}_by_kernels"] = partial(stage.step_by_kernels, inputs, hidden)
        row = take_turns(turns, rounds)
        for kind in specs:
            row[f"{kind}_to_by_kernels"] = row[f"{kind}_ms"] / row[f"{kind}_by_kernels_ms"]
        for kind in [*specs][1:]:
            row[f"bf16_to_{kind}"] = row["bf16_ms"] / row[f"{kind}_ms"]
        table.append({"step": name, **row})
    return table


def measure_operations(dtype: torch.dtype, rounds: int) -> list[Row]:
    """Times a layer's operations between its products, as often as the stage has layers."""
    table = []
    for num_rows in OPERATION_ROWS:
        kernels = competitors()
        calls = {name: _operations(leaf, num_rows, dtype) for name, leaf in kernels.items()}
        for operation in calls["compiled"]:
            turns = {name: partial(_in_each_layer, calls[name][operation]) for name in kernels}
            row = take_turns(turns, rounds)
            row["compiled_to_torch"] = row["compiled_ms"] / row["torch_ms"]
            table.append({"operation": operation, "rows": num_rows, **row})
    return table


def random_inputs(chunks: list[tuple[int, int]], with_states: bool = False) -> StepInputs:
    """A step of `chunks` that all sample, on shuffled pages, none of which is shared; with state
    slots in their order, if the model has states."""
    counts = [-(-(start + length) // PAGE_SIZE) for start, length in chunks]
    pages = torch.randperm(sum(counts)).int().split(counts)
    mirrored = [
        MirroredChunk(
            MirroredRequest(
                handle,
                GREEDY,
                1,
                array("i", [7]) * (start + length),
                array("i", own.tolist()),
                state_slot=handle if with_states else None,
            ),
            start,
            length,
            samples=True,
        )
        for handle, ((start, length), own) in enumerate(zip(chunks, pages, strict=True))
    ]
    return build_step_inputs(mirrored, PAGE_SIZE, CPU)


class _StageUnderTest:
    """The stage with its own weights and pages, which hold random keys and values."""

    def __init__(
        self, kernels: LayerKernels, dtype: torch.dtype, spec: DecoderSpec | None = None
    ) -> None:
        self.spec = spec or read_preset(dtype)
        self._model = _load(self.spec, kernels, dtype)
        self.weight_bytes = self._model.weight_bytes
        shapes, kernels_of = self.spec.attention_shapes(PAGE_SIZE, dtype, CPU), load_cpu_kernels()
        attention = StageAttention(shapes, lambda shape: CpuAttention(shape, kernels_of))
        longest = max(
            random_inputs(chunks).layout.page_indices.numel() for chunks in STEPS.values()
        )
        pool = KvPool(LAYERS, shapes, longest)
        for layer in LAYERS:
            for store in pool.pages(layer):
                store.normal_()
        held_layers = HeldLayers(self._model, pool)
        self._recorded = RecordedLayers(held_layers, attention)
        self._by_kernels = EagerLayers(held_layers, attention)

    def step(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """As a stage runs it."""
        return self._run(self._recorded, inputs, hidden)

    def step_by_kernels(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Each kernel called by Python."""
        return self._run(self._by_kernels, inputs, hidden)

    def _run(self, layers: StepLayers, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        layers.plan(0, LAYERS, inputs)
        hidden = layers.run(inputs, hidden)
        return self._model.logits(hidden[inputs.sample_rows])


def read_preset(dtype: torch.dtype) -> DecoderSpec:
    """The spec of PRESET in `dtype`."""
    return model_spec(PRESET.config(str(dtype).removeprefix("torch.")))


def _load(spec: DecoderSpec, kernels: LayerKernels, dtype: torch.dtype) -> NativeStageModel:
    return NativeStageModel.load(
        spec,
        "",
        layers=LAYERS,
        is_first=False,
        is_last=True,
        dtype=dtype,
        device=CPU,
        kernels=kernels,
        load_format="dummy",
    )


def _operations(
    kernels: LayerKernels, num_rows: int, dtype: torch.dtype
) -> Mapping[str, Callable[[], object]]:
    head_dim, kv_heads = PRESET.head_dim, PRESET.num_key_value_heads
    width = (PRESET.num_attention_heads + 2 * kv_heads) * head_dim
    norm = RmsNorm(torch.ones(PRESET.hidden_size, dtype=dtype), 1e-6)
    head_weight = torch.ones(head_dim, dtype=dtype)
    head_norms = HeadNorms(head_weight, head_weight, 1e-6)
    angles = torch.randn(num_rows, head_dim // 2)
    pages = (torch.zeros(num_rows, PAGE_SIZE, kv_heads, head_dim, dtype=dtype),) * 2
    slots = torch.randperm(num_rows * PAGE_SIZE)[:num_rows]
    stream, added = (torch.randn(num_rows, PRESET.hidden_size).to(dtype) for _ in range(2))
    qkv = torch.randn(num_rows, width).to(dtype)
    gate_up = torch.randn(num_rows, 2 * PRESET.intermediate_size).to(dtype)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved=False)
    return {
        "norm": partial(kernels.norm, stream, norm),
        "add_norm": partial(kernels.add_norm, stream, added, norm),
        "place_heads": partial(kernels.place_heads, qkv, head_norms, rotation, slots, pages),
        "gate": partial(kernels.gate, gate_up),
    }


def _in_each_layer(operation: Callable[[], object]) -> None:
    for _ in LAYERS:
        operation()
