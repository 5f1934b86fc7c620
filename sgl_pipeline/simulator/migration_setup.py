"""How layers may move in a simulated cluster: planner, its costs, and what a move takes.

Used by `experiment.py`. The planner and its arguments are the server's own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_fit import errors_on, fit_parts
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.simulator.models import ModelShape
from sgl_pipeline.simulator.page_copies import MoveCosts
from sgl_pipeline.simulator.pipeline_costs import PartSeconds
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.stage_costs import PartSample
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_costs import FitErrors, StepCosts
from sgl_pipeline.step_work import StepWork

# Steps that costs are fitted to: decodes, what each attends to, a chunk and what is before it.
_DECODES = (0, 1, 4, 16, 32, 64, 96, 128, 192, 256)
_CONTEXTS = (128, 512, 1536)
_CHUNKS = (0, 32, 128, 256, 512, 1024, 2048)
_STARTS = (0, 1024)
# Where a card's times may bend.
_CURVE_ROWS = (1.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0)
# Reading weights from the host's memory over PCIe, as gLLM's machine has it.
_WEIGHT_BYTES_PER_S = 20.79e9
_OFF = MigrationArgs(mode="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Whether and how layers move.

    `planner` None: as the server's, with the window of `args`. `costs` says what the planner
    predicts by: `tables`, costs fitted beforehand to made-up steps of the cluster's own tables, as
    a server has them from a file; `online`, costs fitted to the steps that it sees. The stages'
    speeds are learnt from their steps with both. `copying` and `shares_links` are as in
    `MoveCosts`. `wishes` are an operator's plans, each with its moment.
    """

    args: MigrationArgs = _OFF
    planner: PlannerArgs | None = None
    costs: Literal["tables", "online"] = "tables"
    copying: Literal["stage", "beside"] = "stage"
    shares_links: bool = False
    wishes: tuple[tuple[float, tuple[int, ...]], ...] = ()

    @property
    def is_on(self) -> bool:
        return self.args.mode != "off"

    def control(
        self, plan: StagePlan, parts: PartSeconds, layer_weights: tuple[float, ...]
    ) -> MigrationControl:
        """That of a new pipeline."""
        if not self.is_on:
            return MigrationControl.off(plan)
        window = self.args.window_steps
        args = self.planner or PlannerArgs(
            window_steps=window, evaluate_steps=min(PlannerArgs().evaluate_steps, window)
        )
        predictor = None
        if self.costs == "tables":
            predictor = StepPredictor(fitted_costs(parts, plan.num_layers, layer_weights))
        planner = LayerPlanner(args, plan, predictor, self.args.max_layers(plan))
        return MigrationControl.of(self.args, plan, planner)

    def move_costs(
        self, model: ModelShape, latency_s: float, bytes_per_s: float, page_size: int
    ) -> MoveCosts:
        """What a layer's way takes over that link."""
        is_resident = self.args.weights == "resident"
        return MoveCosts(
            kv_bytes_per_token=model.kv_bytes_per_layer_token,
            page_size=page_size,
            weight_bytes=model.layer_weight_bytes,
            weight_bytes_per_s=float("inf") if is_resident else _WEIGHT_BYTES_PER_S,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            copying=self.copying,
            shares_links=self.shares_links,
        )


STILL = Migration()


def fitted_costs(
    parts: PartSeconds, num_layers: int, layer_weights: tuple[float, ...] = ()
) -> StepCosts:
    """The costs that come nearest to the tables' times of made-up steps."""
    costs = fit_parts(list(_samples(parts, _made_up_steps())), (0,) * num_layers, _CURVE_ROWS)
    if layer_weights:
        return StepCosts(costs.layer, costs.embedding, costs.tail, layer_weights)
    return costs


def fit_errors(parts: PartSeconds, num_layers: int, steps: Iterable[StepShape]) -> FitErrors:
    """How far `fitted_costs` are from the tables on other steps."""
    samples = list(_samples(parts, steps))
    return errors_on(fitted_costs(parts, num_layers), samples, (0,) * num_layers)


def work_of(shape: StepShape) -> StepWork:
    """What the planner would see of such a step."""
    return StepWork(
        tokens=shape.num_tokens,
        decodes=shape.num_decodes,
        decode_attended_tokens=sum(shape.decode_contexts),
        prefill_attended_tokens=sum(
            length * (2 * before + length + 1) // 2 for length, before in shape.prefills
        ),
        samples=shape.num_samples,
    )


def _made_up_steps() -> Iterator[StepShape]:
    for decodes, context, chunk, start in product(_DECODES, _CONTEXTS, _CHUNKS, _STARTS):
        is_repeated = (not decodes and context != _CONTEXTS[0]) or (not chunk and start)
        if is_repeated or not decodes + chunk:
            continue
        prefills = ((chunk, start),) if chunk else ()
        yield StepShape(prefills, (context,) * decodes, decodes + (chunk > 0))


def _samples(parts: PartSeconds, steps: Iterable[StepShape]) -> Iterator[PartSample]:
    for shape in steps:
        yield PartSample(
            work_of(shape),
            (parts.layer_s(shape) * 1e3,),
            parts.embedding_s(shape) * 1e3,
            parts.tail_s(shape) * 1e3,
        )
