"""The sockets of a storage process: clients, their turns and their chunks of staging memory."""

import logging
import os
import socket
import threading
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from sgl_pipeline.errors import MalformedData
from sgl_pipeline.kv_store.storage_messages import (
    ClearAll,
    Counted,
    CountObjects,
    Done,
    Failed,
    Reply,
    Request,
    SetObjects,
    Staging,
    receive_request,
    send_message,
    send_staging,
)

logger = logging.getLogger(__name__)

READY = b"ready"


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a storage process.

    `address` is the Unix socket that it makes. An object has at most `object_bytes`. At most
    `max_clients` connections have `chunks_each` chunks of staging memory each.
    """

    address: str
    backend: str
    extra_config: dict[str, Any]
    digest: str
    object_bytes: int
    max_clients: int = 16
    chunks_each: int = 16


class Storage(Protocol):
    """See `upstream_storage.UpstreamStorage`."""

    def set(self, names: tuple[str, ...], first_chunk: int) -> list[bool]: ...
    def get(self, names: tuple[str, ...], first_chunk: int) -> list[bool]: ...
    def count(self, names: tuple[str, ...]) -> int: ...
    def clear(self) -> None: ...


class StorageServer:
    """Answers clients, each on a thread of its own.

    Args:
        memory: descriptor of the staging memory, of `max_clients * chunks_each` chunks.
    """

    def __init__(
        self, settings: StorageSettings, storage: Storage, memory: int, chunk_bytes: int
    ) -> None:
        self._settings = settings
        self._storage = storage
        self._memory = memory
        self._chunk_bytes = chunk_bytes
        self._free_places = [*range(settings.max_clients)]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Of a process that this one replaces.
        with suppress(FileNotFoundError):
            os.unlink(settings.address)
        self._listener.bind(settings.address)
        os.chmod(settings.address, 0o600)
        self._listener.listen(settings.max_clients)

    def serve(self) -> None:
        """Takes clients until the process ends."""
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve_client, args=(client,), daemon=True).start()

    def _serve_client(self, client: socket.socket) -> None:
        with client:
            try:
                place = self._free_places.pop()
            except IndexError:
                message = f"it has {self._settings.max_clients} clients and takes no more"
                send_message(client, Failed(message))
                return
            try:
                self._answer_all(client, place * self._settings.chunks_each)
            except (OSError, MalformedData) as error:
                logger.warning("a client of the storage process is lost: %s", error)
            finally:
                # Only here, so that no other client has chunks that a transfer still writes.
                self._free_places.append(place)

    def _answer_all(self, client: socket.socket, first_chunk: int) -> None:
        num_chunks = self._settings.chunks_each
        offset_bytes = first_chunk * self._chunk_bytes
        staging = Staging(self._chunk_bytes, num_chunks, offset_bytes)
        send_staging(client, staging, self._memory)
        while (request := receive_request(client)) is not None:
            try:
                reply = self._answer(request, first_chunk)
            except Exception as error:
                # Whatever a backend raises, it is the transfer that fails.
                reply = Failed(f"{type(error).__name__}: {error}"[:1000])
            send_message(client, reply)

    def _answer(self, request: Request, first_chunk: int) -> Reply:
        if isinstance(request, CountObjects):
            return Counted(self._storage.count(request.names))
        if isinstance(request, ClearAll):
            self._storage.clear()
            return Done()
        if len(request.names) > self._settings.chunks_each:
            return Failed(f"{len(request.names)} objects, {self._settings.chunks_each} fit")
        move = self._storage.set if isinstance(request, SetObjects) else self._storage.get
        return Done(tuple(move(request.names, first_chunk)))
