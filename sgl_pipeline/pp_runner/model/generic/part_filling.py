"""Fills a copy of a part's template, a layer or an end, with its tensors.

Linears, norms, MLPs and experts become ours (`layers.py`), quantized where the model is; of other
modules the parameters are filled.
"""

import torch
from torch import nn

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import RmsNorm
from sgl_pipeline.pp_runner.model.generic.expert_reader import read_experts
from sgl_pipeline.pp_runner.model.generic.layers import (
    OwnProducts,
    RowGatedMlp,
    RowLinear,
    RowNorm,
    gated_mlp,
    is_experts,
    norm_weight,
)
from sgl_pipeline.pp_runner.model.generic.tensor_reader import TensorReader
from sgl_pipeline.pp_runner.weights.quantized_weights import join


def fill(module: nn.Module, prefix: str, reader: TensorReader) -> nn.Module:
    """`module` with the tensors below `prefix`, which ends with a dot, or the module of ours
    that takes its place."""
    ours = _replacement(module, prefix, reader)
    if ours is not None:
        return ours
    for name, child in module.named_children():
        setattr(module, name, fill(child, f"{prefix}{name}.", reader))
    for name, parameter in module.named_parameters(recurse=False):
        tensor = reader.tensor(f"{prefix}{name}", parameter)
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            module._buffers[name] = reader.tensor(f"{prefix}{name}", buffer)
    if (norm := norm_weight(module)) is not None:
        return RowNorm(RmsNorm(*norm), reader.kernels)
    if any(one.dim() > 1 for one in module.parameters(recurse=False)):
        return OwnProducts(module, prefix.rstrip("."))
    return module


def _replacement(module: nn.Module, prefix: str, reader: TensorReader) -> nn.Module | None:
    """The replacement of a module whose matrices our kernels keep; None for any other."""
    if type(module) is nn.Linear:
        linear = reader.linear(module, prefix)
        return RowLinear(linear, module.out_features)
    if is_experts(module):
        return read_experts(reader, module, prefix)
    if (names := gated_mlp(module)) is None:
        return None
    gate_up, down = names
    linears = [_linear(module, name) for name in gate_up]
    matrices = [
        reader.matrix(f"{prefix}{name}", one.weight.shape)
        for name, one in zip(gate_up, linears, strict=True)
    ]
    joined = join(matrices)
    if joined is None:
        return None
    matrices.clear()
    biases = [
        reader.bias(one, f"{prefix}{name}") for name, one in zip(gate_up, linears, strict=True)
    ]
    given = [bias for bias in biases if bias is not None]
    gated_up = reader.kernels.gated_linear(joined, torch.cat(given) if given else None)
    return RowGatedMlp(gated_up, reader.linear(_linear(module, down), f"{prefix}{down}."))


def _linear(module: nn.Module, name: str) -> nn.Linear:
    linear = module.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def refuse_meta(module: nn.Module, name: str) -> None:
    """Raises UnsupportedModelError for a tensor of `module` that was not read."""
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedModelError(
                f"the checkpoint has nothing for {name}{key}, with which transformers' code of "
                "this model computes"
            )
