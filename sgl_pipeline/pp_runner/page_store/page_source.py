"""The sources of loads: the store, or a peer (`peer_pages.py`)."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.object_layers import object_parts
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer


class LoadedLayers(NamedTuple):
    """Some `layers` of the page at `page_index` of a load, checked. They lie one behind the other
    at the beginning of `content`, which the last call for a buffer gave."""

    page_index: int
    layers: range
    content: Bytes


class PageSource(Protocol):
    """One thread reads and closes."""

    def read(self, job: PageTransfer, buffer: Callable[[], Bytes]) -> Iterator[LoadedLayers]:
        """The pages of a load, each with the layers of the stage in sequence.

        Raises StoreError; PeerLost where loads behind this one would fail too.

        Args:
            buffer: see `PageCopies.buffer`.
        """

    def interrupt(self) -> None:
        """Ends a read under way soon, with any error; called by another thread."""

    def end_read(self, transfer: int) -> None:
        """Ends the read of this transfer soon, if it is under way, with a StoreError that is no
        PeerLost; called by another thread."""

    def close(self) -> None: ...


class StoredPages:
    """The pages of `digest` in a store.

    Args:
        layers: of the stage.
        sizes: bytes of a page of each layer of the model.
    """

    def __init__(
        self, store: ObjectStore, digest: str, layers: range, sizes: Sequence[int]
    ) -> None:
        self._store, self._digest = store, digest
        self._layers, self._sizes = layers, sizes

    def read(self, job: PageTransfer, buffer: Callable[[], Bytes]) -> Iterator[LoadedLayers]:
        """See `PageSource`."""
        parts = {cuts: [*object_parts(cuts, self._sizes, self._layers)] for cuts in {*job.cuts}}
        for index, cuts in enumerate(job.cuts):
            for part in parts[cuts]:
                content = buffer()
                self._store.read_into(
                    object_name(job.hash_of(index), self._digest, part.object_layers),
                    [content[place].data for place in layer_places(part.layers, self._sizes)],
                    job.checksums_of(index, part.layers),
                    part.num_bytes,
                    part.offset,
                )
                yield LoadedLayers(index, part.layers, content)

    def interrupt(self) -> None:
        """Nothing: a store ends each read by itself."""

    def end_read(self, transfer: int) -> None:
        """As `interrupt`."""

    def close(self) -> None:
        """Nothing: the store outlives the session."""


def layer_places(layers: range, sizes: Sequence[int]) -> Iterator[slice]:
    """The places of layers in a buffer, one behind the other."""
    start = 0
    for layer in layers:
        yield slice(start, start := start + sizes[layer])
