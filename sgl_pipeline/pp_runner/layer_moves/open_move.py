"""The move under way on one stage: its two directions, and how far it has come."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic

from sgl_pipeline.pp_runner.layer_moves.incoming_layers import IncomingLayers
from sgl_pipeline.pp_runner.layer_moves.move_site import MoveSite, PageLinks, R
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import OutgoingLayers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    LayerMove,
    MoveDone,
    PrepareMove,
    SwitchPlan,
    layer_moves,
)
from sgl_pipeline.wire.step_order import INT32


@dataclass(slots=True)
class OpenMove(Generic[R]):
    """`switch` is the order to switch, from when it is obeyed at `switch_began_s`; the stage
    `is_switched` when it has sent all that the targets lacked."""

    order: PrepareMove
    began_s: float
    outgoing: list[OutgoingLayers[R]]
    incoming: list[IncomingLayers[R]]
    is_loading: bool
    load_ms: float = 0.0
    patch_ms: float = 0.0
    is_ready: bool = False  # and has reported it
    switch: SwitchPlan | None = None
    switch_began_s: float = 0.0
    is_switched: bool = False
    has_failed: bool = False
    new_layers: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        order: PrepareMove,
        stage: int,
        plan: StagePlan,
        site: MoveSite[R],
        links: PageLinks[R],
        now_s: float,
    ) -> "OpenMove[R]":
        """The part of `stage` in the move from `plan`, which begins now."""
        moves = layer_moves(plan, order.plan)
        pages, slots = array(INT32, order.pages), array(INT32, order.slots)
        incoming = [
            IncomingLayers(layers, site, links.receiver(order.move, source))
            for source, layers in _by_stage(
                (one.source, one) for one in moves if one.target == stage
            )
        ]
        outgoing = [
            OutgoingLayers(layers, pages, slots, site, links.sender(order.move, target))
            for target, layers in _by_stage(
                (one.target, one) for one in moves if one.source == stage
            )
        ]
        new_layers = [layer for part in incoming for layer in part.layers]
        return cls(order, now_s, outgoing, incoming, bool(new_layers), new_layers=new_layers)

    @property
    def leaving_layers(self) -> list[int]:
        return [layer for outgoing in self.outgoing for layer in outgoing.layers]

    @property
    def has_sent_once(self) -> bool:
        """True if the weights are here and what is left to send is little."""
        return not self.is_loading and all(outgoing.is_ready for outgoing in self.outgoing)

    def begin_switch(self, order: SwitchPlan, now_s: float) -> None:
        """No step of the old plan runs here any more."""
        self.switch, self.switch_began_s = order, now_s
        for outgoing in self.outgoing:
            outgoing.begin_rest()

    def work(self) -> bool:
        """Sends and takes a parcel in each direction, where there is one; False: in none. The new
        layers are held, unless the stage `is_loading`."""
        did_work = False
        for outgoing in self.outgoing:
            did_work |= outgoing.work()
        for incoming in self.incoming if not self.is_loading else ():
            did_work |= incoming.work()
        return did_work

    def send_rest(self) -> bool:
        """As `OutgoingLayers.send_rest`, to all targets."""
        have_sent = [outgoing.send_rest() for outgoing in self.outgoing]
        return all(have_sent)

    def done(self, stage: int) -> MoveDone | None:
        """The report of the end; None before it."""
        if not self.is_switched or not all(incoming.has_all for incoming in self.incoming):
            return None
        return MoveDone(
            stage=stage,
            move=self.order.move,
            copied_bytes=sum(outgoing.copied_bytes for outgoing in self.outgoing),
            patched_bytes=sum(outgoing.patched_bytes for outgoing in self.outgoing),
            patch_ms=self.patch_ms,
            wait_ms=sum(incoming.wait_s for incoming in self.incoming) * 1e3,
        )

    def close_links(self) -> None:
        for outgoing in self.outgoing:
            outgoing.close()
        for incoming in self.incoming:
            incoming.close()


def _by_stage(moves: Iterable[tuple[int, LayerMove]]) -> list[tuple[int, list[int]]]:
    """The layers of each other stage; moves are ascending by layer, hence by stage."""
    return [
        (stage, [one.layer for _, one in group])
        for stage, group in groupby(moves, key=lambda pair: pair[0])
    ]
