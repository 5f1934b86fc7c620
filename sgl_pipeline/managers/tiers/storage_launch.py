"""Starts the storage process of a host."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.tiers.storage_server import READY, StorageSettings

# It imports SGLang and connects to what keeps the bytes.
START_TIMEOUT_S = 120.0


class StorageProcess:
    """A storage process that is ready. `close` must be called in the end.

    Args:
        environment: of the process.

    Raises ConfigurationError where its backend cannot be set up.
    """

    def __init__(self, settings: StorageSettings, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "sgl_pipeline.managers.tiers.storage_process"]
        command += ["--parent", str(os.getpid()), "--socket", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        with ours:
            ours.settimeout(START_TIMEOUT_S)
            try:
                ours.send(msgspec.json.encode(settings))
                answer = ours.recv(1 << 12)
            except OSError as error:
                answer = str(error).encode()
        if answer != READY:
            self.close()
            reason = answer.decode(errors="replace") or "its process ended while it started"
            raise ConfigurationError(f"--hicache-storage-backend {settings.backend}: {reason}")

    @property
    def has_ended(self) -> bool:
        """True if it has ended by itself: pages are neither saved nor loaded."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends it; transfers under way fail."""
        self._process.kill()
        self._process.wait()
