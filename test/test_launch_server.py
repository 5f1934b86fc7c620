import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_pipeline import launch_server
from sgl_pipeline.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]


def test_an_unsupported_python_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert launch_server.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Python 3.11 or 3.12 is needed" in line


def test_only_a_server_that_listens_says_that_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of two that were started at once, the other one answers the loser's warm-up.
    monkeypatch.setattr(launch_server, "_LISTEN_S", 0.1)
    pipeline: Any = SimpleNamespace(ui="off", stages=SimpleNamespace(num_stages=2))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server: Any = SimpleNamespace(
            port=port, api_key=None, served_model_name="m", url=lambda: "http://here"
        )
        launch_server._announce(server, pipeline)
        assert capsys.readouterr().out == ""
        listener.listen()
        launch_server._announce(server, pipeline)
        assert "Ready: m on 2 stages at http://here" in capsys.readouterr().out


def test_a_port_that_another_server_took_meanwhile_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host, port = listener.getsockname()
        with pytest.raises(ConfigurationError, match=f"--port {port}"):
            fail_to_start(3, host, port)
        with pytest.raises(SystemExit) as ended:
            fail_to_start(0, host, port)
        assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        fail_to_start(3, host, port)
    assert ended.value.code == 3


def fail_to_start(code: int, host: str, port: int) -> None:
    with launch_server._start_errors(host, port):
        raise SystemExit(code)


@pytest.mark.multiproc
def test_the_module_that_children_run_again_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sgl_pipeline.launch_server\n"
        "print(sorted({'torch', 'sglang', 'numpy', 'zmq'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.multiproc
def test_a_start_up_error_is_one_line_and_leaves_nothing_behind(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """By the package; `test_commands.py` has what it runs. A model that is not there is named
    before SGLang is imported, which takes seconds."""
    directory = tmp_path_factory.mktemp("t")
    command = [sys.executable, "-X", "importtime", "-m", "sgl_pipeline"]
    result = subprocess.run(
        [*command, "--model-path", "/no/such/model"],
        cwd=ROOT,
        env=dict(os.environ, TMPDIR=str(directory)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    said, imported = list[str](), set[str]()
    for line in result.stderr.splitlines():
        if line.startswith("import time:"):
            imported.add(line.rpartition("|")[2].strip())
        else:
            said.append(line)
    assert said[-1].startswith("sgl_pipeline: error: --model-path /no/such/model does not exist")
    assert "sgl_pipeline.launch_server" in imported and "sglang" not in imported
    assert list(directory.iterdir()) == []
