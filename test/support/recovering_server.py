"""A roster, a core and their recovery, whose workers say what a test has them say."""

from support.pipelines import new_scheduler
from support.worker_messages import NUM_LAYERS, hello, loaded, measured, ready

from sgl_pipeline.args import MigrationArgs, PipelineArgs, RecoveryArgs, StageArgs
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import MeasureCosts, Regrouped

PLAN = StagePlan(0, (3, 3, 2))


class Server:
    """Three stages that run, filled by the workers 0 to 2; where times decide, with 4,3,1 layers in
    place of `PLAN`."""

    def __init__(
        self,
        *,
        layer_partition: str = "3,3,2",
        migration: MigrationArgs | None = None,
        log: RecoveryLog | None = None,
        **options: object,
    ) -> None:
        stages = StageArgs(
            num_stages=3, layer_partition=layer_partition, model_path="m", dtype="float32"
        )
        args = PipelineArgs(
            stages=stages,
            run_directory="run",
            recovery=RecoveryArgs(**options),
            migration=migration or MigrationArgs(),
        )
        self.roster = WorkerRoster(args, NUM_LAYERS)
        asked = [order for worker in range(3) for order in self.roster.take(hello(worker))]
        for worker, order in asked:
            if isinstance(order, MeasureCosts):
                self.roster.take(measured(worker, order))
        plan = self.roster.plan
        assert plan is not None
        for stage in range(3):
            self.roster.take(loaded(stage))
        for stage in range(3):
            self.roster.take(ready(stage, log_pages=0 if log is None else log.capacity))
        scheduler = new_scheduler(
            throttle=args.throttle, num_pages=10, num_stages=3, context_length=40, log=log
        )
        control = MigrationControl.of(args.migration, plan)
        self.core = PipelineCore(scheduler, plan, control)
        self.recovery = StageRecovery(self.core, self.roster, args.recovery)

    def lose(self, worker: int, now_s: float) -> list[Addressed]:
        return self.recovery.lose(worker, "killed", now_s)

    def ask(self, worker: int, now_s: float) -> None:
        assert self.recovery.num_wanted_workers(now_s) > 0
        self.recovery.asked(worker, now_s)

    def regrouped(self, *stages: int, incarnation: int, now_s: float = 0.0) -> list[Addressed]:
        return [
            answer
            for stage in stages
            for answer in self.recovery.take(Regrouped(stage, incarnation), now_s)
        ]


def links(incarnation: int) -> tuple[str, ...]:
    return tuple(f"unix:run/link-{incarnation}-{boundary}" for boundary in range(2))
