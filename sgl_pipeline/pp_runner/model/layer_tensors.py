"""One layer's tensors, read from a `WeightSource` and joined as the layer uses them.

They are read while a stage loads; names come from `families.py`.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import GatedLinear, LayerKernels, Linear
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.kv_scales import KvScales, read_kv_scales
from sgl_pipeline.pp_runner.weights.layouts import read_matrix
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix, join, part_of, scale_rows
from sgl_pipeline.pp_runner.weights.schemes import Layout, Quantization
from sgl_pipeline.pp_runner.weights.stacked_matrices import read_plain_stack, read_stacked_matrices


class LayerTensors:
    """The tensors under `prefix`, which ends with a dot; `kernels` will multiply with them."""

    def __init__(
        self,
        prefix: str,
        weights: WeightSource,
        kernels: LayerKernels,
        quantization: Quantization | None = None,
    ) -> None:
        self.kernels = kernels
        self._prefix = prefix
        self._weights = weights
        self._quantization = quantization

    def kv_scales(self, projection: str) -> KvScales:
        """The KV scales of the attention whose `projection` this is."""
        attention = f"{self._prefix}{projection}".rpartition(".")[0]
        return read_kv_scales(self._weights, self._quantization, attention)

    def is_quantized(self, name: str) -> bool:
        """True if the matrix `name` is not of 16 bits."""
        quantization = self._quantization
        return quantization is not None and (
            quantization.scheme_of(f"{self._prefix}{name}") is not None
        )

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`.weight, which is never quantized."""
        return self._weights.read(f"{self._prefix}{name}.weight", shape)

    def stacked_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> torch.Tensor:
        """The named matrices, or the single one that holds them all, one below the other."""
        sizes = _sizes_in_file(names, out_features)
        return torch.cat(
            [
                self.weight(name, (size, in_features))
                for name, size in zip(names, sizes, strict=True)
            ]
        )

    def has_stack(self, name: str) -> bool:
        """True if a file holds the matrices of all experts as one tensor `name`."""
        return self._weights.has(f"{self._prefix}{name}")

    def stacked_matrices(
        self, name: str, shape: tuple[int, int, int]
    ) -> Iterator[tuple[Matrix, torch.Tensor]]:
        """Matrix [O, I] and bias [O] of each expert of the stack `name` with `shape` (E, O, I)."""
        module = f"{self._prefix}{name}"
        biases = self._weights.read(f"{module}_bias", shape[:2])
        matrices = read_stacked_matrices(self._weights, self._quantization, module, shape)
        return zip(matrices, biases, strict=True)

    def plain_stack(self, name: str, shape: tuple[int, int, int], like: str) -> Iterator[Matrix]:
        """The matrix [O, I] of each expert of the stack `name` with `shape` (E, O, I), which has 16
        bits in the file and is rounded as the matrix `like`.

        Raises CheckpointError where that should have fewer bits in the file.
        """
        quantization, module = self._quantization, f"{self._prefix}{like}"
        scheme = None if quantization is None else quantization.scheme_of(module)
        if quantization is not None and scheme is not None:
            layout = quantization.layout_of(module)
            if layout is not Layout.SIXTEEN_BITS:
                raise CheckpointError(
                    f"{self._prefix}{name} holds all experts in 16 bits; by config.json {module} "
                    f"is one of the matrices in {quantization.method}, which are read one by one"
                )
        return read_plain_stack(self._weights, scheme, f"{self._prefix}{name}", shape)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """The tensor `name` [size], which is neither a weight nor a bias of a module."""
        return self._weights.read(f"{self._prefix}{name}", (size,))

    def exact_vector(self, name: str, size: int) -> torch.Tensor:
        """The same in fp32, as precise as it is in its file."""
        if self._weights.is_made_up:
            return self.vector(name, size).float()
        return self._weights.read_as(f"{self._prefix}{name}", (size,), torch.float32)

    def linear(
        self,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        has_bias: bool,
        output_factors: torch.Tensor | None = None,
        input_factor: float = 1.0,
    ) -> Linear:
        """One product for the named projections, or the single one that holds them all.

        Args:
            output_factors: powers of two by which the outputs are multiplied, one for each; None
                for none.
            input_factor: a factor of all inputs.
        """
        matrices, biases = self._read(names, out_features, in_features, has_bias)
        _scale(matrices, biases, output_factors, input_factor)
        return linear_of(self.kernels, matrices, biases)

    def linear_and_gate(
        self,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        has_bias: bool,
        num_heads: int,
        output_factors: torch.Tensor | None,
    ) -> tuple[Linear, Linear]:
        """The `linear` of projections of which the first has twice its `out_features`, of each of
        `num_heads` the outputs and then their gates; and the product for the gates."""
        first, *others = out_features
        matrices, biases = self._read(names, (2 * first, *others), in_features, has_bias)
        sizes = (first // num_heads,) * 2
        matrices[0], gate = _turns(matrices[0], num_heads, sizes)
        gate_bias, bias = None, biases[0]
        if bias is not None:
            biases[0], gate_bias = bias.unflatten(0, (num_heads, 2, -1)).transpose(0, 1).flatten(1)
        _scale(matrices, biases, output_factors)
        return linear_of(self.kernels, matrices, biases), self.kernels.linear(gate, gate_bias)

    def linears_of_turns(
        self,
        name: str,
        num_turns: int,
        sizes: Sequence[int],
        in_features: int,
        places: Sequence[Sequence[int]],
    ) -> list[Linear]:
        """Products with parts of one matrix, in whose rows parts of these `sizes` take turns.

        Args:
            places: of the parts of each product, one below the other.
        """
        (matrix,), _ = self._read((name,), (num_turns * sum(sizes),), in_features, False)
        parts = _turns(matrix, num_turns, sizes)
        return [
            linear_of(self.kernels, [parts[place] for place in own], [None] * len(own))
            for own in places
        ]

    def gated_linear(
        self, names: Sequence[str], inner_size: int, in_features: int, has_bias: bool
    ) -> Linear:
        """`LayerKernels.gated_linear` of the named projections to the gate and to the gated
        values."""
        matrices, biases = self._read(names, (inner_size, inner_size), in_features, has_bias)
        return gated_linear_of(self.kernels, matrices, biases)

    def _read(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, has_bias: bool
    ) -> tuple[list[Matrix], list[torch.Tensor | None]]:
        """Matrix and bias, if there is one, of each of the projections in the file."""
        sizes = _sizes_in_file(names, out_features)
        matrices: list[Matrix] = []
        biases: list[torch.Tensor | None] = []
        for name, size in zip(names, sizes, strict=True):
            module = f"{self._prefix}{name}"
            biases.append(self._weights.read(f"{module}.bias", (size,)) if has_bias else None)
            matrices.append(
                read_matrix(self._weights, self._quantization, module, (size, in_features))
            )
        return matrices, biases


def linear_of(
    kernels: LayerKernels, matrices: list[Matrix], biases: Sequence[torch.Tensor | None]
) -> Linear:
    """The product with `matrices`, one below the other, and their biases; empties the list where
    they are joined."""
    return _joined(kernels.linear, matrices, biases) or _separate(kernels, matrices, biases)


def gated_linear_of(
    kernels: LayerKernels, matrices: list[Matrix], biases: Sequence[torch.Tensor | None]
) -> Linear:
    """`LayerKernels.gated_linear` of the matrices of gate and values, or of the one of both, as
    `linear_of`."""
    joined = _joined(kernels.gated_linear, matrices, biases)
    return joined or GatedLinear(_separate(kernels, matrices, biases), kernels.gate)


def _scale(
    matrices: list[Matrix],
    biases: list[torch.Tensor | None],
    output_factors: torch.Tensor | None,
    input_factor: float = 1.0,
) -> None:
    """Replaces matrices and biases by multiples, as `LayerTensors.linear` says."""
    if output_factors is None and input_factor == 1.0:
        return
    sizes = [matrix.shape[0] for matrix in matrices]
    factors = torch.ones(sum(sizes)) if output_factors is None else output_factors
    for place, part in enumerate(factors.split(sizes)):
        matrices[place] = scale_rows(matrices[place], part * input_factor)
        if (bias := biases[place]) is not None:
            biases[place] = bias * part.to(bias)


def _turns(matrix: Matrix, num_turns: int, sizes: Sequence[int]) -> list[Matrix]:
    """The parts of a matrix in whose rows parts of these `sizes` take turns, each as one."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    starts = range(0, num_turns * ends[-1], ends[-1])
    parts = []
    for end, size in zip(ends, sizes, strict=True):
        part = join([part_of(matrix, slice(at + end - size, at + end)) for at in starts])
        assert part is not None, "they are of one kind"
        parts.append(part)
    return parts


class _SeparateLinears:
    """The products with several weights, beside each other: for projections that cannot be one,
    because they are not quantized alike."""

    def __init__(self, linears: list[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self._linears], dim=1)


def _separate(
    kernels: LayerKernels, matrices: Sequence[Matrix], biases: Sequence[torch.Tensor | None]
) -> _SeparateLinears:
    return _SeparateLinears(
        [kernels.linear(matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
    )


def _joined(
    make: Callable[[Matrix, torch.Tensor | None], Linear],
    matrices: list[Matrix],
    biases: Sequence[torch.Tensor | None],
) -> Linear | None:
    """The product with all of `matrices` as one, which empties the list; None where they are of
    several kinds."""
    matrix = join(matrices)
    if matrix is None:
        return None
    matrices.clear()  # or there would be three copies while `make` packs the joined one
    given = [bias for bias in biases if bias is not None]
    return make(matrix, torch.cat(given) if given else None)


def _sizes_in_file(names: Sequence[str], sizes: Sequence[int]) -> Sequence[int]:
    return [sum(sizes)] if len(names) == 1 else sizes
