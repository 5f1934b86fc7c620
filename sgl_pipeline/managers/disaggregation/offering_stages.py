"""The places at which the stages of a prefill server offer pages."""

from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.stage_workers import StageWorkers
from sgl_pipeline.wire.store_orders import PeerStage, offer_door


class OfferingStages:
    """The stages of `core`, which the workers of `roster` fill. While one is being replaced they
    are those that were complete last."""

    def __init__(self, core: PipelineCore, roster: StageWorkers) -> None:
        self._core, self._roster = core, roster
        self._stages: tuple[PeerStage, ...] = ()

    def __call__(self) -> tuple[PeerStage, ...]:
        plan, workers = self._core.plan, self._roster.workers_of_stages
        if len(workers) == plan.num_stages:
            self._stages = tuple(
                PeerStage(
                    f"{self._roster.host_address(worker)}/{offer_door(worker)}",
                    (plan.layers_of(stage).start, plan.layers_of(stage).stop),
                )
                for stage, worker in enumerate(workers)
            )
        return self._stages
