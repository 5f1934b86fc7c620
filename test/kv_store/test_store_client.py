"""The client's thread answers every lookup, whatever the store does, and no call waits for it."""

import select
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.store_files import (
    contents_of,
    open_store,
    page_hash,
    read_page,
    save_page,
    write_objects,
)

from sgl_pipeline.errors import StoreError
from sgl_pipeline.kv_store.store_client import (
    SUSPECT_LOOKUPS,
    Answer,
    Cleared,
    Found,
    StoreClient,
    Trouble,
)
from sgl_pipeline.page_record import PageRecord

WAIT_S = 60.0


class SlowStore:
    """Does nothing until it may; fails on demand."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.error: Exception | None = None
        self.committed: list[bytes] = []

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        assert self.may_go.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return []

    def commit(self, records: Sequence[PageRecord]) -> None:
        self.lookup([])
        self.committed.extend(record.page_hash for record in records)

    def drop(self, page_hash: bytes) -> None:
        self.lookup([])

    def clear(self) -> int:
        self.lookup([])
        return len(self.committed)

    def tend(self) -> float:
        return WAIT_S


@pytest.fixture
def slow() -> Iterator[tuple[SlowStore, StoreClient]]:
    store = SlowStore()
    client = StoreClient(store, max_queued=3)
    yield store, client
    store.may_go.set()
    client.close()


def answers(client: StoreClient, number: int) -> list[Answer]:
    """The next `number` answers, for which it polls the client's descriptor."""
    found: list[Answer] = []
    while len(found) < number:
        assert select.select([client.fileno()], [], [], WAIT_S)[0], found
        found.extend(client.take_answers())
    return found


def test_pages_are_found_dropped_and_cleared(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    client = StoreClient(store)
    hashes = [page_hash(number) for number in range(5)]
    client.commit([write_objects(objects, number) for number in range(4)])
    client.ask(1, hashes)
    (first,) = answers(client, 1)
    assert isinstance(first, Found)
    assert [read_page(objects, record) for record in first.records] == [
        contents_of(number) for number in range(4)
    ]
    client.drop(hashes[2])
    client.ask(2, hashes)
    client.clear()
    client.ask(3, hashes)
    second, cleared, third = answers(client, 3)
    assert isinstance(second, Found) and (second.lookup, len(second.records)) == (2, 2)
    assert (cleared, third) == (Cleared(3), Found(3, []))
    assert not select.select([client.fileno()], [], [], 0)[0] and client.take_answers() == []
    client.close()
    counts = client.counts
    assert (counts.lookups, counts.lookups_with_hits, counts.pages_found) == (3, 2, 6)
    assert (counts.pages_committed, counts.pages_dropped, counts.errors) == (4, 1, 0)


def test_a_full_queue_refuses_and_clear_goes_in_even_so(
    slow: tuple[SlowStore, StoreClient],
) -> None:
    store, client = slow
    taken = 0
    while client.has_room:
        taken += client.ask(taken, [])
    assert taken in (3, 4)  # its thread may hold one
    assert not client.ask(9, []) and not client.commit([]) and not client.drop(b"")
    assert client.counts.refused == 3
    client.clear()
    store.may_go.set()
    assert answers(client, taken + 1) == [
        *(Found(number, []) for number in range(taken)),
        Cleared(0),
    ]
    assert client.has_room


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), StoreError("no"), KeyError("bug")]
)
def test_errors_are_told_once_and_end_nothing(
    slow: tuple[SlowStore, StoreClient], error: Exception
) -> None:
    store, client = slow
    store.error = error
    store.may_go.set()
    client.ask(1, [])
    client.commit([])
    client.ask(2, [])
    told = answers(client, 3)
    assert [answer for answer in told if isinstance(answer, Found)] == [Found(1, ()), Found(2, ())]
    (trouble,) = (answer for answer in told if isinstance(answer, Trouble))
    assert str(error) in trouble.message
    store.error = None
    client.clear()
    assert answers(client, 1) == [Cleared(0)]
    assert client.counts.errors == 3


def test_close_does_what_is_queued(slow: tuple[SlowStore, StoreClient]) -> None:
    store, _ = slow
    other = StoreClient(store)
    other.commit([PageRecord(page_hash(1), (), b"")])
    store.may_go.set()
    other.close()
    assert store.committed == [page_hash(1)]


def test_a_store_that_never_hits_is_told_once(slow: tuple[SlowStore, StoreClient]) -> None:
    store, client = slow
    store.may_go.set()
    told: list[Answer] = []
    for number in range(2 * SUSPECT_LOOKUPS):
        assert client.ask(number, [])
        told += answers(client, 1)
    (trouble,) = (answer for answer in told if isinstance(answer, Trouble))
    assert "1000 lookups" in trouble.message


def test_the_thread_keeps_the_bounds_between_calls(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    client = StoreClient(store)
    save = [write_objects(objects, number) for number in range(20)]
    client.commit(save)
    for number in range(20):
        client.ask(number, [page_hash(number)])
    answers(client, 20)
    client.close()
    assert store.counts().held_files >= 20 * 3


def test_two_clients_share_a_folder(tmp_path: Path) -> None:
    clients = []
    for _ in range(2):
        store, objects = open_store(tmp_path)
        clients.append((StoreClient(store), objects))
    for number in range(40):
        for client, objects in clients[number % 2 :]:
            client.commit([write_objects(objects, number)])
    for client, _ in clients:
        client.ask(0, [])
        answers(client, 1)
    hashes = [page_hash(number) for number in range(40)]
    for client, objects in clients:
        client.ask(1, hashes)
        (found,) = answers(client, 1)
        assert isinstance(found, Found)
        assert [read_page(objects, record) for record in found.records] == [
            contents_of(number) for number in range(40)
        ]
        client.close()


def test_saves_are_found_by_the_next_server(tmp_path: Path) -> None:
    save_page(*open_store(tmp_path), 3)
    client = StoreClient(open_store(tmp_path)[0])
    client.ask(1, [page_hash(3)])
    (found,) = answers(client, 1)
    assert isinstance(found, Found) and len(found.records) == 1
    client.close()
