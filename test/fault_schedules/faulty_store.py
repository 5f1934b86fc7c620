"""A store of pages in virtual time that does what stores do at their worst.

It outlives the workers and what the stages hold, as files do. What is written to it is compared
with what the model makes of the page's tokens, what is committed with what was written.
"""

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from fault_schedules.fake_front import Client
from fault_schedules.fake_model import Oracle
from support.kept_pages import KeptPages

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.object_layers import Cuts, ObjectPart, object_layers
from sgl_pipeline.page_hash import page_hashes
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.wire.store_orders import UINT32

# What one page of one layer holds: the fingerprint of each token.
Content = tuple[int, ...]
T = TypeVar("T")
# Bytes of a fingerprint in the sizes of objects.
SLOT_BYTES = 8


def checksum(content: Content) -> int:
    return zlib.crc32(repr(content).encode())


class RightPages:
    """What each page of each request must hold, by its hash; and the hashes of each request."""

    def __init__(self, clients: Iterable[Client], num_layers: int, page_size: int) -> None:
        self.num_layers = num_layers
        self.page_size = page_size
        self.runs: list[list[bytes]] = []
        self._contents: dict[bytes, list[Content]] = {}
        for client in clients:
            self._add(client, Oracle(client.request, num_layers))

    def of(self, page_hash: bytes, layer: int) -> Content:
        """Raises KeyError for a page that no request can have."""
        return self._contents[page_hash][layer]

    def _add(self, client: Client, alone: Oracle) -> None:
        request, size = client.request, self.page_size
        tokens = [*request.prompt_ids, *alone.output]
        run = page_hashes(tokens, size, bytes.fromhex(request.cache_namespace))
        self.runs.append(run)
        for index, page_hash in enumerate(run):
            slots = slice(index * size, (index + 1) * size)
            self._contents[page_hash] = [tuple(one[slots]) for one in alone.fingerprints]


@dataclass(frozen=True, slots=True)
class StoreTempo:
    """Most seconds of a page's read or write, and of an answer; how often a read or write fails or
    never ends, no answer comes, and a page that was found is evicted soon."""

    read_s: float
    write_s: float
    answer_s: float
    failure_chance: float
    hang_chance: float
    silence_chance: float
    eviction_chance: float


def random_tempo(rng: Random) -> StoreTempo:
    slow_s = rng.choice((0.001, 0.01, 0.01, 0.1))
    return StoreTempo(
        read_s=slow_s,
        write_s=slow_s * rng.choice((1.0, 5.0)),
        answer_s=rng.choice((0.0, 0.02, 0.02, 0.5)),
        failure_chance=rng.choice((0.0, 0.0, 0.02)),
        hang_chance=rng.choice((0.0, 0.0, 0.05)),
        silence_chance=rng.choice((0.0, 0.0, 0.1)),
        eviction_chance=rng.choice((0.0, 0.0, 0.3)),
    )


