"""What is broken on purpose, and must be noticed."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

Mutation = Callable[[pytest.MonkeyPatch], None]


def nothing_is_done(owner: type, name: str) -> Mutation:
    """Breaks a method: it returns nothing, at once."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: None)


def require_found(
    mutation: Mutation,
    patch: pytest.MonkeyPatch,
    run_seed: Callable[[int], Any],
    seeds: Iterable[int],
) -> None:
    """Fails where no run of a seed fails with what is broken."""
    mutation(patch)
    with pytest.raises(Exception):  # noqa: B017 - whatever notices it
        for seed in seeds:
            run_seed(seed)
