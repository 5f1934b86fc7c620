"""The router of experts by torch, on any device."""

import torch

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Routing, RoutingRule
from sgl_pipeline.pp_runner.layer_kernels.torch_linear import TorchLinear


class TorchRouter:
    """See `Router` and `LayerKernels.router`."""

    def __init__(
        self, rule: RoutingRule, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._rule = rule
        self._linear = TorchLinear(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: torch.Tensor) -> Routing:
        """The routing of rows `x` [T, H]."""
        logits = self._linear(x.float())
        probabilities = logits[:, : self._rule.num_experts].softmax(dim=-1)
        weights, experts = probabilities.topk(self._rule.experts_per_token, dim=-1)
        if self._rule.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(experts, weights, logits[:, self._rule.num_experts :].sigmoid())
