"""The first layer split, by what the workers have measured of its parts.

Called by `worker_roster.py`, and says in the log what it expects of the split.
"""

import logging
from collections.abc import Sequence

from sgl_pipeline.args import StageArgs
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.migration.cost_model import costs_by_host, predicted_costs, stage_times_ms
from sgl_pipeline.migration.partition import balanced_layer_counts, fits_in
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.stage_costs import TYPICAL_STEP, PartCosts, StageCosts
from sgl_pipeline.stage_plan import StagePlan

logger = logging.getLogger(__name__)


def plan_by_time(
    found: Sequence[PartCosts],
    hosts: Sequence[str],
    stages: StageArgs,
    num_layers: int,
    predictor: StepPredictor | None,
) -> tuple[StagePlan, tuple[float, ...]]:
    """The plan whose slowest stage takes least, of those that fit the stages' memory, and what a
    typical step should take each stage, in ms.

    Args:
        found: by each worker, of as many as there are stages.
        hosts: of the same workers; on CPUs those of one host count as alike.
        predictor: of the parts' times; None: those of `found` count.

    Raises ConfigurationError where no split fits.
    """
    if predictor is not None:
        costs = (predicted_costs(predictor, TYPICAL_STEP.work),) * stages.num_stages
    else:
        measured = [StageCosts.of(own.kinds, own.samples[0]) for own in found]
        costs = costs_by_host(measured, hosts, are_alike=stages.device == "cpu")
    memory_bytes = [own.memory_bytes for own in found]
    fits = fits_in(found[0].sizes, memory_bytes, stages.max_total_tokens or 0)
    counts = balanced_layer_counts(costs, fits)
    even = even_layer_counts(num_layers, stages.num_stages)
    predicted_ms = stage_times_ms(costs, counts)
    logger.info(
        "layer split %s: %s should take the stages %s ms, %.2f of it for the head; the slowest "
        "of an even split %.2f ms",
        ",".join(map(str, counts)),
        TYPICAL_STEP,
        ", ".join(f"{stage_ms:.2f}" for stage_ms in predicted_ms),
        costs[-1].head_ms,
        max(stage_times_ms(costs, even)),
    )
    return StagePlan(0, counts), predicted_ms
