import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_pipeline import launch_server

ROOT = Path(__file__).resolve().parents[1]


def test_an_unsupported_python_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert launch_server.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Python 3.11 or 3.12 is needed" in line


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
@pytest.mark.parametrize("module", ["sgl_pipeline", "sgl_pipeline.launch_server"])
def test_a_start_up_error_is_one_line_and_leaves_nothing_behind(
    module: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("t")
    result = subprocess.run(
        [sys.executable, "-m", module, "--model-path", "/no/such/model"],
        cwd=ROOT,
        env=dict(os.environ, TMPDIR=str(directory)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        "sgl_pipeline: error: --model-path /no/such/model does not exist"
    )
    assert list(directory.iterdir()) == []
