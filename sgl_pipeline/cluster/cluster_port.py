"""The one TCP port on which a host listens for the others of its cluster.

Runs in the event loop of the head process or of a host's agent. It reads a greeting (`doors.py`),
which strangers cannot write, and hands the connection over. Anything else is dropped, counted and
has no other effect; a connection that sends nothing is dropped too.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from sgl_pipeline.cluster.doors import (
    GREETING_BYTES,
    MAGIC_BYTES,
    NOBODY_HERE,
    OTHER_KEY,
    OTHER_VERSION,
    hand_over,
    is_greeting,
    join_address,
    read_greeting,
)
from sgl_pipeline.cluster.keys import greeting_key
from sgl_pipeline.errors import ConfigurationError

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 3.0
# Connections whose greeting is awaited; more are dropped at once.
MAX_STRANGERS = 256
_LOG_INTERVAL_S = 10.0
# What to do about connections of hosts that are meant to be of the cluster, by reason.
HINTS = {
    "another key": "give all hosts the same cluster key",
    "another version": "install the same sgl_pipeline on all hosts",
}
# Without them, loss of the network would be noticed after a quarter of an hour.
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


# Answers a connection that does not begin as a greeting, given that beginning (`MAGIC_BYTES`);
# whether it could. The connection is closed afterwards.
OtherProtocol = Callable[[socket.socket, bytes], Awaitable[bool]]


class ClusterPort:
    """Listens from the beginning. `dropped` counts connections that were let go, by reason;
    `last_sender` is the address that the last one of each came from.

    Raises ConfigurationError where it cannot listen at `host` and `port`.

    Args:
        name: of the port, in messages.
        other: another protocol that this port speaks.
    """

    def __init__(
        self,
        host: str,
        port: int,
        run_directory: str,
        *,
        name: str = "the cluster port",
        other: OtherProtocol | None = None,
    ) -> None:
        self._run_directory = run_directory
        self._name = name
        self._other = other
        self._key = greeting_key(run_directory)
        self.dropped: Counter[str] = Counter()
        self.last_sender: dict[str, str] = {}
        self._num_strangers = 0
        self._logged_s: dict[str, float] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setblocking(False)
        try:
            self._listener.bind((host, port))
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            raise ConfigurationError(
                f"cannot listen on {join_address(host, port)}, {self._name}: "
                f"{error.strerror or error}"
            ) from error

    async def serve(self) -> None:
        """Admits connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                # Too many open files, say: those who wait must not end this.
                self._drop("not accepted", error.strerror or str(error))
                await asyncio.sleep(0.1)
                continue
            if self._num_strangers >= MAX_STRANGERS:
                connection.close()
                self._drop("too many at once", address[0])
                continue
            self._num_strangers += 1
            task = loop.create_task(self._admit(connection, address[0]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def close(self) -> None:
        self._listener.close()

    async def _admit(self, connection: socket.socket, sender: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection.setblocking(False)
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                data = await _read(connection, MAGIC_BYTES)
                if self._other is not None and not is_greeting(data):
                    if not await self._other(connection, data):
                        self._drop("no greeting", sender)
                    return
                data += await _read(connection, GREETING_BYTES - MAGIC_BYTES)
            name, answer = read_greeting(self._key, data)
            if name is None:
                self._drop(
                    {OTHER_KEY: "another key", OTHER_VERSION: "another version"}.get(
                        answer, "no greeting"
                    ),
                    sender,
                )
                await asyncio.wait_for(loop.sock_sendall(connection, answer), GREETING_TIMEOUT_S)
                return
            for level, option, value in KEEP_ALIVE:
                connection.setsockopt(level, option, value)
            if not _is_handed_over(self._run_directory, name, connection, sender):
                # Processes come and go: not worth a line.
                self.dropped["no process at the door"] += 1
                await asyncio.wait_for(
                    loop.sock_sendall(connection, NOBODY_HERE), GREETING_TIMEOUT_S
                )
        except (OSError, EOFError, TimeoutError):
            self._drop("no greeting", sender)
        finally:
            self._num_strangers -= 1
            connection.close()

    def _drop(self, reason: str, sender: str) -> None:
        """Counts, and says so now and then."""
        self.dropped[reason] += 1
        self.last_sender[reason] = sender
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s.get(reason, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            return
        self._logged_s[reason] = now_s
        hint = HINTS.get(reason, "")
        logger.warning(
            "dropped a connection of %s to %s (%s; %d so far)%s",
            sender,
            self._name,
            reason,
            self.dropped[reason],
            f": {hint}" if hint else "",
        )


def _is_handed_over(run_directory: str, name: str, connection: socket.socket, sender: str) -> bool:
    try:
        return hand_over(run_directory, name, connection, sender)
    except ValueError:
        return False


async def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Raises EOFError where the connection ends before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < num_bytes:
        more = await loop.sock_recv(connection, num_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data
