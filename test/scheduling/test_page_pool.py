"""Page ids are given out once each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.scheduling.page_pool import PagePool


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_pages_are_conserved_under_any_sequence(operations: list[tuple[bool, int]]) -> None:
    pool, held = PagePool(12), []
    for takes, count in operations:
        if takes:
            new = pool.allocate(min(count, pool.num_free))
            assert not set(new) & set(held)
            held += new
        else:
            pool.free(held[:count])
            held = held[count:]
        assert pool.num_free + len(held) == pool.num_pages
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(12))


def test_freeing_a_page_twice_is_caught() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)


def test_allocating_more_than_is_free_is_caught() -> None:
    with pytest.raises(AssertionError, match="3 pages asked, 2 are free"):
        PagePool(2).allocate(3)
