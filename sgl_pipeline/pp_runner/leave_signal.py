"""SIGTERM as a request to leave: a worker that serves a stage goes on until another one has taken
it over.

Before its first stage gets ready, a worker has nothing to hand over, and a SIGTERM ends it as it
ends any process; so does a second one.
"""

import signal
from types import FrameType


class LeaveSignal:
    """Must be listened for in the main thread."""

    def __init__(self) -> None:
        self._is_listening = False
        self._has_come = False

    def listen(self) -> None:
        """From now on the first SIGTERM is only noted."""
        if not self._is_listening:
            self._is_listening = True
            signal.signal(signal.SIGTERM, self._note)

    def take(self) -> bool:
        """Takes the signal: True once after it has come."""
        if not self._has_come:
            return False  # without a write, which could undo that of a signal in between
        self._has_come = False
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the worker, so it must not send."""
        self._has_come = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
