"""Schedulers of two servers find each other, agree or say why not, and notice each other's end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.clusters import host_directory, open_port, until
from support.paired_servers import IDENTITY
from support.room_ends import LiveEnd

from sgl_pipeline.cluster.doors import ROOMS_DOOR, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import SecureStream
from sgl_pipeline.disaggregation import identity, prefill_servers
from sgl_pipeline.disaggregation.room_messages import End
from sgl_pipeline.requests import Request, Room

TEST = Path(__file__).resolve().parents[2]


class Pair:
    """A decode server's end, and where a prefill server's is or was."""

    def __init__(self, address: str, prefill_directory: str, decode: LiveEnd) -> None:
        self.address, self.prefill_directory, self.decode = address, prefill_directory, decode
        self.prefill: LiveEnd | None = None
        self._next_room = 1

    def submit(self) -> Request:
        self._next_room += 1
        return self.decode.submit(Room(self._next_room, self.address))

    def until(self, condition: Callable[[], bool]) -> None:
        def turned() -> bool:
            self.decode.turn()
            if self.prefill is not None:
                self.prefill.turn()
            return condition()

        until(turned)

    def until_connected(self) -> None:
        self.until(lambda: self.decode.rooms.num_peers == 1)

    def until_failed(self, request: Request) -> tuple[str, int | None]:
        self.until(lambda: request in self.decode.failed)
        assert request.finish is not None
        return request.finish.message, request.finish.status_code


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(prefill_servers, "REDIAL_S", 0.05)
    monkeypatch.setattr(prefill_servers, "UNREACHABLE_S", 0.3)
    directory = host_directory(tmp_path / "p")
    with open_port(directory) as (address, _):
        own = host_directory(tmp_path / "d")
        made = Pair(address, directory, LiveEnd(own, is_prefill=False, silence_s=1.5))
        yield made
        made.decode.end.close()
        if made.prefill is not None:
            made.prefill.end.close()


@contextmanager
def prefill_process(directory: str) -> Iterator["subprocess.Popen[str]"]:
    """A prefill server's end that can be killed, behind the port that the test keeps."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TEST), str(TEST.parent)))}
    command = [sys.executable, "-m", "support.room_ends", directory]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait()
        Path(directory, f"door-{ROOMS_DOOR}").unlink(missing_ok=True)


def test_two_that_are_alike_serve_rooms_over_one_stream(pair: Pair) -> None:
    pair.prefill = LiveEnd(pair.prefill_directory, is_prefill=True)
    first, second = pair.submit(), pair.submit()
    pair.until_connected()
    pair.until(lambda: len(pair.prefill.rooms._halves.wanted) == 2)  # type: ignore[union-attr]
    assert pair.decode.end.state().bootstrap_requests == 2
    # The other half of one is refused: both clients hear the same.
    other = pair.prefill
    assert first.room is not None
    half = Room(first.room.number)
    other.end.refused(half, "the prompt is too long", 400, time.monotonic())
    assert pair.until_failed(first) == ("the prompt is too long", 400)
    assert second not in pair.decode.failed
    assert other.rooms.num_peers == 1


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("digest", "of another model", "the same model, weights and dtype"),
        ("page_size", 8, "--page-size"),
        ("num_layers", 12, "--model-path"),
        ("kv_dtype", "fp8_e4m3", "--kv-cache-dtype"),
    ],
)
def test_two_that_differ_say_in_what(pair: Pair, field: str, value: Any, remedy: str) -> None:
    pair.prefill = LiveEnd(pair.prefill_directory, is_prefill=True, **{field: value})
    request = pair.submit()
    assert request.room is not None
    half = pair.prefill.submit(Room(request.room.number))
    message, status = pair.until_failed(request)
    assert status == 500
    assert str(value) in message and str(getattr(IDENTITY, field)) in message and remedy in message
    assert pair.decode.rooms.num_peers == 0
    # Its other half hears it in the last messages of the stream.
    pair.until(lambda: half in pair.prefill.failed)  # type: ignore[union-attr]
    assert half.finish is not None
    assert (half.finish.message, half.finish.status_code) == (message, status)
    # The next request is told at once, too.
    assert pair.until_failed(pair.submit())[1] == 500


def test_versions_that_differ_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.prefill = LiveEnd(pair.prefill_directory, is_prefill=True)
    hello = IDENTITY.hello()
    monkeypatch.setattr(identity, "VERSION", hello.version + 1)
    refusal = IDENTITY.refusal(hello)
    assert refusal is not None
    assert f"version {hello.version} " in refusal and f" {hello.version + 1}, " in refusal
    assert "install the same sgl_pipeline" in refusal


