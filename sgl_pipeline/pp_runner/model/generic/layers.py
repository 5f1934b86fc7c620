"""Our kernels inside transformers' layers, in the place of modules that compute the same.

A row's bits must not depend on the rows beside it, and torch's products do not promise that: so
every product of a layer is one of ours. A module is replaced only where a trial on numbers shows
what it computes; its class and its names show nothing.

Shapes: T rows, H hidden size, F feed-forward size, E experts, K experts of a row.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, Linear, RmsNorm
from sgl_pipeline.pp_runner.layer_kernels.torch_linear import TorchLinear

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_SCALES = (1e-3, 1.0, 100.0)  # small ones show the epsilon, large ones a limit


class RowLinear(nn.Module):
    """`linear`, which takes two dimensions, for any number of them."""

    def __init__(self, linear: Linear, out_features: int) -> None:
        super().__init__()
        self._linear = linear
        self.out_features = out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._linear(rows).view(*x.shape[:-1], self.out_features)


class RowNorm(nn.Module):
    """An RMS norm by our kernels, over the last of any number of dimensions."""

    def __init__(self, norm: RmsNorm, kernels: LayerKernels) -> None:
        super().__init__()
        self._norm = norm
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.norm(rows, self._norm).view(x.shape)


class RowGatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))` for any number of dimensions.

    Args:
        gated_up: to `silu(gate(x)) * up(x)` [T, F].
        down: back to [T, H].
    """

    def __init__(self, gated_up: Linear, down: Linear) -> None:
        super().__init__()
        self._gated_up = gated_up
        self._down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._down(self._gated_up(rows)).view(*x.shape[:-1], -1)


