"""Names of pages are SGLang's, so that its stores and ours agree."""

from random import Random

import pytest
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

from sgl_pipeline.page_hash import namespace_hash, page_hashes

PARTS = (None, "", "a", "tenant:1", "ключ", "x" * 300)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("prior", [b"", bytes(range(32))])
def test_pages_have_the_hashes_of_upstream(page_size: int, prior: bytes) -> None:
    rng = Random(page_size)
    for length in (0, 1, page_size, page_size * 3, 50):
        tokens = [rng.choice((0, 1, rng.randrange(2**20), 2**32 - 1)) for _ in range(length)]
        hashes = page_hashes(tokens, page_size, prior)
        whole = tokens[: length // page_size * page_size]
        expected = get_hash_str(whole, prior.hex() or None, page_size) if whole else []
        assert [one.hex() for one in hashes] == expected


def test_pages_are_chained() -> None:
    tokens = list(range(40))
    first = page_hashes(tokens[:16], 8)
    assert page_hashes(tokens, 8) == first + page_hashes(tokens[16:], 8, first[-1])


@pytest.mark.parametrize("extra_key", PARTS)
@pytest.mark.parametrize("cache_salt", PARTS)
def test_namespaces_have_the_seeds_of_upstream(
    extra_key: str | None, cache_salt: str | None
) -> None:
    seed = storage_namespace_seed(extra_key, cache_salt)
    assert namespace_hash((extra_key, cache_salt)).hex() == (seed or "")
