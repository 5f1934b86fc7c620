"""The radix tree against a page-by-page model, and its bookkeeping of what is wanted."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_pipeline.scheduling.radix_cache import RadixCache, RadixNode

Prefix = tuple[str, tuple[int, ...]]


def matched(cache: RadixCache, tokens: list[int], namespace: str = "") -> RadixNode:
    """The cached part of `tokens`, by the way the scheduler takes."""
    path = cache.want(tokens, namespace)
    node = cache.match(path)
    cache.unwant(path)
    return node


def put(cache: RadixCache, tokens: list[int], first_page: int, namespace: str = "") -> list[int]:
    """Inserts `tokens` with consecutive page ids; returns the declined ones."""
    pages = list(range(first_page, first_page + len(tokens) // cache.page_size))
    return cache.insert(cache.root, tokens, pages, namespace).declined


class PageModel:
    """What the cache must do, one page at a time and without a tree."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.clock = 0

    def prefixes(self, tokens: list[int], namespace: str) -> Iterator[Prefix]:
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            yield namespace, tuple(tokens[:end])

    def match(self, tokens: list[int], namespace: str) -> list[Prefix]:
        hits = []
        for prefix in self.prefixes(tokens, namespace):
            if prefix not in self.pages:
                break
            hits.append(prefix)
        return hits

    def use(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(prefixes, self.clock))

    def put(self, tokens: list[int], first_page: int, namespace: str) -> list[int]:
        declined = []
        prefixes = list(self.prefixes(tokens, namespace))
        for page, prefix in enumerate(prefixes, first_page):
            if prefix in self.pages:
                declined.append(page)
            else:
                self.pages[prefix] = page
        self.use(prefixes)
        return declined

    def evict(self, count: int) -> list[int]:
        """Page by page: of those that nothing cached continues, the least recently used."""
        evicted = []
        for _ in range(count):
            inner = {(name, tokens[: -self.page_size]) for name, tokens in self.pages}
            tails = [p for p in self.pages if p not in inner and not self.locks.get(p)]
            if not tails:
                break
            evicted.append(self.pages.pop(min(tails, key=self.used.__getitem__)))
        return evicted

    def locked(self) -> int:
        return sum(bool(self.locks.get(prefix)) for prefix in self.pages)


operations = st.lists(
    st.tuples(
        st.sampled_from(["match", "put", "put", "lock", "unlock", "evict"]),
        st.lists(st.integers(0, 1), max_size=10),
        st.sampled_from(["", "", "salt"]),
        st.integers(1, 4),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(page_size=st.sampled_from([1, 2, 3]), operations=operations)
def test_the_tree_does_what_a_page_by_page_model_does(
    page_size: int, operations: list[tuple[str, list[int], str, int]]
) -> None:
    cache, model = RadixCache(page_size), PageModel(page_size)
    locked: list[tuple[RadixNode, list[Prefix]]] = []
    next_page = 0
    for kind, tokens, namespace, count in operations:
        if kind == "put":
            declined = put(cache, tokens, next_page, namespace)
            assert declined == model.put(tokens, next_page, namespace)
            next_page += len(tokens)
        elif kind == "evict":
            evicted = cache.evict(count)
            assert sorted(evicted) == sorted(model.evict(count))
        elif kind == "unlock" and locked:
            node, hits = locked.pop(count % len(locked))
            cache.unlock(node)
            model.use(hits)
            for prefix in hits:
                model.locks[prefix] -= 1
        elif kind in ("match", "lock"):
            node, hits = matched(cache, tokens, namespace), model.match(tokens, namespace)
            model.use(hits)
            assert node.end == len(hits) * page_size
            assert cache.pages_of(node) == [model.pages[prefix] for prefix in hits]
            if kind == "lock":
                cache.lock(node)
                model.use(hits)
                locked.append((node, hits))
                for prefix in hits:
                    model.locks[prefix] = model.locks.get(prefix, 0) + 1
        assert cache.locked_pages == model.locked()
        assert cache.cached_pages == len(model.pages)
        assert cache.pending_tokens == 0


def test_eviction_takes_only_the_pages_needed_from_a_leafs_tail() -> None:
    cache = RadixCache(2)
    put(cache, [1, 2, 3, 4, 5, 6], first_page=10)
    assert cache.evict(1) == [12]
    assert matched(cache, [1, 2, 3, 4, 5, 6]).end == 4


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    cache = RadixCache(1)
    for first_page, token in ((10, 1), (20, 2), (30, 3)):
        put(cache, [token], first_page)
    matched(cache, [1])
    assert cache.evict(2) == [20, 30]


def test_an_insert_counts_as_a_use_of_the_whole_prefix() -> None:
    cache = RadixCache(1)
    for first_page, token in ((10, 1), (20, 2)):
        put(cache, [token], first_page)
    put(cache, [1], first_page=30)
    assert cache.evict(1) == [20]
    put(cache, [3], first_page=40)
    matched(cache, [1])
    assert cache.evict(1) == [40]


def test_a_split_run_keeps_its_last_use_where_it_was_not_used_again() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2, 3, 4], first_page=10)
    put(cache, [9], first_page=20)
    matched(cache, [1, 2])
    matched(cache, [1])
    # Least recently used: tokens 3 and 4, then 9, then 2, then 1.
    assert [cache.evict(1) for _ in range(5)] == [[13], [12], [20], [11], [10]]


