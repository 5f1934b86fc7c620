"""Matrix products in bf16 on CPU cores, compiled from `cpu_kernels/products.cpp`.

They need special instructions of the CPU. This module hands raw pointers to C++, so it must never
pass a tensor on whose shape, type or layout was not checked. Never keeps two copies of a weight.
"""

import torch

from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels
from sgl_pipeline.pp_runner.layer_kernels.weight_packing import in_lines


class CompiledLinear:
    """`x @ weight.T + bias` in bf16, summed in fp32 and rounded once; see `Linear`. Gated, that of
    `LayerKernels.gated_linear`: nothing is rounded before the gate.

    A row's result is bitwise the same in any microbatch and on any number of threads.
    At 1, 8, 32, 64, 128, 256 and 512 rows it takes 0.80, 0.82, 0.52, 0.90, 0.87, 0.91 and 0.90 of
    the time of oneDNN (`TorchLinear`): one core of a shared Xeon with AMX, the matrices of the
    0.27b preset, by `benchmark/kernels/kernels_cpu.py`.

    Args:
        kernels: of a library that `has_products`.
        weight: [out, in], gated [2 * out, in], bf16.
        bias: [out], gated [2 * out], in bf16, or None.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        assert kernels.has_products
        assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype)
        outputs, self.in_features = weight.shape
        assert outputs % (2 if is_gated else 1) == 0
        self.out_features = outputs // 2 if is_gated else outputs
        self._kernels = kernels
        self._bias = None if bias is None else bias.contiguous()
        self._is_gated = is_gated
        self._packed = in_lines(weight, 4, is_gated)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] for `x` [T, in]."""
        x = x.contiguous()
        assert x.dim() == 2 and x.shape[1] == self.in_features
        assert x.dtype == torch.bfloat16 and x.device.type == "cpu"
        y = x.new_empty(x.shape[0], self.out_features)
        self._kernels.product(
            num_rows=x.shape[0],
            inputs=self.in_features,
            outputs=self.out_features,
            gated=self._is_gated,
            rows=x,
            weight=self._packed,
            bias=self._bias,
            out=y,
            num_threads=torch.get_num_threads(),
        )
        return y
