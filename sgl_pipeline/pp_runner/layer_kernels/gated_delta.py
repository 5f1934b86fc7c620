"""The gated delta rule (arXiv 2412.06464) of layers that keep a state per request, and its
reference in plain torch: the compiled kernel of `cpu_kernels/gated_delta.cpp` is tested against it.

Shapes: T rows of the step in R runs (`StateRows`), Hk key heads of Dk, Hv value heads of Dv, a
convolution over K rows of W = 2 * Hk * Dk + Hv * Dv channels, S state slots. Value head h has the
query and the key of head h // (Hv // Hk).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.base.state_rows import StateRows

NORM_EPSILON = 1e-6  # of queries and keys, added to the sum of squares


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaWeights:
    """The weights besides projections. `conv` and `norm` are in the model's dtype."""

    conv: torch.Tensor  # [K, W], contiguous: a checkpoint's [W, 1, K], transposed
    a_log: torch.Tensor  # [Hv], fp32
    dt_bias: torch.Tensor  # [Hv], fp32
    norm: torch.Tensor  # [Dv], of the gated norm, not one less
    epsilon: float  # of the gated norm


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The states of one layer, contiguous, by slot."""

    recurrent: torch.Tensor  # [S, Hv, Dk, Dv], fp32
    conv: torch.Tensor  # [S, K - 1, W], the last inputs, oldest first; in the model's dtype


def gated_delta(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: GatedDeltaWeights,
    states: StateRows,
    pool: LayerStates,
) -> torch.Tensor:
    """See `LayerKernels.gated_delta`. All arithmetic is fp32, and only the result is rounded."""
    num_value_heads, key_dim, value_dim = pool.recurrent.shape[1:]
    decay = (-weights.a_log.exp() * _softplus(a.float() + weights.dt_bias)).exp()
    beta = b.float().sigmoid()
    read = qkv.new_empty(qkv.shape[0], num_value_heads, value_dim, dtype=torch.float32)
    bounds = states.row_indptr.tolist()
    read_slots, write_slots = states.read_slots.tolist(), states.write_slots.tolist()
    runs = zip(read_slots, write_slots, states.starts_anew.tolist(), strict=True)
    for (source, slot, is_new), begin, end in zip(runs, bounds, bounds[1:], strict=False):
        rows, recurrent, conv = slice(begin, end), pool.recurrent[slot], pool.conv[slot]
        if is_new:
            recurrent.zero_()
            conv.zero_()
        elif source != slot:
            recurrent.copy_(pool.recurrent[source])
            conv.copy_(pool.conv[source])
        mixed = F.silu(_convolve(qkv[rows], weights.conv, conv))
        width = (mixed.shape[1] - num_value_heads * value_dim) // 2
        query, key, value = mixed.split((width, width, num_value_heads * value_dim), dim=1)
        heads = num_value_heads * key_dim // width
        read[rows] = _recur(
            _unit(query.unflatten(1, (-1, key_dim))).repeat_interleave(heads, 1) * key_dim**-0.5,
            _unit(key.unflatten(1, (-1, key_dim))).repeat_interleave(heads, 1),
            value.unflatten(1, (-1, value_dim)),
            decay[rows],
            beta[rows],
            recurrent,
        )
    normed = F.rms_norm(read, (value_dim,), weights.norm.float(), weights.epsilon)
    return (normed.flatten(1) * F.silu(z.float())).to(qkv.dtype)


def _convolve(rows: torch.Tensor, weight: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The causal convolution [n, W] of `rows` [n, W], fp32; `last` [K - 1, W] becomes the last
    inputs."""
    inputs = torch.cat((last, rows))
    last.copy_(inputs[rows.shape[0] :])
    sums = inputs.new_zeros(rows.shape, dtype=torch.float32)
    for tap, factors in enumerate(weight.float()):
        sums += inputs[tap : tap + rows.shape[0]] * factors
    return sums


def _recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The reads [n, Hv, Dv] of a run's rows from `state` [Hv, Dk, Dv], each after it wrote.

    `query` and `key` [n, Hv, Dk], `value` [n, Hv, Dv], `decay` and `beta` [n, Hv].
    """
    read = value.new_empty(value.shape)
    for row in range(value.shape[0]):
        state *= decay[row, :, None, None]
        known = (key[row, :, :, None] * state).sum(1)
        delta = beta[row, :, None] * (value[row] - known)
        state += key[row, :, :, None] * delta[:, None]
        read[row] = (query[row, :, :, None] * state).sum(1)
    return read


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * ((heads * heads).sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + (-x.abs()).exp().log1p()
