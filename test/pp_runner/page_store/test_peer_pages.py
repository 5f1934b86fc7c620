"""Pages cross from the stages of one server to those of another, of any depth and split.

Real pools, real sockets, real keys; the schedulers are these tests.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from support.clusters import until
from support.page_transfers import (
    DIGEST,
    NUM_PAGES,
    PLACE,
    MemoryStore,
    await_reports,
    checksums_of,
    filled_pool,
    load_order,
    open_transfers,
    pool_content,
    save_order,
    shapes_of,
)
from support.peers import Hosts, Offering, Reading, load_from, offer_order, two_hosts

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.links import stream_server
from sgl_pipeline.pp_runner.page_store import offered_pages, page_server, peer_pages
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import PeerPlace, UseStore

PAGES, NUMBERS, TARGETS = [5, 0, 7], [11, 12, 13], [2, 6, 3]
SHAPES = shapes_of(torch.bfloat16)
WHOLE, SPLITS = (3,), [(3,), (2, 1), (1, 2), (1, 1, 1)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


class Servers:
    """Those of a test, closed in the end."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.all = hosts, list[Offering | Reading]()

    def offering(
        self, counts: Sequence[int] = (2, 1), dtype: torch.dtype = torch.bfloat16, name: str = "P"
    ) -> Offering:
        hosts = self.hosts
        self.all.append(Offering(hosts.address, hosts.directory, shapes_of(dtype), counts, name))
        return self.all[-1]

    def reading(
        self,
        *peers: PeerPlace,
        counts: Sequence[int] = (1, 2),
        dtype: torch.dtype = torch.bfloat16,
    ) -> Reading:
        self.all.append(Reading(self.hosts.other, shapes_of(dtype), counts, *peers))
        return self.all[-1]


@pytest.fixture
def servers(hosts: Hosts) -> Iterator[Servers]:
    servers = Servers(hosts)
    yield servers
    for server in servers.all:
        server.close()


def assert_equal(
    reading: Reading, offering: Offering, targets: Sequence[int], pages: Sequence[int]
) -> None:
    for layer in range(3):
        for target, page in zip(targets, pages, strict=True):
            assert reading.content(layer, target) == offering.content(layer, page)


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("dtype", "offered", "read"),
    [
        *((dtype, (2, 1), (1, 2)) for dtype in DTYPES),
        *((torch.bfloat16, offered, read) for offered in SPLITS for read in SPLITS),
    ],
    ids=str,
)
def test_stages_of_any_split_read_their_layers_from_stages_of_any_split(
    servers: Servers, dtype: torch.dtype, offered: Sequence[int], read: Sequence[int]
) -> None:
    offering = servers.offering(offered, dtype)
    reading = servers.reading(offering.place, counts=read, dtype=dtype)
    offering.offer(4, PAGES, NUMBERS)
    before = [pool_content(pool) for pool in reading.pools]
    for stage, report in enumerate(reading.load(4, TARGETS, NUMBERS)):
        own = reading.plan.layers_of(stage)
        assert (report.stage, report.num_pages, report.message) == (stage, 3, "")
        assert report.num_bytes == 3 * sum(shapes_of(dtype)[layer].page_bytes for layer in own)
    assert_equal(reading, offering, TARGETS, PAGES)
    for old, pool in zip(before, reading.pools, strict=True):
        others = [at for at in range(len(old)) if at % NUM_PAGES not in TARGETS]
        after = pool_content(pool)
        assert [old[at] for at in others] == [after[at] for at in others]


@pytest.mark.parametrize("frame_bytes", [1, SHAPES[0].page_bytes + 1, 1 << 30])
def test_frames_have_some_layers_of_a_page_each(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, frame_bytes: int
) -> None:
    monkeypatch.setattr(offered_pages, "FRAME_BYTES", frame_bytes)
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    assert [report.message for report in reading.load(4, TARGETS, NUMBERS)] == [""]
    assert_equal(reading, offering, TARGETS, PAGES)


