"""Queries of a roster: which worker fills which stage, and which worker will take one over.

The base of `worker_roster.WorkerRoster`, which changes this state.
"""

from sgl_pipeline.pipeline.known_worker import Worker, WorkerPhase


class StageWorkers:
    """The workers, by number, of `num_stages` stages."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._workers: dict[int, Worker] = {}

    @property
    def spare_workers(self) -> tuple[int, ...]:
        """Workers that have greeted and fill no stage."""
        return tuple(
            number
            for number, worker in self._workers.items()
            if worker.phase is WorkerPhase.GREETED
        )

    @property
    def workers_of_stages(self) -> list[int]:
        """The worker that fills each stage, where one does, in the order of the stages."""
        filled = [
            (one.filled_stage, n)
            for n, one in self._workers.items()
            if one.filled_stage is not None
        ]
        return [number for _, number in sorted(filled)]

    def worker_of(self, stage: int) -> int | None:
        """The worker that fills `stage`, if one does."""
        return next((n for n, one in self._workers.items() if one.filled_stage == stage), None)

    def host_address(self, number: int) -> str:
        """The cluster port of a worker's host; empty where there is one host."""
        return self._workers[number].hello.host_address

    def worker_stage(self, number: int) -> int | None:
        """The stage that a worker fills, if it fills one."""
        worker = self._workers.get(number)
        return None if worker is None else worker.filled_stage

    def assigned_stage(self, number: int) -> int | None:
        """The stage that a worker fills or is about to take over, if any."""
        worker = self._workers.get(number)
        return None if worker is None else worker.stage

    @property
    def vacant_stages(self) -> list[int]:
        """The stages that no worker fills."""
        return [stage for stage in range(self.num_stages) if self._filling(stage) is None]

    @property
    def is_settled(self) -> bool:
        """True if no worker that fills a stage owes an answer: then all can be given others."""
        filling = (one for one in self._workers.values() if one.filled_stage is not None)
        return all(one.is_settled for one in filling)

    @property
    def late_workers(self) -> list[int]:
        """The workers that were ordered to join a stage's neighbors and have not done so."""
        return [number for number, worker in self._workers.items() if worker.is_joining]

    def is_ready(self, number: int) -> bool:
        """True if a worker is ready to take orders, of any stream."""
        worker = self._workers.get(number)
        return worker is not None and worker.phase is WorkerPhase.READY

    def has_served(self, number: int) -> bool:
        """True if a worker was ready once, for any stage."""
        worker = self._workers.get(number)
        return worker is not None and worker.has_served

    def rehearsal_s(self, stage: int) -> float:
        """Seconds that the rehearsal of the worker of `stage` took; 0 before it is ready."""
        worker = self._filling(stage)
        return 0.0 if worker is None or worker.ready is None else worker.ready.rehearsal_s

    def stage_of(self, number: int) -> int:
        """The stage that a worker fills; its own number before it has one."""
        worker = self._workers.get(number)
        return number if worker is None or worker.stage is None else worker.stage

    def successor_of(self, stage: int) -> int | None:
        """The worker that will take `stage` over from its present one, if any."""
        return next(
            (n for n, one in self._workers.items() if one.is_successor and one.stage == stage), None
        )

    def _filling(self, stage: int) -> Worker | None:
        """The worker that fills `stage`, if any does."""
        return next((one for one in self._workers.values() if one.filled_stage == stage), None)

    def _loaded_workers(self) -> list[tuple[int, Worker]]:
        """The workers that wait for the number of pages."""
        return [
            (number, worker)
            for number, worker in self._workers.items()
            if worker.phase is WorkerPhase.LOADED
        ]

    def _gpu_of(self, stage: int) -> int | None:
        """The GPU of the worker that fills `stage`, if any does."""
        worker = self._filling(stage)
        return None if worker is None else worker.gpu
