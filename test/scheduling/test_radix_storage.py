"""What the radix tree caches, locks and evicts, against a page-by-page model."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from support.radix import Radix

from sgl_pipeline.scheduling.radix_tree import RadixNode

Prefix = tuple[str, tuple[int, ...]]


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
    radix, model = Radix(page_size), PageModel(page_size)
    locked: list[tuple[RadixNode, list[Prefix]]] = []
    next_page = 0
    for kind, tokens, namespace, count in operations:
        if kind == "put":
            declined = radix.put(tokens, next_page, namespace)
            assert declined == model.put(tokens, next_page, namespace)
            next_page += len(tokens)
        elif kind == "evict":
            evicted = radix.storage.evict(count)
            assert sorted(evicted) == sorted(model.evict(count))
        elif kind == "unlock" and locked:
            node, hits = locked.pop(count % len(locked))
            radix.storage.unlock(node)
            model.use(hits)
            for prefix in hits:
                model.locks[prefix] -= 1
        elif kind in ("match", "lock"):
            node, hits = radix.matched(tokens, namespace), model.match(tokens, namespace)
            model.use(hits)
            assert node.end == len(hits) * page_size
            assert radix.storage.pages_of(node) == [model.pages[prefix] for prefix in hits]
            if kind == "lock":
                radix.storage.lock(node)
                model.use(hits)
                locked.append((node, hits))
                for prefix in hits:
                    model.locks[prefix] = model.locks.get(prefix, 0) + 1
        assert radix.storage.locked_pages == model.locked()
        assert radix.storage.cached_pages == len(model.pages)
        assert radix.demand.pending_tokens == 0


def test_eviction_takes_only_the_pages_needed_from_a_leafs_tail() -> None:
    radix = Radix(2)
    radix.put([1, 2, 3, 4, 5, 6], first_page=10)
    assert radix.storage.evict(1) == [12]
    assert radix.matched([1, 2, 3, 4, 5, 6]).end == 4


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    radix = Radix(1)
    for first_page, token in ((10, 1), (20, 2), (30, 3)):
        radix.put([token], first_page)
    radix.matched([1])
    assert radix.storage.evict(2) == [20, 30]


def test_an_insert_counts_as_a_use_of_the_whole_prefix() -> None:
    radix = Radix(1)
    for first_page, token in ((10, 1), (20, 2)):
        radix.put([token], first_page)
    radix.put([1], first_page=30)
    assert radix.storage.evict(1) == [20]
    radix.put([3], first_page=40)
    radix.matched([1])
    assert radix.storage.evict(1) == [40]


def test_a_split_run_keeps_its_last_use_where_it_was_not_used_again() -> None:
    radix = Radix(1)
    radix.put([1, 2, 3, 4], first_page=10)
    radix.put([9], first_page=20)
    radix.matched([1, 2])
    radix.matched([1])
    # Least recently used: tokens 3 and 4, then 9, then 2, then 1.
    assert [radix.storage.evict(1) for _ in range(5)] == [[13], [12], [20], [11], [10]]


def test_eviction_splits_a_run_without_making_it_younger() -> None:
    radix = Radix(1)
    radix.put([1, 2, 3], first_page=10)
    radix.put([9], first_page=20)
    assert [radix.storage.evict(1) for _ in range(4)] == [[12], [11], [10], [20]]


def test_a_locked_page_is_never_evicted() -> None:
    radix = Radix(1)
    radix.put([1, 2, 3, 4], first_page=10)
    node = radix.matched([1, 2])
    radix.storage.lock(node)
    assert (radix.storage.locked_pages, radix.storage.evictable_pages) == (2, 2)
    assert sorted(radix.storage.evict(9)) == [12, 13]
    radix.storage.unlock(node)
    assert sorted(radix.storage.evict(9)) == [10, 11]


def test_a_disabled_cache_declines_everything() -> None:
    radix = Radix(1, enabled=False)
    assert radix.put([1, 2], first_page=10) == [10, 11]
    assert radix.matched([1, 2]) is radix.tree.root
    assert not radix.storage.accepts(radix.tree.root, [1, 2])
    assert radix.storage.cached_pages == 0
