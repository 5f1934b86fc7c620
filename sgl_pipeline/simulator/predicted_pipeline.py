"""A pipeline whose stages take what `sgl-pipeline fit` measured of a model on this machine."""

from dataclasses import dataclass

from sgl_pipeline.costs.stage_costs import TYPICAL_STEP
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.cost_model import predicted_costs
from sgl_pipeline.migration.partition import balanced_layer_counts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.stage_plan import StagePlan

# Means of a step of our server, whose front, scheduler and two stages share two cores of a Xeon:
# the last round of benchmark/results/2026-11-22_0231_calibration.md. Messages take a hop each way.
_HOP_S = 0.21e-3
TWO_CORE_HOST = HostCosts(
    schedule_step_s=0.51e-3,
    result_step_s=0.35e-3,
    prepare_step_s=0.48e-3,
    transit_s=2 * _HOP_S,
    preparation="early",
)
TWO_CORE_LINK = SimulatedLink(latency_s=_HOP_S)


@dataclass(frozen=True, slots=True)
class PredictedTiming:
    """A `PipelineTiming` of fitted costs, times `slowness`; equal steps take equal times."""

    predictor: StepPredictor
    layer_counts: tuple[int, ...]
    slowness: float
    host: HostCosts = TWO_CORE_HOST
    link: SimulatedLink = TWO_CORE_LINK

    @property
    def num_stages(self) -> int:
        return len(self.layer_counts)

    def link_after(self, stage: int) -> SimulatedLink:
        """The same between all stages; what results take is in `host`."""
        return self.link if stage + 1 < self.num_stages else SimulatedLink()

    def stage_seconds(self, shape: StepShape, step_id: int) -> tuple[float, ...]:
        parts = self.predictor.parts_ms(shape.work)
        times_ms = self.predictor.stage_times_ms(parts, self.layer_counts)
        return tuple(one_ms * 1e-3 * self.slowness for one_ms in times_ms)

    def under(self, layer_counts: tuple[int, ...]) -> "PredictedTiming":
        """Raises ConfigurationError: nothing here plans a move."""
        raise ConfigurationError("layers of a predicted pipeline stay where they are")

    def seconds_before(self, shape: StepShape, stage: int, layer: int) -> float:
        """As `under`."""
        raise AssertionError("no layer moves in a predicted pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPipeline:
    """A server of ours on this machine, before it is started: stages of `layer_counts` layers, by
    default split by the time of a typical step, over a pool of `pool_tokens`. They take `slowness`
    times what the costs say."""

    costs: StepCosts
    num_stages: int
    pool_tokens: int
    layer_counts: tuple[int, ...] = ()
    slowness: float = 1.0

    @property
    def layers(self) -> tuple[int, ...]:
        """The split. Raises ConfigurationError for more stages than layers."""
        if self.layer_counts:
            return self.layer_counts
        of_step = predicted_costs(StepPredictor(self.costs), TYPICAL_STEP.work)
        return balanced_layer_counts([of_step] * self.num_stages)

    def kv_pool_tokens(self) -> int:
        return self.pool_tokens

    def pipeline(
        self, scheduler: StepScheduler, page_size: int, *, is_timed: bool = False
    ) -> VirtualPipeline:
        """A new one, with nothing in it; its policy predicts by the same costs."""
        timing = PredictedTiming(StepPredictor(self.costs), self.layers, self.slowness)
        plan = StagePlan(0, self.layers)
        forecast = StepForecast(plan, timing.predictor if is_timed else None, learns=False)
        return VirtualPipeline(scheduler, timing, forecast)
