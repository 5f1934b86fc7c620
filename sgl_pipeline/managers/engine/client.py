"""The program's end of an engine: starts its process, sends calls, and hands out their answers.

Calls come from any thread or event loop. One thread starts the process and reads its answers, so
that the process lives as long as this one does (`die_with_parent` means a thread); another writes,
so that no caller waits for the socket. Imports neither sglang, torch nor zmq.
"""

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from sgl_pipeline import errors
from sgl_pipeline.errors import ConfigurationError, EngineEnded, RequestError
from sgl_pipeline.managers.engine.channel import (
    Answer,
    Call,
    Cancel,
    Done,
    EndEngine,
    EngineFailed,
    FromEngine,
    Refused,
    Reply,
    StartEngine,
    StartFailed,
    encode_frame,
    read_frame,
)
from sgl_pipeline.process_lifetime import child_environment

PROCESS = "sgl_pipeline.managers.engine.process"
# For ending its children, which takes a fraction of it.
_END_TIMEOUT_S = 20.0

_decoder = msgspec.msgpack.Decoder(FromEngine)


class _Ended(msgspec.Struct, frozen=True):
    reason: str


class _Inbox(Protocol):
    """Receives the answers to one call."""

    def put(self, answer: Answer | _Ended) -> None: ...


class _AsyncInbox:
    """The inbox of a call from the event loop that runs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Answer | _Ended] = asyncio.Queue()

    def put(self, answer: Answer | _Ended) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before its call did
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    async def get(self) -> Answer | _Ended:
        return await self._answers.get()


class EngineClient:
    """`close` must be called in the end.

    Args:
        arguments: of `Engine`.

    Returns once the engine is ready. Raises ConfigurationError when it cannot start as asked.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._numbers = itertools.count()
        self._inboxes: dict[int, _Inbox] = {}
        self._ended: str | None = None
        self._lock = threading.RLock()  # a garbage collection may run `close` anywhere
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(
            target=self._keep, args=(theirs,), name="engine answers", daemon=True
        )
        _clients.add(self)
        self._keeper.start()
        threading.Thread(target=self._write, name="engine calls", daemon=True).start()
        try:
            self.call(lambda number: StartEngine(number, dict(arguments)))
        except BaseException as error:
            self.close()
            if isinstance(error, EngineEnded):
                raise ConfigurationError(f"the engine did not start: {error}") from error
            if isinstance(error, TypeError | OverflowError):
                raise ConfigurationError(f"Engine takes no such value: {error}") from error
            raise

    def call(self, make: Callable[[int], Call]) -> Any:
        """The one answer to the message that `make` makes of a call's number.

        Raises RequestError for a refused request, EngineEnded where there is no engine any more.
        """
        (answer,) = self.stream(make)
        return answer

    def stream(self, make: Callable[[int], Call]) -> Generator[Any, None, None]:
        """All answers, as they come; a call whose answers are not awaited any more is cancelled."""
        inbox: queue.SimpleQueue[Answer | _Ended] = queue.SimpleQueue()
        with self._open(make, inbox):
            while not isinstance(answer := inbox.get(), Done):
                yield _value_of(answer)

    async def call_async(self, make: Callable[[int], Call]) -> Any:
        """As `call`, in an event loop."""
        (answer,) = [answer async for answer in self.stream_async(make)]
        return answer

    async def stream_async(self, make: Callable[[int], Call]) -> AsyncGenerator[Any, None]:
        """As `stream`, in an event loop."""
        inbox = _AsyncInbox()
        with self._open(make, inbox):
            while not isinstance(answer := await inbox.get(), Done):
                yield _value_of(answer)

    def close(self) -> None:
        """Ends the engine's processes, and returns when they have ended; may be called again. In a
        fork of the program it does nothing: the engine is not the fork's."""
        if os.getpid() != self._owner:
            return
        self._end("it was shut down")
        self._outgoing.put(encode_frame(EndEngine()))
        if threading.current_thread() is not self._keeper:
            self._keeper.join(_END_TIMEOUT_S)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._outgoing.put(None)

    @contextlib.contextmanager
    def _open(self, make: Callable[[int], Call], inbox: _Inbox) -> Iterator[None]:
        """Sends a call whose answers go to `inbox`."""
        number = next(self._numbers)
        frame = encode_frame(make(number))
        with self._lock:
            if self._ended is not None:
                raise EngineEnded(self._ended)
            self._inboxes[number] = inbox
        self._outgoing.put(frame)
        try:
            yield
        finally:
            with self._lock:
                is_open = self._inboxes.pop(number, None) is not None
            if is_open:
                self._outgoing.put(encode_frame(Cancel(number)))

    def forget(self) -> None:
        """In a fork of the program, which has none of the threads, and may have a lock that one of
        them held: all calls end, and the socket is the parent's alone."""
        self._lock = threading.RLock()
        self._outgoing = queue.SimpleQueue()
        with contextlib.suppress(OSError):  # it was closed already
            os.close(self._socket.detach())
        self._stop("the engine belongs to the process that this one was forked from")

    def _end(self, reason: str) -> None:
        self._stop(f"the engine has ended: {reason}")

    def _stop(self, message: str) -> None:
        """No call is possible any more. Those that wait for an answer get an error."""
        with self._lock:
            self._ended = self._ended or message
            waiting = [*self._inboxes.values()]
            self._inboxes.clear()
        for inbox in waiting:
            inbox.put(_Ended(self._ended))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader notices the end
            while (frame := self._outgoing.get()) is not None:
                self._socket.sendall(frame)

    def _keep(self, theirs: socket.socket) -> None:
        """The thread whose child the process is, until its end."""
        command = [sys.executable, "-m", PROCESS, "--socket", str(theirs.fileno())]
        command += ["--parent", str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            self._end(f"its process cannot be started: {error}")
            return
        finally:
            theirs.close()
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while (payload := read_frame(cast(BinaryIO, stream))) is not None:
                self._take(_decoder.decode(payload))
        code = self._process.wait()
        end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._end(f"its process ended, {end}")
        self._socket.close()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, EngineFailed):
            self._end(message.reason)
            return
        with self._lock:
            is_last = not isinstance(message, Reply)
            take = self._inboxes.pop if is_last else self._inboxes.get
            inbox = take(message.call, None)
        if inbox is not None:
            inbox.put(message)


def _forget_engines() -> None:
    for client in _clients:
        client.forget()


_clients: weakref.WeakSet[EngineClient] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_engines)


def _value_of(answer: Answer | _Ended) -> Any:
    if isinstance(answer, Reply):
        return answer.value
    if isinstance(answer, Refused):
        raise RequestError(answer.message, answer.status_code)
    if isinstance(answer, StartFailed):
        raise cast(type[ConfigurationError], getattr(errors, answer.kind))(answer.message)
    assert isinstance(answer, _Ended)
    raise EngineEnded(answer.reason)
