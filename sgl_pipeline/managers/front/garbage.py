"""Keeps Python's cyclic garbage collector from stopping every stage for a tenth of a second.

In the scheduler process a full collection looks at each token id of each waiting prompt: 0.2 s with
ten thousand prompts. No object of `scheduling/` needs one, because it drops no cycles; cycles that
others drop can wait until the server is idle.
"""

import gc

_NEVER = 1_000_000_000


def postpone_full_collections() -> None:
    """From now on only young objects are collected, except by `collect_at_leisure`."""
    collect_at_leisure()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


def collect_at_leisure() -> None:
    """Collects all objects made since the last time, and never looks at the remaining ones
    again."""
    gc.collect()
    gc.freeze()
