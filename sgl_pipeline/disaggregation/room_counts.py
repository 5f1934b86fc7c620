"""Totals of a server's rooms since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class RoomCounts:
    """Rooms by their ends: `num_bootstrap_failed` before the prompt could be read,
    `num_transfer_failed` afterwards; of these a decode server has computed `num_computed_here`
    itself. Of those that ended well, `transfer_s` sums the seconds from ready pages to read ones,
    and on a decode server `bootstrap_s` those from the request to ready pages, `alloc_s` those from
    there until the load began."""

    num_transferred: int = 0
    num_bootstrap_failed: int = 0
    num_transfer_failed: int = 0
    num_computed_here: int = 0
    transfer_s: float = 0.0
    bootstrap_s: float = 0.0
    alloc_s: float = 0.0

    def note_transfer(
        self, transfer_s: float, bootstrap_s: float = 0.0, alloc_s: float = 0.0
    ) -> None:
        """A room has ended well."""
        self.num_transferred += 1
        self.transfer_s += transfer_s
        self.bootstrap_s += bootstrap_s
        self.alloc_s += alloc_s

    def note_failure(self, *, is_transfer: bool) -> None:
        """A room has ended badly."""
        if is_transfer:
            self.num_transfer_failed += 1
        else:
            self.num_bootstrap_failed += 1
