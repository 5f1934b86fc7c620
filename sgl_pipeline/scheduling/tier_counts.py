"""Counts of what has gone to a store and come back since the start; they only grow."""

from dataclasses import dataclass, field
from typing import Literal

# Why tokens that were in the store, or might have been, are computed.
UnfulfilledReason = Literal[
    "below_threshold",  # too few to be worth a load
    "device_covered",  # cached by the time the answer came
    "device_capacity",  # no pages to load them into
    "slower_than_compute",
    "owed",  # behind pages that a replaced stage must compute again
    "deadline",
    "storage_transfer",  # a load that failed or was broken
    "dropped",  # the transfers were cancelled
]


@dataclass(slots=True)
class TierCounts:
    """Tokens unless a name says otherwise. `unsaved_tokens` were evicted before they were saved."""

    num_lookups: int = 0
    num_hits: int = 0  # lookups that found a page
    found_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0  # busy seconds of all stages
    saved_tokens: int = 0
    saved_bytes: int = 0
    save_s: float = 0.0
    unsaved_tokens: int = 0
    num_failed_saves: int = 0
    num_broken_pages: int = 0
    unfulfilled: dict[UnfulfilledReason, int] = field(default_factory=dict)

    def miss(self, reason: UnfulfilledReason, num_tokens: int) -> None:
        """Notes tokens that are not loaded."""
        if num_tokens > 0:
            self.unfulfilled[reason] = self.unfulfilled.get(reason, 0) + num_tokens
