"""The driver of a store: what it passes on, and how stores come and go."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import zmq
from support.pipelines import FOUR_TOKEN_PAGES, make_request, new_scheduler

from sgl_pipeline.args import TierArgs
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.errors import ConfigurationError, StoreError
from sgl_pipeline.kv_store.store_client import StoreClient
from sgl_pipeline.managers.tiers.open_tier import OpenTier
from sgl_pipeline.managers.tiers.tier_driver import TierDriver, TierOutcome
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.wire.store_orders import PagesSaved, StorePlace

IN_X = TierArgs(
    enabled=True,
    backend="file",
    is_attachable=True,
    store=StoreConfig(file_storage_path="/x", prefetch_threshold=8),
)
IN_Y = replace(IN_X, store=StoreConfig(file_storage_path="/y"))
WAIT_S = 10.0


class FakePages:
    """A `PageStore` in memory; `gate` holds its thread up, which is `asked` before."""

    def __init__(self) -> None:
        self.records: dict[bytes, PageRecord] = {}
        self.dropped: list[bytes] = []
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        self.asked.set()
        self.gate.wait()
        found = []
        for page_hash in hashes:
            if page_hash not in self.records:
                break
            found.append(self.records[page_hash])
        return found

    def commit(self, records: Sequence[PageRecord]) -> None:
        self.records |= {record.page_hash: record for record in records}

    def drop(self, page_hash: bytes) -> None:
        self.dropped.append(page_hash)

    def clear(self) -> int:
        if self.failure is not None:
            raise self.failure
        self.records, before = {}, self.records
        return len(before)

    def tend(self) -> float:
        return 60.0


class FakeProcess:
    has_ended = is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Server:
    """A driver, and what was opened for it. A folder named `/bad` cannot be opened."""

    def __init__(self, max_queued: int = 256) -> None:
        self.scheduler = new_scheduler(FOUR_TOKEN_PAGES, num_pages=32, num_stages=1)
        self.tier = self.scheduler.tier
        self.poller = zmq.Poller()
        self.opened: list[OpenTier] = []
        self.pages: list[FakePages] = []
        self.process: Any = None
        self._max_queued = max_queued
        self.driver = TierDriver(self.tier, replace(IN_X, backend=None), self._open, self.poller)

    def _open(self, args: TierArgs) -> OpenTier:
        if args.store.file_storage_path == "/bad":
            raise ConfigurationError("the folder /bad cannot hold a store")
        place = StorePlace(
            backend="file", address=args.store.file_storage_path, digest="d", save_bytes_per_s=1
        )
        self.pages.append(FakePages())
        client = StoreClient(self.pages[-1], self._max_queued)
        self.opened.append(OpenTier(place, client, self.process))
        return self.opened[-1]

    def use(self, args: TierArgs = IN_X) -> FakePages:
        self.driver.use(self._open(args), args)
        return self.pages[-1]

    def place(self) -> StorePlace | None:
        """What the stages are told to use next."""
        return self.tier._place

    def serve_until(self, holds: Callable[[], bool]) -> None:
        """Turns of a loop that waits for nothing but its descriptors."""
        end_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end_s, "it did not come true"
            self.poller.poll(100)
            self.driver.serve()

    def outcome(self, change: Callable[..., None], *arguments: Any) -> TierOutcome:
        outcomes: list[TierOutcome] = []
        change(*arguments, outcomes.append)
        self.serve_until(lambda: bool(outcomes))
        (outcome,) = outcomes
        return outcome


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.driver.close()


def record(number: int) -> PageRecord:
    return PageRecord(bytes([number] * 32), (1,), b"1234")


def test_requests_are_looked_up_and_let_go(server: Server) -> None:
    server.use()
    server.scheduler.add(make_request("a", range(16)))
    assert server.scheduler.next_microbatch(0.0) is None
    server.serve_until(lambda: server.scheduler.next_microbatch(0.0) is not None)
    assert server.tier.counts.num_lookups == 1
    state = server.driver.state()
    assert (state.backend, state.lookups, state.hits) == ("file", 1, 0)


def test_records_go_to_the_store_and_broken_ones_from_it(server: Server) -> None:
    pages = server.use()
    server.tier.commits += [record(1), record(2)]
    server.tier.broken.append(record(1).page_hash)
    server.serve_until(lambda: len(pages.records) == 2 and len(pages.dropped) == 1)
    assert not server.tier.commits and not server.tier.broken


def test_a_busy_client_gets_records_later_and_lookups_go_on_without_it() -> None:
    server = Server(max_queued=1)
    pages = server.use()
    pages.gate.clear()
    for number in range(3):
        server.scheduler.add(make_request(str(number), range(16 * number, 16 * number + 16)))
        server.driver.serve()
        assert pages.asked.wait(WAIT_S)
    server.tier.commits.append(record(1))
    server.driver.serve()
    assert server.tier.commits and server.scheduler.next_microbatch(0.0) is not None
    pages.gate.set()
    server.serve_until(lambda: bool(pages.records))
    server.driver.close()


def test_a_store_is_attached_beside_the_loop_and_detached(server: Server) -> None:
    assert server.outcome(server.driver.attach, IN_X).succeeded
    assert server.driver.args == IN_X and server.place() == server.opened[0].place
    assert server.outcome(server.driver.detach).succeeded
    assert server.driver.args.backend is None and server.place() is None
    watched = [descriptor for descriptor, _ in server.poller.sockets]
    assert server.opened[0].client.fileno() not in watched


def test_a_store_that_cannot_be_opened_leaves_none(server: Server) -> None:
    server.use()
    outcome = server.outcome(
        server.driver.attach, replace(IN_X, store=StoreConfig(file_storage_path="/bad"))
    )
    assert outcome == TierOutcome(False, "the folder /bad cannot hold a store")
    assert server.driver.args.backend is None and server.place() is None


def test_new_rules_need_no_other_store_and_another_store_takes_its_place(server: Server) -> None:
    server.use()
    assert server.outcome(server.driver.attach, replace(IN_X, write_policy="write_back")).succeeded
    assert server.tier.rules.write_policy == "write_back" and len(server.opened) == 1
    assert server.outcome(server.driver.attach, IN_Y).succeeded
    place = server.place()
    assert place is not None and place.address == "/y" and len(server.opened) == 2


def test_a_clear_forgets_what_is_under_way_and_goes_on(server: Server) -> None:
    pages = server.use()
    pages.commit([record(1)])
    assert server.outcome(server.driver.clear) == TierOutcome(True, "1 pages are removed")
    assert server.place() == server.opened[0].place and not pages.records


def test_a_clear_that_fails_says_so(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.use().failure = StoreError("the disk is gone")
    assert not server.outcome(server.driver.clear).succeeded
    server.serve_until(lambda: "the disk is gone" in caplog.text)
    assert server.place() is not None


def test_a_detach_ends_a_clear_that_is_under_way(server: Server) -> None:
    server.use().gate.clear()
    outcomes: list[TierOutcome] = []
    server.driver.clear(outcomes.append)
    server.driver.detach(outcomes.append)
    assert [outcome.succeeded for outcome in outcomes] == [False, True]
    server.pages[0].gate.set()


def test_a_process_that_ends_detaches_its_store(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.process = FakeProcess()
    server.use()
    server.driver.check()
    assert server.place() is not None
    server.process.has_ended = True
    server.driver.check()
    assert server.place() is None and "PUT /hicache/storage-backend" in caplog.text
    server.serve_until(lambda: server.process.is_closed)


def test_reasons_of_stages_do_not_flood_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(30):
        failed = PagesSaved(
            stage=1,
            transfer=0,
            num_pages=0,
            layers=(0, 1),
            sizes=(),
            checksums=b"",
            busy_s=0.0,
            message=f"object {number} cannot be written",
        )
        server.driver.heard(failed, now_s=float(number))
    assert [record.args[1].split()[1] for record in caplog.records] == ["0", "10", "20"]
