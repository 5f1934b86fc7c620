"""What a layer move needs of the stage and of its links to other stages.

`stage_site.py` and `links/page_link.py` offer it in a worker, fakes in virtual time. Neither this
file nor the state machines on it (`outgoing_layers`, `incoming_layers`, `layer_mover`) know
tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from sgl_pipeline.stage_plan import StagePlan

R = TypeVar("R")


class Parcel(NamedTuple, Generic[R]):
    """Pages of one layer on their way; `rows` are as `MoveSite.read_pages` gave them, None where
    the parcel only says that it `is_last`."""

    rows: R | None
    num_bytes: int
    is_last: bool


class LeavingPages(Protocol[R]):
    """Pages that are being read: those of a GPU come to the host beside its kernels."""

    def is_read(self) -> bool:
        """Whether `parcel` would not wait."""

    def parcel(self) -> Parcel[R]:
        """They, as steps that were launched before had written them."""


class PageSender(Protocol[R]):
    """The source's end of the way to one target."""

    def can_send(self) -> bool:
        """Whether the target listens and has taken up most of what was sent."""

    def send(self, parcel: Parcel[R]) -> None:
        """Sends without waiting for the target, whatever `can_send` says."""

    def close(self) -> None: ...


class PageReceiver(Protocol[R]):
    """The target's end of the way from one source."""

    def receive(self, timeout_s: float) -> Parcel[R] | None:
        """The next parcel, waited for at most `timeout_s`; its rows are valid until the next call.
        None when there is none.

        Raises StageGone when the source has closed its end.
        """

    def close(self) -> None: ...


class PageLinks(Protocol[R]):
    """Ways between any two stages, one for each move and direction, and, by its address, between
    two workers of one stage."""

    def sender(self, move: int, target: int) -> PageSender[R]: ...
    def receiver(self, move: int, source: int) -> PageReceiver[R]: ...
    def sender_at(self, address: str) -> PageSender[R]: ...
    def receiver_at(self, address: str) -> PageReceiver[R]: ...


class MoveSite(Protocol[R]):
    """The stage, as a move sees it."""

    @property
    def pages_per_parcel(self) -> int:
        """How many pages of a layer make a good parcel."""

    def begin_loading(self, layers: Sequence[int]) -> None:
        """Loads the weights of `layers` beside the steps."""

    def has_loaded(self) -> bool:
        """Whether the layers of `begin_loading` can be held now. Raises what loading raised."""

    def hold(self, layers: Iterable[int]) -> None:
        """Takes over what was loaded and gives the layers pages."""

    def drop(self, layers: Iterable[int]) -> None:
        """Lets go of layers and of what was loaded for them, as far as there is any of it."""

    def read_pages(self, layer: int, pages: Sequence[int]) -> LeavingPages[R]:
        """Begins to read the keys and values of `pages`."""

    def write_pages(self, rows: R) -> None:
        """Puts pages of another stage where they belong."""

    def know_plan(self, plan: StagePlan) -> None:
        """Makes ready for steps of the plan, whose layers are held."""

    def close(self) -> None:
        """Ends what `begin_loading` began."""

    def wait_before(self, layers: Iterable[int], incoming: "Awaited") -> None:
        """Has `incoming.wait` called before a step runs the first of `layers`."""

    def stop_waiting(self) -> None:
        """Has nothing called of what `wait_before` was given."""

    def attend(self, timeout_s: float) -> None:
        """Listens to the scheduler for so long, while a step waits for pages. Raises what ends the
        step where they will never come."""


class Awaited(Protocol):
    """Pages that are on their way."""

    def wait(self) -> None:
        """Returns when they are there."""


class StageGone(Exception):
    """Another stage has closed its end of a page link before its last parcel."""