def test_loads_take_any_part_of_an_offer_over_the_same_streams(servers: Servers) -> None:
    offering = servers.offering((2, 1))
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    offering.offer(9, [1, 5], [77, 11])
    for offer, pages, numbers in (
        (4, [7, 5], [13, 11]), (9, [1], [77]), (4, [0], [12]), (9, [5], [11]),
    ):  # fmt: skip
        assert [one.message for one in reading.load(offer, TARGETS[: len(pages)], numbers)] == [""]
        assert_equal(reading, offering, TARGETS[: len(pages)], pages)
    for stage in offering.stages:
        server = stage._offers._server
        assert server is not None and len(server.visitors) == 1


def test_a_page_that_is_no_part_of_the_offer_ends_the_load_behind_the_good_prefix(
    servers: Servers,
) -> None:
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES[:2], NUMBERS[:2])
    offering.offer(5, PAGES[2:], NUMBERS[2:])
    (report,) = reading.load(4, TARGETS, NUMBERS)
    assert (report.num_pages, report.is_broken) == (2, False)
    assert "peer P" in report.message and "is not part of offer 4" in report.message
    assert_equal(reading, offering, TARGETS[:2], PAGES[:2])
    # The next one dials again.
    assert reading.load(5, TARGETS[2:], NUMBERS[2:])[0].message == ""


def test_pages_of_another_digest_are_not_read(servers: Servers) -> None:
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES, NUMBERS, digest="ukv1-of-another")
    before = pool_content(reading.pools[0])
    (report,) = reading.load(4, TARGETS, NUMBERS)
    assert report.num_pages == 0
    assert "another model or format, ukv1-of-another, not " + DIGEST in report.message
    assert pool_content(reading.pools[0]) == before


def test_pages_of_another_size_are_noticed(servers: Servers) -> None:
    offering = servers.offering(WHOLE, torch.float32)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    (report,) = reading.load(4, TARGETS, NUMBERS)
    assert report.num_pages == 0 and "bytes for layers 0 to 2" in report.message


def test_a_server_reads_from_several_peers_and_a_store(
    tmp_path: Path, hosts: Hosts, servers: Servers
) -> None:
    saver, store = filled_pool(range(3), SHAPES, 7), MemoryStore()
    transfers = open_transfers(saver, StagePlan(0, (3,)), 0, store)
    transfers.obey(UseStore(PLACE))
    transfers.obey(save_order(1, PAGES, NUMBERS))
    checksums = checksums_of(await_reports(transfers)[0])
    transfers.close()
    with two_hosts(tmp_path / "more") as others:
        one = servers.offering(WHOLE, name="one")
        two = Offering(others.address, others.directory, SHAPES, (1, 2), "two")
        reading = Reading(
            hosts.other,
            SHAPES,
            WHOLE,
            one.place,
            two.place,
            place=PLACE,
            open_store=lambda place, sizes: store,
        )
        one.offer(4, [1], NUMBERS[:1])
        two.offer(4, [2], NUMBERS[:1])
        reading.begin(4, [3], NUMBERS[:1], "one")
        reading.begin(4, [4], NUMBERS[:1], "two")
        reading.stages[0].obey(load_order(9, [6], NUMBERS[:1], checksums[:3]))
        assert [one.message for one in reading.reports(3)] == [""] * 3
        for layer in range(3):
            assert reading.content(layer, 3) == one.content(layer, 1)
            assert reading.content(layer, 4) == two.content(layer, 2)
            assert reading.content(layer, 6) == page_of(saver, layer, PAGES[0])
        with pytest.raises(ProtocolError, match="no peer three is in use"):
            reading.begin(4, [3], NUMBERS[:1], "three")
        reading.close()
        two.close()


def page_of(pool: KvPool, layer: int, page: int) -> bytes:
    return pool_content(pool)[pool.layers.index(layer) * NUM_PAGES + page]


# Orders of the server that offers come later than those of the one that reads


