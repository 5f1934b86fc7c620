"""The mixture-of-experts layer: a router, experts that run in groups of rows, a shared expert.

Takes the place of the dense MLP in the layers that `ModelSpec.layer_experts` names. Rows are sorted
by expert, so that each expert sees all of its rows at once, and every row's results are summed in
the order of its routing: in fp32 on a CPU a row's bits do not depend on the rows beside it.

Shapes: T rows, H hidden size, F an expert's size, E experts, K experts of a row.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    GateClamp,
    LayerKernels,
    Router,
    Routing,
)
from sgl_pipeline.pp_runner.model.families import MlpNames, TensorNames
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.model.mlp import GatedMlp
from sgl_pipeline.pp_runner.model.model_spec import ExpertSpec
from sgl_pipeline.pp_runner.weights.quantized_weights import join, part_of


class Experts(Protocol):
    """All experts of a layer."""

    def __call__(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns [T, K, H]: what the `experts` [T, K] of each row of `x` [T, H] make of it, in
        their order."""


class OfGroups(Protocol):
    """The experts of a layer, with the rows of each together."""

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns [T * K, H], what its expert makes of each of `rows` [T * K, H], which are sorted
        by expert: those of expert e end before `ends[e]` ([E], int32, ascending)."""


class SeparateExperts:
    """An MLP for each expert, with its weights packed (see `Linear`): for CPUs, where it costs
    nothing to know the number of rows, and one product after the other uses all cores."""

    def __init__(self, mlps: list[GatedMlp]) -> None:
        self._mlps = mlps

    @classmethod
    def load(
        cls, tensors: LayerTensors, names: TensorNames, hidden_size: int, spec: ExpertSpec
    ) -> "SeparateExperts":
        if spec.clamp is not None:
            return cls(_stacked_mlps(tensors, names.expert, hidden_size, spec, spec.clamp))
        stacks = names.expert_stacks
        if stacks is not None and tensors.has_stack(stacks.down):
            return cls(_plainly_stacked_mlps(tensors, stacks, names.expert, hidden_size, spec))
        return cls(
            [
                GatedMlp.load(tensors, _expert_names(names.expert, e), hidden_size, spec.inner_size)
                for e in range(spec.num_experts)
            ]
        )

    def __call__(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See `Experts`. A row alone has the bits that it has in a group, and nothing is sorted for
        it: that takes longer than a small expert."""
        if len(x) == 1:
            return torch.cat([self._mlps[expert](x) for expert in experts[0].tolist()])[None]
        return _in_groups(x, experts, len(self._mlps), self.of_groups)

    def of_groups(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See `OfGroups`."""
        outputs, start = [], 0
        for mlp, end in zip(self._mlps, ends.tolist(), strict=True):
            if start < end:
                outputs.append(mlp(rows[start:end]))
            start = end
        return torch.cat(outputs)


def groups_stay_on_device(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """True if `grouped_mm` leaves the ends of its groups on a GPU of this compute capability.

    torch (2.11 to 2.14, `_scaled_mm_allowed_device`) has such a kernel for bf16 on 9.x and 10.x.
    Elsewhere it copies them to the host and computes one product for each group.
    """
    return dtype == torch.bfloat16 and capability[0] in (9, 10)


class StackedExperts:
    """All experts in two grouped products (`torch.nn.functional.grouped_mm`): for GPUs, where the
    number of rows of each expert need not come back to the host (`groups_stay_on_device`).

    Args:
        gate_up: [E, 2 F, H].
        down: [E, H, F].
        kernels: compute the gate between the two.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, kernels: LayerKernels) -> None:
        self._kernels = kernels
        self._gate_up = gate_up.transpose(1, 2)
        self._down = down.transpose(1, 2)

    @classmethod
    def load(
        cls, tensors: LayerTensors, names: TensorNames, hidden_size: int, spec: ExpertSpec
    ) -> "StackedExperts":
        """Copies one expert after the other into its place: the stack is the only whole copy.

        Raises ConfigurationError for quantized experts, and for those with a `clamp`.
        """
        if spec.clamp is not None:
            raise ConfigurationError(
                "experts with gpt-oss's gate are computed with on CPUs only; use --device cpu"
            )
        first = _expert_names(names.expert, 0)
        if any(tensors.is_quantized(name) for name in (*first.gate_up, first.down)):
            raise ConfigurationError(
                "quantized experts are computed with on CPUs only; use --device cpu, or a "
                "checkpoint whose experts have 16 bits"
            )
        stacks: list[torch.Tensor] = []
        for e in range(spec.num_experts):
            own = _expert_names(names.expert, e)
            weights = (
                tensors.stacked_weight(
                    own.gate_up, (spec.inner_size, spec.inner_size), hidden_size
                ),
                tensors.weight(own.down, (hidden_size, spec.inner_size)),
            )
            stacks = stacks or [
                weight.new_empty(spec.num_experts, *weight.shape) for weight in weights
            ]
            for stack, weight in zip(stacks, weights, strict=True):
                stack[e] = weight
        gate_up, down = stacks
        return cls(gate_up, down, tensors.kernels)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        return _in_groups(x, experts, len(self._gate_up), self.of_groups)

    def of_groups(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """See `OfGroups`."""
        inner = self._kernels.gate(F.grouped_mm(rows, self._gate_up, offs=ends))
        return F.grouped_mm(inner, self._down, offs=ends)


def experts_of(device: torch.device) -> type[SeparateExperts | StackedExperts]:
    """The experts of a stage on `device`; for torch's meta device, which is asked for sizes, those
    that have them in all formats."""
    return StackedExperts if device.type == "cuda" else SeparateExperts


class SparseMlp:
    """Router, experts and the shared expert, if there is one, as one `Mlp`."""

    def __init__(self, router: Router, experts: Experts, shared_expert: GatedMlp | None) -> None:
        self._router = router
        self._experts = experts
        self._shared_expert = shared_expert

    @classmethod
    def load(
        cls, tensors: LayerTensors, names: TensorNames, hidden_size: int, spec: ExpertSpec
    ) -> "SparseMlp":
        gates = [tensors.weight(names.router, (spec.num_experts, hidden_size))]
        shared_expert = None
        if spec.shared_inner_size:
            gates.append(tensors.weight(names.shared_expert_gate, (1, hidden_size)))
            shared_expert = GatedMlp.load(
                tensors, names.shared_expert, hidden_size, spec.shared_inner_size
            )
        experts = experts_of(gates[0].device)
        return cls(
            tensors.kernels.router(spec, torch.cat(gates), _router_bias(tensors, names, spec)),
            experts.load(tensors, names, hidden_size, spec),
            shared_expert,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        routing = self._router(x)
        mixed = self._mix(x, routing)
        if self._shared_expert is not None:
            mixed += routing.shared_weight * self._shared_expert(x)
        return mixed.to(x.dtype)

    def _mix(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The weighted sum [T, H], in fp32, of the results of each row's experts."""
        by_row = self._experts(x, routing.experts)
        return (by_row * routing.weights[..., None]).sum(dim=1)


def _in_groups(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int, of_groups: OfGroups
) -> torch.Tensor:
    """See `Experts`, by `of_groups` of `num_experts` experts."""
    per_row = experts.shape[1]
    by_expert, order = experts.flatten().sort(stable=True)
    all_experts = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(by_expert, all_experts, right=True, out_int32=True)
    outputs = of_groups(x[order // per_row], ends)
    return outputs[order.argsort()].unflatten(0, (-1, per_row))


def _router_bias(
    tensors: LayerTensors, names: TensorNames, spec: ExpertSpec
) -> torch.Tensor | None:
    has_bias = spec.clamp is not None
    return tensors.vector(f"{names.router}.bias", spec.num_experts) if has_bias else None


def _stacked_mlps(
    tensors: LayerTensors, names: MlpNames, hidden_size: int, spec: ExpertSpec, clamp: GateClamp
) -> list[GatedMlp]:
    """The MLPs of a checkpoint's stacks: of the first outputs of gates and of ups take turns."""
    num_experts, inner_size = spec.num_experts, spec.inner_size
    (gate_up,) = names.gate_up
    both = tensors.stacked_matrices(gate_up, (num_experts, 2 * inner_size, hidden_size))
    down = tensors.stacked_matrices(names.down, (num_experts, hidden_size, inner_size))
    parts = (slice(0, None, 2), slice(1, None, 2))
    mlps = []
    for (matrix, bias), (down_matrix, down_bias) in zip(both, down, strict=True):
        turned = join([part_of(matrix, part) for part in parts])
        assert turned is not None, "they are of one kind"
        turned_bias = torch.cat([bias[part] for part in parts])
        mlps.append(
            GatedMlp.clamped(
                tensors.kernels, clamp, (turned, turned_bias), (down_matrix, down_bias.clone())
            )
        )
    return mlps


def _plainly_stacked_mlps(
    tensors: LayerTensors,
    stacks: MlpNames,
    expert: MlpNames,
    hidden_size: int,
    spec: ExpertSpec,
) -> list[GatedMlp]:
    """The MLPs of a checkpoint's `stacks`, in the place of separate ones named as `expert`: of the
    first all gates come before all ups."""
    num_experts, inner_size, kernels = spec.num_experts, spec.inner_size, tensors.kernels
    first, (gate_up,) = _expert_names(expert, 0), stacks.gate_up
    both = tensors.plain_stack(
        gate_up, (num_experts, 2 * inner_size, hidden_size), first.gate_up[0]
    )
    down = tensors.plain_stack(stacks.down, (num_experts, hidden_size, inner_size), first.down)
    return [
        GatedMlp(kernels.gated_linear(gate_up_matrix), kernels.linear(down_matrix))
        for gate_up_matrix, down_matrix in zip(both, down, strict=True)
    ]


def _expert_names(names: MlpNames, expert: int) -> MlpNames:
    return MlpNames(
        tuple(name.format(expert=expert) for name in names.gate_up),
        names.down.format(expert=expert),
    )
