"""Dials prefill servers beside the scheduler's loop: a name or a host may take seconds to answer.

Each attempt has a thread of its own, so that one that hangs holds up no other. There are as many at
a time as a decode server has peers (`decode_rooms.MOST_PEERS`).
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

from sgl_pipeline.cluster.doors import DialError, dial


class Dialer:
    """Attempts to reach `door` of other hosts."""

    def __init__(self, run_directory: str, door: str) -> None:
        self._run_directory, self._door = run_directory, door
        self._ended: SimpleQueue[tuple[str, socket.socket | DialError]] = SimpleQueue()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """A descriptor that can be read when `take_ended` has something."""
        return self._news

    def dial(self, address: str) -> None:
        """Begins an attempt, whose end `take_ended` will have."""
        threading.Thread(
            target=self._run, args=(address,), name=f"dials {address}", daemon=True
        ).start()

    def take_ended(self) -> Iterator[tuple[str, socket.socket | DialError]]:
        """The addresses of attempts that are over, and what came of each."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        while not self._ended.empty():
            yield self._ended.get()

    def _run(self, address: str) -> None:
        end: socket.socket | DialError
        try:
            end = dial(address, self._door, self._run_directory)
        except DialError as error:
            end = error
            if isinstance(error.__cause__, socket.gaierror):
                end = DialError(
                    f"{address} cannot be resolved ({error.__cause__.strerror}): bootstrap_host "
                    "must be a name that the decode server's host knows"
                )
        except ValueError as error:
            end = DialError(str(error), is_final=True)
        except Exception as error:  # whatever it is, the loop must hear that the attempt is over
            end = DialError(f"{address} could not be dialed: {error}")
        self._ended.put((address, end))
        os.eventfd_write(self._news, 1)
