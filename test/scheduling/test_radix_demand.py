"""The tokens that requests want of the radix tree, and who waits for whose prefill."""

from support.pipelines import make_request
from support.radix import Radix


def test_a_prefix_that_two_waiting_requests_want_is_pending_once() -> None:
    radix = Radix(2)
    first, second = radix.demand.want([1, 2, 3, 4]), radix.demand.want([1, 2, 5, 6, 7])
    assert radix.demand.pending_tokens == 6
    radix.demand.unwant(first)
    assert radix.demand.pending_tokens == 4
    radix.demand.unwant(second)
    assert radix.demand.pending_tokens == 0
    assert not radix.tree.root.children


def test_cached_tokens_are_not_pending_until_they_are_evicted() -> None:
    radix = Radix(2)
    path = radix.demand.want([1, 2, 3, 4])
    radix.put([1, 2, 3, 4, 5, 6], first_page=0)
    assert (radix.storage.match(path).end, radix.demand.pending_tokens) == (4, 0)
    radix.storage.evict(2)
    assert (radix.storage.match(path).end, radix.demand.pending_tokens) == (2, 2)
    radix.storage.evict(1)
    assert (radix.storage.match(path).end, radix.demand.pending_tokens) == (0, 4)


def test_what_is_being_prefilled_is_not_pending_but_is_claimed() -> None:
    radix = Radix(1)
    prefilling, waiting = radix.demand.want([1, 2, 3]), radix.demand.want([1, 2, 9])
    radix.demand.claim(prefilling)
    assert radix.demand.pending_tokens == 1
    claimed = radix.demand.claimed_node(waiting)
    assert claimed is not None
    assert claimed.end == 2
    radix.demand.unclaim(prefilling)
    assert radix.demand.claimed_node(waiting) is None
    assert radix.demand.pending_tokens == 3


def test_a_parked_request_returns_when_the_claimed_node_is_cached_or_given_up() -> None:
    for is_cached in (True, False):
        radix = Radix(1)
        prefilling, waiting = radix.demand.want([1, 2, 3]), radix.demand.want([1, 2, 9])
        radix.demand.claim(prefilling)
        claimed = radix.demand.claimed_node(waiting)
        assert claimed is not None
        parked = make_request("parked", [1, 2, 9])
        radix.demand.park(parked, claimed)
        radix.put([1], first_page=0)
        assert radix.demand.take_unparked() == []
        if is_cached:
            radix.put([1, 2], first_page=1)
        else:
            radix.demand.unclaim(prefilling)
        assert radix.demand.take_unparked() == [parked]
        assert radix.demand.take_unparked() == []
