"""Measures a stream between two hosts: its delay, its rate, and how their clocks differ.

The dialing end asks and measures; the other end answers. The stream has the TLS of the stream that
rows take (`secure_stream.py`), so its times include encryption. Both ends block until a deadline,
so each needs a thread of its own.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from statistics import median
from typing import Self

import msgspec

from sgl_pipeline.cluster.clock import HostClock
from sgl_pipeline.cluster.doors import DialError, dial
from sgl_pipeline.cluster.keys import tls_context
from sgl_pipeline.cluster.secure_stream import WRITE_BYTES, reason_of

PROBE_DOOR = "probe"
NUM_PINGS = 40
PING_INTERVAL_S = 0.01
# Of a whole probe: beyond, the link is as good as none.
LIMIT_S = 20.0
# TCP finds the rate of a link in some round trips (slow start, RFC 5681). The rate is that of a
# window of as many, whose first third does not count.
_WINDOW_ROUND_TRIPS = 30
_MOST_WINDOW_S = 6.0

_REQUEST = struct.Struct("<B")
_PING, _FLOOD = 1, 2
_MOMENTS = struct.Struct("<dd")
_BLOCK_BYTES = 256 * 1024


class LinkReading(msgspec.Struct, frozen=True, kw_only=True):
    """One way of a link, as the host that dialed has seen it.

    `median_ms` and `worst_ms` are round trips of a few bytes on the idle link, `gbit_per_s` what
    came from the other end. A moment of the other's monotonic clock plus `offset_s` is one of the
    dialing host's, within `error_s`.
    """

    median_ms: float
    worst_ms: float
    gbit_per_s: float
    offset_s: float
    error_s: float


class ProbeFailed(Exception):
    """The link could not be measured. The text is one clause."""


def probe_link(
    address: str, run_directory: str, window_s: float, limit_s: float = LIMIT_S
) -> LinkReading:
    """Measures the link to the host whose cluster port is at `address`, its rate for `window_s` or,
    where TCP needs longer, for more.

    Raises ProbeFailed, at the latest after `limit_s`.
    """
    deadline_s = time.monotonic() + limit_s
    try:
        connection = dial(address, PROBE_DOOR, run_directory)
        with _Exchange(connection, run_directory, deadline_s, is_server=False) as exchange:
            clock, round_trips_s = _ping(exchange)
            typical_s = median(round_trips_s)
            window_s = min(_MOST_WINDOW_S, max(window_s, _WINDOW_ROUND_TRIPS * typical_s))
            exchange.write(_REQUEST.pack(_FLOOD))
            gbit_per_s = _rate(exchange, window_s)
    except DialError as error:
        raise ProbeFailed(str(error)) from error
    except TimeoutError as error:
        raise ProbeFailed(
            f"{address} was reached, and a probe of the link is not over after {limit_s:g} s: "
            "packets are lost, or its rate is far too low"
        ) from error
    except (OSError, EOFError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise ProbeFailed(f"the connection to {address} ended: {reason}") from error
    reading = clock.read(time.monotonic())
    assert reading is not None
    return LinkReading(
        median_ms=typical_s * 1e3,
        worst_ms=max(round_trips_s) * 1e3,
        gbit_per_s=gbit_per_s,
        offset_s=reading.offset_s,
        error_s=reading.error_s,
    )


def answer_probe(connection: socket.socket, run_directory: str) -> None:
    """Answers one that has come to `PROBE_DOOR`, until it ends or takes too long."""
    deadline_s = time.monotonic() + LIMIT_S
    with (
        contextlib.suppress(OSError, EOFError),
        _Exchange(connection, run_directory, deadline_s, is_server=True) as exchange,
    ):
        while exchange.read(_REQUEST.size) == _REQUEST.pack(_PING):
            received_s = time.monotonic()
            exchange.write(_MOMENTS.pack(received_s, time.monotonic()))
        block = bytes(_BLOCK_BYTES)
        while True:
            exchange.write(block)


def _ping(exchange: "_Exchange") -> tuple[HostClock, list[float]]:
    """The other end's clock, and how long each ping was on its way there and back."""
    clock, round_trips_s = HostClock(), []
    for _ in range(NUM_PINGS):
        sent_s = time.monotonic()
        exchange.write(_REQUEST.pack(_PING))
        received_s, answered_s = _MOMENTS.unpack(exchange.read(_MOMENTS.size))
        returned_s = time.monotonic()
        clock.add(sent_s, received_s, answered_s, returned_s)
        round_trips_s.append(max(0.0, (returned_s - sent_s) - (answered_s - received_s)))
        time.sleep(PING_INTERVAL_S)
    return clock, round_trips_s


def _rate(exchange: "_Exchange", window_s: float) -> float:
    """Gbit/s of what comes in the last two thirds of the window."""
    arrivals = exchange.arrivals()
    began_s, _ = next(arrivals)
    counted_from_s, num_bytes = began_s, 0
    for now_s, count in arrivals:
        if now_s < began_s + window_s / 3:
            counted_from_s, num_bytes = now_s, 0
            continue
        num_bytes += count
        if now_s >= began_s + window_s:
            return num_bytes * 8e-9 / (now_s - counted_from_s)
    raise AssertionError("arrivals never end")


class _Exchange:
    """A TLS stream whose calls block, for use in a `with`. They raise TimeoutError after
    `deadline_s`, and OSError or EOFError when the other end is gone."""

    def __init__(
        self,
        connection: socket.socket,
        run_directory: str,
        deadline_s: float,
        *,
        is_server: bool,
    ) -> None:
        self._deadline_s = deadline_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = tls_context(run_directory, is_server=is_server).wrap_socket(
            connection, server_side=is_server, do_handshake_on_connect=False
        )

    def __enter__(self) -> Self:
        try:
            self._limit()
            self._tls.do_handshake()
        except OSError:
            self._tls.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._tls.close()

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._limit()
            left = left[self._tls.send(left[:WRITE_BYTES]) :]

    def read(self, num_bytes: int) -> bytes:
        data, num_read = bytearray(num_bytes), 0
        while num_read < num_bytes:
            num_read += self._receive(memoryview(data)[num_read:])
        return bytes(data)

    def arrivals(self) -> Iterator[tuple[float, int]]:
        """Yields the moment and the number of bytes of each arrival."""
        room = memoryview(bytearray(_BLOCK_BYTES))
        while True:
            count = self._receive(room)
            yield time.monotonic(), count

    def _receive(self, room: memoryview) -> int:
        self._limit()
        count = self._tls.recv_into(room)
        if not count:
            raise EOFError("the other end has closed the connection")
        return count

    def _limit(self) -> None:
        """Lets the next call block until the deadline."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError
        self._tls.settimeout(left_s)
