"""Rounds of copying, and how much of them fits between two steps."""

from dataclasses import replace

import pytest

from sgl_pipeline.simulator.page_copies import MAX_ROUNDS, MoveCosts, PageCopy

# A page of a layer is 10 bytes, ten of which are copied in a second.
COSTS = MoveCosts(kv_bytes_per_token=5, page_size=2, bytes_per_s=100.0)


def copy_of(num_pages: int, costs: MoveCosts = COSTS, num_layers: int = 1) -> PageCopy:
    return PageCopy(costs, tuple(range(num_layers)), 0, 1, num_pages, begins_s=1.0)


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
    copy.wrote(list(range(70)))
    copy.wrote([3, 4])
    # 90 pages are left, then the 70 that were written.
    assert copy.sent_if_idle(2.0) == pytest.approx(18.0)
    copy.send(2.0, 11.0 + 1e-9)
    copy.wrote(list(range(64)))
    copy.send(11.0, 30.0)
    assert copy.ready_s == pytest.approx(18.0)
    assert copy.finish(30.0) == pytest.approx(36.4)
    assert (copy.copied_bytes, copy.patch_bytes) == (pytest.approx(1700.0), 640.0)


def test_rounds_end_where_steps_write_as_fast_as_pages_are_copied() -> None:
    copy, now_s = copy_of(100), 1.0
    rounds = 0
    while copy.ready_s is None:
        copy.wrote(list(range(100)))
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
    copy.wrote([1, 2])
    assert copy.finish(6.0) == pytest.approx(6.2)
    # 50 bytes of before and 20 of the patch, from 6.1 on.
    assert copy.has_all_if_idle(6.1) == pytest.approx(6.8)
    assert copy.wait(7.0) == pytest.approx(7.7)
    assert copy.has_all_if_idle(9.0) == pytest.approx(7.7)
