"""All pages and states of a stage, on their way from the worker that leaves it to its successor.

It does with all layers of a stage what a layer move does with some. The plan stays, and the leaver
gives nothing up: it can serve on as if nothing had been sent.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.layer_moves.incoming_layers import IncomingLayers
from sgl_pipeline.pp_runner.layer_moves.move_site import MoveSite, PageLinks, PageSender, R
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import OutgoingLayers
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    HandPagesOver,
    PagesCopied,
    PagesTaken,
    TakePagesOver,
)
from sgl_pipeline.wire.step_order import INT32

HandoverOrder = HandPagesOver | TakePagesOver | FinishHandover
HandoverReport = PagesCopied | PagesTaken


class PageHandover(Generic[R]):
    """The newest handover that the worker takes part in; at first there is none. It
    `has_rest` from its end on, until `send_rest` has sent all.

    Args:
        report: takes the worker's reports on it.
    """

    def __init__(
        self,
        stage: int,
        site: MoveSite[R],
        links: PageLinks[R],
        report: Callable[[HandoverReport], None],
    ) -> None:
        self._stage = stage
        self._site = site
        self._links = links
        self._report = report
        self._handover = -1
        self._sender: PageSender[R] | None = None
        self._outgoing: OutgoingLayers[R] | None = None
        self._incoming: IncomingLayers[R] | None = None
        self._has_copied = False  # and has reported it
        self.has_rest = False

    @property
    def is_open(self) -> bool:
        """True if `work` may have something to do."""
        return self._outgoing is not None or self._incoming is not None

    def obey(self, order: HandoverOrder, layers: Sequence[int]) -> None:
        """Takes an order of the scheduler; `layers` are the stage's.

        Raises ProtocolError for the end of a handover that is not under way.
        """
        if isinstance(order, FinishHandover):
            if self._outgoing is None or order.handover != self._handover:
                raise ProtocolError(
                    f"stage {self._stage} was ordered to finish handover {order.handover}, "
                    f"it takes part in {self._handover}"
                )
            self._outgoing.begin_rest()
            self.has_rest = True
            return
        self.close()
        self._handover, self._has_copied = order.handover, False
        if isinstance(order, HandPagesOver):
            self._sender = self._links.sender_at(order.address)
            pages, slots = array(INT32, order.pages), array(INT32, order.slots)
            self._outgoing = OutgoingLayers(layers, pages, slots, self._site, self._sender)
        else:
            receiver = self._links.receiver_at(order.address)
            self._incoming = IncomingLayers(layers, self._site, receiver)
        self._look_how_far()

    def wrote(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """A step has written to these pages and state slots of all layers."""
        if self._outgoing is not None:
            self._outgoing.wrote(pages, slots)

    def work(self) -> bool:
        """Does the next small piece of work; False: there is none now."""
        did_work = False
        if self._outgoing is not None:
            did_work |= self._outgoing.work()
        if self._incoming is not None:
            did_work |= self._incoming.work()
        self._look_how_far()
        return did_work

    def send_rest(self) -> bool:
        """As `OutgoingLayers.send_rest`, of a handover that `has_rest`."""
        assert self._outgoing is not None
        self.has_rest = not self._outgoing.send_rest()
        return not self.has_rest

    def close(self) -> None:
        """Drops the handover at any point."""
        if self._outgoing is not None:
            self._outgoing.close()
        if self._incoming is not None:
            self._incoming.close()
        self._outgoing = self._incoming = self._sender = None
        self.has_rest = False

    def _look_how_far(self) -> None:
        if self._incoming is not None and self._incoming.has_all:
            self._incoming = None
            self._report(PagesTaken(self._stage, self._handover))
        if self._outgoing is None or self._sender is None or self._has_copied:
            return
        # A parcel to a worker that does not listen yet is lost.
        if self._outgoing.is_ready and self._sender.can_send():
            self._has_copied = True
            self._report(PagesCopied(self._stage, self._handover))
