"""What is broken on purpose, and must be noticed."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest

Mutation = Callable[[pytest.MonkeyPatch], None]


def nothing_is_done(owner: type, name: str) -> Mutation:
    """Breaks a method: it returns nothing, at once."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: None)


def require_found(
    mutation: Mutation,
    request: pytest.FixtureRequest,
    run_seed: Callable[[int], Any],
    seeds: Iterable[int],
) -> None:
    """Fails the test of `request` where no run of a seed fails with what is broken.

    Runs first the seed that found it the last time, which pytest's cache keeps.
    """
    mutation(request.getfixturevalue("monkeypatch"))
    cache = getattr(request.config, "cache", None)  # missing with `-p no:cacheprovider`
    key = f"found_by/{request.node.nodeid}"
    before = None if cache is None else cache.get(key, None)
    for seed in chain([] if before is None else [before], seeds):
        try:
            run_seed(seed)
        except Exception:
            if cache is not None and seed != before:
                cache.set(key, seed)
            return
    pytest.fail("no seed finds it")
