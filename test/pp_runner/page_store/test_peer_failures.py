"""A peer that is gone, hangs, or sends what it should not: loads fail within seconds, with a
message that names the peer and the reason, and nothing but checked pages reaches the pool."""

import pickle
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from support.clusters import until
from support.page_transfers import DIGEST, pool_content, shapes_of
from support.peers import FakePeer, Hosts, Offering, Reading, two_hosts

from sgl_pipeline.cluster.doors import Door, join_address
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.pp_runner.page_store import peer_pages
from sgl_pipeline.wire.peer_messages import PageFrame, ReadPages
from sgl_pipeline.wire.store_orders import EndLoad, PeerPlace, PeerStage

PAGES, NUMBERS, TARGETS = [5, 0, 7], [11, 12, 13], [2, 6, 3]
SHAPES = shapes_of(torch.bfloat16)
PAGE_BYTES = sum(shape.page_bytes for shape in SHAPES)
WHOLE = (3,)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pages, "SILENCE_S", 0.4)
    monkeypatch.setattr(peer_pages, "DIAL_TIMEOUT_S", 0.4)


def frame(index: int = 0, layers: tuple[int, int] = (0, 3), **changes: object) -> bytes:
    content = bytes([index + 1]) * PAGE_BYTES
    made = PageFrame(index, layers, zlib.crc32(content), memoryview(content))
    return msgspec.msgpack.encode(msgspec.structs.replace(made, **changes))


class _Exploding:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return pytest.fail, ("something was unpickled",)


WRONG = {
    "altered": (frame(1, checksum=1), "altered on its way"),
    "short": (frame(1, content=memoryview(bytes(PAGE_BYTES - 1))), f"{PAGE_BYTES - 1} bytes for"),
    "long": (frame(1, content=memoryview(bytes(PAGE_BYTES + 1))), f"{PAGE_BYTES + 1} bytes for"),
    "empty": (frame(1, content=memoryview(b"")), "0 bytes for layers 0 to 2"),
    "of another page": (frame(2), "of page 2, when those from 0 on of page 1 were due"),
    "the same page again": (frame(0), "of page 0, when those from 0 on of page 1 were due"),
    "of later layers": (frame(1, (1, 3)), r"\(1, 3\) of page 1"),
    "of no layers": (frame(1, (0, 0)), r"\(0, 0\) of page 1"),
    "of more layers": (frame(1, (0, 4)), r"\(0, 4\) of page 1"),
    "refused": (b"\x82\xa4type\xa7Refused\xa6reason\xa3why", ": why"),
    "negative": (b"\x84\xa4type\xa9PageFrame\xa5index\xff", "malformed"),
    "garbage": (b"\xc1\xff\x00garbage", "malformed"),
    "nothing": (b"", "malformed"),
    "a pickle": (pickle.dumps(_Exploding()), "malformed"),
    "a request": (
        msgspec.msgpack.encode(ReadPages(DIGEST, 1, bytes(32), (0, 1))),
        "malformed",
    ),
}