def test_eviction_splits_a_run_without_making_it_younger() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2, 3], first_page=10)
    put(cache, [9], first_page=20)
    assert [cache.evict(1) for _ in range(4)] == [[12], [11], [10], [20]]


def test_a_locked_page_is_never_evicted() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2, 3, 4], first_page=10)
    node = matched(cache, [1, 2])
    cache.lock(node)
    assert (cache.locked_pages, cache.evictable_pages) == (2, 2)
    assert sorted(cache.evict(9)) == [12, 13]
    cache.unlock(node)
    assert sorted(cache.evict(9)) == [10, 11]


def test_namespaces_share_nothing() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2], 10, "tenant a")
    assert matched(cache, [1, 2], "tenant b").end == 0
    assert matched(cache, [1, 2]).end == 0
    assert put(cache, [1, 2], 20, "tenant b") == []
    assert cache.pages_of(matched(cache, [1, 2], "tenant b")) == [20, 21]


def test_only_whole_pages_match() -> None:
    cache = RadixCache(4)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8], first_page=0)
    assert matched(cache, [1, 2, 3, 4, 5, 6, 7]).end == 4
    assert matched(cache, [1, 2, 3]).end == 0


def test_a_disabled_cache_declines_everything() -> None:
    cache = RadixCache(1, enabled=False)
    assert put(cache, [1, 2], first_page=10) == [10, 11]
    assert matched(cache, [1, 2]) is cache.root
    assert not cache.accepts(cache.root, [1, 2])
    assert cache.cached_pages == 0


def test_a_prefix_that_two_waiting_requests_want_is_pending_once() -> None:
    cache = RadixCache(2)
    first, second = cache.want([1, 2, 3, 4]), cache.want([1, 2, 5, 6, 7])
    assert cache.pending_tokens == 6
    cache.unwant(first)
    assert cache.pending_tokens == 4
    cache.unwant(second)
    assert cache.pending_tokens == 0
    assert not cache.root.children


def test_cached_tokens_are_not_pending_until_they_are_evicted() -> None:
    cache = RadixCache(2)
    path = cache.want([1, 2, 3, 4])
    put(cache, [1, 2, 3, 4, 5, 6], first_page=0)
    assert (cache.match(path).end, cache.pending_tokens) == (4, 0)
    cache.evict(2)
    assert (cache.match(path).end, cache.pending_tokens) == (2, 2)
    cache.evict(1)
    assert (cache.match(path).end, cache.pending_tokens) == (0, 4)


def test_what_is_being_prefilled_is_not_pending_but_is_claimed() -> None:
    cache = RadixCache(1)
    prefilling, waiting = cache.want([1, 2, 3]), cache.want([1, 2, 9])
    cache.claim(prefilling)
    assert cache.pending_tokens == 1
    claimed = cache.claimed_node(waiting)
    assert claimed is not None
    assert claimed.end == 2
    cache.unclaim(prefilling)
    assert cache.claimed_node(waiting) is None
    assert cache.pending_tokens == 3


@pytest.mark.parametrize("length", [7, 8, 9, 64, 1000])
def test_the_point_where_two_prompts_part_is_found_exactly(length: int) -> None:
    for parting in {0, 1, length // 2, length - 1}:
        cache = RadixCache(1)
        tokens = list(range(length))
        put(cache, tokens, first_page=0)
        other = [*tokens[:parting], -1, *tokens[parting + 1 :]]
        assert matched(cache, other).end == parting
