"""The server of a stage's offered pages under readers of every kind, and under withdrawals."""

import logging
import os
import pickle
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from support.clusters import until
from support.late_pages import LatePages
from support.page_transfers import DIGEST, Gate, hash_of, shapes_of
from support.peers import (
    Hosts,
    Offering,
    Reading,
    dial_door,
    next_frame,
    offer_order,
    two_hosts,
)

from sgl_pipeline.cluster.doors import dial, door_path
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import StreamClosed
from sgl_pipeline.pp_runner.links import stream_server
from sgl_pipeline.pp_runner.page_store import offered_pages, page_transfers
from sgl_pipeline.pp_runner.page_store.offered_pages import OfferedPages
from sgl_pipeline.pp_runner.page_store.page_bytes import PageBytes
from sgl_pipeline.pp_runner.page_store.page_server import serve_pages
from sgl_pipeline.wire.peer_messages import Answer, PageFrame, ReadPages
from sgl_pipeline.wire.store_orders import WithdrawPages

PAGES, NUMBERS, TARGETS = [5, 0, 7], [11, 12, 13], [2, 6, 3]
HASHES = b"".join(map(hash_of, NUMBERS))
SHAPES = shapes_of(torch.bfloat16)
WHOLE = (3,)
REQUEST = ReadPages(DIGEST, 4, HASHES, (0, 3))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def offering(hosts: Hosts) -> Iterator[Offering]:
    """A server of one stage with offer 4."""
    offering = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    yield offering
    offering.close()


def ask(stream: FramedStream, request: ReadPages = REQUEST) -> list[Answer]:
    """All answers of a request that is not refused."""
    stream.send(msgspec.msgpack.encode(request))
    answers: list[Answer] = []
    while len(answers) < request.num_pages:
        answers.append(msgspec.msgpack.decode(next_frame(stream), type=Answer))
    return answers


def assert_served(hosts: Hosts, offering: Offering) -> None:
    stream = dial_door(hosts, "offers-0")
    for page, answer in zip(PAGES, ask(stream), strict=True):
        assert isinstance(answer, PageFrame)
        content = b"".join(offering.content(layer, page) for layer in range(3))
        assert bytes(answer.content) == content and answer.checksum == zlib.crc32(content)
    stream.close()


class _Exploding:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os._exit, (3,)  # type: ignore[return-value]


def encoded(**changes: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(REQUEST, **changes))


