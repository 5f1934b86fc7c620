"""Attention kernels by themselves: for each kind of step, those that the device could run it with.

Used by `part_kernels.py`. A kernel runs over the pages of many layers in turn, as in a step, so
that it never finds its keys in the card's cache.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmark.gpu import vllm_attention
from benchmark.gpu.checks import random_layout
from benchmark.gpu.device_times import device_ms, repeat_ms
from benchmark.gpu.shapes import Step
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import (
    FlashInferAttention,
    open_flashinfer,
)
from sgl_pipeline.pp_runner.kernel_choice import choose_attention_backend, make_attention_backend

# Keys and values of all layers together: several times the largest card's cache.
_CYCLED_BYTES = 2**29
_MOST_LAYERS = 36
_HOPPER = 9
# Query heads to a KV head for which FlashInfer has decode kernels without tensor cores (0.7.2).
_GROUPS_WITHOUT_TENSOR_CORES = (1, 2, 3, 4, 6, 8, 16)

TENSOR_CORES, CUDA_CORES = "tensor cores", "CUDA cores"
VLLM = "vLLM's FA3"

# Makes the attention that a step of `layout` is run with.
MakeAttention = Callable[[AttentionShape, PagedLayout], AttentionBackend]


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """`plan_ms` of the host for a step, and `layer_ms` of the kernels for one layer of it: None
    where the profiler sees none. `output` [T, Hq, D] is that of the first layer."""

    plan_ms: float
    layer_ms: float | None
    output: torch.Tensor


def prefill_kernels(device: torch.device) -> tuple[str, ...]:
    """The values of `--stage-prefill-kernels` that name a kernel of this device."""
    if device.type != "cuda":
        return ("auto",)
    major, _ = torch.cuda.get_device_capability(device)
    return ("fa2", "fa3") if major == _HOPPER else ("fa2",)


def prefill_choices(device: torch.device) -> Mapping[str, MakeAttention]:
    """The kernels for chunks of prompts, by name; on a CPU its own and plain torch."""
    if device.type != "cuda":
        return _cpu_choices()
    return {name: partial(_flashinfer_prefill, name) for name in prefill_kernels(device)}


def decode_choices(shape: AttentionShape) -> Mapping[str, MakeAttention]:
    """The kernels for decodes from a graph, by name; on a CPU its own and plain torch."""
    if shape.device.type != "cuda":
        return _cpu_choices()
    choices: dict[str, MakeAttention] = {TENSOR_CORES: partial(_flashinfer_decode, True)}
    if shape.num_query_heads // shape.num_kv_heads in _GROUPS_WITHOUT_TENSOR_CORES:
        choices[CUDA_CORES] = partial(_flashinfer_decode, False)
    return choices


def rival_choices(device: torch.device) -> Mapping[str, MakeAttention]:
    """Kernels of other engines that are there, by name, for chunks of prompts and for decodes."""
    return {} if vllm_attention.why_not_there(device) else {VLLM: _vllm_attention}


def time_attention(shape: AttentionShape, step: Step, make: MakeAttention) -> AttentionTimes:
    """Times one kernel on `step`. Inputs are the same for every kernel."""
    layout = random_layout(step.chunks, shape.page_size, seed=0)
    attention = make(shape, layout)
    plan_ms = repeat_ms(partial(attention.plan, layout), shape.device)
    query, layers = _inputs(shape, step, layout)

    def attend_all() -> None:
        for keys, values in layers:
            attention.attend(query, keys, values)

    kernels_ms = device_ms(attend_all, shape.device)
    layer_ms = None if kernels_ms is None else kernels_ms / len(layers)
    return AttentionTimes(plan_ms, layer_ms, attention.attend(query, *layers[0]))


def _inputs(
    shape: AttentionShape, step: Step, layout: PagedLayout
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Queries [T, Hq, D], and the key and value pages [P, S, Hkv, D] of each layer."""
    generator = torch.Generator(shape.device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        numbers = torch.randn(size, generator=generator, device=shape.device)
        return numbers.to(shape.dtype)

    pages = (layout.page_indices.numel(), shape.page_size, shape.num_kv_heads, shape.head_dim)
    layer_bytes = 2 * torch.Size(pages).numel() * shape.dtype.itemsize
    most_layers = _MOST_LAYERS if shape.device.type == "cuda" else 1
    num_layers = max(1, min(most_layers, -(-_CYCLED_BYTES // layer_bytes)))
    query = random(step.num_rows, shape.num_query_heads, shape.head_dim)
    return query, [(random(*pages), random(*pages)) for _ in range(num_layers)]


def _cpu_choices() -> dict[str, MakeAttention]:
    return {name: partial(_named_backend, name) for name in ("auto", "torch")}


def _named_backend(name: str, shape: AttentionShape, layout: PagedLayout) -> AttentionBackend:
    return make_attention_backend(choose_attention_backend(name, shape), shape)


def _flashinfer_prefill(
    kernels: str, shape: AttentionShape, layout: PagedLayout
) -> AttentionBackend:
    return make_attention_backend(choose_attention_backend("flashinfer", shape), shape, kernels)


def _flashinfer_decode(
    use_tensor_cores: bool, shape: AttentionShape, layout: PagedLayout
) -> AttentionBackend:
    """Decodes as a graph holds them; run here without the graph, since kernels are timed."""
    open_parts = partial(open_flashinfer, use_tensor_cores=use_tensor_cores)
    attention = FlashInferAttention(shape, open_parts=open_parts)
    indices = torch.zeros_like(layout.page_indices, device=shape.device)
    return attention.decode_for_graph(layout.num_chunks, padding_page=0, indices=indices)


def _vllm_attention(shape: AttentionShape, layout: PagedLayout) -> AttentionBackend:
    return vllm_attention.VllmAttention(shape)
