"""Takes in the hosts that dial one door, for the head of a server and for the doctor of rank 0.

A host greets, is refused with the reason or taken in, and is pinged until it is lost.
"""

import asyncio
import logging
import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import msgspec

from sgl_pipeline.cluster.cluster_port import MAX_STRANGERS
from sgl_pipeline.cluster.doors import Door
from sgl_pipeline.cluster.host_messages import HostHello, Ping, Rejected
from sgl_pipeline.cluster.secure_stream import StreamClosed
from sgl_pipeline.errors import MalformedData
from sgl_pipeline.managers.hosts.host_checks import version_fault
from sgl_pipeline.managers.hosts.host_stream import HostStream, accept_stream

logger = logging.getLogger(__name__)

# From the handshake to the greeting, and from a refusal to the end of the connection.
HELLO_TIMEOUT_S = 5.0


def _future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False, kw_only=True)
class GatheredHost:
    """A host that has greeted; `over` is done when it is lost."""

    hello: HostHello
    stream: HostStream[msgspec.Struct]
    over: "asyncio.Future[None]" = field(default_factory=_future)

    def send(self, message: msgspec.Struct) -> None:
        self.stream.send(message)


Host = TypeVar("Host", bound=GatheredHost)


class HostGathering(ABC, Generic[Host]):
    """The hosts that are there, by rank. Must be made in its event loop.

    Args:
        messages: the union of what a host may send.
        silence_s: after this many seconds without a message a host is lost.
    """

    def __init__(
        self,
        door: str,
        run_directory: str,
        messages: object,
        ping_interval_s: float,
        silence_s: float,
    ) -> None:
        self.hosts: dict[int, Host] = {}
        self._run_directory = run_directory
        self._decoder: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(messages)
        self._ping_interval_s = ping_interval_s
        self._silence_s = silence_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._door = Door(run_directory, door)
        self._loop.add_reader(self._door, self._accept)

    async def serve(self) -> None:
        """Pings the hosts until it is cancelled."""
        while True:
            for host in [*self.hosts.values()]:
                host.send(Ping(time.monotonic()))
            self._on_ping()
            await asyncio.sleep(self._ping_interval_s)

    def close(self) -> None:
        """Ends all connections at once."""
        self._loop.remove_reader(self._door)
        self._door.close()
        for task in self._tasks:
            task.cancel()

    @abstractmethod
    def _greeted(self, message: msgspec.Struct, stream: HostStream[msgspec.Struct]) -> Host | None:
        """The host whose first message this is; None if that is not a greeting."""

    @abstractmethod
    def _objection(self, host: Host, before: Host | None) -> Rejected | None:
        """The reason to refuse a host, or None; `before` is the one that has its rank."""

    @abstractmethod
    def _on_host(self, host: Host) -> None:
        """A host was taken in."""

    @abstractmethod
    def _take(self, host: Host, message: msgspec.Struct) -> None:
        """A host that was taken in has sent a message."""

    @abstractmethod
    def _on_lost(self, host: Host, reason: str) -> None:
        """A host is lost; `hosts` has another one of its rank if that replaced it."""

    @abstractmethod
    def _complain(self, text: str) -> None:
        """Reports what kept a connection from becoming a host."""

    def _on_ping(self) -> None:
        """The hosts were pinged."""

    def _accept(self) -> None:
        while (accepted := self._door.accept()) is not None:
            if len(self._tasks) - len(self.hosts) >= MAX_STRANGERS:
                accepted[0].close()
                continue
            task = self._loop.create_task(self._attend(*accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _attend(self, connection: socket.socket, sender: str) -> None:
        """One connection, from the handshake to its end."""
        stream = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                stream = await accept_stream(connection, self._run_directory, self._decoder)
                host = self._greeted(await stream.receive(), stream)
            if host is not None and not await self._is_refused(host):
                await self._serve(host)
        except TimeoutError:
            pass
        except StreamClosed as ending:
            self._complain(f"the connection of {sender} ended before it greeted: {ending}")
        except MalformedData:
            # The other end has the key, and runs another version.
            assert stream is not None
            reason = version_fault(f"the host at {sender}", "another version")
            self._complain(reason)
            await _refuse(stream, Rejected(reason))
        finally:
            if stream is not None:
                stream.abort()

    async def _is_refused(self, host: Host) -> bool:
        rejection = self._objection(host, self.hosts.get(host.hello.rank))
        if rejection is None:
            return False
        self._complain(f"{host.hello.title} is not taken in: {rejection.reason}")
        await _refuse(host.stream, rejection)
        return True

    async def _serve(self, host: Host) -> None:
        """Takes a host in; returns when it is lost."""
        rank = host.hello.rank
        before, self.hosts[rank] = self.hosts.get(rank), host
        if before is not None:
            self._end(before, "its agent was started again")
        self._on_host(host)
        reason = ""
        try:
            await host.stream.converse(
                partial(self._hear, host), host.over, lambda: self._silence_s
            )
        except StreamClosed as ending:
            reason = str(ending)
        except Exception:
            logger.exception("a message of %s failed", host.hello.title)
            reason = "one of its messages failed; see the log"
        if self.hosts.get(rank) is host:
            del self.hosts[rank]
            self._end(host, reason)

    def _hear(self, host: Host, message: msgspec.Struct) -> None:
        if not host.over.done():
            self._take(host, message)

    def _end(self, host: Host, reason: str) -> None:
        if not host.over.done():
            host.over.set_result(None)
        self._on_lost(host, reason)


async def _refuse(stream: HostStream[msgspec.Struct], rejection: Rejected) -> None:
    """Sends the reason; the other end closes the connection when it has read that."""
    stream.send(rejection)
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            while True:
                await stream.receive()
    except (StreamClosed, MalformedData, TimeoutError):
        pass
