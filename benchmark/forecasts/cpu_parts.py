"""A small model on CPU cores as a simulated stage: the times of its parts on one core.

From `2026-11-23_1901_kernels_cpu` (0.27B, bfloat16, AMD EPYC): `matrices of 8 layers` give a layer,
`steps of a stage` less those give the head. Attention is arithmetic: 4 KiB of keys and values of a
token at 20 GB/s, and 4,096 operations of a pair at 200 GFLOP/s.
"""

from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.simulator.step_shape import StepShape

NUM_LAYERS = 16
CPU_COSTS = StepCosts(
    layer=LayerCost(
        rows=RowCost((1.0, 4.0, 16.0, 64.0, 256.0), (1.2, 1.2, 2.2, 8.2, 32.75), 0.128),
        decode_ms=0.0,
        decode_attended_ms=2e-4,
        prefill_attended_ms=2e-5,
    ),
    embedding=RowCost((1.0,), (0.0,), 0.0),
    tail=RowCost((1.0, 8.0, 32.0), (4.2, 4.8, 19.0), 0.59),
    layer_weights=(1.0,) * NUM_LAYERS,
)


class PredictedParts:
    """The `PartSeconds` of a predictor."""

    def __init__(self, predictor: StepPredictor) -> None:
        self._predictor = predictor

    def layer_s(self, shape: StepShape) -> float:
        return self._predictor.parts_ms(shape.work).layer_ms * 1e-3

    def embedding_s(self, shape: StepShape) -> float:
        return self._predictor.parts_ms(shape.work).embedding_ms * 1e-3

    def tail_s(self, shape: StepShape) -> float:
        return self._predictor.parts_ms(shape.work).tail_ms * 1e-3


CPU_PARTS = PredictedParts(StepPredictor(CPU_COSTS))
