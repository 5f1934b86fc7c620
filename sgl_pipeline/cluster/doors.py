"""Hands each connection of a host's one port to the process that it is for.

Whoever dials a host's cluster port first sends a greeting: the name of a door, authenticated by the
cluster's secret. `cluster_port.py` answers with one byte and hands the connection over to the
process that has opened the door, through a Unix datagram socket in the run directory. TLS follows
between these two, so nothing is relayed. Until then nothing of what came is used but the name.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct

from sgl_pipeline.cluster.keys import greeting_key

# The digit is the version of what crosses the port.
MAGIC = b"sglpipe1"
MAGIC_BYTES = len(MAGIC)
_BODY = struct.Struct("<8s64s16s")  # magic, name padded by zeros, a number used once
_MAC_BYTES = 32
GREETING_BYTES = _BODY.size + _MAC_BYTES
DIAL_TIMEOUT_S = 5.0

# Doors of the head: of its process that knows the agents, and of the scheduler process.
AGENTS_DOOR = "agents"
SCHEDULER_DOOR = "scheduler"
# Of a prefill server's scheduler process, for decode servers.
ROOMS_DOOR = "rooms"

# Answers.
PASSED_ON, OTHER_KEY, OTHER_VERSION, NOBODY_HERE = b"+", b"k", b"v", b"?"


class DialError(Exception):
    """A door of another host cannot be reached. `is_final`: nor can it later, unless something
    is changed. The text is one clause."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class DoorClosed(DialError):
    """The other host is there, and no process is behind the door, or not yet."""


def greeting(key: bytes, door: str) -> bytes:
    """The first `GREETING_BYTES` bytes of a connection."""
    body = _BODY.pack(MAGIC, door.encode(), secrets.token_bytes(16))
    return body + hmac.digest(key, body, "sha256")


def read_greeting(key: bytes, data: bytes) -> tuple[str | None, bytes]:
    """The door that a greeting names, or None and what to answer (nothing, for what is none)."""
    body, mac = data[: _BODY.size], data[_BODY.size :]
    magic, name, _ = _BODY.unpack(body)
    if magic[:-1] != MAGIC[:-1]:
        return None, b""
    if magic != MAGIC:
        return None, OTHER_VERSION
    if not hmac.compare_digest(hmac.digest(key, body, "sha256"), mac):
        return None, OTHER_KEY
    return name.rstrip(b"\0").decode("ascii", "replace"), PASSED_ON


def is_greeting(start: bytes) -> bool:
    """True if a connection that begins with these `MAGIC_BYTES` bytes may go on as a greeting, of
    this version or another one."""
    return start[:-1] == MAGIC[:-1]


class Door:
    """Accepts one kind of connection for one process. `close` removes the address."""

    def __init__(self, run_directory: str, name: str) -> None:
        self._path = door_path(run_directory, name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._path)

    def fileno(self) -> int:
        """Can be read when a connection waits."""
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, str] | None:
        """A connection and the address that it came from, if one waits."""
        try:
            sender, descriptors, *_ = socket.recv_fds(self._socket, 256, 1)
        except BlockingIOError:
            return None
        if not descriptors:
            return None
        return socket.socket(fileno=descriptors[0]), sender.decode("ascii", "replace")

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def hand_over(run_directory: str, name: str, connection: socket.socket, sender: str) -> bool:
    """Gives a connection to the process behind a door; whether there is one that can take it.

    The caller still has to close its own end.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
        way.setblocking(False)
        try:
            way.connect(door_path(run_directory, name))
            connection.sendall(PASSED_ON)
            socket.send_fds(way, [sender.encode()], [connection.fileno()])
        except OSError:
            return False
    return True


def dial(
    address: str, door: str, run_directory: str, timeout_s: float = DIAL_TIMEOUT_S
) -> socket.socket:
    """A connection to the process behind `door` of the host whose cluster port is at `address`.

    Waits at most about `timeout_s`. Raises DialError.
    """
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise DialError(_unreachable(address, error)) from error
    try:
        connection.sendall(greeting(greeting_key(run_directory), door))
        answer = connection.recv(1)
    except OSError as error:
        connection.close()
        raise DialError(f"{address} does not answer ({error.strerror or error})") from error
    if answer == PASSED_ON:
        return connection
    connection.close()
    if answer == NOBODY_HERE:
        raise DoorClosed(f"{address} is starting, and nothing is behind its door {door!r} yet")
    raise DialError(
        {
            OTHER_KEY: f"{address} has another cluster key; give all hosts the same one",
            OTHER_VERSION: f"{address} runs another version of sgl_pipeline; install the same one",
        }.get(answer, f"{address} is not a cluster port of sgl_pipeline; look at the port number"),
        is_final=answer in (OTHER_KEY, OTHER_VERSION),
    )


def door_path(run_directory: str, name: str) -> str:
    """The socket behind a door. Raises ValueError for a name that could leave the directory."""
    if not name or not all(part.isalnum() for part in name.split("-")):
        raise ValueError(f"{name!r} is not a name of a door")
    return f"{run_directory}/door-{name}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 address stands in brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unreachable(address: str, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"{address} refuses connections: it has not been started, or uses another port"
    if isinstance(error, socket.gaierror):
        return f"{address} cannot be resolved ({error.strerror}); look at --dist-init-addr"
    if isinstance(error, TimeoutError):
        return f"{address} cannot be reached: no answer; look at the network and at firewalls"
    return f"{address} cannot be reached: {error.strerror or error}"
