"""Pages leave in the order in which they were read, and nothing waits while they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sgl_pipeline.pp_runner.layer_moves.move_site import Parcel
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import (
    MAX_READING,
    MAX_ROUNDS,
    OutgoingLayers,
)
from sgl_pipeline.wire.move_orders import RESTING_STEPS

LAYER = 3


@dataclass
class Leaving:
    pages: tuple[int, ...]
    is_there: bool = False
    was_waited_for: bool = False

    def is_read(self) -> bool:
        return self.is_there

    def parcel(self) -> Parcel[Any]:
        self.was_waited_for = not self.is_there
        return Parcel(self.pages, len(self.pages), is_last=False)


@dataclass
class SlowSite:
    """Only what moves need to read pages; `reading` are in the order of their reading."""

    reading: list[Leaving] = field(default_factory=list)
    with_states: tuple[int, ...] = ()

    def has_states(self, layer: int) -> bool:
        return layer in self.with_states

    def places_per_parcel(self, layer: int) -> int:
        return 1

    def read(self, layer: int, pages: Sequence[int]) -> Leaving:
        assert layer == LAYER
        self.reading.append(Leaving(tuple(pages)))
        return self.reading[-1]


@dataclass
class Sent:
    parcels: list[Parcel[Any]] = field(default_factory=list)
    room: int = 1_000
    keeps_up: bool = True

    def can_send(self) -> bool:
        return self.keeps_up

    def has_room(self) -> bool:
        return len(self.parcels) < self.room

    def send(self, parcel: Parcel[Any]) -> None:
        self.parcels.append(parcel)

    def close(self) -> None:
        pass


@pytest.fixture
def parts() -> tuple[SlowSite, Sent, OutgoingLayers[Any]]:
    site, sent = SlowSite(), Sent()
    return site, sent, OutgoingLayers([LAYER], range(5), (), site, sent)  # type: ignore[arg-type]


def test_a_parcel_is_sent_when_it_has_been_read(
    parts: tuple[SlowSite, Sent, OutgoingLayers[Any]],
) -> None:
    site, sent, outgoing = parts
    while outgoing.work():
        pass
    assert len(site.reading) == MAX_READING and not sent.parcels
    site.reading[1].is_there = True
    assert not outgoing.work(), "the one that was read first goes first"
    site.reading[0].is_there = True
    assert outgoing.work()
    assert [parcel.rows for parcel in sent.parcels] == [one.pages for one in site.reading[:2]]
    assert outgoing.copied_bytes == 2
    while not outgoing.is_ready:
        for leaving in site.reading:
            leaving.is_there = True
        outgoing.work()
    assert not any(leaving.was_waited_for for leaving in site.reading)
    assert sorted(parcel.rows for parcel in sent.parcels) == [(page,) for page in range(5)]


def test_it_is_not_ready_while_a_parcel_is_read(
    parts: tuple[SlowSite, Sent, OutgoingLayers[Any]],
) -> None:
    site, sent, outgoing = parts
    while len(site.reading) < 5:
        assert not outgoing.is_ready
        outgoing.work()
        for leaving in site.reading[:-1]:
            leaving.is_there = True
    while len(sent.parcels) < 4:
        outgoing.work()
    assert not outgoing.is_ready
    site.reading[-1].is_there = True
    outgoing.work()
    assert outgoing.is_ready


def test_what_is_still_being_read_at_the_switch_comes_before_the_patch(
    parts: tuple[SlowSite, Sent, OutgoingLayers[Any]],
) -> None:
    site, sent, outgoing = parts
    outgoing.work()
    first = site.reading[0].pages
    outgoing.wrote(first, ())
    outgoing.begin_rest()
    assert outgoing.send_rest()
    rows = [parcel.rows for parcel in sent.parcels]
    assert rows[0] == first and rows[-1] is None and sent.parcels[-1].is_last
    assert first in rows[1:], "a step has written to it since"
    assert sorted(rows[1:-1]) == [(page,) for page in range(5)]


def test_states_that_steps_write_go_once_after_the_switch() -> None:
    """The others go before it; no page is read of a layer with states."""
    site, sent = SlowSite(with_states=(LAYER,)), Sent()
    slots = (0, 1, 2)
    outgoing: OutgoingLayers[Any] = OutgoingLayers([LAYER], range(5), slots, site, sent)  # type: ignore[arg-type]
    outgoing.wrote([4], [1])
    while outgoing.work():
        for leaving in site.reading:
            leaving.is_there = True
    assert outgoing.is_ready
    assert sorted(one.pages for one in site.reading) == [(0,), (2,)]
    outgoing.wrote([4], [1, 3])
    outgoing.begin_rest()
    assert outgoing.send_rest()
    assert [one.pages for one in site.reading[2:]] == [(1,), (3,)]
    assert (outgoing.copied_bytes, outgoing.patched_bytes) == (2, 2)
    assert sent.parcels[-1].is_last


def test_states_after_the_switch_wait_for_the_target() -> None:
    """Nothing goes beyond the limit, and the end is said once."""
    site, sent = SlowSite(with_states=(LAYER,)), Sent(room=4)
    outgoing: OutgoingLayers[Any] = OutgoingLayers([LAYER], (), range(9), site, sent)  # type: ignore[arg-type]
    outgoing.wrote((), range(9))
    outgoing.begin_rest()
    assert not outgoing.send_rest()
    assert [parcel.rows for parcel in sent.parcels] == [(slot,) for slot in range(4)]
    sent.room = 7
    assert not outgoing.send_rest()
    sent.room = 1_000
    assert outgoing.send_rest() and outgoing.send_rest()
    rows = [parcel.rows for parcel in sent.parcels]
    assert rows == [*((slot,) for slot in range(9)), None]


def test_the_pages_of_a_patch_wait_for_nothing() -> None:
    site, sent = SlowSite(), Sent(room=0)
    outgoing: OutgoingLayers[Any] = OutgoingLayers([LAYER], range(5), (), site, sent)  # type: ignore[arg-type]
    outgoing.begin_rest()
    assert outgoing.send_rest()
    assert len(sent.parcels) == 6 and sent.parcels[-1].is_last


def test_states_that_steps_have_left_alone_go_before_the_switch() -> None:
    """Those of a request that has ended, while another one runs; and once more if they are written
    again."""
    site, sent = SlowSite(with_states=(LAYER,)), Sent()
    outgoing: OutgoingLayers[Any] = OutgoingLayers([LAYER], (), (0, 1), site, sent)  # type: ignore[arg-type]

    def run(slots: Sequence[int], num_steps: int) -> None:
        for _ in range(num_steps):
            outgoing.wrote([], slots)
            while outgoing.work():
                for leaving in site.reading:
                    leaving.is_there = True

    run([0, 1], 1)
    run([1], RESTING_STEPS - 1)
    assert not site.reading and outgoing.is_ready
    run([1], 1)
    assert [one.pages for one in site.reading] == [(0,)] and outgoing.is_ready
    run([0, 1], 1)
    run([1], RESTING_STEPS)
    assert [one.pages for one in site.reading] == [(0,), (0,)]
    outgoing.begin_rest()
    assert outgoing.send_rest()
    assert [parcel.rows for parcel in sent.parcels] == [(0,), (0,), (1,), None]


def test_rounds_of_states_end() -> None:
    """They put no move off for ever, and send no state again for ever."""
    site, sent = SlowSite(with_states=(LAYER,)), Sent()
    outgoing: OutgoingLayers[Any] = OutgoingLayers([LAYER], (), (), site, sent)  # type: ignore[arg-type]
    was_ready = []
    for number in range(1, MAX_ROUNDS + 1):
        outgoing.wrote([], [number])
        for _ in range(RESTING_STEPS):
            outgoing.wrote([], [0])
        sent.keeps_up = False
        assert not outgoing.work()
        was_ready.append(outgoing.is_ready)
        sent.keeps_up = True
        while outgoing.work():
            for leaving in site.reading:
                leaving.is_there = True
    assert was_ready == [False] * (MAX_ROUNDS - 2) + [True] * 2
    assert [one.pages for one in site.reading] == [(number,) for number in range(1, MAX_ROUNDS)]
    outgoing.begin_rest()
    assert outgoing.send_rest()
    assert [one.pages for one in site.reading[MAX_ROUNDS - 1 :]] == [(0,), (MAX_ROUNDS,)]
