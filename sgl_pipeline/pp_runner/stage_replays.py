"""A stage's work before a step for replaced stages: it computes again, or sends kept rows.

The stage that lacks keys and values runs its layers on the rows that they were first computed from;
the stage before it has these in its log. No other stage has a part.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs
from sgl_pipeline.pp_runner.boundary_log import BoundaryLog
from sgl_pipeline.pp_runner.links.activation_link import ActivationLink
from sgl_pipeline.pp_runner.step_layers import StepLayers
from sgl_pipeline.wire.step_order import MirroredChunk, StepOrder

# Time for which a stage reads the scheduler's messages before it looks for rows again.
LOOK_S = 0.5e-3

# Reads the scheduler's messages for some seconds; raises the reason to drop the step.
Attend = Callable[[float], None]


def attend_idle(timeout_s: float) -> None:
    """Returns at once: stages that share a thread never wait."""
    assert timeout_s == 0.0, "a stage waits for another one, which shares its thread"


@dataclass(frozen=True, slots=True)
class StageReplays:
    """The replays of one stage. `log` is None if it keeps no rows."""

    stage: int
    page_size: int
    device: torch.device
    layers: StepLayers
    log: BoundaryLog | None

    def run(
        self,
        plan: StepOrder,
        replays: Iterable[tuple[tuple[int, ...], list[MirroredChunk]]],
        own_layers: range,
        link: ActivationLink,
        attend: Attend,
    ) -> None:
        """Does this stage's part of `replays` (`RequestMirror.replays`), which come before the
        chunks of `plan`.

        Raises as `ActivationLink.receive`, and ProtocolError for rows that were not kept.
        """
        for stages, chunks in replays:
            computes, feeds = self.stage in stages, self.stage + 1 in stages
            if not (computes or feeds):
                continue
            attend(0.0)
            inputs = build_step_inputs(chunks, self.page_size, self.device)
            if computes:
                hidden = None
                if self.stage > 0:
                    while not link.has_rows():
                        attend(LOOK_S)
                    hidden = link.receive(plan.step_id, inputs.num_tokens)
                self.layers.plan(plan.epoch, own_layers, inputs)
                rows = self.layers.run(inputs, hidden)
                if self.log is not None:
                    self.log.write(inputs.slots, rows)
            elif self.log is not None:
                rows = self.log.read(inputs.slots)
            else:
                raise ProtocolError(f"stage {self.stage} was asked for rows, and keeps none")
            if feeds:
                while not link.has_room():
                    attend(LOOK_S)
                link.send(plan.step_id, rows)
