"""Our own `DecoderLayer` from the parts of a layer of transformers that computes the same.

`plain_probe.py` finds which layers do. Ours can be recorded, which transformers' cannot.

Shapes: P rows, R rotated dims.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    HeadNorms,
    LayerKernels,
    RmsNorm,
    Rotation,
)
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer, LayerParts
from sgl_pipeline.pp_runner.model.generic.passing_layers import Given
from sgl_pipeline.pp_runner.model.generic.tensor_reader import TensorReader
from sgl_pipeline.pp_runner.model.layer_tensors import gated_linear_of, linear_of
from sgl_pipeline.pp_runner.model.mixers import AttentionMixer
from sgl_pipeline.pp_runner.model.mlp import GatedMlp
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix


@dataclass(frozen=True, slots=True)
class PlainForm:
    """Names of a layer's parts, by which it is a `DecoderLayer`; `epsilons` are those of its norms,
    `interleaved` as in `Rotation`."""

    norms: tuple[str, str | None, str, str | None]
    qkv: tuple[str, ...]
    output: str
    head_norms: tuple[str, ...]
    gate_up: tuple[str, ...]
    down: str
    epsilons: Mapping[str, float]
    interleaved: bool


def rotation_of(given: Given, *, interleaved: bool) -> Rotation | None:
    """The rotation of the rows; None if the layer does not get cosines and sines [1, P, R] that
    repeat those of its pairs."""
    angles = given[1].get("position_embeddings")
    if not isinstance(angles, tuple) or len(angles) != 2:
        return None
    halves = [one[0].float().chunk(2, dim=-1) for one in angles if one.dim() == 3]
    if len(halves) != 2 or not all(torch.equal(*pair) for pair in halves):
        return None
    return Rotation(halves[0][0].contiguous(), halves[1][0].contiguous(), interleaved)


def build_plain_layer(
    layer: int, form: PlainForm, template: nn.Module, prefix: str, reader: TensorReader
) -> DecoderLayer:
    """Our layer with the tensors below `prefix`, which ends with a dot."""

    def matrix(name: str) -> Matrix:
        linear = template.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return reader.matrix(f"{prefix}{name}", linear.weight.shape)

    def tensor(name: str) -> torch.Tensor:
        return reader.tensor(f"{prefix}{name}", template.get_parameter(name))

    parts = parts_of(form, template, matrix, tensor, reader.kernels)
    return DecoderLayer(layer, parts, reader.kernels)


def parts_of(
    form: PlainForm,
    layer: nn.Module,
    matrix: Callable[[str], Matrix],
    tensor: Callable[[str], torch.Tensor],
    kernels: LayerKernels,
) -> LayerParts:
    """The parts of `layer` by their names; `matrix` reads that of a Linear, `tensor` another
    parameter."""

    def norm(name: str | None) -> RmsNorm | None:
        return None if name is None else RmsNorm(tensor(f"{name}.weight"), form.epsilons[name])

    def read(names: Sequence[str]) -> tuple[list[Matrix], list[torch.Tensor | None]]:
        has_bias = [layer.get_submodule(name).bias is not None for name in names]
        biases = [
            tensor(f"{name}.bias") if given else None
            for name, given in zip(names, has_bias, strict=True)
        ]
        return [matrix(name) for name in names], biases

    attention_norm, mlp_norm = norm(form.norms[0]), norm(form.norms[2])
    assert attention_norm is not None and mlp_norm is not None
    return LayerParts(
        attention_norm=attention_norm,
        mixer=AttentionMixer(
            qkv=linear_of(kernels, *read(form.qkv)),
            head_norms=_head_norms(form, tensor),
            sinks=None,
            gate=None,
            output=linear_of(kernels, *read((form.output,))),
        ),
        attention_output_norm=norm(form.norms[1]),
        mlp_norm=mlp_norm,
        mlp=GatedMlp(
            gated_linear_of(kernels, *read(form.gate_up)), linear_of(kernels, *read((form.down,)))
        ),
        mlp_output_norm=norm(form.norms[3]),
    )


def _head_norms(form: PlainForm, tensor: Callable[[str], torch.Tensor]) -> HeadNorms | None:
    if not form.head_norms:
        return None
    query, key = (tensor(f"{name}.weight") for name in form.head_norms)
    return HeadNorms(query, key, form.epsilons[form.head_norms[0]])
