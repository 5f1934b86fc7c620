"""Sets up layer moves in a simulated cluster: the server's own planner, and the costs of a move."""

from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.migration.move_prices import MovePrices
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.models import ModelShape
from sgl_pipeline.simulator.page_copies import MoveCosts
from sgl_pipeline.stage_plan import StagePlan

# Reading weights from the host's memory over PCIe, as gLLM's machine has it.
_WEIGHT_BYTES_PER_S = 20.79e9
_OFF = MigrationArgs(mode="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The rules of layer moves.

    `planner` None: as the server's, with the window of `args`. `copying` and `shares_links` are as
    in `MoveCosts`. With `state_bytes` three layers of four keep a state of that size for each
    request in place of keys and values, as Qwen3.5's; what steps take is as without.
    `wishes` are an operator's plans, each with its moment.
    """

    args: MigrationArgs = _OFF
    planner: PlannerArgs | None = None
    copying: Literal["stage", "beside"] = "stage"
    shares_links: bool = False
    state_bytes: int = 0
    wishes: tuple[tuple[float, tuple[int, ...]], ...] = ()

    @property
    def is_on(self) -> bool:
        return self.args.mode != "off"

    def control(
        self, plan: StagePlan, forecast: StepForecast, scheduler: StepScheduler
    ) -> MigrationControl:
        """The control of a new pipeline with that scheduler."""
        if not self.is_on:
            return MigrationControl.off(plan)
        window = self.args.window_steps
        args = self.planner or PlannerArgs(
            window_steps=window, evaluate_steps=min(PlannerArgs().evaluate_steps, window)
        )
        prices = MovePrices(
            args, self._state_bytes(plan.num_layers), lambda: scheduler.state_slots.num_used
        )
        planner = LayerPlanner(args, plan, forecast, self.args.max_layers(plan), prices)
        return MigrationControl.of(self.args, plan, planner)

    def move_costs(
        self, model: ModelShape, latency_s: float, bytes_per_s: float, page_size: int
    ) -> MoveCosts:
        """The costs of sending a layer over that link."""
        is_resident = self.args.weights == "resident"
        return MoveCosts(
            kv_bytes_per_token=model.kv_bytes_per_layer_token,
            state_bytes=self._state_bytes(model.num_layers),
            page_size=page_size,
            weight_bytes=model.layer_weight_bytes,
            weight_bytes_per_s=float("inf") if is_resident else _WEIGHT_BYTES_PER_S,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            copying=self.copying,
            shares_links=self.shares_links,
        )

    def _state_bytes(self, num_layers: int) -> tuple[int, ...]:
        """The bytes of a slot in each layer, 0 where it has pages."""
        return tuple(self.state_bytes if layer % 4 < 3 else 0 for layer in range(num_layers))


STILL = Migration()
