"""What cannot be started ends at once with one line that names the flag and the limit."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

pytestmark = pytest.mark.multiproc
ROOT = Path(__file__).resolve().parents[2]


def start(*flags: str) -> tuple[int, str]:
    """Exit code and output of a server that is not expected to come up."""
    command = [sys.executable, "-W", "ignore", "-m", "sgl_pipeline.launch_server", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model-path", "/no/such/model"], ["--model-path /no/such/model"]),
        (["--pp", "17"], ["--pp 17", "16 layers"]),
        (["--pp", "2", "--pp-layer-partition", "9,9"], ["9,9 sums to 18", "16 layers"]),
        (["--pp", "2", "--nnodes", "2"], ["--nnodes 2"]),
    ],
)
def test_a_wrong_flag_is_named(flags, words):
    code, output = start(*flags)
    assert code == 1
    error = [line for line in output.splitlines() if "error:" in line]
    assert len(error) == 1, output
    assert [word for word in words if word not in error[0]] == [], error
    assert "Traceback" not in output


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = start("--port", str(port))
    assert code == 1
    assert f"--port {port}" in output
    assert "Traceback" not in output


def test_a_truncated_checkpoint_is_named(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    code, output = start("--model-path", str(model), "--pp", "2")
    assert code == 1
    assert "model.safetensors" in output
    assert "truncated" in output
    assert "Traceback" not in output
