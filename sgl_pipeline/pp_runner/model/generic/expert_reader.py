"""Reads the experts of a layer into products of ours, one expert after the other.

A checkpoint has a matrix for each projection of each expert, or stacks of all; transformers'
modules have stacks.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear
from sgl_pipeline.pp_runner.model.generic.layers import (
    RowExperts,
    expert_gate,
    has_silu_gate,
    num_experts_of,
)
from sgl_pipeline.pp_runner.model.generic.skeleton import Entry
from sgl_pipeline.pp_runner.model.generic.tensor_reader import TensorReader
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix, join

# The matrix of an expert.
_MatrixOf = Callable[[int], Matrix]


def read_experts(reader: TensorReader, module: nn.Module, prefix: str) -> RowExperts:
    """The experts `module`, whose parameters are below `prefix`."""
    first, gated = "gate_up_proj" if module.has_gate else "up_proj", has_silu_gate(module)
    up = _matrices(reader, module, prefix, first)
    down = _matrices(reader, module, prefix, "down_proj")
    up_biases, down_biases = (
        _biases(reader, module, f"{prefix}{name}_bias", name) for name in (first, "down_proj")
    )
    make_up = reader.kernels.gated_linear if gated else reader.kernels.linear
    gate = None if gated else expert_gate(module)
    return RowExperts(
        [
            _Expert(
                make_up(up(expert), up_biases(expert)),
                gate,
                reader.kernels.linear(down(expert), down_biases(expert)),
            )
            for expert in range(num_experts_of(module))
        ]
    )


class _Expert:
    """Two products, and the gate between them if the first one does not compute it."""

    def __init__(
        self, up: Linear, gate: Callable[[torch.Tensor], torch.Tensor] | None, down: Linear
    ) -> None:
        self._up, self._gate, self._down = up, gate, down

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        inner = self._up(rows)
        if self._gate is not None:
            inner = self._gate(inner).contiguous()
        return self._down(inner)


def _matrices(reader: TensorReader, module: nn.Module, prefix: str, name: str) -> _MatrixOf:
    """The matrices [outputs, inputs] of the parameter `name` of `module`."""
    parameter = module.get_parameter(name)
    entry = reader.entry_of(f"{prefix}{name}")
    if entry is not None and (parts := _separate(entry, module)) is not None:
        _, outputs, inputs = parameter.shape
        shape = (outputs // len(parts), inputs)

        def read(expert: int) -> Matrix:
            matrices = [reader.source_matrix(names[expert], shape) for names in parts]
            joined = join(matrices)
            if joined is None:
                raise UnsupportedModelError(
                    f"{parts[0][expert]} and {parts[1][expert]} are not quantized alike"
                )
            return joined

        return read
    stored = entry.sources[0][0] if entry is not None else f"{prefix}{name}"
    if reader.is_quantized(stored):
        raise UnsupportedModelError(
            f"{stored} holds several experts at once, which are computed with in 16 bits only"
        )
    stack = reader.tensor(f"{prefix}{name}", parameter)
    return lambda expert: (stack[expert].T if module.is_transposed else stack[expert]).contiguous()


def _separate(entry: Entry, module: nn.Module) -> list[list[str]] | None:
    """The checkpoint's matrices of each expert, one list for each projection that the entry puts
    one below the other; None if it has stacks, or something else happens to them."""
    if entry.converter is None or module.is_transposed:
        return None
    steps = entry.converter.operations
    dims = [(type(step), getattr(step, "dim", None)) for step in steps]
    patterns = entry.converter.source_patterns
    wanted = [(MergeModulelist, 0)] + [(Concatenate, 1)] * (len(patterns) > 1)
    parts = [entry.sources_of(pattern) for pattern in patterns]
    parts = [names for names in parts if names]
    if dims != wanted or any(len(names) != num_experts_of(module) for names in parts):
        return None
    return parts


def _biases(
    reader: TensorReader, module: nn.Module, target: str, name: str
) -> Callable[[int], torch.Tensor | None]:
    if not module.has_bias:
        return lambda expert: None
    stack = reader.tensor(target, module.get_parameter(f"{name}_bias"))
    return lambda expert: stack[expert].contiguous()
