"""One server for all tests that only talk to it: two stages, the demo model in fp32."""

from collections.abc import Iterator

import pytest
from support.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def demo_server() -> Iterator[LiveServer]:
    with live_server("--pp", "2", "--dtype", "float32") as server:
        yield server
