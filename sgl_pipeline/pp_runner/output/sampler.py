"""Draws the next token of each sampled row from its logits.

A row's token depends on its logits, its `SamplingSpec` and its position alone, never on the rows
beside it or on tokens drawn before: the random number is a hash of (seed, position), so nothing has
to be kept, moved or restored, and probabilities are added up as integers, whose sums do not depend
on the order of addition.

On a GPU nothing comes back to the host before the drawn token ids do. FlashInfer's samplers are not
used: their random numbers follow from a row's place in the microbatch (`curand_init(seed, row,
offset)` in 0.6.18 and 0.7.2), so that a token would change with its neighbors.

Shapes: S sampled rows, V vocabulary size, C candidates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sgl_pipeline.pp_runner.base.to_device import to_device
from sgl_pipeline.requests import SamplingSpec

# Rows with a cut by rank or mass order this many of their likeliest candidates instead of the
# vocabulary. The counts change no token, only how often a row has to be drawn again.
FEW_CANDIDATES, MANY_CANDIDATES = 256, 1024
# The id of a row that needs more candidates than it had; no token has it.
UNDECIDED = -1

# As many logits are worked on at once, and of the rows that order all of theirs: see
# `sampler_memory_bytes`.
_MOST_LOGITS, _MOST_ORDERED_LOGITS = 2**24, 2**22
_BYTES_PER_LOGIT, _BYTES_PER_ORDERED_LOGIT = 32, 96

# A probability of 1 as an integer. The sums of a row stay below 2 ** 53, so fp64 holds them too.
_ONE = 2.0**52
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """The tokens of a step, which the device may still be drawing.

    `token_ids` is [S] int64 on the device of the logits. Once it has been copied to the host,
    `settle` must see it: an id there may be `UNDECIDED`.
    """

    token_ids: torch.Tensor
    _logits: torch.Tensor | None  # None where every row is decided
    _sampling: Sequence[SamplingSpec]
    _positions: np.ndarray

    @property
    def is_decided(self) -> bool:
        """True if no id can be `UNDECIDED`, and the logits are not needed any more."""
        return self._logits is None

    def settle(self, token_ids: list[int]) -> list[int]:
        """`token_ids` on the host with every undecided row drawn again, from its whole vocabulary.

        Waits for the device where there is such a row.
        """
        undecided = [row for row, token_id in enumerate(token_ids) if token_id == UNDECIDED]
        if not undecided:
            return token_ids
        assert self._logits is not None, "only rows with few candidates are undecided"
        settled = list(token_ids)
        vocab_size = self._logits.shape[1]
        for rows in _slices(undecided, vocab_size, vocab_size):
            drawn = _draw(self._logits, self._sampling, self._positions, rows, vocab_size)
            for row, token_id in zip(rows, drawn.tolist(), strict=True):
                settled[row] = token_id
        return settled


class Sampler:
    """Greedy, temperature, top-k, top-p and min-p, with different parameters in each row.

    The order is that of SGLang (`top_k_top_p_min_p_sampling_from_probs_torch`): softmax of the
    logits over the temperature, then three cuts that all look at these probabilities, unrenormed:
    rank below top_k; the mass before a token at most top_p; at least min_p times the highest. The
    token is drawn from what all three keep. Of equal probabilities the lowest token id ranks first.

    A row whose logits are not finite never fails and never touches other rows. Greedy gives the
    index of its first NaN; otherwise NaN and -inf count as the lowest number of fp32 and +inf as
    the highest.
    """

    def sample(
        self, logits: torch.Tensor, sampling: Sequence[SamplingSpec], positions: torch.Tensor
    ) -> list[int]:
        """The token ids of the rows, on the host.

        Args:
            logits: [S, V] fp32.
            sampling: the spec of each row.
            positions: [S] int64 on the host: the position of each drawn token in its request.
        """
        drawn = self.draw(logits, sampling, positions)
        return drawn.settle(drawn.token_ids.tolist())

    def draw(
        self, logits: torch.Tensor, sampling: Sequence[SamplingSpec], positions: torch.Tensor
    ) -> DrawnTokens:
        """The first half of `sample`, which never waits for the device."""
        vocab_size, host_positions = logits.shape[1], positions.numpy()
        rows_of = _rows_to_draw(sampling, vocab_size)
        token_ids = _likeliest(logits)
        for num_candidates, all_rows in rows_of.items():
            for rows in _slices(all_rows, vocab_size, num_candidates):
                drawn = _draw(logits, sampling, host_positions, rows, num_candidates)
                token_ids[to_device(np.array(rows), logits.device)] = drawn
        is_decided = all(count in (0, vocab_size) for count in rows_of)
        return DrawnTokens(token_ids, None if is_decided else logits, sampling, host_positions)


def sampler_memory_bytes(vocab_size: int, num_rows: int) -> int:
    """The most device memory that drawing takes beside the logits, for any cuts of the rows."""
    unordered_bytes = _BYTES_PER_LOGIT * min(vocab_size * num_rows, max(_MOST_LOGITS, vocab_size))
    return max(unordered_bytes, settling_memory_bytes(vocab_size, num_rows))


def settling_memory_bytes(vocab_size: int, num_rows: int) -> int:
    """The most that `DrawnTokens.settle` takes beside the logits."""
    most_logits = max(_MOST_ORDERED_LOGITS, vocab_size)
    return _BYTES_PER_ORDERED_LOGIT * min(vocab_size * num_rows, most_logits)


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
    """The rows that are not greedy, by how many of their likeliest candidates are ordered."""
    rows_of: dict[int, list[int]] = {}
    for row, spec in enumerate(sampling):
        if not spec.is_greedy:
            rows_of.setdefault(_num_candidates(spec, vocab_size), []).append(row)
    return rows_of


def _num_candidates(spec: SamplingSpec, vocab_size: int) -> int:
    """0 where no cut needs an order (min-p does not), the vocabulary where no fewer will do.

    A cut by rank gets twice its rank: equal probabilities at the end of the list are of no use.
    """
    if spec.top_k == 0 and spec.top_p >= 1.0:
        return 0
    enough = MANY_CANDIDATES if spec.top_p < 1.0 else vocab_size
    if spec.top_k > 0:
        for count in (MANY_CANDIDATES, FEW_CANDIDATES):
            enough = count if 2 * spec.top_k <= count else enough
    return min(enough, vocab_size)


def _slices(rows: list[int], vocab_size: int, num_candidates: int) -> Iterator[list[int]]:
    """`rows` in runs that memory holds at once."""
    most = _MOST_ORDERED_LOGITS if num_candidates == vocab_size else _MOST_LOGITS
    count = max(1, most // vocab_size)
    return (rows[start : start + count] for start in range(0, len(rows), count))


class _Parameters(NamedTuple):
    """The parameters of each row, [S, 1] fp64. `top_p_mass` is in units of `_ONE`."""

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p_mass: torch.Tensor
    top_k: torch.Tensor
    uniform: torch.Tensor


def _draw(
    logits: torch.Tensor,
    sampling: Sequence[SamplingSpec],
    positions: np.ndarray,
    rows: list[int],
    num_candidates: int,
) -> torch.Tensor:
    """Token ids [len(rows)] of `rows`, or UNDECIDED, each drawn from its `num_candidates` likeliest
    tokens (0: from all, in the vocabulary's order)."""
    vocab_size, device = logits.shape[1], logits.device
    specs = [sampling[row] for row in rows]
    uniforms = uniform_numbers([spec.seed for spec in specs], positions[rows])
    # Rounding may carry the whole mass past 1.0, where top_p = 1.0 must still cut nothing.
    columns = [
        (
            spec.temperature,
            spec.min_p,
            spec.top_p * _ONE if spec.top_p < 1.0 else math.inf,
            spec.top_k or vocab_size,
        )
        for spec in specs
    ]
    # One copy for all parameters.
    table = to_device(np.column_stack((columns, uniforms)), device)
    parameters = _Parameters(*table[:, :, None].unbind(1))
    if len(rows) < len(logits):
        logits = logits[to_device(np.array(rows), device)]
    probabilities = _probabilities(logits, parameters.temperature)
    if num_candidates:
        return _draw_ordered(probabilities, num_candidates, parameters)
    weights = _weights(probabilities)
    if any(spec.min_p > 0.0 for spec in specs):
        highest = probabilities.amax(dim=-1, keepdim=True)
        weights *= probabilities >= parameters.min_p * highest
    mass = weights.cumsum(dim=-1)
    return _first_above(mass, mass[:, -1:], parameters.uniform)[:, 0]


def _draw_ordered(
    probabilities: torch.Tensor, num_candidates: int, parameters: _Parameters
) -> torch.Tensor:
    """Token ids [S] of rows of `probabilities` [S, V], or UNDECIDED, under all three cuts."""
    vocab_size = probabilities.shape[1]
    likeliest, candidate_ids = _ordered(probabilities, num_candidates)
    weights = _weights(likeliest)
    mass = weights.cumsum(dim=-1)
    # Each cut keeps the first ones of a row, and all of them keep the very first.
    is_kept = likeliest >= parameters.min_p * likeliest[:, :1]
    is_kept &= mass - weights <= parameters.top_p_mass
    is_kept &= torch.arange(num_candidates, device=mass.device) < parameters.top_k
    last_kept = is_kept.sum(dim=-1, keepdim=True) - 1
    chosen = _first_above(mass, mass.gather(1, last_kept), parameters.uniform)
    token_ids = candidate_ids.gather(1, chosen)
    if num_candidates < vocab_size:
        # As likely as the last of the list may be tokens outside of it, of lower ids or as yet
        # uncut. It does not matter where they weigh nothing.
        reaches_end = likeliest.gather(1, last_kept) == likeliest[:, -1:]
        reaches_end &= weights.gather(1, last_kept) > 0
        token_ids = token_ids.masked_fill(reaches_end, UNDECIDED)
    return token_ids[:, 0]


def _ordered(probabilities: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest logits of each row and their token ids, lower ids first if they are
    equal.

    Of several that equal the lowest of them, any may be included.
    """
    if count == probabilities.shape[1]:
        return torch.sort(probabilities, dim=-1, descending=True, stable=True)
    # topk gives equal ones in any order.
    _, token_ids = probabilities.topk(count, dim=-1, sorted=False)
    token_ids, _ = token_ids.sort(dim=-1)
    likeliest, order = torch.sort(
        probabilities.gather(1, token_ids), dim=-1, descending=True, stable=True
    )
    return likeliest, token_ids.gather(1, order)


def _weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities as int64: what is below 2 ** -52 weighs nothing and is never drawn."""
    return (probabilities * _ONE).to(torch.int64)


def _first_above(mass: torch.Tensor, whole: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse of the distribution function: the first place [S, 1] where the cumulated `mass`
    [S, C] is above a uniform share of the `whole` [S, 1]. That share stays below the whole, so
    there is one."""
    share = torch.minimum((uniforms * whole).to(torch.int64), whole - 1)
    return torch.searchsorted(mass, share, right=True)


def _probabilities(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Softmax of `logits` [S, V] over `temperatures` [S, 1], fp32, finite for any input."""
    limits = torch.finfo(logits.dtype)
    scaled = torch.nan_to_num(logits, nan=limits.min, posinf=limits.max, neginf=limits.min)
    # The highest is taken off first: a small temperature cannot overflow what is at most 0.
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= temperatures.to(logits.dtype).clamp_min(limits.tiny)
    return scaled.softmax(dim=-1)
