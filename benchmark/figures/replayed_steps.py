"""The steps of a run once more, back to back, through workers that hold one range of layers or two.

No scheduler decides: step n enters when step n - window has come back. What is left of the bubbles
comes from the steps' sizes, the links and the window alone.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_pipeline.costs.stage_costs import StageCosts
from sgl_pipeline.migration.partition import balanced_layer_counts
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a layer of one step, of the model's ends, and of the way to the next range."""

    layer_s: float
    embedding_s: float
    tail_s: float
    hop_s: float


def parts_of(shapes: Sequence[StepShape], costs: PipelineCosts) -> list[StepParts]:
    """The parts of each step, over the links of `costs`."""
    link = costs.link
    return [
        StepParts(
            costs.stage.layer_s(shape),
            costs.stage.embedding_s(shape),
            costs.stage.tail_s(shape),
            link.latency_s + link.transfer_s(len(shape.decode_contexts) + prefill_tokens),
        )
        for shape in shapes
        for prefill_tokens in [sum(length for length, _ in shape.prefills)]
    ]


def two_ranges(layer_counts: Sequence[int]) -> tuple[int, ...]:
    """Layers of the first range of each worker, then of the second: half of its layers each."""
    return tuple(count // 2 for count in layer_counts) + tuple(
        count - count // 2 for count in layer_counts
    )


def idle_share(
    steps: Sequence[StepParts], layer_counts: Sequence[float], num_workers: int, window: int
) -> float:
    """The share of the workers' time in which they wait.

    Args:
        layer_counts: of each range, in the order of the layers; worker w holds the ranges w, w +
            `num_workers` and so on, and runs the oldest step that it can.
        window: steps in flight.
    """
    last = len(layer_counts) - 1
    # What each worker could run: the step, and the range.
    ready: list[list[tuple[int, int]]] = [[] for _ in range(num_workers)]
    is_busy = [False] * num_workers
    # A step reaches a range, or leaves it.
    events = [(0.0, number, 0, False) for number in range(min(window, len(steps)))]
    entered = len(events)
    busy_s = now_s = 0.0
    while events:
        now_s, number, place, is_over = heapq.heappop(events)
        worker = place % num_workers
        if not is_over:
            heapq.heappush(ready[worker], (number, place))
        else:
            is_busy[worker] = False
            if place < last:
                arrives_s = now_s + steps[number].hop_s
                heapq.heappush(events, (arrives_s, number, place + 1, False))
            elif entered < len(steps):
                heapq.heappush(events, (now_s, entered, 0, False))
                entered += 1
        if ready[worker] and not is_busy[worker]:
            number, place = heapq.heappop(ready[worker])
            parts = steps[number]
            seconds = layer_counts[place] * parts.layer_s
            seconds += parts.embedding_s if place == 0 else 0.0
            seconds += parts.tail_s if place == last else 0.0
            is_busy[worker] = True
            busy_s += seconds
            heapq.heappush(events, (now_s + seconds, number, place, True))
    return 1.0 - busy_s / (num_workers * now_s)


def best_split(
    steps: Sequence[StepParts], num_layers: int, num_workers: int, cuts: int
) -> tuple[float, ...]:
    """Layers of each worker in the split whose slowest worker has least to do in these steps.

    Args:
        cuts: places in a layer where a worker's layers may end: 1, or 2 with one in its middle.
    """
    layer_ms = 1e3 * sum(step.layer_s for step in steps) / cuts
    ends_ms = [1e3 * sum(getattr(step, name) for step in steps) for name in _ENDS]
    costs = StageCosts((layer_ms,) * (num_layers * cuts), *ends_ms)
    return tuple(count / cuts for count in balanced_layer_counts([costs] * num_workers))


def floor(steps: Sequence[StepParts], layer_counts: Sequence[float]) -> float:
    """The idle share of a split if none of these steps differed: 1 - mean worker / slowest
    worker."""
    layer_s = sum(step.layer_s for step in steps)
    workers_s = [count * layer_s for count in layer_counts]
    workers_s[0] += sum(step.embedding_s for step in steps)
    workers_s[-1] += sum(step.tail_s for step in steps)
    return 1.0 - sum(workers_s) / (len(workers_s) * max(workers_s))


_ENDS = ("embedding_s", "tail_s")