MALFORMED = {
    "garbage": b"\xc1\x00\xff",
    "nothing": b"",
    "a pickle": pickle.dumps(_Exploding()),
    "no hashes": encoded(hashes=b""),
    "half a hash": encoded(hashes=HASHES[:-1]),
    "no layers": encoded(layers=(1, 1)),
    "layers backwards": encoded(layers=(2, 0)),
    "negative layers": encoded(layers=(-1, 2)),
    "another message": msgspec.msgpack.encode(PageFrame(0, (0, 1), 0, memoryview(b""))),
    "text that is none": b"\x85\xa4type\xa9ReadPages\xa6digest\xa2\xff\xff",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_reader_with_a_malformed_message_loses_its_stream_and_no_other_does(
    hosts: Hosts, offering: Offering, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = dial_door(hosts, "offers-0"), dial_door(hosts, "offers-0")
    assert len(ask(good)) == 3
    with caplog.at_level(logging.WARNING):
        bad.send(MALFORMED[what])
        with pytest.raises(StreamClosed):
            next_frame(bad)
    (record,) = caplog.records
    assert "127.0.0.1" in record.getMessage() and not record.exc_info
    assert len(ask(good)) == 3
    for stream in (good, bad):
        stream.close()
    assert_served(hosts, offering)


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", os.urandom(3000), b"\x03\x00\x00\x00ab"])
def test_bytes_that_are_no_frames_and_a_reader_that_goes_in_the_middle(
    hosts: Hosts, offering: Offering, content: bytes
) -> None:
    stream = dial_door(hosts, "offers-0")
    stream._stream.write(memoryview(content))
    stream.close()
    assert_served(hosts, offering)
    server = offering.stages[0]._offers._server
    assert server is not None
    until(lambda: not server.visitors)


def test_a_reader_that_takes_nothing_holds_up_no_other_and_no_withdrawal(
    hosts: Hosts, offering: Offering
) -> None:
    many = ReadPages(DIGEST, 4, HASHES * 20_000, (0, 3))
    stuck = dial_door(hosts, "offers-0")
    stuck.send(msgspec.msgpack.encode(many))
    while stuck.has_backlog:
        stuck.flush()
    server = offering.stages[0]._offers._server
    assert server is not None
    until(lambda: any(reader.stream.has_backlog for reader in server.visitors))
    assert_served(hosts, offering)
    started_s = time.monotonic()
    offering.withdraw(4)
    assert time.monotonic() - started_s < 3.0
    stuck.close()
    until(lambda: not server.visitors)


def test_a_process_that_does_not_shake_hands_is_let_go(
    hosts: Hosts, offering: Offering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(stream_server, "TIMER_INTERVAL_S", 0.05)
    server = offering.stages[0]._offers._server
    assert server is not None
    with dial(hosts.address, "offers-0", hosts.other):
        until(lambda: len(server.visitors) == 1)
        assert_served(hosts, offering)
        until(lambda: not server.visitors)


def test_a_connection_that_is_none_is_let_go(hosts: Hosts, offering: Offering) -> None:
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
        way.connect(door_path(hosts.directory, "offers-0"))
        socket.send_fds(way, [b"nowhere"], [one.fileno()])
        assert_served(hosts, offering)


def test_a_reader_that_waits_and_goes_is_let_go(hosts: Hosts, offering: Offering) -> None:
    server, offered = offering.stages[0]._offers._server, offering.stages[0]._offers._offered
    assert server is not None
    looks: list[int] = []
    read = offered.read

    def look(request: ReadPages, index: int, first: int) -> Answer:
        looks.append(index)
        return read(request, index, first)

    offered.read = look  # type: ignore[method-assign]
    stream = dial_door(hosts, "offers-0")
    stream.send(encoded(offer=5))
    until(lambda: any(one.waits_since_s is not None for one in server.visitors))
    stream.close()
    until(lambda: not server.visitors)
    assert len(looks) < 20, "it was looked at all the time"


def test_an_error_of_ours_costs_one_stream(
    hosts: Hosts, offering: Offering, caplog: pytest.LogCaptureFixture
) -> None:
    offered = offering.stages[0]._offers._offered
    read, is_first = offered.read, [True]

    def fail_once(request: ReadPages, index: int, first: int) -> Answer:
        if is_first.pop() if is_first else False:
            raise OSError("a copy failed")
        return read(request, index, first)

    offered.read = fail_once  # type: ignore[method-assign]
    stream = dial_door(hosts, "offers-0")
    with caplog.at_level(logging.WARNING), pytest.raises(StreamClosed):
        ask(stream)
    stream.close()
    (record,) = caplog.records
    assert "a copy failed" in record.getMessage() and record.exc_info
    assert_served(hosts, offering)


def test_the_end_of_a_stage_ends_its_streams_and_frees_its_door(hosts: Hosts) -> None:
    for _ in range(2):
        offering = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
        offering.offer(4, PAGES, NUMBERS)
        stream = dial_door(hosts, "offers-0")
        assert len(ask(stream)) == 3
        offering.close()
        with pytest.raises(StreamClosed):
            next_frame(stream)
        stream.close()
        assert not any(thread.name == "page server" for thread in threading.enumerate())


# What was withdrawn is not read


class GatedPages(PageBytes):
    """Its copies out stop at a gate."""

    gate: Gate
    num_copies = 0

    def copy_out(self, layer: int, page: int, content) -> None:  # type: ignore[no-untyped-def]
        self.gate()
        GatedPages.num_copies += 1
        super().copy_out(layer, page, content)


@pytest.mark.parametrize("way", ["withdraw", "forget"])
def test_a_withdrawal_waits_for_the_copy_under_way_and_no_other_begins(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(page_transfers, "PageBytes", GatedPages)
    monkeypatch.setattr(GatedPages, "gate", Gate(), raising=False)
    monkeypatch.setattr(GatedPages, "num_copies", 0)
    offering = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
    (stage,) = offering.stages
    offering.offer(4, PAGES, NUMBERS)
    reading = Reading(hosts.other, SHAPES, WHOLE, offering.place)
    reading.begin(4, TARGETS, NUMBERS)
    GatedPages.gate.await_one()
    end = stage.cancel if way == "forget" else lambda: stage.obey_offer(WithdrawPages(4))
    withdrawal = threading.Thread(target=end)
    withdrawal.start()
    time.sleep(0.05)
    assert withdrawal.is_alive(), "a page was given back while it was read"
    GatedPages.gate.open()
    withdrawal.join(20.0)
    assert not withdrawal.is_alive()
    num_copies = GatedPages.num_copies
    assert num_copies
    time.sleep(0.05)
    assert GatedPages.num_copies == num_copies
    reading.close()
    offering.close()


@pytest.mark.parametrize("seed", range(4))
def test_steps_write_pages_anew_from_the_moment_that_an_offer_was_withdrawn(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Offers, loads and withdrawals at random moments. Behind each withdrawal the pages get bytes
    of the turn; a reader that saw them had read too late."""
    monkeypatch.setattr(offered_pages, "FRAME_BYTES", 1)
    random = Random(seed)
    offering = Offering(hosts.address, hosts.directory, SHAPES, (2, 1))
    reading = Reading(hosts.other, SHAPES, WHOLE, offering.place)
    memory = [
        pages.view(torch.uint8)
        for pool in offering.pools
        for layer in pool.layers
        for pages in pool.pages(layer)
    ]
    loaded = withdrawn = 0
    for turn in range(80):
        for pages in memory:
            pages.fill_(turn)
        offering.offer(turn, PAGES, NUMBERS)
        reading.begin(turn, TARGETS, NUMBERS)
        if turn % 8 > 1:
            time.sleep(random.random() * 8e-3)
        elif turn % 8:  # otherwise the offer ends at once
            until(lambda: bool(reading.stages[0]._done))
        offering.withdraw(turn)
        for pages in memory:
            pages.fill_(0xFF)
        (report,) = reading.reports()
        for target in TARGETS[: report.num_pages]:
            for layer in range(3):
                assert set(reading.content(layer, target)) == {turn}
        loaded += report.num_pages
        withdrawn += "was withdrawn" in report.message
    assert loaded and withdrawn, (loaded, withdrawn)
    for server in (reading, offering):
        server.close()


def test_copies_of_a_gpu_come_after_the_steps_before_the_offer_and_before_those_after_its_end(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated; not run on hardware."""
    monkeypatch.setattr(page_transfers, "PageBytes", LatePages)
    offering = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
    offering.offer(4, PAGES, NUMBERS)
    offering.offer(5, [1], [50])
    pages = LatePages.newest
    reading = Reading(hosts.other, SHAPES, WHOLE, offering.place)
    assert reading.load(5, [1], [50])[0].message == ""
    assert reading.load(4, TARGETS, NUMBERS)[0].message == ""
    assert_equal_to(reading, offering)
    of_server = pages.calls_of("page server")
    of_frame = ["copy", "copy", "copy", "wait"]
    assert of_server == ["begin behind 2", *of_frame, *["begin behind 1", *of_frame] * 3]
    assert "steps follow" not in [call for _, call in pages.calls]
    offering.withdraw(4)
    assert pages.calls[-1] == (threading.current_thread().name, "steps follow")
    reading.close()
    offering.close()


def assert_equal_to(reading: Reading, offering: Offering) -> None:
    for layer in range(3):
        for target, page in zip(TARGETS, PAGES, strict=True):
            assert reading.content(layer, target) == offering.content(layer, page)


def test_the_thread_uses_every_core_of_the_stage(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        stream_server, "use_every_core", lambda: asked.append(threading.current_thread().name)
    )
    server = serve_pages(OfferedPages((1,)), hosts.directory, "offers-7")
    server.close()
    assert asked == ["page server"]


def test_offers_of_one_stage_do_not_depend_on_their_sequence(
    hosts: Hosts, offering: Offering
) -> None:
    (stage,) = offering.stages
    stage.obey_offer(offer_order(2, [1], [50]))
    offering.withdraw(9)  # forgotten, or never made
    offering.withdraw(2)
    assert_served(hosts, offering)
