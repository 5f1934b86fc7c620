"""Typed message channels between the scheduler and the stage workers, over ZeroMQ.

The scheduler binds one ROUTER socket, every worker connects a DEALER with its worker number as
identity, so workers connect by address and never depend on who started them. Sends never wait (the
queues are unbounded). Addresses are `ipc://` paths in a directory that only the owner can enter.
Workers of other hosts have a channel of their own (`cluster/remote_workers.py`), which the
scheduler's end is given.
"""

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

import msgspec
import zmq

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import ConfigurationError, MalformedData, ProtocolError, WorkerFault
from sgl_pipeline.wire.stage_messages import FromWorker, ToWorker

_encoder = msgspec.msgpack.Encoder()
_PREFIX = b"worker-"


class _Channel:
    """The common part of both ends: a socket that is closed with the block it was opened for."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 500)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class OtherHosts(Protocol):
    """Workers of other hosts; messages are encoded."""

    def fileno(self) -> int: ...
    def knows(self, worker: int) -> bool: ...
    def send(self, worker: int, payload: bytes) -> None: ...
    def receive(self) -> Iterable[tuple[int, bytes]]: ...
    def close(self) -> None: ...

    def forget(self, worker: int) -> None:
        """Lets go of a worker that was given up."""

    def take_broken(self) -> dict[int, str]:
        """The workers whose connection has ended since the last call, and what was noticed."""


class WorkerEnd(Protocol):
    """A worker's end of a channel, wherever the worker is; see `WorkerChannel`."""

    def send(self, message: FromWorker) -> None: ...
    def wait(self, descriptors: Iterable[int], timeout_s: float | None = None) -> None: ...
    def receive(self, timeout_ms: int | None = None) -> ToWorker | None: ...


class SchedulerChannel(_Channel):
    """The scheduler's end: sends to workers by number, receives from all."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        others: OtherHosts | None = None,
    ) -> None:
        super().__init__(context, zmq.ROUTER)
        self._others = others
        self._from_others: deque[tuple[int, bytes]] = deque()
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)

    def send(self, worker: int, message: ToWorker) -> None:
        """Queues `message` for one worker. One that is gone is skipped: its exit is noticed."""
        self._send_encoded(worker, _encoder.encode(message))

    def broadcast(self, workers: Iterable[int], message: ToWorker) -> None:
        """Queues `message`, encoded once, for every worker in `workers`."""
        payload = _encoder.encode(message)
        for worker in workers:
            self._send_encoded(worker, payload)

    @property
    def readable(self) -> list["zmq.Socket[bytes] | int"]:
        """The sockets that are readable, in ZeroMQ's sense, when `receive` may have something."""
        return [self.socket] if self._others is None else [self.socket, self._others.fileno()]

    def wait(self, timeout_ms: int) -> bool:
        """Waits up to `timeout_ms` milliseconds; True if something has arrived."""
        return any(zmq.select(self.readable, [], [], timeout_ms * 1e-3))

    def receive(self) -> tuple[int, FromWorker] | None:
        """The next message that has already arrived and its worker's number, or None.

        Raises WorkerFault for one that cannot be read. A message from an unknown number is dropped.
        """
        received = self._receive_here()
        if received is not None or self._others is None:
            return received
        if not self._from_others:
            self._from_others.extend(self._others.receive())
        if not self._from_others:
            return None
        worker, frame = self._from_others.popleft()
        return worker, self._decode(worker, [frame])

    def close(self) -> None:
        super().close()
        if self._others is not None:
            self._others.close()

    def _receive_here(self) -> tuple[int, FromWorker] | None:
        while True:
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            worker = _worker_of(identity)
            if worker is not None:
                return worker, self._decode(worker, frames)

    def _decode(self, worker: int, frames: list[bytes]) -> FromWorker:
        if len(frames) != 1:
            raise WorkerFault(worker, f"it sent a message of {len(frames)} parts, 1 is due")
        try:
            message: FromWorker = decode(self._decoder, frames[0])
        except MalformedData as error:
            raise WorkerFault(worker, f"it sent a malformed message: {error}") from error
        return message

    def _send_encoded(self, worker: int, payload: bytes) -> None:
        if self._others is not None and self._others.knows(worker):
            self._others.send(worker, payload)
            return
        try:
            self.socket.send_multipart([_identity(worker), payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise


class WorkerChannel(_Channel):
    """A worker's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, worker: int) -> None:
        super().__init__(context, zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, _identity(worker))
        self.socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: FromWorker) -> None:
        """Queues `message` for the scheduler."""
        self.socket.send(_encoder.encode(message), zmq.NOBLOCK)

    def wait(self, descriptors: Iterable[int], timeout_s: float | None = None) -> None:
        """Returns when a message is there, or something can be read from one of the file
        `descriptors`, or after `timeout_s` (None: never)."""
        zmq.select([self.socket, *descriptors], [], [], timeout_s)

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        """The next message; waits for it at most `timeout_ms` (None: for ever), then gives None."""
        if not self.socket.poll(timeout_ms):
            return None
        payload = self.socket.recv(zmq.NOBLOCK)
        try:
            message: ToWorker = decode(self._decoder, payload)
        except (MalformedData, ConfigurationError) as error:
            raise ProtocolError(f"the scheduler sent a malformed message: {error}") from error
        return message


def _worker_of(identity: bytes) -> int | None:
    """The number in `identity`, where it is one of ours."""
    number = identity.removeprefix(_PREFIX)
    return int(number) if identity.startswith(_PREFIX) and number.isdigit() else None


def _identity(worker: int) -> bytes:
    # ZeroMQ forbids identities that begin with a zero byte, hence text.
    return _PREFIX + b"%d" % worker
