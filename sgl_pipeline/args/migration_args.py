"""Settings of layer moves between stages."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require, require_seconds
from sgl_pipeline.args.flags import check_flags, our_flag
from sgl_pipeline.stage_plan import StagePlan

MIGRATION_MODES = ("off", "manual", "auto")
MIGRATION_WEIGHTS = ("resident", "background")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationArgs:
    """Settings of layer moves between stages while requests run (DynaPipe, NeurIPS'25).

    With `background` weights, those of layers that leave stay while there is room.
    """

    mode: str = our_flag(
        "off",
        "--migration",
        help="Whether layers may move between stages while requests run: never, by hand "
        "(POST /pipeline/plan), or by the planner as well. Needs two stages.",
        choices=MIGRATION_MODES,
    )
    spare_layers: int = our_flag(
        2,
        "--migration-spare-layers",
        help="With --migration, most layers that a stage may hold beyond those that it starts "
        "with; memory is kept free for them.",
    )
    weights: str = our_flag(
        "background",
        "--migration-weights",
        help="Weights of layers that may come: loaded when a move begins (background), or at the "
        "start, of the spare layers on either side of a stage's own (resident).",
        choices=MIGRATION_WEIGHTS,
    )
    window_steps: int = our_flag(
        25,
        "--migration-window",
        help="Latest steps by whose work the planner judges a split.",
    )
    timeout_s: float = our_flag(
        60.0,
        "--migration-timeout-s",
        help="Seconds that the stages may take to get ready for a move; a longer one is abandoned.",
        check=require_seconds,
    )

    def __post_init__(self) -> None:
        check_flags(self)
        require(
            self.spare_layers >= 1,
            f"--migration-spare-layers {self.spare_layers} must be at least 1; layers stay where "
            "they are with --migration off",
        )
        require(
            self.window_steps >= 1,
            f"--migration-window {self.window_steps} must be at least 1 step",
        )

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
