"""The sources of loads: the store, or a peer (`peer_pages.py`)."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes
from sgl_pipeline.pp_runner.page_store.transfer_jobs import PageTransfer


class LoadedObject(NamedTuple):
    """The object of a page and layer of a load, checked. It is the beginning of `content`, which
    the last call for a buffer gave."""

    page: int
    layer: int
    content: Bytes


class PageSource(Protocol):
    """One thread reads and closes."""

    def read(self, job: PageTransfer, buffer: Callable[[], Bytes]) -> Iterator[LoadedObject]:
        """The objects of a load, page by page, each with the layers of the stage in sequence.

        Raises StoreError; PeerLost where loads behind this one would fail too.

        Args:
            buffer: see `PageCopies.buffer`.
        """

    def interrupt(self) -> None:
        """Ends a read under way soon, with any error; called by another thread."""

    def close(self) -> None: ...


class StoredPages:
    """The pages of `digest` in a store."""

    def __init__(
        self,
        store: ObjectStore,
        digest: str,
        layers: range,
        object_bytes: Callable[[int], int],
    ) -> None:
        self._store, self._digest = store, digest
        self._layers, self._object_bytes = layers, object_bytes

    def read(self, job: PageTransfer, buffer: Callable[[], Bytes]) -> Iterator[LoadedObject]:
        """See `PageSource`."""
        for index, page in enumerate(job.pages):
            for layer in self._layers:
                content = buffer()
                self._store.read_into(
                    object_name(job.hash_of(index), self._digest, layer),
                    content.data,
                    self._object_bytes(layer),
                    job.checksum_of(index, layer),
                )
                yield LoadedObject(page, layer, content)

    def interrupt(self) -> None:
        """Nothing: a store ends each read by itself."""

    def close(self) -> None:
        """Nothing: the store outlives the session."""
