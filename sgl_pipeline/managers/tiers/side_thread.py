"""A thread beside the scheduler's loop, for calls that may wait for disks, networks or programs."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

Call = Callable[[], Any]
# Gets what a call has returned or raised, in the loop's thread.
Then = Callable[[Any], None]


class SideThread:
    """Runs calls one after the other. It lives as long as the process: programs that it starts die
    with it (`process_lifetime.py`)."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Call, Then]] = SimpleQueue()
        self._results: SimpleQueue[tuple[Then, Any]] = SimpleQueue()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, name="beside the loop", daemon=True).start()

    def fileno(self) -> int:
        """A descriptor that can be read when `finish` has something to do."""
        return self._news

    def submit(self, call: Call, then: Then) -> None:
        self._calls.put((call, then))

    def finish(self) -> None:
        """Passes on the results of calls that are over."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        while not self._results.empty():
            then, result = self._results.get()
            then(result)

    def _run(self) -> None:
        while True:
            call, then = self._calls.get()
            try:
                result = call()
            except Exception as error:
                result = error
            self._results.put((then, result))
            os.eventfd_write(self._news, 1)
