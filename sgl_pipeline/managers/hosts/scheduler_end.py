"""The head process's connection to the scheduler process: packets, which are never split.

Made by `head_process.py`; the other end is `cluster_workers.py`. It holds back what the scheduler
process does not take at once, so that no agent waits for it.
"""

import asyncio
import socket
from collections.abc import Callable

import msgspec

from sgl_pipeline.cluster.host_messages import ForHost, FromHead

MAX_MESSAGE_BYTES = 64 * 1024

_encode = msgspec.msgpack.Encoder().encode


def scheduler_end_path(run_directory: str) -> str:
    """The path at which the scheduler process meets the head process."""
    return f"{run_directory}/scheduler-end"


def listen_for_scheduler(
    run_directory: str, on_connection: Callable[[socket.socket], None]
) -> None:
    """Opens the socket at `scheduler_end_path` and calls `on_connection` for each connection.

    Must be called in the event loop.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(scheduler_end_path(run_directory))
    listener.listen(1)
    listener.setblocking(False)
    asyncio.get_running_loop().add_reader(listener, lambda: on_connection(listener.accept()[0]))


class SchedulerEnd:
    """Sends what the hosts report, and hands on the scheduler's orders. Made in the event loop.

    Args:
        on_order: called with each message for a host.
        on_gone: called once, when the scheduler process has closed its end.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_order: Callable[[ForHost], None],
        on_gone: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_order = on_order
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(ForHost)
        self._waiting: list[bytes] = []
        self._loop.add_reader(connection, self._receive)

    def send(self, message: FromHead) -> None:
        """Sends `message` after all that were sent before it; never waits."""
        self._waiting.append(_encode(message))
        self._flush()

    def _flush(self) -> None:
        self._loop.remove_writer(self._connection)
        while self._waiting:
            try:
                self._connection.send(self._waiting[0])
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._flush)
                return
            except OSError:
                self._waiting.clear()  # it is gone, which `_receive` notices
                return
            self._waiting.pop(0)

    def _receive(self) -> None:
        try:
            while packet := self._connection.recv(MAX_MESSAGE_BYTES):
                self._on_order(self._decoder.decode(packet))
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._on_gone()