def test_a_load_waits_for_the_door_the_offer_and_the_pages_of_layers_that_moved(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So an offer that did not wake the server would be noticed by nobody.
    monkeypatch.setattr(page_server, "NOT_YET_INTERVAL_S", 10.0**6)
    monkeypatch.setattr(page_server, "OFFER_WAIT_S", 10.0**6)
    monkeypatch.setattr(peer_pages, "SILENCE_S", 60.0)
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.may_start = False
    reading.begin(4, TARGETS, NUMBERS)
    time.sleep(0.1)  # no door is there
    offering.offer(3, [1], [50])
    assert offering.stages[0].is_open and offering.stages[0]._offers._server is None
    offering.may_start = True
    assert offering.stages[0].take_reports() == []
    assert not offering.stages[0].is_open
    time.sleep(0.1)  # a door is there, not the offer
    assert reading.stages[0].take_reports() == []
    offering.offer(4, PAGES, NUMBERS)
    assert reading.reports()[0].message == ""
    assert_equal(reading, offering, TARGETS, PAGES)


def test_a_reader_that_waits_is_told_so_and_refused_in_the_end(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "NOT_YET_INTERVAL_S", 0.02)
    monkeypatch.setattr(stream_server, "TIMER_INTERVAL_S", 0.02)
    monkeypatch.setattr(page_server, "OFFER_WAIT_S", 0.3)
    monkeypatch.setattr(peer_pages, "SILENCE_S", 0.15)
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(3, [1], [50])
    started_s = time.monotonic()
    (report,) = reading.load(4, TARGETS, NUMBERS)
    assert 0.3 <= time.monotonic() - started_s < 2.0
    assert "offer 4 did not come within 0.3 s" in report.message


def test_an_offer_that_was_withdrawn_is_refused_at_once(servers: Servers) -> None:
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    offering.withdraw(4)
    started_s = time.monotonic()
    (report,) = reading.load(4, TARGETS, NUMBERS)
    assert time.monotonic() - started_s < 2.0
    assert report.num_pages == 0 and "offer 4 was withdrawn" in report.message


def test_a_load_that_is_refused_fails_none_behind_it(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "NOT_YET_INTERVAL_S", 0.02)
    monkeypatch.setattr(stream_server, "TIMER_INTERVAL_S", 0.02)
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(5, PAGES, NUMBERS)
    reading.begin(4, [1], NUMBERS[:1])
    reading.begin(5, TARGETS, NUMBERS)  # it waits behind a load that waits for its offer
    offering.withdraw(4)
    first, second = reading.reports(2)
    assert "offer 4 was withdrawn" in first.message and second.message == ""
    assert_equal(reading, offering, TARGETS, PAGES)


def test_an_offer_that_waits_is_forgotten_too(servers: Servers) -> None:
    (stage,) = servers.offering(WHOLE).stages
    stage._may_start = lambda: False
    stage.obey_offer(offer_order(4, PAGES, NUMBERS))
    stage.cancel()
    stage._may_start = lambda: True
    assert not stage.is_open and stage.take_reports() == []
    assert not stage._offers._offered.is_offered(4)


def test_an_offer_that_waits_can_be_withdrawn(servers: Servers) -> None:
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.may_start = False
    offering.offer(3, [1], [50])
    offering.offer(4, PAGES, NUMBERS)
    offering.withdraw(4)
    offering.may_start = True
    offering.stages[0].take_reports()
    assert "offer 4 was withdrawn" in reading.load(4, TARGETS, NUMBERS)[0].message
    assert reading.load(3, [2], [50])[0].message == ""


def test_only_some_ends_of_offers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_pages, "MAX_REMEMBERED", 3)
    offered = offered_pages.OfferedPages((1,))
    for number in range(8):
        offered.withdraw(number)
    assert [*offered._withdrawn] == [5, 6, 7]