def test_a_server_that_is_not_there_fails_its_requests_by_name(pair: Pair) -> None:
    message, status = pair.until_failed(pair.submit())
    assert status == 503 and pair.address in message and "nothing is behind its door" in message


def test_a_name_that_cannot_be_resolved_is_named(pair: Pair) -> None:
    pair.address = "no-such-host.invalid:8998"
    message, status = pair.until_failed(pair.submit())
    assert status == 503 and "no-such-host.invalid:8998" in message and "bootstrap_host" in message


def test_another_key_is_told_at_once(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_servers, "UNREACHABLE_S", 60.0)
    other = host_directory(tmp_path / "other", b"another secret, also long enough")
    with open_port(other) as (address, _):
        pair.address = address
        message, status = pair.until_failed(pair.submit())
    assert status == 503 and "another cluster key" in message


@pytest.mark.multiproc
def test_a_server_that_is_killed_fails_its_rooms_and_the_next_one_takes_over(pair: Pair) -> None:
    with prefill_process(pair.prefill_directory) as child:
        request = pair.submit()
        pair.until_connected()
        child.kill()
        killed_s = time.monotonic()
        message, status = pair.until_failed(request)
        assert status == 503 and f"{pair.address} is gone" in message
        assert time.monotonic() - killed_s < 2.0
    with prefill_process(pair.prefill_directory):
        again = pair.submit()
        pair.until_connected()
        assert again not in pair.decode.failed


@pytest.mark.multiproc
def test_a_server_that_hangs_fails_its_rooms(pair: Pair) -> None:
    with prefill_process(pair.prefill_directory) as child:
        request = pair.submit()
        pair.until_connected()
        # Pings keep an idle stream.
        time_s = time.monotonic() + 2.0
        pair.until(lambda: time.monotonic() > time_s)
        assert request not in pair.decode.failed
        child.send_signal(signal.SIGSTOP)
        message, status = pair.until_failed(request)
        assert status == 503 and f"{pair.address} is silent" in message


def test_a_decode_server_that_is_gone_costs_its_rooms_alone(pair: Pair, tmp_path: Path) -> None:
    pair.prefill = LiveEnd(pair.prefill_directory, is_prefill=True)
    other = LiveEnd(host_directory(tmp_path / "d2"), is_prefill=False)
    lost = other.submit(Room(1_000, pair.address))
    kept = pair.submit()
    prefill = pair.prefill
    assert lost.room is not None and kept.room is not None
    halves = [prefill.submit(Room(one.room.number)) for one in (lost, kept) if one.room]

    def are_wanted() -> bool:
        other.turn()
        return prefill.end.state().bootstrap_requests == 0

    pair.until(are_wanted)
    other.end.close()
    pair.until(lambda: halves[0] in prefill.failed)
    assert halves[0].finish is not None
    assert "the decode server is gone" in halves[0].finish.message
    assert halves[1] not in prefill.failed and prefill.rooms.num_peers == 1


def test_what_is_no_message_ends_the_stream_and_nothing_else(pair: Pair) -> None:
    pair.prefill = LiveEnd(pair.prefill_directory, is_prefill=True)
    kept = pair.submit()
    pair.until_connected()
    connection = dial(pair.address, ROOMS_DOOR, pair.prefill_directory)
    stranger = FramedStream(SecureStream(connection, pair.prefill_directory, is_server=False))
    stranger.send(b"\xc1 no msgpack")
    closed = []

    def is_closed() -> bool:
        try:
            stranger.flush()
            stranger.receive()
        except Exception as error:
            closed.append(error)
        return bool(closed)

    pair.until(is_closed)
    assert pair.prefill.rooms.num_peers == 1 and kept not in pair.decode.failed


def test_a_room_may_not_be_asked_for_before_the_hello(pair: Pair) -> None:
    pair.prefill = LiveEnd(pair.prefill_directory, is_prefill=True)
    rooms = pair.prefill.rooms
    rooms.connected(7, 0.0)  # type: ignore[call-arg, arg-type]
    rooms.take(7, End(1, "x", 500), 0.0)  # type: ignore[arg-type]
    assert rooms.num_peers == 0
    (session, message) = rooms.outbox[0]
    assert session == 7 and "it has not said who it is" in repr(message)
