"""Totals of a server's rooms since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class RoomCounts:
    """Rooms by their ends: `num_bootstrap_failed` before the prompt could be read,
    `num_transfer_failed` afterwards; of these a decode server has computed `num_computed_here`
    itself. `transfer_s` sums the seconds from ready pages to read ones."""

    num_transferred: int = 0
    num_bootstrap_failed: int = 0
    num_transfer_failed: int = 0
    num_computed_here: int = 0
    transfer_s: float = 0.0

    def note_transfer(self, transfer_s: float) -> None:
        """A room has ended well."""
        self.num_transferred += 1
        self.transfer_s += transfer_s

    def note_failure(self, *, is_transfer: bool) -> None:
        """A room has ended badly."""
        if is_transfer:
            self.num_transfer_failed += 1
        else:
            self.num_bootstrap_failed += 1
