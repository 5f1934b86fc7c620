"""Divides the bubble share of a simulation among the causes for which stages wait.

Sarathi-Serve names three causes (OSDI'24, section 3.3): prefill chunks of different sizes follow
each other, prefill follows decode, decodes attend to different lengths; the sampler on the last
stage is a fourth. Each is taken out in turn from the recorded steps, which are then run again
through a pipeline that is never short of work; what the bubble share loses is that cause's part.
The order of taking out is that of `CAUSES`, and the parts depend on it; they add up to the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.step_shape import StepShape

CAUSES = (
    "tail sampler",
    "decode sizes differ",
    "prefill sizes differ",
    "prefill against decode",
    "unequal stages and filling",
)


@dataclass(frozen=True, slots=True)
class _StepCost:
    """Seconds of one layer for the decodes of a step and for its prefill, and of the ends."""

    decode_s: float
    prefill_s: float
    embedding_s: float
    tail_s: float


def bubble_causes(shapes: Sequence[StepShape], costs: PipelineCosts) -> dict[str, float]:
    """The bubble share of `shapes` run back to back, by cause; the values add up to it."""
    measured = [_cost(shape, costs) for shape in shapes]
    without_tail = [replace(step, tail_s=0.0, embedding_s=0.0) for step in measured]
    even_decodes = _equalised(without_tail, "decode_s")
    even_prefills = _equalised(even_decodes, "prefill_s")
    mean_prefill_s = sum(step.prefill_s for step in even_prefills) / len(even_prefills)
    mean_decode_s = sum(step.decode_s for step in even_prefills) / len(even_prefills)
    alike = [
        replace(step, prefill_s=mean_prefill_s, decode_s=mean_decode_s) for step in even_prefills
    ]
    series = (measured, without_tail, even_decodes, even_prefills, alike)
    shares = [_bubble_share(steps, costs) for steps in series] + [0.0]
    parts = (before - after for before, after in pairwise(shares))
    return dict(zip(CAUSES, parts, strict=True))


def _cost(shape: StepShape, costs: PipelineCosts) -> _StepCost:
    whole_s = costs.stage.layer_s(shape)
    decode_s = 0.0
    if shape.decode_contexts:
        decode_s = costs.stage.layer_s(replace(shape, prefills=()))
    return _StepCost(
        decode_s=decode_s,
        prefill_s=whole_s - decode_s,
        embedding_s=costs.stage.embedding_s(shape),
        tail_s=costs.stage.tail_s(shape),
    )


def _equalised(steps: Sequence[_StepCost], part: str) -> list[_StepCost]:
    """The same total of `part`, in equal shares over the steps that have any of it."""
    having = [value for step in steps if (value := getattr(step, part)) > 0.0]
    share = sum(having) / max(1, len(having))
    return [replace(step, **{part: share}) if getattr(step, part) > 0.0 else step for step in steps]


def _bubble_share(steps: Sequence[_StepCost], costs: PipelineCosts) -> float:
    """Idle share when each step enters as soon as the one a pipeline's depth before it has left."""
    counts = costs.layer_counts
    slowness = costs.stage_slowness or (1.0,) * len(counts)
    free = [0.0] * len(counts)
    left: list[float] = []
    busy_s = 0.0
    for number, step in enumerate(steps):
        ready_s = left[number - len(counts)] if number >= len(counts) else 0.0
        layer_s = step.decode_s + step.prefill_s
        for stage, count in enumerate(counts):
            seconds = count * layer_s
            seconds += step.embedding_s if stage == 0 else 0.0
            seconds += step.tail_s if stage == len(counts) - 1 else 0.0
            seconds *= slowness[stage]
            ready_s = free[stage] = max(ready_s, free[stage]) + seconds
            busy_s += seconds
        left.append(ready_s)
    return 1.0 - busy_s / (len(counts) * left[-1])
