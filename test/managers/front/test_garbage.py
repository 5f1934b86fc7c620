"""When the scheduler process collects cyclic garbage."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from sgl_pipeline.managers.front.garbage import collect_at_leisure, postpone_full_collections


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_only_full_collections_are_postponed() -> None:
    young, middle, full = gc.get_threshold()
    postpone_full_collections()
    assert gc.get_threshold()[:2] == (young, middle)
    assert gc.get_threshold()[2] > 1_000_000 > full


@pytest.mark.usefixtures("collector")
def test_leisure_collects_what_is_new_and_is_done_with_the_rest() -> None:
    kept, dropped = Node(), Node()
    weak_kept, weak_dropped = weakref.ref(kept), weakref.ref(dropped)
    del dropped
    collect_at_leisure()
    assert weak_dropped() is None
    assert not any(thing is kept for thing in gc.get_objects())
    del kept
    gc.collect()
    assert weak_kept() is not None
