"""The interface of a stage and its links to other stages for a layer move.

It has implementations in a worker (`stage_site.py`, `links/page_link.py`) and in virtual time.
Neither this module nor the state machines on it (`outgoing_layers`, `incoming_layers`,
`layer_mover`) use tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from sgl_pipeline.stage_plan import StagePlan

R = TypeVar("R")


class Parcel(NamedTuple, Generic[R]):
    """Places of one layer on their way; `rows` come from `MoveSite.read`; None if the parcel
    only marks the end (`is_last`)."""

    rows: R | None
    num_bytes: int
    is_last: bool


class LeavingPages(Protocol[R]):
    """Places that are being read: a GPU's pages come to the host beside its kernels."""

    def is_read(self) -> bool:
        """True if `parcel` would not wait."""

    def parcel(self) -> Parcel[R]:
        """The places as written by the steps that were launched before."""


class PageSender(Protocol[R]):
    """The source's end of the link to one target."""

    def can_send(self) -> bool:
        """True if the target listens and has taken most of the parcels."""

    def send(self, parcel: Parcel[R]) -> None:
        """Sends without waiting for the target, even if `can_send` is false."""

    def has_room(self) -> bool:
        """True if the target, which has listened, has taken most of the parcels, or has gone."""

    def close(self) -> None: ...


class PageReceiver(Protocol[R]):
    """The target's end of the link from one source."""

    def receive(self, timeout_s: float) -> Parcel[R] | None:
        """The next parcel, after at most `timeout_s`; its rows are valid until the next call. None
        if none came.

        Raises StageGone when the source has closed its end.
        """

    def close(self) -> None: ...


class PageLinks(Protocol[R]):
    """Links between any two stages, one for each move and direction, and, by an address, between
    two workers of one stage."""

    def sender(self, move: int, target: int) -> PageSender[R]: ...
    def receiver(self, move: int, source: int) -> PageReceiver[R]: ...
    def sender_at(self, address: str) -> PageSender[R]: ...
    def receiver_at(self, address: str) -> PageReceiver[R]: ...


class MoveSite(Protocol[R]):
    """The stage, as a move sees it. A place of a layer is a page, or a state slot if it has
    states."""

    def has_states(self, layer: int) -> bool:
        """True if the places of `layer` are state slots."""

    def places_per_parcel(self, layer: int) -> int:
        """A good number of places of `layer`, which is here, for a parcel."""

    def begin_loading(self, layers: Sequence[int]) -> None:
        """Loads the weights of `layers` beside the steps."""

    def has_loaded(self) -> bool:
        """True if the layers of `begin_loading` can be held now. Raises the error of loading."""

    def hold(self, layers: Iterable[int]) -> None:
        """Takes over the loaded weights and gives the layers pages or states."""

    def drop(self, layers: Iterable[int]) -> None:
        """Drops layers and their loaded weights, if any."""

    def read(self, layer: int, places: Sequence[int]) -> LeavingPages[R]:
        """Begins to read what `places` of `layer` hold."""

    def write(self, rows: R) -> None:
        """Writes what another stage has read, to the same places."""

    def know_plan(self, plan: StagePlan) -> None:
        """Makes ready for steps of the plan, whose layers are held."""

    def close(self) -> None:
        """Ends the loading of `begin_loading`."""

    def wait_before(self, layers: Iterable[int], incoming: "Awaited") -> None:
        """Makes a step call `incoming.wait` before it runs the first of `layers`."""

    def stop_waiting(self) -> None:
        """Drops the waits of `wait_before`."""

    def attend(self, timeout_s: float) -> None:
        """Reads the scheduler's messages for this long, while a step waits for pages. Raises the
        error that ends the step if the stages regroup."""


class Awaited(Protocol):
    """Pages that are on their way."""

    def wait(self) -> None:
        """Returns when they are there."""


class StageGone(Exception):
    """Another stage has closed its end of a page link before its last parcel."""
