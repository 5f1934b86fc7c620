"""What workers say, with numbers to check against."""

import msgspec

from sgl_pipeline import __version__
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP, PartCosts, PartSample, PartSizes
from sgl_pipeline.wire.stage_messages import (
    MeasureCosts,
    MeasuredCosts,
    StageLoaded,
    StageReady,
    WorkerHello,
)

NUM_LAYERS = 8
# A layer takes a millisecond, the embedding nothing, the head as long as two layers.
COSTS = PartCosts(
    (0,) * NUM_LAYERS,
    (PartSample(TYPICAL_STEP.work, (1.0,), 0.0, 2.0),),
    PartSizes((100,) * NUM_LAYERS, 10, 10, page_layer_bytes=1, page_size=16),
    10**9,
)


def hello(
    worker: int, *, host: str = "here", cores: tuple[int, ...] = (0, 1), num_gpus: int = 0
) -> WorkerHello:
    return WorkerHello(
        worker=worker,
        host=host,
        cores=cores,
        num_gpus=num_gpus,
        memory_bytes=2**34,
        version=__version__,
    )


def measured(
    worker: int, order: MeasureCosts, *, memory_bytes: int = 10**9, slowness: float = 1.0
) -> MeasuredCosts:
    """`COSTS`, as far as `order` asks for them, of a worker that takes `slowness` as long."""
    samples = [
        PartSample(
            one.work,
            tuple(slowness * kind_ms for kind_ms in one.kinds_ms),
            one.embedding_ms,
            slowness * one.tail_ms,
        )
        for one in COSTS.samples[: len(order.steps)]
    ]
    costs = msgspec.structs.replace(COSTS, samples=tuple(samples), memory_bytes=memory_bytes)
    return MeasuredCosts(worker, costs)


def loaded(stage: int, num_pages: int = 10) -> StageLoaded:
    return StageLoaded(
        stage=stage, num_pages=num_pages, weight_bytes=1000, page_bytes=100, load_seconds=0.5
    )


def ready(stage: int, *notices: str, log_pages: int = 0) -> StageReady:
    return StageReady(stage, "torch", "cpu", notices, log_pages)
