"""Steps as a server would have run them, from costs that are known: for the planner's tests."""

from collections.abc import Callable, Sequence

from benchmark.forecasts.predictor_error import made_up_record
from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork


def flat(time_ms: float) -> RowCost:
    """The same time for any number of rows."""
    return RowCost((1.0,), (time_ms,), 0.0)


def flat_costs(
    num_layers: int, tail_ms: float, layer_ms: float = 1.0, embedding_ms: float = 0.0
) -> StepCosts:
    """Parts that take the same time whatever the step."""
    layer = LayerCost(flat(layer_ms), 0.0, 0.0, 0.0)
    return StepCosts(layer, flat(embedding_ms), flat(tail_ms), (1.0,) * num_layers)


def card_costs(num_layers: int) -> StepCosts:
    """Roughly a 32 B model on a data center's card: a layer of few rows takes 0.3 ms, sampling
    three times as long; a layer of many rows 0.5 us a row, a row of the head 10 us."""
    layer = LayerCost(RowCost((1.0, 256.0), (0.3, 0.3), 0.5e-3), 0.0, 1e-6, 1e-7)
    tail = RowCost((1.0, 128.0), (0.9, 1.1), 10e-3)
    return StepCosts(layer, RowCost((1.0,), (0.01,), 1e-5), tail, (1.0,) * num_layers)


def decode_step(decodes: int, context: int = 512) -> StepWork:
    return StepWork(decodes, decodes, decodes * context, 0, decodes)


def mixed_step(decodes: int, prompt_tokens: int, samples: int | None = None) -> StepWork:
    by_prompt = prompt_tokens * (prompt_tokens + 1) // 2
    own = decodes if samples is None else samples
    return StepWork(decodes + prompt_tokens, decodes, decodes * 512, by_prompt, own)


class ServedSteps:
    """Runs steps on stages that behave as `costs` say, times `slowness` and noise.

    Args:
        slowness: of each stage; () where all are as fast as the costs.
        noise: what to multiply a stage's time by, asked for each.
    """

    def __init__(
        self,
        costs: StepCosts,
        plan: StagePlan,
        slowness: Sequence[float] = (),
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.truth = StepPredictor(costs)
        self.plan = plan
        self.slowness = tuple(slowness)
        self._noise = noise

    def run(self, work: StepWork) -> StepRecord:
        parts = self.truth.parts_ms(work)
        times = self.truth.stage_times_ms(parts, self.plan.layer_counts, self.slowness)
        return made_up_record(work, [one * self._noise() for one in times], self.plan.epoch)