@pytest.mark.parametrize("harm", WRONG)
def test_an_answer_that_is_wrong_ends_a_load_behind_the_good_prefix(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(peer_pages, "SILENCE_S", 10.0)
    wrong, reason = WRONG[harm]

    def behave(stream: FramedStream, request: ReadPages) -> None:
        stream.send(frame(0))
        stream.send(wrong)
        time.sleep(0.2)  # until the next load is under way
        stream.send(frame(0))

    peer = FakePeer(hosts, 3, behave)
    reading = Reading(hosts.other, SHAPES, WHOLE, peer.place)
    untouched = [reading.content(layer, TARGETS[1]) for layer in range(3)]
    for turn in range(2):  # frames that come late are not taken for answers to the next load
        (report,) = reading.load(4, TARGETS, NUMBERS)
        assert (report.num_pages, report.is_broken) == (1, False)
        assert f"peer P at {peer.place.stages[0].address}: " in report.message
        assert re.search(reason, report.message), report.message
        assert len(peer.streams) == turn + 1
    assert [reading.content(layer, TARGETS[1]) for layer in range(3)] == untouched
    assert [set(reading.content(layer, TARGETS[0])) for layer in range(3)] == [{1}] * 3
    reading.close()
    peer.close()


def close_at_once(stream: FramedStream, request: ReadPages) -> None:
    stream.close()


def send_half(stream: FramedStream) -> None:
    payload = frame(1)
    stream._stream.write(memoryview(len(payload).to_bytes(4, "little") + payload[:100]))


def close_in_the_middle(stream: FramedStream, request: ReadPages) -> None:
    stream.send(frame(0))
    send_half(stream)
    time.sleep(0.2)  # what comes together with the end of a stream is not read
    stream.close()


def claim_gigabytes(stream: FramedStream, request: ReadPages) -> None:
    stream._stream.write(memoryview(b"\xff\xff\xff\x7f"))


def hang(stream: FramedStream, request: ReadPages) -> None:
    stream.send(frame(0))


def hang_in_the_middle(stream: FramedStream, request: ReadPages) -> None:
    stream.send(frame(0))
    send_half(stream)


def drip(stream: FramedStream, request: ReadPages) -> None:
    """A byte now and then, for ever."""
    payload = frame(0)
    for byte in len(payload).to_bytes(4, "little") + payload:
        stream._stream.write(memoryview(bytes([byte])))
        time.sleep(0.05)


LOST = {
    close_at_once: (0, "the connection ended"),
    close_in_the_middle: (1, "the connection ended"),
    claim_gigabytes: (0, "a frame of 2147483647 bytes"),
    hang: (1, "it does not answer: nothing came for 0.4 s"),
    hang_in_the_middle: (1, "it does not answer: nothing came for 0.4 s"),
    drip: (0, "no page came within 1 s"),
}


@pytest.mark.parametrize("behave", LOST, ids=lambda behave: behave.__name__)
def test_a_peer_that_is_lost_fails_a_load_and_those_that_wait_behind_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, behave: Callable[[FramedStream, ReadPages], None]
) -> None:
    monkeypatch.setattr(peer_pages, "FRAME_LIMIT_S", 1.0)
    peer = FakePeer(hosts, 3, behave)
    reading = Reading(hosts.other, SHAPES, WHOLE, peer.place)
    started_s = time.monotonic()
    for _ in range(20):
        reading.begin(4, TARGETS, NUMBERS)
    reports = reading.reports(20)
    assert time.monotonic() - started_s < 4.0
    num_pages, reason = LOST[behave]
    assert [one.num_pages for one in reports[:1]] == [num_pages]
    assert sorted(one.transfer for one in reports) == [*range(1, 21)]
    for report in reports:
        assert "peer P at " in report.message and reason in report.message
        assert not report.is_broken
    reading.close()
    peer.close()


def place_at(address: str, door: str = "offers-0") -> PeerPlace:
    stage = PeerStage(f"{address}/{door}", (0, 3))
    return PeerPlace(name="P", digest=DIGEST, stages=(stage,))


