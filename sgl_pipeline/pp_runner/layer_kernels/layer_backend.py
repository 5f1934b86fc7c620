"""The interface of backends for the decoder layers: all of their work except attention.

`pp_runner/kernel_choice.py` chooses between them. Shapes: T rows of the step, H hidden size, F
feed-forward size, Hq query heads, Hkv key/value heads, D head dim, of which R are rotated, N pages,
S page size, W width of a row in a page, E experts, K experts of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sgl_pipeline.pp_runner.base.state_rows import StateRows
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import GatedDeltaWeights, LayerStates
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix


class RmsNorm(NamedTuple):
    """Root mean square norm (arXiv 1910.07467) over the last dimension, times `weight` [H] plus
    `offset`."""

    weight: torch.Tensor
    epsilon: float
    offset: float = 0.0


class HeadNorms(NamedTuple):
    """The norms of every query head and every key head, by their weights [D], to which `offset` is
    added."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float
    offset: float = 0.0


class Rotation(NamedTuple):
    """The rotary embedding (arXiv 2104.09864) of a step's rows: `cosine` and `sine` [T, R / 2] fp32
    of each pair's angle, times the attention factor of YaRN or LongRoPE. Pairs are neighbors where
    `interleaved`, else the i-th of the first R / 2 dimensions and the i-th of the next R / 2."""

    cosine: torch.Tensor
    sine: torch.Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True)
class GateClamp:
    """gpt-oss's gate: `(up + 1) * gate * sigmoid(alpha * gate)`, where the gate is at most `limit`,
    and `up` between that and its negative (transformers: `GptOssExperts._apply_gate`)."""

    alpha: float
    limit: float


class Routing(NamedTuple):
    """The experts of rows: `experts` [T, K] int64, best first, and their `weights` [T, K] fp32.

    `shared_weight` [T, 1] fp32 is the shared expert's weight; empty, [T, 0], without a shared
    expert.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    shared_weight: torch.Tensor


class RoutingRule(Protocol):
    """The choice of a router: K of E experts, whose weights sum to one if they are normalized."""

    @property
    def num_experts(self) -> int: ...

    @property
    def experts_per_token(self) -> int: ...

    @property
    def normalized(self) -> bool: ...


class Router(Protocol):
    """Softmax over the experts, then the K best (transformers: `MixtralTopKRouter`,
    `Qwen2MoeTopKRouter`), all in fp32; the shared expert's sigmoid gate is one more row of it."""

    def __call__(self, x: torch.Tensor) -> Routing:
        """The routing of rows `x` [T, H]."""


class Linear(Protocol):
    """A matrix product with a weight of its own."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias` [T, out] for `x` [T, in], in its dtype."""


class GatedLinear:
    """`gate` of the result of `linear`: the `LayerKernels.gated_linear` of leaves that compute the
    two one after the other."""

    def __init__(self, linear: Linear, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._linear = linear
        self._gate = gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(self._linear(x))


class LayerKernels(Protocol):
    """Products, norms, heads and the gate of a layer. Tensors are in the model's dtype and
    contiguous.

    Only pages and states are written to, and the arguments that `add_norm` may overwrite.
    """

    def linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        """The product with `weight` [out, in], quantized or not, and `bias` [out], if any.

        The caller drops its reference to `weight`, which may be kept in another layout.
        """

    def gated_linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        """`gate` of the product with `weight` [2 F, in] and `bias` [2 F], gate first: [T, F]. As
        for `linear`, the caller drops its reference."""

    def router(
        self, rule: RoutingRule, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Router:
        """The router with `weight` [E, H], or [E + 1, H] with the shared expert's gate last, and
        `bias` of as many numbers, if any."""

    def norm(self, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """The normed `rows` [T, H]."""

    def add_norm(
        self,
        stream: torch.Tensor,
        added: torch.Tensor,
        norm: RmsNorm,
        may_overwrite: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum `stream + added` [T, H], and the norm of the sum.

        Backends may take the norm before they round the sum to the dtype, or after it; each must
        do the same in every layer, or tokens would depend on where stages are cut.

        Args:
            added: the backend may overwrite it.
            may_overwrite: whether `stream` is, too. Changes no bit of the results.
        """

    def add(self, stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """The sum `stream + added` [T, H]."""

    def place_heads(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        rotation: Rotation,
        slots: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The rows of `qkv` [T, (Hq + 2 Hkv) * D] on their way to the attention.

        Norms the heads of queries and keys, if there are `norms`, rotates them, and writes keys and
        values of row t into slot `slots[t]` (int64 [T], unique) of the layer's key and value
        `pages` [N, S, Hkv, W], which is offset `slots[t] % S` of page `slots[t] // S`: the numbers,
        or their codes (`kv_format.py`).

        Returns the queries [T, Hq, D].
        """

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` [T, F] of `gate_up` [T, 2 F], gate first."""

    def clamped_gate(self, gate_up: torch.Tensor, clamp: GateClamp) -> torch.Tensor:
        """The same with another gate."""

    def output_gate(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`rows * sigmoid(gate)`, all [T, any]."""

    def gated_delta(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: GatedDeltaWeights,
        states: StateRows,
        pool: LayerStates,
    ) -> torch.Tensor:
        """The gated delta rule, from the four projections of a layer's rows to the input of its
        output projection: [T, Hv * Dv].

        Convolves `qkv` [T, W] over rows, norms queries and keys, then has each row read its run's
        state after it decayed it, by `a` [T, Hv], and wrote to it, by `b` [T, Hv]; norms what was
        read, and gates it with `z` [T, Hv * Dv]. Shapes: `gated_delta.py`.

        Args:
            states: which rows take which state further; the runs of a chunk one after the other.
            pool: the states in the slots that are written are replaced.
        """
