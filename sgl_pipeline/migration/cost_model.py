"""The workers' costs without their noise, and each stage's time under a split.

Measures nothing: that is `pp_runner/`'s job.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from sgl_pipeline.costs.stage_costs import StageCosts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.step_work import StepWork

# Workers whose times differ by less count as equal: short measurements are noisy.
SPEED_TOLERANCE = 0.15


def predicted_costs(predictor: StepPredictor, work: StepWork) -> StageCosts:
    """Time of each part of the predictor's model in a step of that work, layer by layer."""
    parts = predictor.parts_ms(work)
    ends_ms = predictor.layer_ends_ms(parts)
    layers_ms = tuple(end_ms - start_ms for start_ms, end_ms in pairwise(ends_ms))
    return StageCosts(layers_ms, parts.embedding_ms, parts.tail_ms)


def agreed_costs(measured: Sequence[StageCosts], *, are_alike: bool) -> tuple[StageCosts, ...]:
    """The workers' costs with less noise: their medians, times the slowness of a worker's layers if
    it differs by more than `SPEED_TOLERANCE` from the median.

    Workers that `are_alike` count as equally fast in spite of their measurements: on a machine with
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


def costs_by_host(
    measured: Sequence[StageCosts], hosts: Sequence[str], *, are_alike: bool
) -> tuple[StageCosts, ...]:
    """`agreed_costs` of workers on `hosts`, one entry per worker: only workers of one host may be
    alike."""
    if len({*hosts}) == 1:
        return agreed_costs(measured, are_alike=are_alike)
    if are_alike:
        of_host = {
            host: agreed_costs(
                [own for own, other in zip(measured, hosts, strict=True) if other == host],
                are_alike=True,
            )[0]
            for host in hosts
        }
        measured = [of_host[host] for host in hosts]
    return agreed_costs(measured, are_alike=False)


def stage_times_ms(costs: Sequence[StageCosts], layer_counts: Sequence[int]) -> tuple[float, ...]:
    """Each stage's time in a step, by the costs of the worker at the same place in `costs`."""
    ends = list(accumulate(layer_counts))
    return tuple(
        run_ms(costs, stage, end - count, end)
        for stage, (end, count) in enumerate(zip(ends, layer_counts, strict=True))
    )


def run_ms(costs: Sequence[StageCosts], stage: int, start: int, end: int) -> float:
    """Milliseconds of layers [start, end) on `stage`, plus its embedding or head."""
    own = costs[stage]
    total_ms = sum(own.layers_ms[start:end])
    if stage == 0:
        total_ms += own.embedding_ms
    if stage == len(costs) - 1:
        total_ms += own.head_ms
    return total_ms
