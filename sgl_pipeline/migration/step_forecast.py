"""Predicts step times once they are known: a predictor, fitted or given, and the stages' speeds.

Must be notified of every step that has ended. It serves the planner of layer moves and, through
`SlowestStage`, policies that budget time. Pure.
"""

from collections.abc import Sequence

from sgl_pipeline.migration.online_fit import OnlineFit
from sgl_pipeline.migration.predictor import (
    PartTimes,
    SlowestStage,
    StepPredictor,
    weighted_times_ms,
)
from sgl_pipeline.migration.stage_speeds import StageSpeeds
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.stage_plan import StagePlan

# Plans whose steps may still come back: the present, the previous and the next one.
_MOST_KNOWN_PLANS = 4


class StepForecast:
    """Learns from ended steps the times of the next ones.

    Args:
        plan: the one in use.
        predictor: None: fitted from the first steps, and again as more are seen; nothing is known
            before that.
        learns: whether the stages' timings measure computation. On a GPU they measure its host, not
            the GPU's speed.
        layer_windows: as `StepCosts.layer_windows`, for what is fitted.
    """

    def __init__(
        self,
        plan: StagePlan,
        predictor: StepPredictor | None = None,
        learns: bool = True,
        layer_windows: Sequence[int | None] = (),
    ) -> None:
        self._num_stages = plan.num_stages
        self._plans: dict[int, tuple[int, ...]] = {}
        self._weights: dict[int, tuple[tuple[float, ...], ...]] = {}
        self.predictor = predictor
        self._speeds = StageSpeeds(plan.num_stages) if learns else None
        windows = layer_windows or (None,) * plan.num_layers
        self._online = OnlineFit(windows) if learns and predictor is None else None
        self._slowest: tuple[object, SlowestStage] | None = None
        self.know_plan(plan)

    @property
    def speeds(self) -> tuple[float, ...]:
        """The ratio of each stage's measured to its predicted time."""
        return self._speeds.factors if self._speeds else (1.0,) * self._num_stages

    def start_over(self, plan: StagePlan) -> None:
        """Other stages run the steps from now on: their speeds are unknown."""
        self._num_stages = plan.num_stages
        if self._speeds is not None:
            self._speeds = StageSpeeds(plan.num_stages)
        self._plans.clear()
        self._slowest = None
        self.know_plan(plan)

    def know_plan(self, plan: StagePlan) -> None:
        """Steps of this plan's epoch may be noted from now on."""
        self._plans[plan.epoch] = plan.layer_counts
        while len(self._plans) > _MOST_KNOWN_PLANS:
            self._plans.pop(min(self._plans))
        self._weights.clear()

    def note(self, record: StepRecord) -> PartTimes | None:
        """A step has ended on all stages; nothing is learned from one of an unknown plan, or with
        rows that attend elsewhere. Returns its predicted times, None while nothing is known."""
        work = record.work
        counts = self._plans.get(record.epoch)
        if record.leased_rows:
            counts = None  # its stages may have waited for another server
        if self._online is not None and counts is not None and self._may_fit(self._online):
            costs = self._online.note(work, counts, [s.compute_ms for s in record.stages])
            if costs is not None:
                self._predict_with(StepPredictor(costs))
        if self.predictor is None:
            return None
        parts = self.predictor.parts_ms(work)
        if self._speeds is not None and counts is not None:
            weights = self._weights.get(record.epoch)
            if weights is None:
                weights = self._weights[record.epoch] = self.predictor.stage_weights(counts)
            predicted_ms = weighted_times_ms(parts, weights)
            self._speeds.note([s.compute_ms for s in record.stages], predicted_ms)
        return parts

    def slowest(self, layer_counts: tuple[int, ...]) -> SlowestStage | None:
        """Step times on the slowest stage of that split; None while nothing is known."""
        if self.predictor is None:
            return None
        key = (self.predictor, layer_counts, self.speeds)
        if self._slowest is None or self._slowest[0] != key:
            self._slowest = (key, SlowestStage(*key))
        return self._slowest[1]

    def _may_fit(self, online: OnlineFit) -> bool:
        """A fit over a disturbed stage would attribute the disturbance to the costs of its layers
        or ends. But where few steps have been seen, stages look uneven because these were all alike
        and the others are predicted badly: only more steps put that right."""
        return online.is_young or len(set(self.speeds)) == 1

    def _predict_with(self, predictor: StepPredictor) -> None:
        self.predictor = predictor
        self._weights.clear()
        if self._speeds is not None:
            self._speeds.forget()
