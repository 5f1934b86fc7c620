"""Both ends of a channel between the scheduler and a worker of another host.

As `channels.py` for workers of the scheduler's own host: the worker dials the head's cluster port,
and the scheduler takes it in at its door. Nothing here waits but what says so.
"""

import contextlib
import select
import time
from collections.abc import Iterable, Iterator

import msgspec

from sgl_pipeline.cluster.doors import SCHEDULER_DOOR, DialError, Door, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import ConfigurationError, MalformedData, ProtocolError
from sgl_pipeline.wire.stage_messages import FromWorker, ToWorker, WorkerHello

# The scheduler process comes up after the workers.
REDIAL_S = 0.25
# Of a connection that has passed the port, until it says which worker it is of.
HELLO_TIMEOUT_S = 5.0
# Between the end of a connection and the agent's word on the process.
BROKEN_GRACE_S = 0.5


class RemoteWorkers:
    """The scheduler's end. A stream belongs to a worker from its `WorkerHello` on."""

    def __init__(self, run_directory: str) -> None:
        self._run_directory = run_directory
        self._door = Door(run_directory, SCHEDULER_DOOR)
        self._ready = select.epoll()
        self._ready.register(self._door, select.EPOLLIN)
        self._strangers: dict[int, tuple[FramedStream, float]] = {}  # by descriptor
        self._workers: dict[int, FramedStream] = {}
        self._numbers: dict[int, int] = {}  # of workers, by descriptor
        self._broken: dict[int, tuple[str, float]] = {}
        self._decoder = msgspec.msgpack.Decoder(FromWorker)

    def fileno(self) -> int:
        """Can be read when `receive` may have something."""
        return self._ready.fileno()

    def knows(self, worker: int) -> bool:
        return worker in self._workers

    def send(self, worker: int, payload: bytes) -> None:
        """Queues an encoded message for a worker that is known."""
        stream = self._workers[worker]
        try:
            stream.send(payload)
        except StreamClosed as ending:
            self._break(worker, str(ending))
            return
        self._watch(stream)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Encoded messages that have arrived, and the workers that they are of."""
        for descriptor, _ in self._ready.poll(0):
            if descriptor == self._door.fileno():
                self._accept()
            elif descriptor in self._strangers:
                yield from self._meet(descriptor)
            elif (worker := self._numbers.get(descriptor)) is not None:
                yield from self._read(worker)

    def take_broken(self) -> dict[int, str]:
        """The workers whose connection has ended, and what was noticed; each once, and some time
        later: if its process has ended, its agent says more."""
        now_s = time.monotonic()
        for descriptor, (stream, since_s) in [*self._strangers.items()]:
            if now_s - since_s > HELLO_TIMEOUT_S:
                self._forget(descriptor)
                stream.close()
        over = {
            worker: reason
            for worker, (reason, since_s) in self._broken.items()
            if now_s - since_s > BROKEN_GRACE_S
        }
        for worker in over:
            del self._broken[worker]
        return over

    def forget(self, worker: int) -> None:
        """Lets go of a worker that was given up."""
        self._broken.pop(worker, None)
        stream = self._workers.pop(worker, None)
        if stream is not None:
            del self._numbers[stream.fileno()]
            self._ready.unregister(stream)
            stream.close()

    def close(self) -> None:
        for worker in [*self._workers]:
            self.forget(worker)
        for stream, _ in self._strangers.values():
            stream.close()
        self._door.close()
        self._ready.close()

    def _accept(self) -> None:
        while (accepted := self._door.accept()) is not None:
            stream = FramedStream(SecureStream(accepted[0], self._run_directory, is_server=True))
            self._strangers[stream.fileno()] = stream, time.monotonic()
            self._ready.register(stream, select.EPOLLIN)

    def _meet(self, descriptor: int) -> Iterator[tuple[int, bytes]]:
        stream, _ = self._strangers[descriptor]
        frame, message = b"", None
        with contextlib.suppress(StreamClosed, MalformedData):
            arrived = stream.receive()
            if arrived is None:
                return
            frame, message = arrived, decode(self._decoder, arrived)
        if not isinstance(message, WorkerHello) or message.worker in self._workers:
            self._forget(descriptor)
            stream.close()
            return
        del self._strangers[descriptor]
        self._workers[message.worker] = stream
        self._numbers[descriptor] = message.worker
        yield message.worker, frame
        yield from self._read(message.worker)

    def _read(self, worker: int) -> Iterator[tuple[int, bytes]]:
        stream = self._workers[worker]
        try:
            stream.flush()
            while (frame := stream.receive()) is not None:
                yield worker, frame
        except StreamClosed as ending:
            self._break(worker, str(ending))
            return
        if self.knows(worker):
            self._watch(stream)

    def _watch(self, stream: FramedStream) -> None:
        events = select.EPOLLIN | (select.EPOLLOUT if stream.has_backlog else 0)
        self._ready.modify(stream, events)

    def _break(self, worker: int, reason: str) -> None:
        self.forget(worker)
        self._broken[worker] = f"its connection ended: {reason}", time.monotonic()

    def _forget(self, descriptor: int) -> None:
        del self._strangers[descriptor]
        self._ready.unregister(descriptor)


class RemoteWorkerChannel:
    """A worker's end, with the methods of `channels.WorkerChannel`.

    Dials until the scheduler is there: the worker's agent ends it when the head is gone. Raises
    DialError where that cannot succeed.
    """

    def __init__(self, head_address: str, run_directory: str) -> None:
        while True:
            try:
                connection = dial(head_address, SCHEDULER_DOOR, run_directory)
                break
            except DialError as error:
                if error.is_final:
                    raise
                time.sleep(REDIAL_S)
        self._stream = FramedStream(SecureStream(connection, run_directory, is_server=False))
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: FromWorker) -> None:
        """Queues `message` for the scheduler."""
        with _no_scheduler():
            self._stream.send(self._encode(message))

    def wait(self, descriptors: Iterable[int], timeout_s: float | None = None) -> None:
        """As `WorkerChannel.wait`."""
        poller = select.poll()
        poller.register(self._stream, self._events())
        for descriptor in descriptors:
            poller.register(descriptor, select.POLLIN)
        poller.poll(None if timeout_s is None else timeout_s * 1e3)
        with _no_scheduler():
            self._stream.flush()

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        """As `WorkerChannel.receive`."""
        deadline_s = None if timeout_ms is None else time.monotonic() + timeout_ms * 1e-3
        with _no_scheduler():
            while (frame := self._stream.receive()) is None:
                self._stream.flush()
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0.0:
                    return None
                self._stream.wait(left_s)
        try:
            message: ToWorker = decode(self._decoder, frame)
        except (MalformedData, ConfigurationError) as error:
            raise ProtocolError(f"the scheduler sent a malformed message: {error}") from error
        return message

    def close(self) -> None:
        self._stream.close()

    def _events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._stream.has_backlog else 0)


@contextlib.contextmanager
def _no_scheduler() -> Iterator[None]:
    """A worker without its scheduler has nothing left to do."""
    try:
        yield
    except StreamClosed as ending:
        raise SystemExit(f"the scheduler is gone: {ending}") from ending
