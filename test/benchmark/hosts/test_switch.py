"""Frames between ports, in virtual time: when they come, in which order, and which never do."""

import os
from collections.abc import Iterator

import pytest

from benchmark.hosts.switch import Port, Setting, Switch, wire_bytes

HEADER_BYTES = 10
EVERYBODY = 0xFF


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    """One for each port: the end that is read and the one that is written to."""
    opened = [os.pipe2(os.O_NONBLOCK) for _ in range(3)]
    yield opened
    for pipe in opened:
        for end in pipe:
            os.close(end)


@pytest.fixture
def far_ends(pipes: list[tuple[int, int]]) -> list[int]:
    """What the switch writes to port `n` can be read from `far_ends[n]`."""
    return [read for read, _ in pipes]


@pytest.fixture
def switch(pipes: list[tuple[int, int]]) -> Switch:
    return Switch([Port(tap, Setting(port=number)) for number, (_, tap) in enumerate(pipes)])


def frame(target: int, size: int = 1000, segment_bytes: int = 0) -> bytes:
    header = bytes(4) + segment_bytes.to_bytes(2, "little") + bytes(4)
    first = 0xFF if target == EVERYBODY else 0x02
    return header + bytes([first, 0, 0, 0, 0, target]) + bytes(size - 6)


def arrived(end: int) -> int:
    """Bytes that can be read now."""
    try:
        return len(os.read(end, 1 << 20))
    except BlockingIOError:
        return 0


def test_a_frame_goes_to_its_port_alone_and_one_for_all_to_all_others(
    switch: Switch, far_ends: list[int]
) -> None:
    switch.take(0, frame(2), now_s=0.0)
    switch.deliver(0.0)
    assert [arrived(end) for end in far_ends] == [0, 0, 1010]
    switch.take(1, frame(EVERYBODY), now_s=0.0)
    switch.deliver(0.0)
    assert [arrived(end) for end in far_ends] == [1010, 0, 1010]


def test_a_frame_takes_its_bits_of_the_slower_cable_and_the_delay_of_both(
    switch: Switch, far_ends: list[int]
) -> None:
    switch.ports[0].cable = Setting(port=0, delay_ms=1.0, gbit_per_s=1.0)
    switch.ports[1].cable = Setting(port=1, delay_ms=2.0, gbit_per_s=0.1)
    on_wire_s = 8 * wire_bytes(frame(1)) / 0.1e9
    for _ in range(2):
        switch.take(0, frame(1), now_s=10.0)
    for number in (1, 2):
        due_s = 10.003 + number * on_wire_s
        assert switch.wait_s(10.0) == pytest.approx(due_s - 10.0)
        switch.deliver(due_s - 1e-6)
        assert arrived(far_ends[1]) == 0
        switch.deliver(due_s + 1e-6)
        assert arrived(far_ends[1]) == 1010
    assert switch.wait_s(11.0) is None


def test_the_two_ways_of_a_cable_are_independent(switch: Switch) -> None:
    switch.ports[0].cable = Setting(port=0, gbit_per_s=0.1)
    on_wire_s = 8 * wire_bytes(frame(1)) / 0.1e9
    switch.take(0, frame(1), now_s=0.0)
    switch.take(1, frame(0), now_s=0.0)
    switch.deliver(on_wire_s + 1e-9)
    assert switch.wait_s(0.0) is None


def test_a_cut_cable_loses_what_is_sent_and_what_is_under_way(
    switch: Switch, far_ends: list[int]
) -> None:
    switch.ports[1].cable = Setting(port=1, delay_ms=1.0)
    switch.take(0, frame(1), now_s=0.0)
    switch.ports[1].cable = Setting(port=1, is_cut=True)
    switch.take(0, frame(1), now_s=0.0)
    switch.take(1, frame(0), now_s=0.0)
    switch.deliver(1.0)
    switch.ports[1].cable = Setting(port=1)
    switch.deliver(2.0)
    assert [arrived(end) for end in far_ends] == [0, 0, 0]


def test_a_share_of_the_frames_is_lost(switch: Switch, far_ends: list[int]) -> None:
    switch.ports[1].cable = Setting(port=1, loss=0.25)
    came = 0
    for _ in range(1000):
        switch.take(0, frame(1, 60), now_s=0.0)
        switch.deliver(0.0)
        came += arrived(far_ends[1]) > 0
    assert 700 < came < 800


def test_a_large_frame_counts_as_the_segments_that_a_card_would_send() -> None:
    assert wire_bytes(frame(1, 1500)) == 1500 + 24
    assert wire_bytes(frame(1, 60_000, segment_bytes=1448)) == 60_000 + 42 * 90
