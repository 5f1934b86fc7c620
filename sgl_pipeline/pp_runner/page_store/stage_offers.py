"""The offers of one stage to peers, for the thread of the steps.

While pages of the stage's layers are on their way to it, its offers are held back. The door opens
with the first offer: a server without peers has none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.links.stream_server import StreamServer
from sgl_pipeline.pp_runner.page_store.offered_pages import OfferedPages
from sgl_pipeline.pp_runner.page_store.page_server import Reader, serve_pages
from sgl_pipeline.pp_runner.page_store.pool_pages import PoolPages


class PeerSite(NamedTuple):
    """The place at which peers reach a stage: its door, and the run directory of its host, where
    the keys are too."""

    run_directory: str
    door: str


class StageOffers:
    """Offers that were made, and those that are held back.

    Args:
        sizes: bytes of a page of each layer of the model.
        own_pages: gives the layers that the stage has now, and the way to their pages.
    """

    def __init__(
        self,
        site: PeerSite,
        sizes: Sequence[int],
        own_pages: Callable[[], tuple[range, PoolPages]],
    ) -> None:
        self._site, self._own_pages = site, own_pages
        self._offered = OfferedPages(sizes)
        self._server: StreamServer[Reader] | None = None
        self._held_back: dict[int, tuple[str, Mapping[bytes, int]]] = {}

    @property
    def has_held_back(self) -> bool:
        """True if there are offers for `make`."""
        return bool(self._held_back)

    def hold_back(self, number: int, digest: str, pages: Mapping[bytes, int]) -> None:
        """Takes an offer of pages, given by their hashes. Raises ProtocolError if there is one of
        this number."""
        if number in self._held_back or self._offered.is_offered(number):
            raise ProtocolError(f"offer {number} was made twice")
        self._held_back[number] = digest, pages

    def make(self) -> None:
        """Makes the offers that were held back."""
        if not self._offered.knows_layers:
            self._offered.hold(*self._own_pages())
        for number, (digest, pages) in self._held_back.items():
            self._offered.offer(number, digest, pages)
        self._held_back.clear()
        if self._server is None:
            self._server = serve_pages(self._offered, self._site.run_directory, self._site.door)
        self._server.look_again()

    def withdraw(self, number: int) -> None:
        """Ends an offer: no peer reads its pages from here on."""
        self._held_back.pop(number, None)
        self._offered.withdraw(number)

    def forget(self) -> None:
        """Ends all offers. Readers wait for them to be made again."""
        self._held_back.clear()
        self._offered.forget()

    def close(self) -> None:
        """`forget`, and closes the door."""
        self.forget()
        if self._server is not None:
            self._server.close()
