"""Starts a whole server, as a user would, and tells its processes apart.

Used by test/server/. A server takes seconds to come up on two cores, so tests share one where they
can (see test/server/shared/conftest.py).
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import requests
from support.ports import number_of, reserve_port
from support.warm_launcher import ForkedServer, WarmLauncher

START_TIMEOUT_S = 400.0
# How long a test waits for what takes moments: it ends a test that hangs, also on a machine many
# times slower than usual, and says nothing of speed.
PATIENCE_S = 90.0
# How long a client waits for an answer: longer than that, so that a wait whose condition asks the
# server ends with what it waited for.
ANSWER_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("-m", "sgl_pipeline.launch_server")


@dataclass
class LiveServer:
    """A running `python -m sgl_pipeline.launch_server`; `output` is all that it has printed."""

    process: subprocess.Popen[str] | ForkedServer
    reserved_port: socket.socket
    output: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)

    @property
    def port(self) -> int:
        return number_of(self.reserved_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        return "".join(self.output)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stages(self) -> list[psutil.Process]:
        """The stage processes, in pipeline order."""
        # A fork's title is one string.
        words = {one: " ".join(one.cmdline()).split() for one in self.descendants()}
        stages = [one for one in words if "sgl_pipeline.pp_runner.stage_process" in words[one]]
        return sorted(stages, key=lambda one: int(words[one][words[one].index("--worker") + 1]))

    def scheduler(self) -> psutil.Process:
        return self._titled("sgl_pipeline::scheduler")

    def detokenizer(self) -> psutil.Process:
        return self._titled("sglang::detokenizer")

    def _titled(self, title: str) -> psutil.Process:
        (process,) = [p for p in self.descendants() if title in " ".join(p.cmdline())]
        return process

    def facts(self) -> dict:
        """The scheduler's part of /server_info."""
        answer = requests.get(f"{self.url}/server_info", timeout=ANSWER_S)
        return answer.json()["internal_states"][0]

    def wait_for_end(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code of a server that ends by itself; `text` is then all of its output."""
        code = self.process.wait(timeout_s)
        self.wait_for_output(timeout_s)
        return code

    def wait_for_output(self, timeout_s: float = PATIENCE_S) -> None:
        """Until `text` is all that a server that has ended printed, which none of its processes
        may hold up."""
        self.reader.join(timeout_s)
        assert not self.reader.is_alive(), f"a process outlived its server:\n{self.text}"

    def generate(self, **body) -> requests.Response:
        return requests.post(f"{self.url}/generate", json=body, timeout=ANSWER_S)


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Fails unless `condition()` comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {timeout_s} s"
        time.sleep(0.05)


def wait_until_equal(read: Callable[[], Any], wanted: object) -> None:
    """Fails, and shows what was read last, unless `read()` is soon equal to `wanted`."""
    deadline = time.monotonic() + PATIENCE_S
    while (value := read()) != wanted:
        assert time.monotonic() < deadline, f"{value} and not {wanted} after {PATIENCE_S} s"
        time.sleep(0.05)


def start_server(
    *flags: str,
    port: socket.socket | None = None,
    launcher: tuple[str, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LiveServer:
    """Starts a server and returns at once.

    Args:
        port: that of a server that has ended.
        launcher: how Python is to start it afresh, such as `LAUNCHER`; None is seconds quicker.
        environment: added to this process's; Python's own variables need a `launcher`.
    """
    port = port or reserve_port()
    arguments = ["--port", str(number_of(port)), *flags]
    own_environment = os.environ | dict(environment or {})
    process: subprocess.Popen[str] | ForkedServer
    if launcher is None:
        process = _warm_launcher().start(arguments, own_environment)
    else:
        process = subprocess.Popen(
            [sys.executable, *launcher, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=own_environment,
        )
    return LiveServer(process, port)


@cache
def _warm_launcher() -> WarmLauncher:
    return WarmLauncher()


@contextmanager
def live_server(
    *flags: str,
    launcher: tuple[str, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[LiveServer]:
    """A server that is ready; stopped, by force if need be, when the block ends."""
    server = start_server(*flags, launcher=launcher, environment=environment)
    try:
        wait_until_ready(server)
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            for process in server.descendants():
                process.kill()
            server.process.kill()
            server.process.wait()
        server.wait_for_output()


def wait_until_ready(server: LiveServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "Ready:" not in server.text:
        assert server.process.poll() is None, f"the server ended:\n{server.text}"
        assert time.monotonic() < deadline, f"the server is not up:\n{server.text}"
        time.sleep(0.1)


def wait_until_idle(server: LiveServer) -> None:
    """Fails unless the server lives, is not paused and soon has no request left."""
    assert server.process.poll() is None, f"a shared server ended:\n{server.text}"
    assert not server.facts()["is_paused"], "a shared server was left paused"

    def is_idle() -> bool:
        facts = server.facts()
        return bool(facts["num_running_requests"] == facts["num_waiting_requests"] == 0)

    wait_until(is_idle)


def wait_until_pages_are_back(server: LiveServer) -> None:
    """Fails unless soon every page is free, or cached and free for who needs it: a step in flight
    holds those of requests that have ended until it has come back."""

    def are_back() -> bool:
        facts = server.facts()
        return bool(facts["free_pages"] == facts["total_pages"])

    wait_until(are_back)
