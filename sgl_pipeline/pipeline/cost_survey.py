"""The times of a model's parts on the workers: asked for, and made into layer splits.

For a start that splits layers by time. Does no I/O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.assignment import assign
from sgl_pipeline.pipeline.known_worker import Worker, WorkerPhase
from sgl_pipeline.pipeline.plan_by_time import counts_for_fewer, plan_by_time
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import MeasureCosts


class CostSurvey:
    """Asks the first workers, one for each stage of the first plan. `workers` are all, by number.

    Args:
        num_layers: of the model.
        predictor: of its parts' times on each of the workers; None: they time a typical step.
    """

    def __init__(
        self, args: PipelineArgs, num_layers: int, predictor: StepPredictor | None
    ) -> None:
        self._args, self._num_layers, self._predictor = args, num_layers, predictor
        self._num_stages = args.stages.num_stages
        # Where workers were last asked to measure: host and index of the GPU.
        self._measures_on: dict[int, tuple[str, int]] = {}

    def plan(self, workers: Mapping[int, Worker]) -> tuple[StagePlan, tuple[float, ...]] | None:
        """The plan, and each stage's expected time in a typical step, in ms; None before all of the
        first workers have answered. Raises ConfigurationError where no split fits."""
        asked = [workers[number] for number in self._first(workers)]
        found = [worker.costs for worker in asked if worker.costs is not None]
        if len(found) < self._num_stages:
            return None
        hosts = [worker.hello.host_key for worker in asked]
        return plan_by_time(found, hosts, self._args.stages, self._predictor)

    def layer_counts(self, chosen: Sequence[Worker], known: Iterable[Worker]) -> tuple[int, ...]:
        """The split over `chosen`, as `counts_for_fewer`."""
        device = self._args.stages.device
        return counts_for_fewer(chosen, known, device, self._num_layers, self._predictor)

    def next_orders(self, workers: Mapping[int, Worker]) -> Iterator[tuple[int, MeasureCosts]]:
        """Asks the first workers, once all are there. Workers that share a GPU are asked in turn:
        each would measure the others' kernels too."""
        first = self._first(workers)
        if len(first) < self._num_stages:
            return
        steps = (TYPICAL_STEP,) if self._predictor is None else ()
        even = StagePlan(0, even_layer_counts(self._num_layers, self._num_stages))
        assignments = assign([workers[number].hello for number in first], even, self._args)
        for number, assignment in zip(first, assignments, strict=True):
            worker = workers[number]
            card = (worker.hello.host_key, assignment.gpu)
            if worker.phase is not WorkerPhase.GREETED or worker.costs is not None:
                continue
            if self._args.stages.device == "cuda" and card in self._busy_cards(workers):
                continue
            worker.phase = WorkerPhase.MEASURING
            self._measures_on[number] = card
            yield number, MeasureCosts(assignment, steps)

    def _first(self, workers: Mapping[int, Worker]) -> list[int]:
        """The numbers of the first living workers, at most one for each stage."""
        alive = (n for n, worker in workers.items() if worker.phase is not WorkerPhase.LOST)
        return sorted(alive)[: self._num_stages]

    def _busy_cards(self, workers: Mapping[int, Worker]) -> set[tuple[str, int]]:
        """Host and index of the GPUs that a worker measures on."""
        return {
            card
            for number, card in self._measures_on.items()
            if workers[number].phase is WorkerPhase.MEASURING
        }
