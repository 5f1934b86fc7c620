"""Draws the next token of each sampled row from its logits.

Called by the last stage's worker after the forward pass. A row's token depends on its logits, its
`SamplingSpec` and its position alone, never on the rows beside it or on what was drawn before: the
random number is a hash of (seed, position), so nothing has to be kept, moved or restored.

On a GPU nothing comes back to the host before the drawn token ids do. FlashInfer's samplers are not
used: their random numbers follow from a row's place in the microbatch (`curand_init(seed, row,
offset)` in 0.6.18 and 0.7.2), so that a token would change with its neighbours.

Shapes: S sampled rows, V vocabulary size, C candidates.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from sgl_pipeline.pp_runner.step_inputs import to_device
from sgl_pipeline.requests import SamplingSpec

# Rows with a top-k up to here look at this many candidates and save the sort of the vocabulary. One
# number for all of them, so that ties are broken alike whatever the microbatch.
MAX_PARTIAL_TOP_K = 128

_MASK_64 = (1 << 64) - 1


class Sampler:
    """Greedy, temperature, top-k, top-p and min-p, with different parameters in each row.

    The order is that of SGLang (`top_k_top_p_min_p_sampling_from_probs_torch`): softmax of the
    logits over the temperature, then three cuts that all look at these probabilities, unrenormed:
    rank below top_k; the mass before a token at most top_p; at least min_p times the highest. The
    token is drawn from what all three keep.

    A row whose logits are not finite never fails and never touches other rows. Greedy gives the
    index of its first NaN; otherwise NaN and -inf count as the lowest number of fp32 and +inf as
    the highest.
    """

    def sample(
        self, logits: torch.Tensor, sampling: Sequence[SamplingSpec], positions: torch.Tensor
    ) -> list[int]:
        """The token ids of the rows.

        Args:
            logits: [S, V] fp32.
            sampling: the spec of each row.
            positions: [S] int64 on the host: where in its request each drawn token will stand.
        """
        token_ids = _likeliest(logits)
        for num_candidates, rows in _rows_to_draw(sampling, logits.shape[1]).items():
            specs = [sampling[row] for row in rows]
            uniforms = uniform_numbers([spec.seed for spec in specs], positions.numpy()[rows])
            row_indices = to_device(np.array(rows), logits.device)
            token_ids[row_indices] = _draw(logits[row_indices], specs, num_candidates, uniforms)
        return token_ids.tolist()


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the highest logits of each row, [S] int64; the first NaN where there is one."""
    if logits.device.type == "cpu":
        # A twelfth of the time that torch takes for 32 rows of 32,000.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def uniform_numbers(seeds: Sequence[int], positions: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) for each pair of seed (any integer, 64 bits count) and position.

    Two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): hash the seed, add
    the position, hash again.
    """
    seed_bits = np.array([seed & _MASK_64 for seed in seeds], np.uint64)
    mixed = _mix(_mix(seed_bits) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """One output of SplitMix64 for each uint64 state; uint64 arithmetic wraps."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _rows_to_draw(sampling: Sequence[SamplingSpec], vocab_size: int) -> dict[int, list[int]]:
    """The rows that are not greedy, by how many of their likeliest candidates must be sorted."""
    rows_of: dict[int, list[int]] = {}
    for row, spec in enumerate(sampling):
        if not spec.is_greedy:
            rows_of.setdefault(_num_sorted_candidates(spec, vocab_size), []).append(row)
    return rows_of


def _num_sorted_candidates(spec: SamplingSpec, vocab_size: int) -> int:
    """0 where no cut needs an order (min-p does not)."""
    if spec.top_k == 0 and spec.top_p >= 1.0:
        return 0
    if 0 < spec.top_k <= MAX_PARTIAL_TOP_K:
        return min(MAX_PARTIAL_TOP_K, vocab_size)
    return vocab_size


def _draw(
    logits: torch.Tensor, specs: list[SamplingSpec], num_sorted: int, uniforms: np.ndarray
) -> torch.Tensor:
    """Token ids [S] of rows that all sort `num_sorted` candidates (0: draw in vocabulary order)."""
    vocab_size = logits.shape[1]
    # Rounding may carry the whole mass past 1.0, where top_p = 1.0 must still cut nothing.
    parameters = [
        (
            spec.temperature,
            spec.min_p,
            spec.top_p if spec.top_p < 1.0 else math.inf,
            spec.top_k or vocab_size,
        )
        for spec in specs
    ]
    # One copy for all parameters, each a column [S, 1] there.
    table = to_device(np.column_stack((parameters, uniforms)), logits.device)
    temperatures, min_ps, top_ps, top_ks, shares = table[:, :, None].unbind(1)
    probabilities = _probabilities(logits, temperatures)
    highest = probabilities.amax(dim=-1, keepdim=True)
    candidate_ids = None
    if num_sorted == vocab_size:
        probabilities, candidate_ids = torch.sort(
            probabilities, dim=-1, descending=True, stable=True
        )
    elif num_sorted:
        probabilities, candidate_ids = probabilities.topk(num_sorted, dim=-1)

    is_kept = probabilities >= min_ps * highest
    if candidate_ids is not None:
        mass_before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
        ranks = torch.arange(probabilities.shape[1], device=logits.device)
        is_kept &= mass_before <= top_ps
        is_kept &= ranks < top_ks

    # Inverse of the distribution function: the first candidate whose cumulated mass is above a
    # uniform share of the whole. That share stays below the whole, so a kept candidate is found.
    mass = (probabilities * is_kept).cumsum(dim=-1, dtype=torch.float64)
    whole = mass[:, -1:]
    share = torch.minimum(shares * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    chosen = torch.searchsorted(mass, share, right=True)
    if candidate_ids is not None:
        chosen = candidate_ids.gather(1, chosen)
    return chosen[:, 0]


def _probabilities(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Softmax of `logits` [S, V] over `temperatures` [S, 1], fp32 and finite whatever they are."""
    limits = torch.finfo(logits.dtype)
    finite = torch.nan_to_num(logits, nan=limits.min, posinf=limits.max, neginf=limits.min)
    # The highest is taken off first: a small temperature cannot overflow what is at most 0.
    below_highest = finite - finite.amax(dim=-1, keepdim=True)
    scale = temperatures.to(logits.dtype).clamp_min(limits.tiny)
    return (below_highest / scale).softmax(dim=-1)
