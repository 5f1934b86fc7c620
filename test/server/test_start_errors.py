"""What cannot be started ends at once with one line that names the flag and the limit.

Servers are forks; `test_launch_server.py` starts one that cannot start from nothing.
"""

import shutil
import socket
from pathlib import Path

import pytest
from support.live_server import start_server

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

pytestmark = pytest.mark.multiproc


def start(*flags: str, port: socket.socket | None = None) -> tuple[int, str]:
    """Exit code and output of a server that is not expected to come up."""
    server = start_server(*flags, port=port)
    return server.wait_for_end(120), server.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model-path", "/no/such/model"], ["--model-path /no/such/model"]),
        (["--pp", "17"], ["--pp 17", "16 layers"]),
        (["--pp", "2", "--pp-layer-partition", "9,9"], ["9,9 sums to 18", "16 layers"]),
        (["--pp", "2", "--nnodes", "2"], ["--nnodes 2"]),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], words: list[str]) -> None:
    code, output = start(*flags)
    assert code == 1
    error = [line for line in output.splitlines() if "error:" in line]
    assert len(error) == 1, output
    assert [word for word in words if word not in error[0]] == [], error
    assert "Traceback" not in output


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, output = start(port=taken)
        port = taken.getsockname()[1]
    assert code == 1
    assert f"--port {port}" in output
    assert "Traceback" not in output


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    code, output = start("--model-path", str(model), "--pp", "2")
    assert code == 1
    assert "model.safetensors" in output
    assert "truncated" in output
    assert "Traceback" not in output
