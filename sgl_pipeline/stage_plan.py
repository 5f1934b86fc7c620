"""Which stage owns which layers.

Built at start-up from `--pp-layer-partition`, later by `migration/`; read by everybody. Layers keep
their model-wide index for ever; a stage owns one contiguous run of them, which may be empty only
between two moves.
"""

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

import msgspec

from sgl_pipeline.errors import ConfigurationError


class StagePlan(msgspec.Struct, frozen=True, array_like=True):
    """`layer_counts[s]` consecutive layers belong to stage `s`; `epoch` numbers the plans."""

    epoch: int
    layer_counts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.layer_counts)

    @property
    def num_layers(self) -> int:
        return sum(self.layer_counts)

    def layers_of(self, stage: int) -> range:
        """The model-wide ids of the layers that `stage` runs, in order."""
        start = sum(self.layer_counts[:stage])
        return range(start, start + self.layer_counts[stage])


def even_layer_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Counts that differ by at most one. The remainder goes to the stages before the last, which
    also runs norm, lm_head and sampler (vLLM pull request 13839 does the same)."""
    base, remainder = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    for stage in range(num_stages - 1 - remainder, num_stages - 1):
        counts[stage] += 1
    return tuple(counts)


class LayerCosts(msgspec.Struct, frozen=True):
    """What each layer adds to a stage's decode step and prefill step, and lm_head to the last
    stage's decode step; all in units of the model's mean layer."""

    decode: tuple[float, ...]
    prefill: tuple[float, ...]
    head: float

    @classmethod
    def in_layers(
        cls, decode: Sequence[float], prefill: Sequence[float], head: float
    ) -> "LayerCosts":
        """From costs in any units; `head` in that of `decode`."""
        decode_unit, prefill_unit = fmean(decode), fmean(prefill)
        return cls(
            tuple(cost / decode_unit for cost in decode),
            tuple(cost / prefill_unit for cost in prefill),
            head / decode_unit,
        )


def auto_layer_counts(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """Counts for a load of decodes and prefill alike. Every stage keeps at least one layer.

    A decode step is bound by the weights it reads, lm_head's among them; in a prefill step the head
    has few rows and costs next to nothing. The sum of both steps' slowest stages is minimised, so
    that a large vocabulary takes layers off the last stage, but fewer than decodes alone would.
    However many layers the last stage has, the others share theirs so that the slowest of them,
    decode and prefill together, is as fast as can be.
    """
    num_layers = len(costs.decode)
    if num_stages == 1:
        return (num_layers,)
    both_steps = [sum(pair) for pair in zip(costs.decode, costs.prefill, strict=True)]
    candidates = []
    for num_upstream, upstream in _balanced_splits(both_steps, num_stages - 1).items():
        last = num_layers - num_upstream
        if last < 1:
            continue
        counts = (*upstream, last)
        decode, prefill = _run_costs(costs.decode, counts), _run_costs(costs.prefill, counts)
        decode[-1] += costs.head
        # Ties go to the more even split.
        cost = _comparable(max(decode) + max(prefill))
        candidates.append((cost, max(counts) - min(counts), last, counts))
    return min(candidates)[-1]


def _balanced_splits(costs: Sequence[float], num_runs: int) -> dict[int, tuple[int, ...]]:
    """For each number of first layers, the lengths of `num_runs` runs of which the dearest is as
    cheap as can be: the linear partition problem, by dynamic programming.

    Ties go to equal runs (the least sum of squares), then to longer runs first.
    """
    before = [0.0, *accumulate(costs)]
    # The end of the runs so far: (their dearest's cost, sum of squares, their lengths).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(num_runs):
        longer = {}
        for end in range(1, len(before)):
            options = []
            for start, (dearest, squares, lengths) in best.items():
                if start < end:
                    cost = before[end] - before[start]
                    key = (_comparable(max(dearest, cost)), _comparable(squares + cost**2))
                    options.append((*key, -start, (*lengths, end - start)))
            if options:
                dearest, squares, _, lengths = min(options)
                longer[end] = (dearest, squares, lengths)
        best = longer
    return {end: lengths for end, (_, _, lengths) in best.items()}


def _run_costs(costs: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """The sum of each of the consecutive runs of `lengths`."""
    ends = list(accumulate(lengths))
    return [sum(costs[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _comparable(cost: float) -> float:
    """Rounded, so that sums of the same fractions in another order are equal."""
    return round(cost, 9)


def parse_layer_partition(text: str, num_stages: int, costs: LayerCosts) -> StagePlan:
    """The plan of epoch 0 for `--pp-layer-partition auto|even|a,b,..`, for layers of `costs`.

    Raises ConfigurationError when there are more stages than layers or the counts do not fit.
    """
    num_layers = len(costs.decode)
    if num_stages > num_layers:
        raise ConfigurationError(
            f"--pp {num_stages} is more than the model's {num_layers} layers; "
            f"use --pp {num_layers} or less"
        )
    if text == "auto":
        return StagePlan(0, auto_layer_counts(costs, num_stages))
    if text == "even":
        return StagePlan(0, even_layer_counts(num_layers, num_stages))
    return StagePlan(0, _explicit_layer_counts(text, num_layers, num_stages))


def _explicit_layer_counts(text: str, num_layers: int, num_stages: int) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(
            f"--pp-layer-partition {text!r} is not auto, even or a list of counts like 5,4,4,3"
        ) from None
    if len(counts) != num_stages:
        raise ConfigurationError(
            f"--pp-layer-partition {text} names {len(counts)} stages, --pp asks for {num_stages}"
        )
    if min(counts) < 1:
        raise ConfigurationError(
            f"--pp-layer-partition {text}: each stage needs at least one layer"
        )
    if sum(counts) != num_layers:
        raise ConfigurationError(
            f"--pp-layer-partition {text} sums to {sum(counts)}, the model has {num_layers} layers"
        )
    return counts
