"""The streams between the schedulers of virtual servers, and what befalls them: they delay, break
at one moment and are noticed at others, go silent, and where a world wants it lose and repeat."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol

from fault_schedules.virtual_time import DelayedPipe, EventLoop

from sgl_pipeline.disaggregation.room_messages import Ping

# The address of a host that has no name.
NO_HOST = "no host"
_END = object()


class StreamEnd(Protocol):
    """A server's end (`room_driver.RoomDriver`)."""

    name: str
    rooms: Any

    def arrive(self, call: Callable[[float], None], *, wakes: bool = True) -> None:
        """Something has come; only what `wakes` the server is taken at once."""


@dataclass(slots=True, eq=False)
class Stream:
    """A session. `open_ends` have not closed it, nor noticed that it is over."""

    number: int
    decode: StreamEnd
    prefill: StreamEnd
    open_ends: set[StreamEnd]
    pipes: dict[StreamEnd, DelayedPipe] = field(default_factory=dict)  # by the end that sends
    is_silent: bool = False

    def other(self, end: StreamEnd) -> StreamEnd:
        return self.prefill if end is self.decode else self.decode


class RoomStreams:
    """All streams of a world.

    Args:
        loss: the share of messages that are lost, or come twice.
    """

    def __init__(self, loop: EventLoop, rng: Random, *, loss: float) -> None:
        self._loop, self._rng, self._loss = loop, rng, loss
        self._delay_s = rng.choice((0.0, 0.001, 0.01, 0.2))
        self._listeners: dict[str, StreamEnd] = {}
        self._unreachable_until_s: dict[str, float] = {}
        self._streams: dict[int, Stream] = {}
        self._next_session = 0
        self.num_breaks = 0

    def listen(self, end: StreamEnd) -> None:
        """A prefill server can be dialed at its name from now on."""
        self._listeners[end.name] = end

    def dial(self, decode: StreamEnd, address: str) -> None:
        """Tries to reach a prefill server."""
        rng, now_s = self._rng, self._loop.now_s
        if address == NO_HOST:
            reason, delay_s, is_final = "cannot be dialed", 0.0, True
        elif now_s < self._unreachable_until_s.get(address, now_s):
            reason, delay_s, is_final = "no answer", 3.0 * rng.random(), False
        elif address not in self._listeners:
            reason, delay_s, is_final = "connection refused", 0.1 * rng.random(), False
        else:
            self._loop.after(
                rng.expovariate(1.0) * self._delay_s, partial(self._meet, decode, address)
            )
            return
        self._loop.after(delay_s, partial(self._fail, decode, address, reason, is_final=is_final))

    @staticmethod
    def _fail(decode: StreamEnd, address: str, reason: str, *, is_final: bool) -> None:
        text = f"{address}: {reason}"
        decode.arrive(lambda at_s: decode.rooms.dial_failed(address, text, at_s, is_final=is_final))

    def _meet(self, decode: StreamEnd, address: str) -> None:
        if (prefill := self._listeners.get(address)) is None:
            self._fail(decode, address, "connection refused", is_final=False)
            return
        number, self._next_session = self._next_session, self._next_session + 1
        stream = Stream(number, decode, prefill, {decode, prefill})
        self._streams[number] = stream
        for end in (decode, prefill):
            deliver = partial(self._deliver, stream, stream.other(end))
            stream.pipes[end] = DelayedPipe(self._loop, self._rng, self._delay_s, deliver)
        prefill.arrive(lambda at_s: prefill.rooms.connected(number, at_s))
        decode.arrive(lambda at_s: decode.rooms.connected(address, number, at_s))

    def send(self, end: StreamEnd, session: int, message: Any) -> None:
        """Sends a message from `end`; nothing comes of it where the stream has ended."""
        stream = self._streams[session]
        if end not in stream.open_ends:
            return
        copies = 1
        if self._rng.random() < self._loss:
            copies = self._rng.choice((0, 2))
        for _ in range(copies):
            stream.pipes[end].send(message)

    def close(self, end: StreamEnd, session: int) -> None:
        """`end` closes the stream; the other one hears of it behind all that was sent."""
        stream = self._streams[session]
        if end in stream.open_ends:
            stream.open_ends.discard(end)
            stream.pipes[end].send(_END)

    def end_of(self, end: StreamEnd) -> None:
        """A server has died. Now and then its host has, so that nobody says so."""
        if self._listeners.get(end.name) is end:
            del self._listeners[end.name]
        is_host = self._rng.random() < 0.3
        for stream in self._streams.values():
            if end in stream.open_ends:
                stream.open_ends.discard(end)
                stream.is_silent = stream.is_silent or is_host
                self._break(stream)

    def harm(self) -> None:
        """A stream breaks or goes silent, or a prefill server is out of reach for a while."""
        rng = self._rng
        kind = rng.choice(("break", "break", "silence", "reach"))
        open_streams = [one for one in self._streams.values() if one.open_ends]
        if kind == "reach" and self._listeners:
            until_s = self._loop.now_s + rng.choice((0.5, 2.0, 8.0))
            self._unreachable_until_s[rng.choice([*self._listeners])] = until_s
        if open_streams and kind != "reach":
            stream = rng.choice(open_streams)
            self.num_breaks += 1
            stream.is_silent = stream.is_silent or kind == "silence"
            self._break(stream)

    def _break(self, stream: Stream) -> None:
        """What is on its way is lost from some message on, and both ends notice, if any does."""
        for pipe in stream.pipes.values():
            pipe.cut()
        if not stream.is_silent:
            for end in (stream.decode, stream.prefill):
                noticed_s = self._rng.random() * self._rng.choice((0.0, 0.1, 1.0))
                self._loop.after(noticed_s, partial(self._deliver, stream, end, _END))

    def _deliver(self, stream: Stream, end: StreamEnd, message: Any) -> None:
        if end not in stream.open_ends:
            return
        number = stream.number
        if message is _END:
            stream.open_ends.discard(end)
            end.arrive(lambda at_s: end.rooms.disconnected(number, "it broke", at_s))
        else:
            take = partial(self._take, end, number, message)
            end.arrive(take, wakes=not isinstance(message, Ping))

    def _take(self, end: StreamEnd, number: int, message: Any, at_s: float) -> None:
        end.rooms.take(number, message, at_s)
