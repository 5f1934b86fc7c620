"""Layer splits by the workers' measurements of the model's parts: for the first stages, and for
fewer.

Logs the times that it expects of the split.
"""

import logging
from collections.abc import Iterable, Sequence

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP, PartCosts, StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.migration.cost_model import costs_by_host, predicted_costs, stage_times_ms
from sgl_pipeline.migration.partition import balanced_layer_counts, fits_in
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.known_worker import Worker
from sgl_pipeline.stage_plan import StagePlan

logger = logging.getLogger(__name__)


def plan_by_time(
    found: Sequence[PartCosts],
    hosts: Sequence[str],
    stages: StageArgs,
    predictor: StepPredictor | None,
) -> tuple[StagePlan, tuple[float, ...]]:
    """The plan with the fastest slowest stage among those that fit the stages' memory, and each
    stage's expected time in a typical step, in ms.

    Args:
        found: measurements of as many workers as there are stages.
        hosts: of the same workers; on CPUs the workers of one host count as alike.
        predictor: of the parts' times; None: the times of `found` count.

    Raises ConfigurationError where no split fits.
    """
    costs = _stage_costs(found, hosts, stages.device, predictor)
    memory_bytes = [own.memory_bytes for own in found]
    sizes = found[0].sizes
    fits = fits_in(sizes, memory_bytes, stages.max_total_tokens or 0)
    counts = balanced_layer_counts(costs, fits, have_states=bool(sizes.state_bytes))
    return StagePlan(0, counts), _predicted_ms(costs, counts)


def counts_for_fewer(
    chosen: Sequence[Worker],
    known: Iterable[Worker],
    device: str,
    num_layers: int,
    predictor: StepPredictor | None,
) -> tuple[int, ...]:
    """The split over `chosen`, one stage each, after a loss: by time if the first plan was,
    otherwise even.

    Args:
        known: all workers that have ever greeted, lost ones too. A worker of `chosen` that came
            later and has measured nothing counts as one of its host that has, else as any that has.
        predictor: as in `plan_by_time`.
    """
    found_on: dict[str, PartCosts] = {}
    for worker in known:
        if worker.costs is not None:
            found_on.setdefault(worker.hello.host_key, worker.costs)
    if not found_on:
        return even_layer_counts(num_layers, len(chosen))
    hosts = [worker.hello.host_key for worker in chosen]
    anywhere = next(iter(found_on.values()))
    found = [own.costs or found_on.get(own.hello.host_key, anywhere) for own in chosen]
    costs = _stage_costs(found, hosts, device, predictor)
    try:
        fits = fits_in(found[0].sizes, [own.memory_bytes for own in found], 0)
        counts = balanced_layer_counts(costs, fits)
    except ConfigurationError:
        # Those bytes were measured beside the lost workers: loading will show what fits.
        counts = balanced_layer_counts(costs)
    _predicted_ms(costs, counts)
    return counts


def _stage_costs(
    found: Sequence[PartCosts], hosts: Sequence[str], device: str, predictor: StepPredictor | None
) -> tuple[StageCosts, ...]:
    """Each worker's time in a typical step, part by part."""
    if predictor is not None:
        return (predicted_costs(predictor, TYPICAL_STEP.work),) * len(found)
    measured = [StageCosts.of(own.kinds, own.samples[0]) for own in found]
    return costs_by_host(measured, hosts, are_alike=device == "cpu")


def _predicted_ms(costs: Sequence[StageCosts], counts: Sequence[int]) -> tuple[float, ...]:
    """Each stage's expected time in a typical step, which is logged too."""
    predicted_ms = stage_times_ms(costs, counts)
    even = even_layer_counts(sum(counts), len(counts))
    logger.info(
        "layer split %s: %s should take the stages %s ms, %.2f of it for the head; the slowest "
        "of an even split %.2f ms",
        ",".join(map(str, counts)),
        TYPICAL_STEP,
        ", ".join(f"{stage_ms:.2f}" for stage_ms in predicted_ms),
        costs[-1].head_ms,
        max(stage_times_ms(costs, even)),
    )
    return predicted_ms
