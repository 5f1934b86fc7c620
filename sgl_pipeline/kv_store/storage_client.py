"""Objects in a storage backend of SGLang, by way of the host's storage process."""

import mmap
import os
import socket
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_pipeline.errors import BrokenObject, MalformedData, StoreError
from sgl_pipeline.kv_store.atomic_files import Buffer
from sgl_pipeline.kv_store.storage_messages import (
    MAX_NAMES,
    ClearAll,
    Counted,
    CountObjects,
    Done,
    Failed,
    GetObjects,
    Reply,
    Request,
    SetObjects,
    Staging,
    receive_reply,
    send_message,
)

TIMEOUT_S = 60.0


@dataclass
class _Connection:
    """An open socket and the chunks of shared memory that belong to it."""

    socket: socket.socket
    staging: Staging
    memory: mmap.mmap

    def chunk(self, index: int) -> memoryview:
        size = self.staging.chunk_bytes
        return memoryview(self.memory)[index * size : (index + 1) * size]

    def ask(self, request: Request) -> Reply:
        send_message(self.socket, request)
        reply, _ = receive_reply(self.socket)
        if reply is None:
            raise ConnectionError("it has ended")
        return reply

    def close(self) -> None:
        self.socket.close()


class StorageClient:
    """An `ObjectStore` whose objects have one layer. Threads take turns; give each its own for
    transfers beside each other.

    It connects when it is used, and again after the process has ended and come back.

    Args:
        address: the Unix socket of the storage process.
        timeout_s: for one request.
    """

    groups_layers = False  # an object fits in a chunk

    def __init__(self, address: str, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._turn = threading.Lock()

    def write(self, name: str, parts: Sequence[Buffer]) -> list[int]:
        """Stores an object, unless the backend has one of that name; gives its CRC-32. Raises
        StoreError."""
        (content,) = (memoryview(part).cast("B") for part in parts)
        with self._turn:
            self._fill(0, name, content)
            if not self._move(SetObjects((name,)))[0]:
                raise StoreError(f"the storage backend did not take object {name}")
        return [zlib.crc32(content)]

    def read_into(
        self,
        name: str,
        parts: Sequence[Buffer],
        checksums: Sequence[int],
        num_bytes: int,
        offset: int = 0,
    ) -> None:
        """Fills a writable buffer with an object. Raises BrokenObject where it is missing or
        altered, StoreError where the backend cannot be asked."""
        assert offset == 0
        (content,), (checksum,) = (memoryview(part).cast("B") for part in parts), checksums
        with self._turn:
            if not self._move(GetObjects((name,)))[0]:
                raise BrokenObject(f"object {name} is missing")
            chunk = self._open().chunk(0)
            if num_bytes > len(chunk):
                raise BrokenObject(f"object {name} has {len(chunk)} bytes, not {num_bytes}")
            content[:] = chunk[:num_bytes]
        if zlib.crc32(content) != checksum:
            raise BrokenObject(f"object {name} is altered: its checksum is another one")

    def delete(self, name: str) -> bool:
        """False: no storage backend of SGLang can be asked to."""
        return False

    def write_many(self, names: Sequence[str], contents: Sequence[bytes]) -> None:
        """Stores objects of at most a chunk each. Raises StoreError."""
        with self._turn:
            step = self._open().staging.num_chunks
            for start in range(0, len(names), step):
                batch = tuple(names[start : start + step])
                for index, name in enumerate(batch):
                    self._fill(index, name, memoryview(contents[start + index]))
                if not all(self._move(SetObjects(batch))):
                    raise StoreError(f"the storage backend did not take {len(batch)} objects")

    def read_prefix(self, names: Sequence[str]) -> list[bytes]:
        """The chunks of these objects up to the first that is missing. Raises StoreError."""
        contents: list[bytes] = []
        with self._turn:
            step = self._open().staging.num_chunks
            # Some backends fail a batch whole for one name that is missing.
            there = names[: self._count(names)]
            for start in range(0, len(there), step):
                successes = self._move(GetObjects(tuple(there[start : start + step])))
                for index, is_there in enumerate(successes):
                    if not is_there:
                        return contents
                    contents.append(bytes(self._open().chunk(index)))
        return contents

    def clear(self) -> None:
        """Has the backend forget all that it has, whoever stored it."""
        with self._turn:
            self._ask(ClearAll())

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fill(self, index: int, name: str, content: memoryview) -> None:
        """Copies an object to a chunk, with zeros behind it."""
        chunk, num_bytes = self._open().chunk(index), len(content)
        if num_bytes > len(chunk):
            raise StoreError(f"object {name} has {num_bytes} bytes, a chunk holds {len(chunk)}")
        chunk[:num_bytes] = content
        chunk[num_bytes:] = bytes(len(chunk) - num_bytes)

    def _count(self, names: Sequence[str]) -> int:
        number = 0
        for start in range(0, len(names), MAX_NAMES):
            batch = tuple(names[start : start + MAX_NAMES])
            reply = self._ask(CountObjects(batch))
            if not isinstance(reply, Counted) or reply.number > len(batch):
                raise self._lost(f"{reply} does not answer it")
            number += reply.number
            if reply.number < len(batch):
                break
        return number

    def _move(self, request: SetObjects | GetObjects) -> tuple[bool, ...]:
        reply = self._ask(request)
        if not isinstance(reply, Done) or len(reply.successes) != len(request.names):
            raise self._lost(f"{reply} does not answer it")
        return reply.successes

    def _ask(self, request: Request) -> Reply:
        connection = self._open()
        try:
            reply = connection.ask(request)
        except (OSError, MalformedData) as error:
            raise self._lost(str(error)) from None
        if isinstance(reply, Failed):
            raise StoreError(f"the storage backend failed: {reply.message}")
        return reply

    def _open(self) -> _Connection:
        if self._connection is None:
            try:
                self._connection = _connect(self._address, self._timeout_s)
            except (OSError, MalformedData) as error:
                raise self._lost(str(error)) from None
        return self._connection

    def _lost(self, reason: str) -> StoreError:
        """Gives up the connection, whose chunks may still be written; gives the error to raise."""
        self.close()
        return StoreError(f"the storage process at {self._address} does not answer: {reason}")


def _connect(address: str, timeout_s: float) -> _Connection:
    """Raises OSError, MalformedData."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors: list[int] = []
    try:
        ours.settimeout(timeout_s)
        ours.connect(address)
        reply, descriptors = receive_reply(ours)
        if not isinstance(reply, Staging) or len(descriptors) != 1:
            raise ConnectionError(f"it answered {reply}")
        size = reply.chunk_bytes * reply.num_chunks
        memory = mmap.mmap(descriptors[0], size, offset=reply.offset_bytes)
        return _Connection(ours, reply, memory)
    except BaseException:
        ours.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