def test_a_port_that_nobody_has_a_door_without_a_process_and_one_that_does_not_answer(
    hosts: Hosts,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ways = {
            "127.0.0.1:1": "refuses connections",
            "no-such-host.invalid:1": "cannot be resolved",
            join_address(*mute.getsockname()): "does not answer",
            hosts.address: "nothing is behind its door",
        }
        for address, reason in ways.items():
            reading = Reading(hosts.other, SHAPES, WHOLE, place_at(address))
            started_s = time.monotonic()
            (report,) = reading.load(4, TARGETS, NUMBERS)
            assert time.monotonic() - started_s < 3.0
            assert reason in report.message and "peer P at " in report.message
            reading.close()


def test_a_process_that_hangs_behind_its_door(hosts: Hosts) -> None:
    door = Door(hosts.directory, "offers-0")
    reading = Reading(hosts.other, SHAPES, WHOLE, place_at(hosts.address))
    (report,) = reading.load(4, TARGETS, NUMBERS)
    assert "no handshake within 0.4 s" in report.message
    reading.close()
    door.close()


def test_a_server_with_another_key_reads_nothing(tmp_path: Path) -> None:
    secret = b"another secret, which is as long as that"
    with two_hosts(tmp_path / "two", other_secret=secret) as hosts:
        offering = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
        offering.offer(4, PAGES, NUMBERS)
        reading = Reading(hosts.other, SHAPES, WHOLE, offering.place)
        (report,) = reading.load(4, TARGETS, NUMBERS)
        assert "has another cluster key" in report.message and report.num_pages == 0
        reading.close()
        offering.close()


def test_loads_work_again_when_a_peer_is_back(hosts: Hosts) -> None:
    offering = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
    reading = Reading(hosts.other, SHAPES, WHOLE, offering.place)
    offering.offer(4, PAGES, NUMBERS)
    assert reading.load(4, TARGETS, NUMBERS)[0].message == ""
    offering.close()  # the stage gets another assignment, say
    assert "nothing is behind its door" in reading.load(4, TARGETS, NUMBERS)[0].message
    back = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
    back.offer(4, PAGES, NUMBERS)
    assert reading.load(4, TARGETS, NUMBERS)[0].message == ""
    # A stream that has ended since the last load is no reason to fail the next.
    back.close()
    again = Offering(hosts.address, hosts.directory, SHAPES, WHOLE)
    again.offer(4, PAGES, NUMBERS)
    assert reading.load(4, TARGETS, NUMBERS)[0].message == ""
    for server in (again, reading):
        server.close()


def test_a_peer_that_hangs_holds_up_no_load_of_another(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_pages, "SILENCE_S", 10.0**6)
    hung = FakePeer(hosts, 3, hang)
    offering = Offering(hosts.address, hosts.directory, SHAPES, WHOLE, "good")
    reading = Reading(hosts.other, SHAPES, WHOLE, hung.place, offering.place)
    offering.offer(4, PAGES, NUMBERS)
    reading.begin(4, TARGETS, NUMBERS)
    until(lambda: len(hung.streams) == 1)
    assert reading.load(4, [1], NUMBERS[:1], "good")[0].message == ""
    for server in (reading, offering, hung):
        server.close()


@pytest.mark.parametrize("way", ["cancel", "use", "close"])
def test_an_interrupt_ends_a_load_that_hangs_and_no_page_changes_after_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(peer_pages, "SILENCE_S", 10.0**6)
    goes_on = threading.Event()

    def behave(stream: FramedStream, request: ReadPages) -> None:
        stream.send(frame(0))
        goes_on.wait(20.0)
        stream.send(frame(1))

    peer = FakePeer(hosts, 3, behave)
    reading = Reading(hosts.other, SHAPES, WHOLE, peer.place)
    reading.begin(4, TARGETS, NUMBERS)
    until(lambda: set(reading.content(2, TARGETS[0])) == {1})
    (stage,) = reading.stages
    session = stage._sessions["P"]
    before, started_s = pool_content(reading.pools[0]), time.monotonic()
    {"cancel": stage.cancel, "use": reading.use, "close": stage.close}[way]()
    session.join(20.0)  # the peer holds it for as long
    assert time.monotonic() - started_s < 10.0
    goes_on.set()
    assert pool_content(reading.pools[0]) == before
    if way != "close":
        assert stage.take_reports() == []
        reading.close()
    peer.close()


def test_a_load_that_hangs_is_ended_alone(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pages, "SILENCE_S", 10.0**6)

    def behave(stream: FramedStream, request: ReadPages) -> None:
        stream.send(frame(0))
        if len(peer.streams) == 1:
            return  # and sends no more
        stream.send(frame(1))

    peer = FakePeer(hosts, 3, behave)
    reading = Reading(hosts.other, SHAPES, WHOLE, peer.place)
    (stage,) = reading.stages
    reading.begin(4, TARGETS, NUMBERS)
    until(lambda: set(reading.content(2, TARGETS[0])) == {1})
    reading.begin(5, [0, 1], NUMBERS[:2])
    reading.begin(6, [4, 5], NUMBERS[:2])
    assert stage.take_reports() == []
    stage.obey(EndLoad(3))  # it has not begun
    stage.obey(EndLoad(1))
    queued, hung, whole = reading.reports(3)
    assert [one.transfer for one in (queued, hung, whole)] == [3, 1, 2]
    assert (queued.num_pages, hung.num_pages, whole.num_pages) == (0, 1, 2)
    assert queued.message and "the load was ended" in hung.message and not whole.message
    stage.obey(EndLoad(2))  # it is over
    assert stage.take_reports() == [] and not stage.is_open
    reading.close()
    peer.close()
