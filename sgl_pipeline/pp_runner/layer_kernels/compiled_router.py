"""The router of experts on CPU cores, by `cpu_kernels/routing.cpp`.

It hands raw pointers to C++, so it must never pass a tensor on whose shape, type or layout was not
checked.
"""

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.cpu_kernels.library import CPU_DTYPES, CpuKernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_gated_delta import check_tensors
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Routing, RoutingRule

_BLOCK_OUTPUTS, _BLOCK_INPUTS = 8, 16


class CompiledRouter:
    """See `Router` and `LayerKernels.router`: one kernel, where torch takes a dozen for a row. Of
    equal experts it chooses the first ones. Rows are fp32 or bf16.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        rule: RoutingRule,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        num_outputs, self._size = weight.shape
        self._num_shared = num_outputs - rule.num_experts
        assert self._num_shared in (0, 1) and weight.device.type == "cpu"
        assert 0 < rule.experts_per_token <= rule.num_experts
        assert bias is None or bias.shape == (num_outputs,)
        self._kernels = kernels
        self._rule = rule
        self._weight = _in_blocks(weight.float())
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: torch.Tensor) -> Routing:
        """The routing of rows `x` [T, H]."""
        num_rows, rule = len(x), self._rule
        assert x.dtype in CPU_DTYPES and x.shape == (num_rows, self._size)
        check_tensors(x.dtype, x)
        experts = x.new_empty(num_rows, rule.experts_per_token, dtype=torch.int64)
        weights = x.new_empty(num_rows, rule.experts_per_token, dtype=torch.float32)
        shared_weight = x.new_empty(num_rows, self._num_shared, dtype=torch.float32)
        self._kernels.route(
            is_bf16=x.dtype == torch.bfloat16,
            num_rows=num_rows,
            size=self._size,
            num_experts=rule.num_experts,
            num_outputs=rule.num_experts + self._num_shared,
            experts_per_token=rule.experts_per_token,
            normalized=rule.normalized,
            rows=x,
            weight=self._weight,
            bias=self._bias,
            experts=experts,
            weights=weights,
            shared_weights=shared_weight,
            num_threads=torch.get_num_threads(),
        )
        return Routing(experts, weights, shared_weight)


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """The weight [O, H] as [O / 8, H / 16, 8, 16], padded with zeros: a lone row reads it in the
    order of memory, eight outputs at once."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, -inputs % _BLOCK_INPUTS, 0, -outputs % _BLOCK_OUTPUTS))
    blocks = padded.view(-1, _BLOCK_OUTPUTS, padded.shape[1] // _BLOCK_INPUTS, _BLOCK_INPUTS)
    return blocks.transpose(1, 2).contiguous()
