"""Rounds of copying, and how much of them fits between two steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import OutgoingLayers
from sgl_pipeline.simulator.page_copies import MoveCosts, PageCopy
from sgl_pipeline.simulator.state_copies import MAX_ROUNDS
from sgl_pipeline.wire.move_orders import RESTING_STEPS
from test.pp_runner.layer_moves.test_outgoing_layers import LAYER, Leaving, Sent, SlowSite

# A page of a layer is 10 bytes, ten of which are copied in a second.
COSTS = MoveCosts(kv_bytes_per_token=5, page_size=2, bytes_per_s=100.0)


def copy_of(
    num_pages: int, costs: MoveCosts = COSTS, num_layers: int = 1, slots: tuple[int, ...] = ()
) -> PageCopy:
    return PageCopy(costs, tuple(range(num_layers)), 0, 1, num_pages, slots, begins_s=1.0)


def test_nothing_in_use_is_ready_at_once() -> None:
    copy = copy_of(0)
    assert copy.sent_if_idle(0.0) == 1.0
    copy.send(0.0, 5.0)
    assert copy.ready_s == 1.0


def test_pages_of_all_layers_are_copied() -> None:
    copy = copy_of(30, num_layers=2)
    assert copy.sent_if_idle(0.0) == pytest.approx(7.0)
    copy.send(0.0, 4.0)
    assert copy.ready_s is None
    copy.send(4.0, 20.0)
    assert (copy.ready_s, copy.copied_bytes) == (pytest.approx(7.0), 600.0)


def test_what_was_written_meanwhile_is_copied_again_until_it_is_little() -> None:
    copy = copy_of(100)
    copy.send(0.0, 2.0)
    copy.wrote(list(range(70)), ())
    copy.wrote([3, 4], ())
    # 90 pages are left, then the 70 that were written.
    assert copy.sent_if_idle(2.0) == pytest.approx(18.0)
    copy.send(2.0, 11.0 + 1e-9)
    copy.wrote(list(range(64)), ())
    copy.send(11.0, 30.0)
    assert copy.ready_s == pytest.approx(18.0)
    assert copy.finish(30.0) == pytest.approx(36.4)
    assert (copy.copied_bytes, copy.patch_bytes) == (pytest.approx(1700.0), 640.0)


def test_rounds_end_where_steps_write_as_fast_as_pages_are_copied() -> None:
    copy, now_s = copy_of(100), 1.0
    rounds = 0
    while copy.ready_s is None:
        copy.wrote(list(range(100)), ())
        copy.send(now_s, now_s + 10.0)
        now_s, rounds = now_s + 10.0, rounds + 1
    assert rounds == MAX_ROUNDS
    assert copy.finish(now_s) == pytest.approx(now_s + 10.0)


def test_between_two_steps_goes_no_more_than_a_target_takes_up() -> None:
    copy = copy_of(100, replace(COSTS, bytes_per_s=1e6))
    assert copy.send(2.0, 3.0, most_bytes=50.0) == pytest.approx(2.00005)
    assert copy.copied_bytes == 50.0
    assert copy.take(3.0, 4.0, most_bytes=20.0) == pytest.approx(3.00002)
    assert copy.untaken_bytes == 30.0


def test_the_target_takes_up_what_was_sent_in_its_own_time() -> None:
    copy = copy_of(10)
    copy.send(0.0, 5.0)
    assert copy.untaken_bytes == 100.0
    copy.take(5.0, 5.5)
    copy.wrote([1, 2], ())
    assert copy.finish(6.0) == pytest.approx(6.2)
    # 50 bytes of before and 20 of the patch, from 6.1 on.
    assert copy.has_all_if_idle(6.1) == pytest.approx(6.8)
    assert copy.wait(7.0) == pytest.approx(7.7)
    assert copy.has_all_if_idle(9.0) == pytest.approx(7.7)


# Of two layers the first has states of 30 bytes.
HYBRID = replace(COSTS, state_bytes=(30, 0))


def test_states_go_once_behind_the_pages_and_those_written_meanwhile_at_the_switch() -> None:
    copy = copy_of(10, HYBRID, num_layers=2, slots=(6, 5, 4))
    assert copy.queued_bytes == 10 * 10 + 3 * 30
    copy.send(1.0, 2.0)
    assert copy.queued_bytes == 90
    # Slot 5 is written before it has gone, 4 after the first 15 bytes of it have.
    copy.wrote([1], [5])
    copy.send(2.0, 2.15)
    copy.wrote([1, 2], [4, 5])
    assert copy.queued_bytes == 30
    assert copy.sent_if_idle(3.0) == pytest.approx(3.3)
    copy.send(3.0, 9.0)
    assert copy.ready_s == pytest.approx(3.3)
    copy.wrote([], [7])
    # Two pages, and slots 4, 5 and 7.
    assert copy.finish(9.0) == pytest.approx(9.0 + 0.2 + 0.9)
    assert (copy.copied_bytes, copy.patch_bytes) == (pytest.approx(145.0), 110.0)


def test_rounds_of_states_do_not_put_a_move_off_for_ever() -> None:
    """As `pp_runner/layer_moves/test_outgoing_layers.py` has it of a stage: at each look another
    request has ended, whose state has rested and waits to go."""
    copy, now_s = copy_of(0, replace(COSTS, state_bytes=(30,))), 1.0
    was_ready = []
    for number in range(1, MAX_ROUNDS + 1):
        copy.wrote([], [number])
        for _ in range(RESTING_STEPS):
            copy.wrote([], [0])
        assert copy.queued_bytes == (30 if number < MAX_ROUNDS else 0)
        was_ready.append(copy.sent_if_idle(now_s) == now_s)
        copy.send(now_s, now_s + 9.0)
        now_s += 10.0
    assert was_ready == [False] * (MAX_ROUNDS - 2) + [True] * 2
    assert copy.copied_bytes == pytest.approx(30 * (MAX_ROUNDS - 1))
    # Slot 0 is left, and the last one.
    assert copy.finish(now_s) == pytest.approx(now_s + 0.6)


def test_a_move_is_ready_beside_states_of_later_rounds() -> None:
    """A request writes its state again whenever it has rested and before it has gone."""
    copy = copy_of(0, replace(COSTS, state_bytes=(30,)), slots=(1,))
    for _ in range(2, MAX_ROUNDS + 1):
        copy.send(1.0, 1.1)
        assert copy.ready_s is None
        copy.wrote([], [1])
        for _ in range(RESTING_STEPS):
            copy.wrote([], [])
    copy.send(2.0, 2.1)
    assert copy.ready_s == 2.0
    assert (copy.queued_bytes, copy.copied_bytes) == (pytest.approx(20), pytest.approx(40))


def test_pages_of_layers_with_states_alone_do_not_count() -> None:
    copy = copy_of(500, replace(COSTS, state_bytes=(30,)), slots=(1,))
    copy.wrote(range(400), ())
    copy.send(1.0, 9.0)
    assert (copy.copied_bytes, copy.finish(9.0)) == (30.0, 9.0)


class PromptSite(SlowSite):
    """What is read is there at once."""

    def read(self, layer: int, pages: Sequence[int]) -> Leaving:
        leaving = super().read(layer, pages)
        leaving.is_there = True
        return leaving


def test_rounds_and_bytes_are_those_of_a_stage_that_sends_slot_by_slot() -> None:
    num_rounds = Counter[int]()
    for seed in range(200):
        rng = Random(seed)
        slots = tuple(rng.sample(range(20), rng.randint(0, 20)))
        site = PromptSite(with_states=(LAYER,))
        outgoing: OutgoingLayers[Any] = OutgoingLayers([LAYER], (), slots, site, Sent())  # type: ignore[arg-type]
        copy, now_s = copy_of(0, MoveCosts(state_bytes=(1,), bytes_per_s=100.0), slots=slots), 1.0
        num_slots = rng.choice((3, 60))
        for _ in range(rng.choice((0, *range(30, 50, 2), 400))):
            written = rng.sample(range(num_slots), rng.randint(0, 3))
            copy.wrote([], written)
            outgoing.wrote([], written)
            now_s, count = now_s + 1.0, rng.randint(1, 3)
            copy.send(now_s, now_s + 1e9, most_bytes=count)
            wanted = outgoing.copied_bytes + count
            while outgoing.copied_bytes < wanted and outgoing.work():
                pass
            assert copy._states.rounds == outgoing._state_rounds
            assert copy.copied_bytes == outgoing.copied_bytes
        copy.finish(now_s)
        outgoing.begin_rest()
        assert outgoing.send_rest()
        assert copy.patch_bytes == outgoing.patched_bytes
        num_rounds[outgoing._state_rounds] += 1
    assert {*num_rounds} == {*range(1, MAX_ROUNDS + 1)}
