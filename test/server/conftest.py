"""Servers for all tests that only talk to one, each with two stages and in fp32.

With several pytest workers (`make test`), each worker has servers of its own and runs whole files,
those of this folder one after the other: then the servers end, and give their memory back.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.live_server import LiveServer, live_server, wait_until_idle
from support.parrot_model import parrot_model


@pytest.fixture(scope="package")
def shared_servers() -> list[LiveServer]:
    """Those of the servers below that have been started."""
    return []


@pytest.fixture(scope="module", autouse=True)
def servers_are_left_idle(shared_servers: list[LiveServer]) -> Iterator[None]:
    """A file that leaves a request or a pause behind fails, and not the next file."""
    yield
    for server in shared_servers:
        wait_until_idle(server)


@pytest.fixture(scope="package")
def demo_server(shared_servers: list[LiveServer]) -> Iterator[LiveServer]:
    """The demo model, with the flags that a user gets without asking."""
    with live_server("--pp", "2", "--dtype", "float32") as server:
        shared_servers.append(server)
        yield server


@pytest.fixture(scope="package")
def parrot_server(shared_servers: list[LiveServer]) -> Iterator[LiveServer]:
    """A model that thinks and calls tools (`support/parrot_model.py`), and the parsers for it.

    Chunks of several tokens, as a front that lags behind has them at any time: the marks of
    thoughts and calls share one with the text around them.
    """
    flags = ["--served-model-name", "parrot", "--tool-call-parser", "qwen25"]
    flags += ["--stream-interval", "3"]
    flags += ["--reasoning-parser", "qwen3", "--enable-response-store"]
    with live_server(
        "--pp", "2", "--dtype", "float32", "--model-path", str(parrot_model()), *flags
    ) as server:
        shared_servers.append(server)
        yield server


@pytest.fixture
def client(demo_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def parrot(parrot_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{parrot_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short TMPDIR for servers: pytest's own are too long for Unix sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)
