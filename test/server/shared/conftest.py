"""Servers for all tests that only talk to one, each with two stages and in fp32.

One worker of `make test-servers` runs all files of this folder (`test/conftest.py`). Then the
servers end, and give their memory back.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from support.live_server import LiveServer, live_server, wait_until_idle
from support.parrot_model import parrot_model


class SharedServers:
    """Servers by name, each started when a file first asks for it."""

    def __init__(self) -> None:
        self._running: dict[str, LiveServer] = {}
        self._ends = ExitStack()

    def get(self, name: str, *flags: str) -> LiveServer:
        """The server of that name, which is started with these flags."""
        if name not in self._running:
            server = live_server("--pp", "2", "--dtype", "float32", *flags)
            self._running[name] = self._ends.enter_context(server)
        return self._running[name]

    def wait_until_idle(self) -> None:
        """Fails where one has a request left."""
        for server in self._running.values():
            wait_until_idle(server)

    def end(self) -> None:
        """Ends all of them."""
        self._running.clear()
        self._ends.close()


_shared = SharedServers()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """The servers end with the last test of the folder."""
    yield
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _shared.end()


@pytest.fixture(scope="module", autouse=True)
def servers_are_left_idle() -> Iterator[None]:
    """A file that leaves a request or a pause behind fails, and not the next file."""
    yield
    _shared.wait_until_idle()


@pytest.fixture(scope="module")
def demo_server() -> LiveServer:
    """The demo model, with the flags that a user gets without asking."""
    return _shared.get("demo")


@pytest.fixture(scope="module")
def parrot_server() -> LiveServer:
    """A model that thinks and calls tools (`support/parrot_model.py`), and the parsers for it.

    Chunks of several tokens, as a front that lags behind has them at any time: the marks of
    thoughts and calls share one with the text around them.
    """
    flags = ["--served-model-name", "parrot", "--tool-call-parser", "qwen25"]
    flags += ["--stream-interval", "3"]
    flags += ["--reasoning-parser", "qwen3", "--enable-response-store"]
    return _shared.get("parrot", "--model-path", str(parrot_model()), *flags)


@pytest.fixture
def client(demo_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def parrot(parrot_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{parrot_server.url}/v1", api_key="none", max_retries=0)