class RowExperts(nn.Module):
    """All experts of a layer, called as transformers' expert modules: each sees all of its rows at
    once, and a row's results are summed in the order of its routing, in fp32."""

    def __init__(self, experts: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self._experts = list(experts)
        self.num_experts = len(self._experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] of rows [T, H], with the experts [T, K] of each and their weights [T, K]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        per_row = top_k_index.shape[-1]
        by_expert, order = top_k_index.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(
            by_expert, torch.arange(self.num_experts, device=rows.device), right=True
        )
        outputs, start = [], 0
        sorted_rows = rows[order // per_row]
        for expert, end in zip(self._experts, ends.tolist(), strict=True):
            if start < end:
                outputs.append(expert(sorted_rows[start:end]))
            start = end
        by_row = torch.cat(outputs)[order.argsort()].unflatten(0, (-1, per_row))
        weights = top_k_weights.reshape(-1, per_row, 1).float()
        return (by_row * weights).sum(dim=1).to(rows.dtype).view(hidden_states.shape)


def is_experts(module: nn.Module) -> bool:
    """True for a module of transformers' interface for experts (`use_experts_implementation` in
    integrations/moe.py)."""
    names = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
    return all(hasattr(module, name) for name in names)


def num_experts_of(module: nn.Module) -> int:
    """E of a module that `is_experts`."""
    assert isinstance(module.num_experts, int)
    return module.num_experts


def norm_weight(module: nn.Module) -> tuple[torch.Tensor, float] | None:
    """The weight [H] in the module's dtype and the epsilon with which `RmsNorm` is `module`; None
    if no such weight is."""
    if [*module.children()] or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    if [*module.buffers()]:
        return None
    weight = module.get_parameter("weight")
    if weight.dim() != 1:
        return None
    for name in _EPSILONS:
        epsilon = getattr(module, name, None)
        if not isinstance(epsilon, float):
            continue
        if _is_norm(module, epsilon, added=0.0):
            return weight.detach(), epsilon
        if _is_norm(module, epsilon, added=1.0):
            whole = 1.0 + weight.detach().float()
            rounded = whole.to(weight.dtype)
            # Else the kernel, whose weights have the model's dtype, would compute something else.
            return (rounded, epsilon) if torch.equal(rounded.float(), whole) else None
    return None


def _is_norm(module: nn.Module, epsilon: float, added: float) -> bool:
    """True if `module` is an RMS norm times its weight and `added`, by a trial in fp32."""
    size = 24
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator)
    trial = _with_parts(module, parameters={"weight": nn.Parameter(weight, requires_grad=False)})
    for name in ("normalized_shape", "hidden_size", "dim"):
        if hasattr(trial, name):
            object.__setattr__(trial, name, (size,) if name == "normalized_shape" else size)
    for scale in _SCALES:
        rows = torch.randn(4, size, generator=generator) * scale
        wanted = F.rms_norm(rows, (size,), weight + added, epsilon)
        if not _computes(trial, rows, wanted):
            return False
    return True


def gated_mlp(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """The names of the Linears of `module` by which it is a SwiGLU MLP: those of gate and up, or
    the one of both, gate first, and that of down. None if it computes something else."""
    linears = [name for name, child in module.named_children() if type(child) is nn.Linear]
    others = [child for _, child in module.named_children() if type(child) is not nn.Linear]
    if [*module.parameters(recurse=False)] or any([*one.parameters()] for one in others):
        return None
    if len(linears) == 3:
        for gate in linears:
            for up in linears:
                (down, *_) = [one for one in linears if one not in (gate, up)]
                if gate != up and _is_gated(module, (gate, up), down):
                    return (gate, up), down
    if len(linears) == 2:
        for both, down in (linears, linears[::-1]):
            if _is_gated(module, (both,), down):
                return (both,), down
    return None


def _is_gated(module: nn.Module, gate_up: tuple[str, ...], down: str) -> bool:
    """True if `module` is the MLP of these Linears, by a trial with small ones in fp32."""
    size, inner = 8, 12
    generator = torch.Generator().manual_seed(0)
    own = {}
    for name in (*gate_up, down):
        inputs, outputs = (inner, size) if name == down else (size, inner * 2 // len(gate_up))
        own[name] = nn.Linear(inputs, outputs, module.get_submodule(name).bias is not None)
        for parameter in own[name].parameters():
            parameter.requires_grad_(False).normal_(generator=generator)
    trial = _with_parts(module, modules=own)
    for scale in _SCALES:
        rows = torch.randn(4, size, generator=generator) * scale
        gate, up = torch.cat([own[name](rows) for name in gate_up], dim=-1).chunk(2, dim=-1)
        if not _computes(trial, rows, own[down](F.silu(gate) * up)):
            return False
    return True


def has_silu_gate(experts: nn.Module) -> bool:
    """True if the gate between the products of `experts` is `silu(first half) * second half`."""
    if not experts.has_gate:
        return False
    generator = torch.Generator().manual_seed(0)
    for scale in _SCALES:
        gate_up = torch.randn(4, 24, generator=generator) * scale
        gate, up = gate_up.chunk(2, dim=-1)
        if not _computes(expert_gate(experts), gate_up, F.silu(gate) * up):
            return False
    return True


def expert_gate(experts: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The computation of `experts` between their two products."""
    gate: Callable[[torch.Tensor], torch.Tensor] = (
        experts._apply_gate if experts.has_gate else experts.act_fn  # type: ignore[assignment]
    )
    return gate


def _computes(
    module: Callable[[torch.Tensor], Any], rows: torch.Tensor, wanted: torch.Tensor
) -> bool:
    try:
        found = module(rows)
    except Exception:  # whatever it is, it is not what we look for
        return False
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
        return False
    return torch.allclose(found, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))


def _with_parts(
    module: nn.Module,
    *,
    parameters: dict[str, nn.Parameter] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """A copy of `module` with other parts in the place of its own, which it shares otherwise."""
    trial = copy.copy(module)
    trial.__dict__ = dict(module.__dict__)
    trial.__dict__["_parameters"] = {**module._parameters, **(parameters or {})}
    trial.__dict__["_modules"] = {**module._modules, **(modules or {})}
    return trial


class OwnProducts(nn.Module):
    """A small module that multiplies with matrices of its own, such as a router: its
    `F.linear` is ours. Any other product would depend on the rows beside a row, and is refused."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self._module = module
        self._products = _Products(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._products.of_a_call():
            return self._module(*args, **kwargs)


_OTHER_PRODUCTS = frozenset(
    {
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.Tensor.mm,
        torch.bmm,
        torch.Tensor.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        torch.conv1d,
        F.conv1d,
    }
)


class _Products(TorchFunctionMode):
    """Computes the n-th `F.linear` of each call with the packed weights of the first call's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._linears: list[TorchLinear] = []
        self._count = 0

    def of_a_call(self) -> "_Products":
        self._count = 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._product(*args, **(kwargs or {}))
        if func in _OTHER_PRODUCTS:
            raise UnsupportedModelError(
                f"{self._name} multiplies matrices by {func.__name__}, whose rows would depend on "
                "each other"
            )
        return func(*args, **(kwargs or {}))

    def _product(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._count == len(self._linears):
            self._linears.append(TorchLinear(weight.detach().clone(), bias))
        linear = self._linears[self._count]
        self._count += 1
        assert (linear.out_features, linear.in_features) == tuple(weight.shape)
        rows = input.reshape(-1, input.shape[-1])
        return linear(rows).view(*input.shape[:-1], linear.out_features)
