"""The shape of the radix tree, and what holds of its nodes whoever calls whatever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import make_request
from support.radix import Radix

from sgl_pipeline.scheduling.radix_tree import RadixNode


def prefix_of(node: RadixNode) -> list[int]:
    tokens: list[int] = []
    while node.parent is not None:
        tokens = node.tokens + tokens
        node = node.parent
    return tokens


def test_namespaces_share_nothing() -> None:
    radix = Radix(1)
    radix.put([1, 2], 10, "tenant a")
    assert radix.matched([1, 2], "tenant b").end == 0
    assert radix.matched([1, 2]).end == 0
    assert radix.put([1, 2], 20, "tenant b") == []
    assert radix.storage.pages_of(radix.matched([1, 2], "tenant b")) == [20, 21]


def test_only_whole_pages_match() -> None:
    radix = Radix(4)
    radix.put([1, 2, 3, 4, 5, 6, 7, 8], first_page=0)
    assert radix.matched([1, 2, 3, 4, 5, 6, 7]).end == 4
    assert radix.matched([1, 2, 3]).end == 0


@pytest.mark.parametrize("length", [7, 8, 9, 64, 1000])
def test_the_point_where_two_prompts_part_is_found_exactly(length: int) -> None:
    for parting in {0, 1, length // 2, length - 1}:
        radix = Radix(1)
        tokens = list(range(length))
        radix.put(tokens, first_page=0)
        other = [*tokens[:parting], -1, *tokens[parting + 1 :]]
        assert radix.matched(other).end == parting


def test_a_split_keeps_the_ends_of_paths_and_shares_all_but_the_pages() -> None:
    radix = Radix(2)
    path = radix.demand.want([1, 2, 3, 4, 5, 6])
    assert radix.demand.want([1, 2, 3, 4, 5, 6]) is path
    radix.demand.claim(path)
    radix.put([1, 2, 3, 4, 5, 6], first_page=10)
    radix.storage.lock(path)
    upper = radix.tree.split(path, 4)
    assert (prefix_of(upper), prefix_of(path)) == ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    assert upper.last_used == path.last_used
    assert (upper.num_waiting, upper.num_prefilling) == (1, 1)
    assert (path.num_waiting, path.num_prefilling) == (1, 1)
    assert radix.storage.pages_of(upper) == [10, 11]
    assert radix.storage.pages_of(path) == [10, 11, 12]
    assert radix.storage.evict(3) == []
    radix.storage.unlock(path)
    radix.demand.unwant(path)
    radix.demand.unclaim(path)
    assert sorted(radix.storage.evict(3)) == [10, 11, 12]
    assert not radix.tree.root.children


operations = st.lists(
    st.tuples(
        st.sampled_from("want want unwant claim unclaim park put put lock unlock evict".split()),
        st.lists(st.integers(0, 1), max_size=10),
        st.sampled_from(["", "", "salt"]),
        st.integers(0, 4),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(page_size=st.sampled_from([1, 2, 3]), operations=operations)
def test_what_every_node_promises_holds_after_any_call(
    page_size: int, operations: list[tuple[str, list[int], str, int]]
) -> None:
    radix = Radix(page_size)
    waiting: list[tuple[RadixNode, list[int]]] = []
    prefilling: list[tuple[RadixNode, list[int]]] = []
    locked: list[RadixNode] = []
    next_page = 0
    for kind, tokens, namespace, count in operations:
        if kind == "want":
            whole = tokens[: len(tokens) // page_size * page_size]
            waiting.append((radix.demand.want(tokens, namespace), whole))
        elif kind == "unwant" and waiting:
            radix.demand.unwant(waiting.pop(count % len(waiting))[0])
        elif kind == "claim" and waiting:
            prefilling.append(waiting.pop(count % len(waiting)))
            radix.demand.claim(prefilling[-1][0])
        elif kind == "unclaim" and prefilling:
            radix.demand.unclaim(prefilling.pop(count % len(prefilling))[0])
        elif kind == "park" and waiting:
            claimed = radix.demand.claimed_node(waiting[count % len(waiting)][0])
            if claimed is not None:
                radix.demand.park(make_request("parked", [1]), claimed)
        elif kind == "put":
            radix.put(tokens, next_page, namespace)
            next_page += len(tokens)
        elif kind == "lock":
            locked.append(radix.matched(tokens, namespace))
            radix.storage.lock(locked[-1])
        elif kind == "unlock" and locked:
            radix.storage.unlock(locked.pop(count % len(locked)))
        elif kind == "evict":
            assert len(radix.storage.evict(count)) <= count
        radix.check_nodes()
        for path, wanted in waiting + prefilling:
            assert prefix_of(path) == wanted
    for path, _ in waiting:
        radix.demand.unwant(path)
    for path, _ in prefilling:
        radix.demand.unclaim(path)
    for node in locked:
        radix.storage.unlock(node)
    radix.storage.evict(radix.storage.cached_pages)
    assert not radix.tree.root.children