@pytest.mark.parametrize("way", ["another store", "cancel", "refuse"])
def test_offers_are_forgotten_where_transfers_are_and_made_again_of_other_layers(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(page_server, "OFFER_WAIT_S", 0.3)
    offering = servers.offering((2, 1))
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    for stage in offering.stages:
        if way == "another store":
            stage.obey(UseStore(None))
        elif way == "cancel":
            stage.cancel()
        else:
            assert stage.refuse_open("it goes") == []
    assert "offer 4 did not come" in reading.load(4, TARGETS, NUMBERS)[0].message
    offering.plan = StagePlan(1, (1, 2))
    offering.offer(4, PAGES, NUMBERS)
    (report,) = reading.load(4, TARGETS, NUMBERS)
    assert report.num_pages == 0 and "layer 1 is not here, but 0 to 0" in report.message
    reading.use(offering.place)
    assert reading.load(4, TARGETS, NUMBERS)[0].message == ""
    assert_equal(reading, offering, TARGETS, PAGES)


def test_a_load_under_way_goes_on_when_its_offer_is_made_again(servers: Servers) -> None:
    """Half of the pages are read, the offer is forgotten, and the rest comes behind the next."""
    offering = servers.offering(WHOLE)
    reading = servers.reading(offering.place, counts=WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    stage, seen = offering.stages[0], threading.Event()
    offered = stage._offers._offered
    read = offered.read

    def read_and_look(request, index, first):  # type: ignore[no-untyped-def]
        if index == 1 and not seen.is_set():
            offered.forget()
            seen.set()
        return read(request, index, first)

    offered.read = read_and_look  # type: ignore[method-assign]
    reading.begin(4, TARGETS, NUMBERS)
    until(seen.is_set)
    time.sleep(0.05)
    assert reading.stages[0].take_reports() == []
    offering.offer(4, PAGES, NUMBERS)
    assert reading.reports()[0].message == ""
    assert_equal(reading, offering, TARGETS, PAGES)


def test_a_place_without_some_layer_fails_loads(servers: Servers) -> None:
    offering = servers.offering((2, 1))
    place = offering.place
    for stages, missing in ((place.stages[:1], 2), (place.stages[1:], 0), ((), 0)):
        short = PeerPlace(name="P", digest=DIGEST, stages=stages)
        reading = servers.reading(short, counts=WHOLE)
        (report,) = reading.load(4, TARGETS, NUMBERS)
        assert f"peer P has no stage with layer {missing}" in report.message


# Orders that cannot be obeyed


def test_an_offer_must_be_of_pages_of_the_pool_and_made_once(servers: Servers) -> None:
    (stage,) = servers.offering(WHOLE).stages
    with pytest.raises(ProtocolError, match="offer 4 names pages 0 to 8, the pool has 8"):
        stage.obey_offer(offer_order(4, [0, 8], [1, 2]))
    with pytest.raises(ProtocolError, match="offer 4 names 2 pages, with 32 bytes of hashes"):
        stage.obey_offer(offer_order(4, [0, 1], [1]))
    stage.obey_offer(offer_order(4, [0, 1], [1, 2]))
    with pytest.raises(ProtocolError, match="offer 4 was made twice"):
        stage.obey_offer(offer_order(4, [0, 1], [1, 2]))


@pytest.mark.parametrize("names", [("P", "P"), ("",)])
def test_peers_have_names_of_their_own(servers: Servers, names: tuple[str, ...]) -> None:
    place = servers.offering(WHOLE).place
    (stage,) = servers.reading(counts=WHOLE).stages
    places = tuple(msgspec.structs.replace(place, name=name) for name in names)
    with pytest.raises(ProtocolError, match="without names of their own"):
        stage.obey(UseStore(None, places))


def test_a_load_from_a_peer_has_no_checksums(servers: Servers) -> None:
    reading = servers.reading(servers.offering(WHOLE).place, counts=WHOLE)
    order = load_from("P", 4, 1, PAGES, NUMBERS)
    with_checksums = msgspec.structs.replace(order, checksums=bytes(4))
    with pytest.raises(ProtocolError, match="3 pages of P, with 1 checksums"):
        reading.stages[0].obey(with_checksums)


def test_a_stage_without_keys_cannot_offer(tmp_path: Path) -> None:
    offering = Offering("127.0.0.1:1", str(tmp_path), SHAPES, WHOLE)
    with pytest.raises(FileNotFoundError):
        offering.offer(4, PAGES, NUMBERS)
    offering.close()
