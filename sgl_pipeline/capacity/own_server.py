"""A server of ours, started for a measurement and ended with it."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import requests

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.status_line import StatusLine

_START_S = 600.0
_STOP_S = 60.0
_POLL_S = 0.3
_LINES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The address of a server, and the id of its main process."""

    url: str
    pid: int


@contextmanager
def own_server(words: Sequence[str]) -> Iterator[OwnServer]:
    """Starts `sgl-pipeline serve` with these flags, and gives it once it answers.

    Raises ConfigurationError with the end of its log if it does not.
    """
    port = _free_port()
    command = [sys.executable, "-m", "sgl_pipeline", "serve", *words]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup"]
    # Ended by a time limit, the command must not leave its server behind.
    signal.signal(signal.SIGTERM, _exit_in_order)
    with tempfile.TemporaryDirectory(prefix="sgl-pipeline-capacity-") as directory:
        log_path = Path(directory) / "server.log"
        with log_path.open("wb") as log:
            # Ctrl-C is ours to handle: the server then ends in order.
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                url = f"http://127.0.0.1:{port}"
                _wait(server, url, log_path)
                yield OwnServer(url, server.pid)
            finally:
                _stop(server)


def _free_port() -> int:
    """A port of the loopback that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _exit_in_order(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _wait(server: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    line, began_s = StatusLine(), time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        line.show(f"the server starts: {waited_s:.0f} s")
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                line.clear()
                return
        except requests.RequestException:
            pass
        if server.poll() is not None or waited_s > _START_S:
            line.clear()
            lines = log_path.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
            what = "did not come up" if server.poll() is None else "ended"
            raise ConfigurationError("\n".join([f"the server {what}; its last words:", *lines]))
        time.sleep(_POLL_S)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM drains; what is left then ends with its main process."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
