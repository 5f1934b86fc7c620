"""The orders and reports about layers that move from one stage to another.

A move has three places in the stream of orders. `PrepareMove`: from here on the stages load the
weights and copy the keys and values, or states, of the layers that will change hands, while the old
plan's steps go on. `SwitchPlan`: the steps behind it run under the new plan; what was written since
it was copied follows. `AbandonMove`, in place of the switch: the old plan stands. Each stage
answers the first with `MoveReady` or `MoveFailed`, the second with `MoveDone`, whether or not it
has a part in the move.
"""

from typing import Annotated, NamedTuple

import msgspec

from sgl_pipeline.stage_plan import StagePlan

# The share of its time that a stage which always has a step to run gives to the preparation of a
# move.
MOVE_SHARE = 0.1
# Steps after whose last write a state slot rests: it goes before the switch.
RESTING_STEPS = 32


# What a stage measures; anything else is not a report.
_Amount = Annotated[int, msgspec.Meta(ge=0)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class PrepareMove(msgspec.Struct, frozen=True, tag=True):
    """Make ready for `plan`. `move` is unique for the life of the server.

    `pages` is an int32 array of the pages that hold anything: of running requests and of the
    prefix cache alike; `slots` one of the state slots that do.
    """

    move: int
    plan: StagePlan
    pages: bytes
    slots: bytes


class SwitchPlan(msgspec.Struct, frozen=True, tag=True):
    """The steps behind this order run under `plan`."""

    move: int
    plan: StagePlan


class AbandonMove(msgspec.Struct, frozen=True, tag=True):
    """Forget what was prepared."""

    move: int


MoveOrder = PrepareMove | SwitchPlan | AbandonMove


class MoveReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The stage has the weights of the arriving layers, and has sent the pages of the leaving
    layers once. Loading the weights took `load_ms`, 0 if the stage had them."""

    stage: int
    move: int
    load_ms: _Milliseconds


class MoveDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The stage runs under the new plan and has all weights and pages of its layers.

    `copied_bytes` were sent before the switch, `patched_bytes` after it, in `patch_ms`; a step
    waited `wait_ms` for the bytes of another stage.
    """

    stage: int
    move: int
    copied_bytes: _Amount
    patched_bytes: _Amount
    patch_ms: _Milliseconds
    wait_ms: _Milliseconds


class MoveFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The stage cannot get ready. It has let go of what it had for the move."""

    stage: int
    move: int
    message: str


MoveReport = MoveReady | MoveDone | MoveFailed


class LayerMove(NamedTuple):
    """One layer's way between stages."""

    layer: int
    source: int
    target: int


def layer_moves(old: StagePlan, new: StagePlan) -> tuple[LayerMove, ...]:
    """The layers that change hands between two plans of one model, ascending."""
    return tuple(
        LayerMove(layer, source, target)
        for layer, (source, target) in enumerate(zip(_owners(old), _owners(new), strict=True))
        if source != target
    )


def most_layers_held(old: StagePlan, new: StagePlan) -> tuple[int, ...]:
    """Most layers that each stage holds on the way from `old` to `new`: arriving layers are there
    before leaving ones have left."""
    return tuple(
        len({*old.layers_of(stage), *new.layers_of(stage)}) for stage in range(old.num_stages)
    )


def _owners(plan: StagePlan) -> list[int]:
    """The stage of each layer."""
    return [stage for stage, count in enumerate(plan.layer_counts) for _ in range(count)]
