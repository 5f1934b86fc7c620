"""Reads parameters and matrices of a generic model by the names of its modules.

A parameter may be a tensor of the checkpoint, be made of several, or be made with others of one.
"""

import copy

import torch
from torch import nn

from sgl_pipeline.errors import CheckpointError, UnsupportedModelError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, Linear
from sgl_pipeline.pp_runner.model.generic.skeleton import Entry, KeyTable, Skeleton
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.layouts import read_matrix, round_matrix
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix
from sgl_pipeline.pp_runner.weights.schemes import Layout, Quantization


class TensorReader:
    """The tensors of `source` for the modules of `skeleton`."""

    def __init__(
        self,
        skeleton: Skeleton,
        table: KeyTable,
        source: WeightSource,
        kernels: LayerKernels,
        quantization: Quantization | None,
    ) -> None:
        self.source = source
        self.kernels = kernels
        self._skeleton = skeleton
        self._table = table
        self.quantization = quantization
        self._made: dict[str, torch.Tensor] = {}  # parameters whose entry made several

    def linear(self, module: nn.Linear, prefix: str) -> Linear:
        """Our product with the weight and bias of the Linear `module`."""
        name = prefix.rstrip(".")
        matrix = self.matrix(name, module.weight.shape)
        return self.kernels.linear(matrix, self.bias(module, name))

    def bias(self, module: nn.Linear, name: str) -> torch.Tensor | None:
        if module.bias is None:
            return None
        return self.tensor(f"{name}.bias", module.bias)

    def matrix(self, name: str, shape: torch.Size | tuple[int, ...]) -> Matrix:
        """The matrix `name`.weight, in the format that the model's quantization gives it."""
        outputs, inputs = shape
        target = f"{name}.weight"
        entry = self._table.entry_of(target)
        if entry is None or entry.converter is None:
            module = self.name_of(target).removesuffix(".weight")
            return read_matrix(self.source, self.quantization, module, (outputs, inputs))
        quantization = self.quantization
        scheme = None if quantization is None else quantization.scheme_of(name)
        if quantization is None or scheme is None:
            return self._converted(target, entry, self.source.dtype)
        if quantization.layout_of(name) is not Layout.SIXTEEN_BITS:
            raise UnsupportedModelError(
                f"the quantized matrix {entry.sources[0][0]} is made into {target} by "
                f"{entry.converter.operations}, which is for 16 bits only"
            )
        tensor = self._converted(target, entry, self.source.dtype)
        return round_matrix(self.source, target, tensor, scheme)

    def tensor(self, target: str, like: torch.Tensor) -> torch.Tensor:
        """The parameter `target`, of the shape and dtype of `like`."""
        entry = self._table.entry_of(target)
        if entry is not None and entry.converter is not None:
            return self._converted(target, entry, like.dtype)
        name, shape = self.name_of(target), tuple(like.shape)
        if like.dtype == self.source.dtype or self.source.is_made_up:
            return self.source.read(name, shape).to(like.dtype)
        return self.source.read_as(name, shape, like.dtype)

    def entry_of(self, target: str) -> Entry | None:
        """The entry of the checkpoint that makes the parameter `target`."""
        return self._table.entry_of(target)

    def has(self, target: str) -> bool:
        """True if the checkpoint has the parameter `target`."""
        return self._table.entry_of(target) is not None

    def name_of(self, target: str) -> str:
        """See `KeyTable.name_of`."""
        return self._table.name_of(target)

    def source_matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The matrix that the checkpoint calls `name`."""
        module = name.removesuffix(".weight")
        return read_matrix(self.source, self.quantization, module, shape)

    def is_quantized(self, name: str) -> bool:
        """True if the matrix that the checkpoint calls `name` has fewer than 16 bits in the
        model."""
        quantization = self.quantization
        module = name.removesuffix(".weight")
        return quantization is not None and quantization.scheme_of(module) is not None

    def _converted(self, target: str, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """The parameter `target`, which `entry` makes by a conversion, perhaps with others."""
        if target not in self._made:
            converter = copy.deepcopy(entry.converter)
            assert converter is not None
            for name, pattern in entry.sources:
                tensor = self.source.read(name, self.source.shape_of(name))
                converter.add_tensor(entry.target, name, pattern, tensor)
            model = self._skeleton.model
            made = converter.convert(entry.target, model=model, config=model.config)
            for name, values in made.items():
                self._made[name] = values[0] if isinstance(values, list) else values
        if target not in self._made:
            raise CheckpointError(f"the tensors of {entry.target} do not make {target}")
        return self._made.pop(target).to(dtype).contiguous()
