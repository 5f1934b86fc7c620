"""A server of the demo model, up for as long as clients ask it."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmark.clients.install import CLIENTS_DIRECTORY
from benchmark.support.engine import Engine
from benchmark.support.engines import running

MODEL_NAME = "sgl-pipeline-demo"


@contextlib.contextmanager
def demo_server(depth: int, port: int, flags: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Gives its address and an empty directory, which goes with it.

    Raises EngineFailure with the end of its log when it does not come up.
    """
    with (
        running(engine(depth, port, flags), CLIENTS_DIRECTORY / "server.log"),
        tempfile.TemporaryDirectory() as directory,
    ):
        yield f"http://127.0.0.1:{port}", Path(directory)


def engine(depth: int, port: int, flags: tuple[str, ...]) -> Engine:
    """The server to start, under MODEL_NAME whatever checkpoint `flags` name."""
    command = [sys.executable, "-m", "sgl_pipeline.launch_server", *flags]
    command += ["--served-model-name", MODEL_NAME]
    return Engine(
        label=f"ours --pp {depth}",
        client_backend="sglang",
        base_url=f"http://127.0.0.1:{port}",
        command=(*command, "--pp", str(depth), "--port", str(port)),
    )
