"""Streams of virtual servers do what real ones do: nothing comes behind what is lost, and whoever
cannot be reached has a name."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from fault_schedules.room_errors import name_of
from fault_schedules.room_streams import RoomStreams
from fault_schedules.virtual_time import DelayedPipe, EventLoop

from sgl_pipeline.requests import FinishReason


class Rooms:
    """Notes the attempts that have failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def dial_failed(self, address: str, reason: str, now_s: float, *, is_final: bool) -> None:
        self.failed.append(reason)


class End:
    """A server that takes at once what has come."""

    def __init__(self, name: str) -> None:
        self.name, self.rooms = name, Rooms()

    def arrive(self, call: Callable[[float], None], *, wakes: bool = True) -> None:
        call(0.0)


def test_a_server_that_dies_while_it_is_dialed_refuses_by_name() -> None:
    loop = EventLoop()
    streams, prefill, decode = RoomStreams(loop, Random(0), loss=0.0), End("p:0"), End("d:0")
    streams.listen(prefill)
    streams.dial(decode, prefill.name)
    streams.end_of(prefill)
    loop.run(10, lambda: None)
    assert decode.rooms.failed == ["p:0: connection refused"]
    text = f"the prefill server failed: {decode.rooms.failed[0]}"
    assert name_of(FinishReason("abort", message=text, status_code=503))


def test_a_pipe_that_is_cut_again_has_lost_what_it_lost() -> None:
    for seed in range(100):
        loop, came = EventLoop(), list[Any]()
        pipe = DelayedPipe(loop, Random(seed), 1.0, came.append)
        for number in range(20):
            loop.at(number / 2.0, partial(pipe.send, number))
        for cut_s in (2.0, 4.0, 6.0):
            loop.at(cut_s, pipe.cut)
        loop.run(100, lambda: None)
        assert came == [*range(len(came))]
        assert len(came) < 20
