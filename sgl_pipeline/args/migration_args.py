"""Whether and how layers move between stages."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require, require_choice, require_seconds
from sgl_pipeline.stage_plan import StagePlan

MIGRATION_MODES = ("off", "manual", "auto")
MIGRATION_WEIGHTS = ("resident", "background")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationArgs:
    """Whether and how layers move between stages while requests run (DynaPipe, NeurIPS'25).

    `mode`: `off`, by hand (`manual`), or by the planner as well (`auto`). A stage may hold at most
    `spare_layers` more than it starts with; memory for their pages is kept free. With `weights`
    `resident` it loads the weights of that many layers on either side of its own at the start, with
    `background` when a move begins; those of layers that leave stay while there is room.
    `window_steps` is how long the planner must be of one mind.
    """

    mode: str = "off"
    spare_layers: int = 2
    weights: str = "background"
    window_steps: int = 25
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require_choice("--migration", self.mode, MIGRATION_MODES)
        require(
            self.spare_layers >= 1,
            f"--migration-spare-layers {self.spare_layers} must be at least 1; layers stay where "
            "they are with --migration off",
        )
        require_choice("--migration-weights", self.weights, MIGRATION_WEIGHTS)
        require(
            self.window_steps >= 1,
            f"--migration-window {self.window_steps} must be at least 1 step",
        )
        require_seconds("--migration-timeout-s", self.timeout_s)

    def max_layers(self, plan: StagePlan) -> tuple[int, ...]:
        """The most layers that each stage may hold at once, when it starts with `plan`."""
        spare = 0 if self.mode == "off" else self.spare_layers
        return tuple(min(count + spare, plan.num_layers) for count in plan.layer_counts)

    def layers_to_load(self, plan: StagePlan, stage: int) -> tuple[int, ...]:
        """The layers whose weights `stage` loads at its start beside its own."""
        if self.mode == "off" or self.weights == "background":
            return ()
        own, spare = plan.layers_of(stage), self.spare_layers
        before = range(max(0, own.start - spare), own.start)
        return (*before, *range(own.stop, min(own.stop + spare, plan.num_layers)))
