"""Two ends of a cluster in one process: keys, a port in a thread, streams through it."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import Door, dial, join_address
from sgl_pipeline.cluster.keys import write_identity
from sgl_pipeline.cluster.secure_stream import SecureStream

SECRET = b"a secret of the tests, long enough"
TIMEOUT_S = 60.0


def host_directory(path: Path, secret: bytes = SECRET) -> str:
    """A run directory with keys."""
    path.mkdir(mode=0o700)
    write_identity(secret, os.fspath(path))
    return os.fspath(path)


@contextmanager
def open_port(run_directory: str, host: str = "127.0.0.1") -> Iterator[tuple[str, ClusterPort]]:
    """A cluster port that serves in a thread, and its address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        number = probe.getsockname()[1]
    port = ClusterPort(host, number, run_directory)
    with served(port):
        yield join_address(host, number), port


@contextmanager
def served(port: ClusterPort) -> Iterator[None]:
    """Serves a port in a thread, and closes it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(port.serve())

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        port.close()
        loop.close()


def until(condition: Callable[[], bool]) -> None:
    """Fails unless `condition()` comes true in time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def accept(door: Door) -> socket.socket:
    """The next connection that comes to a door."""
    found: list[socket.socket] = []

    def look() -> bool:
        if (accepted := door.accept()) is not None:
            found.append(accepted[0])
        return bool(found)

    until(look)
    return found[0]


@contextmanager
def stream_pair(path: Path) -> Iterator[tuple[SecureStream, SecureStream]]:
    """Both ends of an open stream: who dialed, and who was dialed."""
    directory = host_directory(path / "host")
    with open_port(directory) as (address, _):
        door = Door(directory, "test")
        dialed = SecureStream(dial(address, "test", directory), directory, is_server=False)
        taken_in = SecureStream(accept(door), directory, is_server=True)
        until(lambda: bool(int(dialed.open()) & int(taken_in.open())))
        yield dialed, taken_in
        for end in (dialed, taken_in, door):
            end.close()