class FaultyStore:
    """Objects and records of pages, and what befalls them.

    Args:
        right: what it must be given.
        groups_layers: whether an object has all layers of the stage that writes it.
    """

    def __init__(
        self, rng: Random, right: RightPages, tempo: StoreTempo, *, groups_layers: bool
    ) -> None:
        self.tempo = tempo
        self.groups_layers = groups_layers
        # Requests do not wait for it for ever.
        self.may_hang = False
        self.has_hung = False
        self._rng, self._right = rng, right
        self._kept = KeptPages[Content]()
        # The checksums of all that was written since the last `clear`, whatever has become of it.
        self._written: dict[tuple[bytes, range], list[int]] = {}
        self._evicted: set[bytes] = set()
        # Pages of which a read has found an object missing or altered.
        self._broken: set[bytes] = set()
        self.num_evicted_reads = 0  # of pages that were evicted after they had been found

    # The stages' side

    def read(self, page_hash: bytes, part: ObjectPart, due: Sequence[int]) -> list[Content]:
        """Raises BrokenObject for an object that is gone or has not the checksums `due`, StoreError
        now and then."""
        self._fail_at_times("this read")
        contents = self._kept.part(page_hash, part)
        if contents is None or [*map(checksum, contents)] != [*due]:
            self._broken.add(page_hash)
            self.num_evicted_reads += page_hash in self._evicted
            raise BrokenObject("the object is gone" if contents is None else "other bytes")
        return contents

    def write(self, page_hash: bytes, layers: range, contents: list[Content]) -> list[int]:
        """The checksum of each layer of an object. Raises StoreError now and then."""
        assert contents == self._right_contents(page_hash, layers), "a page with others is saved"
        self._fail_at_times("this write")
        return self._put(page_hash, layers, contents)

    def hangs(self) -> bool:
        """True if the next read or write never ends."""
        hangs = self.may_hang and self._rng.random() < self.tempo.hang_chance
        self.has_hung = self.has_hung or hangs
        return hangs

    # The scheduler's side

    def look_up(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        return self._kept.lookup(hashes)

    def check(self, record: PageRecord) -> None:
        """Asserts that all layers of the page were written, and that the record describes them."""
        written = array(UINT32)
        for layers in record.objects:
            written.extend(self._written[record.page_hash, layers])
        assert record.checksums == written.tobytes(), "a record is not of what was written"
        assert record.sizes == self._sizes

    def commit(self, record: PageRecord) -> None:
        self._kept.records[record.page_hash] = record

    def check_broken(self, page_hash: bytes) -> None:
        """Asserts that the page's record may be dropped."""
        assert page_hash in self._broken, "a page is called broken that was not"

    def drop(self, page_hash: bytes) -> None:
        self._kept.records.pop(page_hash, None)

    # From outside

    def clear(self) -> None:
        self._kept = KeptPages()
        self._written.clear()

    def evict(self, page_hash: bytes) -> None:
        """It needs the room of the page."""
        self.drop(page_hash)
        for key in [key for key in self._kept.objects if key[0] == page_hash]:
            del self._kept.objects[key]
        self._evicted.add(page_hash)

    def fill(self) -> None:
        """Another server has served the beginnings of some requests, and saved its pages."""
        cuts = self._random_cuts()
        for run in self._rng.sample(self._right.runs, self._rng.randint(1, len(self._right.runs))):
            for page_hash in run[: self._rng.randint(0, len(run))]:
                checksums = array(UINT32)
                for layers in object_layers(cuts, self._right.num_layers):
                    contents = self._right_contents(page_hash, layers)
                    checksums.extend(self._put(page_hash, layers, contents))
                self.commit(PageRecord(page_hash, self._sizes, checksums.tobytes(), cuts))

    def harm(self) -> None:
        """Some objects or records are lost, or some objects altered."""
        share = self._rng.choice((0.05, 0.3, 1.0))
        kind = self._rng.choice(("lose", "alter", "lose records"))
        if kind == "lose records":
            for page_hash in self._some([*self._kept.records], share):
                del self._kept.records[page_hash]
            return
        for key in self._some([*self._kept.objects], share):
            if kind == "lose":
                del self._kept.objects[key]
            else:
                contents = self._kept.objects[key]
                layer = self._rng.randrange(len(contents))
                contents[layer] = (0, *contents[layer][1:])

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (SLOT_BYTES * self._right.page_size,) * self._right.num_layers

    def _right_contents(self, page_hash: bytes, layers: range) -> list[Content]:
        return [self._right.of(page_hash, layer) for layer in layers]

    def _random_cuts(self) -> Cuts:
        """As a server of any split writes objects."""
        if not self.groups_layers:
            return ()
        later = range(1, self._right.num_layers)
        return (0, *sorted(self._rng.sample(later, self._rng.randint(0, len(later)))))

    def _put(self, page_hash: bytes, layers: range, contents: list[Content]) -> list[int]:
        self._kept.objects[page_hash, layers] = [*contents]
        self._evicted.discard(page_hash)
        self._written[page_hash, layers] = [*map(checksum, contents)]
        return self._written[page_hash, layers]

    def _some(self, things: list[T], share: float) -> list[T]:
        return [one for one in things if self._rng.random() < share]

    def _fail_at_times(self, what: str) -> None:
        if self._rng.random() < self.tempo.failure_chance:
            raise StoreError(f"{what} failed")
