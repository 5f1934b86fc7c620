"""Step costs as `sgl_pipeline fit` saves them, made up."""

import msgspec
from support.tiny_models import NUM_LAYERS

from sgl_pipeline.costs.step_costs import CostFile, LayerCost, RowCost, StepCosts
from sgl_pipeline.managers.planning import cost_files


def flat(time_ms: float) -> RowCost:
    return RowCost((1.0,), (time_ms,), 0.0)


def costs_of(name: str, **changes: object) -> CostFile:
    """Of the model of that name: a head as long as two layers, whatever the step."""
    layer = LayerCost(flat(1.0), 0.0, 0.0, 0.0)
    costs = CostFile(
        model=name,
        dtype="float32",
        device="cpu",
        threads=1,
        machine=cost_files.machine_name("cpu"),
        date="2026-01-01",
        costs=StepCosts(layer, flat(0.0), flat(2.0), (1.0,) * NUM_LAYERS),
    )
    return msgspec.structs.replace(costs, **changes)
