"""What is broken on purpose, and must be noticed."""

import json
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

Mutation = Callable[[pytest.MonkeyPatch], None]

# By file and case, a seed that finds what few others do.
FOUND_BY = Path(__file__).with_name("found_by.json")
# A mutation that one of the first so many seeds finds needs no line there: these take seconds.
_FEW_SEEDS = 8


@cache
def known_seeds() -> dict[str, int]:
    """What is in `FOUND_BY`."""
    seeds: dict[str, int] = json.loads(FOUND_BY.read_text())
    return seeds


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

    Runs first the seed of `FOUND_BY`, and then all of `seeds`: that file saves time and decides
    nothing. A TypeError fails the test too: what is broken has to be called as what it replaces,
    and noticed by what it does.
    """
    mutation(request.getfixturevalue("monkeypatch"))
    case = f"{request.node.path.stem}[{request.node.callspec.id}]"
    known = [known_seeds()[case]] if case in known_seeds() else []
    for number, seed in enumerate(chain(known, seeds)):
        try:
            run_seed(seed)
        except TypeError:
            raise
        except Exception:
            if number > _FEW_SEEDS:
                line = f'"{case}": {seed}'
                warnings.warn(f"found late; a line for {FOUND_BY.name}: {line}", stacklevel=2)
            return
    pytest.fail("no seed finds it")
