"""Which pages a log holds: never more than there is room for, and alike wherever it is kept."""

from random import Random

import pytest

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.wire.logged_pages import LogContents, LoggedPages, begun_pages, log_page_capacity


@pytest.mark.parametrize("capacity", [0, 1, 5, 40])
def test_the_newest_pages_are_held_each_in_a_slot_of_its_own(capacity: int) -> None:
    rng = Random(capacity)
    log, newest = LoggedPages(capacity), list[int]()
    for number in range(2_000):
        page = rng.randrange(30)
        if page in newest:
            newest.remove(page)
        newest.append(page)
        slot, left = log.enter(page)
        expected_left = newest.pop(0) if len(newest) > capacity else None
        if capacity == 0:
            assert (slot, left) == (None, None)
            continue
        assert left == expected_left and slot is not None and 0 <= slot < capacity
        held = dict(log.items())
        assert list(held) == newest and len(log) == len(newest) <= capacity
        assert len({*held.values()}) == len(held) and held[page] == slot
        if number % 100 == 0:
            other = LoggedPages(capacity)
            other.restore(log.contents())
            assert list(other.items()) == list(log.items())
            log = other


def test_contents_of_another_log_are_refused() -> None:
    log = LoggedPages(10)
    for page in range(10):
        log.enter(page)
    contents = log.contents()
    with pytest.raises(ProtocolError, match="9 pages"):
        LoggedPages(9).restore(contents)
    with pytest.raises(ProtocolError, match="not those"):
        LoggedPages(10).restore(LogContents(contents.pages, contents.slots[4:]))


def test_pages_begin_with_their_first_row() -> None:
    pages = [7, 5, 9]
    assert begun_pages(pages, 0, 4, 4) == [7]
    assert begun_pages(pages, 0, 5, 4) == [7, 5]
    assert begun_pages(pages, 1, 8, 4) == [5]
    assert begun_pages(pages, 5, 8, 4) == []
    assert begun_pages(pages, 8, 9, 4) == [9]


def test_the_room_is_what_was_asked_for_and_no_more_than_there_are_pages() -> None:
    assert log_page_capacity(1, 1000, 16, 1024) == 64
    assert log_page_capacity(1, 10, 16, 1024) == 10
    assert log_page_capacity(0, 10, 16, 1024) == 0
