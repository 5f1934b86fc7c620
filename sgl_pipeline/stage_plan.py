"""Which stage owns which layers.

Built at start-up from `--pp-layer-partition`, later by `migration/`; read by everybody. Layers keep
their model-wide index for ever; a stage owns one contiguous run of them, which may be empty only
between two moves.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from statistics import median
from typing import NamedTuple

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


class TypicalStep(NamedTuple):
    """A step as a busy server runs it: `decodes` requests with `context_tokens` each before the
    token that they add, and `prompt_tokens` of one more, which does not sample yet."""

    decodes: int
    context_tokens: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.decodes} decodes and {self.prompt_tokens} prompt tokens"


# Token throttling mixes both kinds of tokens in every step. As many of a prompt for each one drawn
# as in Azure's conversation trace (4.5; those in `simulator/data` have 1.4 to 73): the head has
# a fifth of the rows that a layer has.
TYPICAL_STEP = TypicalStep(decodes=32, context_tokens=512, prompt_tokens=144)
# Workers whose times differ by less are taken for equal: what is measured for a moment is noisy.
SPEED_TOLERANCE = 0.15


class StageCosts(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds that a `TYPICAL_STEP` takes one worker: in each layer of the model, in the
    embedding, and in the head with the sampler."""

    layers_ms: tuple[float, ...]
    embedding_ms: float
    head_ms: float

    def scaled(self, factor: float) -> "StageCosts":
        """The costs of a worker that takes `factor` as long."""
        return StageCosts(
            tuple(factor * layer_ms for layer_ms in self.layers_ms),
            factor * self.embedding_ms,
            factor * self.head_ms,
        )


def agreed_costs(measured: Sequence[StageCosts], *, are_alike: bool) -> tuple[StageCosts, ...]:
    """The workers' costs with less noise: their medians, times how slow a worker's layers are
    where that differs by more than `SPEED_TOLERANCE` from the median.

    Workers that `are_alike` are taken for equally fast whatever was measured: on a machine with
    other tenants one core is often half as fast as the next, and not for long.
    """
    typical = StageCosts(
        tuple(median(times) for times in zip(*(own.layers_ms for own in measured), strict=True)),
        median(own.embedding_ms for own in measured),
        median(own.head_ms for own in measured),
    )
    if are_alike:
        return (typical,) * len(measured)
    slowness = [sum(own.layers_ms) / sum(typical.layers_ms) for own in measured]
    return tuple(
        typical.scaled(1.0 if abs(slow - 1.0) <= SPEED_TOLERANCE else slow) for slow in slowness
    )


def stage_times_ms(costs: Sequence[StageCosts], layer_counts: Sequence[int]) -> tuple[float, ...]:
    """What a step takes each stage, of the worker with the same place in `costs`."""
    ends = list(accumulate(layer_counts))
    return tuple(
        _run_ms(costs, stage, end - count, end)
        for stage, (end, count) in enumerate(zip(ends, layer_counts, strict=True))
    )


def balanced_layer_counts(costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """The split, of at least one layer a stage, whose slowest stage takes least; of several such,
    the most even one (the least sum of squares of the stages' times), then longer runs first."""
    fastest = _cheapest_split(costs, max)
    slowest_ms = max(stage_times_ms(costs, fastest))

    def add_square(total: float, stage_ms: float) -> float:
        return total + stage_ms**2 if _comparable(stage_ms) <= _comparable(slowest_ms) else inf

    return _cheapest_split(costs, add_square)


def _cheapest_split(
    costs: Sequence[StageCosts], add: Callable[[float, float], float]
) -> tuple[int, ...]:
    """The linear partition problem, by dynamic programming: `add(total, stage_ms)` is what the
    stages up to one cost together, when those before it cost `total`."""
    num_layers, num_stages = len(costs[0].layers_ms), len(costs)
    # The end of the runs so far: what they cost, and their lengths.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        most = num_layers - (num_stages - 1 - stage)
        ends = range(stage + 1, most + 1) if stage < num_stages - 1 else [num_layers]
        longer = {}
        for end in ends:
            cost, negative_start = min(
                (_comparable(add(total, _run_ms(costs, stage, start, end))), -start)
                for start, (total, _) in best.items()
                if start < end
            )
            longer[end] = (cost, (*best[-negative_start][1], end + negative_start))
        best = longer
    return best[num_layers][1]


def _run_ms(costs: Sequence[StageCosts], stage: int, start: int, end: int) -> float:
    """What the layers from `start` to before `end`, and what else it has, take `stage`."""
    own = costs[stage]
    total_ms = sum(own.layers_ms[start:end])
    if stage == 0:
        total_ms += own.embedding_ms
    if stage == len(costs) - 1:
        total_ms += own.head_ms
    return total_ms


def _comparable(cost: float) -> float:
    """Rounded, so that sums of the same fractions in another order are equal."""
    return round(cost, 9)


def parse_layer_partition(text: str, num_stages: int, num_layers: int) -> StagePlan | None:
    """The plan of epoch 0 for `--pp-layer-partition auto|even|a,b,..`; None where it is `auto`,
    which needs costs that are yet to be measured, and there is a choice.

    Raises ConfigurationError when there are more stages than layers or the counts do not fit.
    """
    if num_stages > num_layers:
        raise ConfigurationError(
            f"--pp {num_stages} is more than the model's {num_layers} layers; "
            f"use --pp {num_layers} or less"
        )
    if text == "auto" and 1 < num_stages < num_layers:
        return None
    if text in ("auto", "even"):
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
