"""Our radix cache against SGLang's: same match lengths, same evictable and locked sizes."""

import random
from array import array
from typing import Any

import pytest
from support.radix import Radix

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim
from sgl_pipeline.scheduling.radix_tree import RadixNode


@pytest.fixture(scope="module")
def upstream() -> Any:
    """SGLang's module, which takes some seconds to import."""
    install_torchvision_shim()
    from sglang.srt.mem_cache import radix_cache

    return radix_cache


class BothCaches:
    """Drives the two side by side."""

    def __init__(self, upstream: Any, page_size: int) -> None:
        self.upstream = upstream
        self.page_size = page_size
        self.ours = Radix(page_size)
        self.theirs = upstream.RadixCache.create_simulated(page_size=page_size)
        self.locked: list[tuple[RadixNode, Any]] = []

    def key(self, tokens: list[int], namespace: str) -> Any:
        return self.upstream.RadixKey(array("q", tokens), namespace or None)

    def match(self, tokens: list[int], namespace: str) -> tuple[RadixNode, Any]:
        node = self.ours.matched(tokens, namespace)
        params = self.upstream.MatchPrefixParams(key=self.key(tokens, namespace))
        result = self.theirs.match_prefix(params)
        assert node.end == result.device_prefix_len
        return node, result.last_device_node

    def insert(self, tokens: list[int], namespace: str) -> None:
        num_pages = len(tokens) // self.page_size
        insertion = self.ours.storage.insert(
            self.ours.tree.root, tokens, list(range(num_pages)), namespace
        )
        params = self.upstream.InsertParams(key=self.key(tokens, namespace))
        already_cached = self.theirs.insert(params).prefix_len
        assert len(insertion.declined) * self.page_size == already_cached

    def lock(self, tokens: list[int], namespace: str) -> None:
        ours, theirs = self.match(tokens, namespace)
        self.ours.storage.lock(ours)
        self.theirs.inc_lock_ref(theirs)
        self.locked.append((ours, theirs))

    def unlock(self, index: int) -> None:
        ours, theirs = self.locked.pop(index)
        self.ours.storage.unlock(ours)
        self.theirs.dec_lock_ref(theirs)

    def check_sizes(self) -> None:
        assert self.ours.storage.evictable_pages * self.page_size == self.theirs.evictable_size()
        assert self.ours.storage.locked_pages * self.page_size == self.theirs.protected_size()


def random_tokens(rng: random.Random, known: list[list[int]], page_size: int) -> list[int]:
    """A new prompt, or a known one cut or continued somewhere."""
    fresh = [token for _ in range(5) for token in [rng.randrange(3)] * page_size]
    fresh = fresh[: rng.randrange(1, len(fresh))]
    if not known or rng.random() < 0.3:
        return fresh
    old = rng.choice(known)
    return old[: rng.randrange(len(old) + 1)] + (fresh if rng.random() < 0.6 else [])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(12))
def test_random_sequences_give_the_same_lengths_and_sizes(
    upstream: Any, page_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    both = BothCaches(upstream, page_size)
    known: list[list[int]] = []
    num_hits = 0
    for _ in range(120):
        tokens = random_tokens(rng, known, page_size)
        namespace = rng.choice(["", "", "", "salt"])
        kind = rng.choice(["match", "insert", "insert", "lock", "unlock"])
        # Upstream's match of an empty key is a special case that the scheduler never meets.
        if kind == "unlock" or len(tokens) < page_size:
            if both.locked:
                both.unlock(rng.randrange(len(both.locked)))
        elif kind == "insert":
            both.insert(tokens, namespace)
            known.append(tokens)
        elif kind == "lock":
            both.lock(tokens, namespace)
        else:
            node, _ = both.match(tokens, namespace)
            num_hits += node.end > 0
        both.check_sizes()
    assert num_hits > 5
    while both.locked:
        both.unlock(0)
        both.check_sizes()
    assert both.ours.storage.locked_pages == 0
