"""The stand-in for a lent machine: its pieces are the recipe's, and what fails there is told.

Scripts are its Python; the real one is made by `python -m benchmark.gpu.standin`.
"""

import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Literal

import pytest
from support.gpu_recipe import README, listed_packages

from benchmark.gpu import standin
from benchmark.gpu.kernel_pack import PACKAGES
from benchmark.gpu.kernel_wheels import pins
from benchmark.gpu.standin import FLAGS, GPU_TESTS, Outcome, Piece, report_of, run_piece
from sgl_pipeline.errors import ConfigurationError

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[3]
PINS = pins(standin.REQUIREMENTS)


def test_it_has_what_the_recipe_lists_and_neither_the_packs_packages_nor_sglang() -> None:
    assert len(listed_packages()) > 12 and {*listed_packages()} <= PINS.keys()
    assert not {*PACKAGES, "flashinfer-python", "sglang", "cryptography"} & PINS.keys()
    assert PINS["torch"] == "2.11.0"


def test_it_runs_with_the_recipes_flags_on_the_recipes_tests() -> None:
    exported = dict(re.findall(r"\b(FLASHINFER_\w+)=(\d)", README))
    assert exported and exported.items() <= FLAGS.items()
    (tests,) = re.findall(r"-m pytest .*?tee", README, re.S)
    assert re.findall(r"test/\S+", tests) == list(GPU_TESTS)


def test_every_piece_names_tests_that_exist(tmp_path: Path) -> None:
    words = [word for piece in standin.pieces(tmp_path) for word in piece.arguments]
    tests = [word for word in words if word.startswith("test/")]
    assert len(tests) > 10 and all((ROOT / test).exists() for test in tests)
    assert words.count("not gpu and not cuda_toolkit") == words.count("--collect-only") == 1


def test_what_a_piece_prints_is_kept_without_the_machines_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("CUDA_HOME", "elsewhere")
    environment = standin.environment_of(tmp_path, [tmp_path / "pack-0"])
    assert "CUDA_HOME" not in environment
    code = "import os; print(os.getcwd(), os.environ['PYTHONPATH']); print('done'); exit(3)"
    outcome = run_piece(Piece("a piece", ("-c", code)), Path(sys.executable), environment, tmp_path)
    assert outcome.status == 3 and outcome.last_line == "done"
    assert outcome.output.split()[:2] == [".", f"STANDIN/pack-0{os.pathsep}."]
    assert (tmp_path / "a_piece.log").exists()


def test_a_piece_that_hangs_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "_TIMEOUT_S", 0.5)
    piece = Piece("a piece", ("-c", "import time; time.sleep(60)"))
    outcome = run_piece(piece, Path(sys.executable), dict(os.environ), tmp_path)
    assert outcome.status != 0 and "still running" in outcome.last_line


def test_a_failure_and_what_was_skipped_are_in_the_report() -> None:
    outcomes = [
        Outcome("good", 0, 1.0, "SKIPPED [2] test_a.py: no AMX\n== 3 passed ==\n"),
        Outcome("bad", 1, 2.0, "    not measured: x (needs a GPU)\nModuleNotFoundError: y\n"),
        Outcome("silent", 0, 0.0, ""),
    ]
    report = report_of(outcomes, ["site.tar.xz"])
    assert report.problems == ["bad: ModuleNotFoundError: y"]
    assert "| good | 0 | 1 | 3 passed |" in report.texts[0]
    assert "no AMX" in report.texts[1] and "needs a GPU" in report.texts[1]
    assert [piece["name"] for piece in report.record["pieces"]] == ["good", "bad", "silent"]


def script(folder: Path, name: str, status: int) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_is_found_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv's command is there for every version, and ends with an error."""
    monkeypatch.setattr(standin.sys, "executable", script(tmp_path, "this", 1))
    monkeypatch.setenv("PATH", str(tmp_path))
    script(tmp_path, "python3.12", 127)
    with pytest.raises(ConfigurationError, match="--python"):
        standin.find_python(None)
    right = script(tmp_path, "python3", 0)
    assert standin.find_python(None) == right
    with pytest.raises(ConfigurationError, match=r"python3\.12 is no Python"):
        standin.find_python("python3.12")


def test_an_environment_is_made_once_and_a_broken_one_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def install(directory: Path, *requirements: Path, python: str) -> None:
        made.append(directory)
        directory.mkdir(exist_ok=True)
        if len(made) == 1:
            raise ConfigurationError("no network")

    monkeypatch.setattr(standin, "install_set", install)
    monkeypatch.setattr(standin, "find_python", lambda named: "python3.12")
    with pytest.raises(ConfigurationError):
        standin.make_environment(tmp_path, None)
    first, again = (standin.make_environment(tmp_path, None) for _ in range(2))
    assert first == again == made[1] / "bin" / "python" and len(made) == 2


@pytest.mark.parametrize(("ending", "mode"), [("tar.xz", "w:xz"), ("tgz", "w:gz")])
def test_packs_are_unpacked_anew_and_one_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str, mode: Literal["w:xz", "w:gz"]
) -> None:
    (tmp_path / "module.py").write_text("")
    with tarfile.open(tmp_path / f"site.{ending}", mode) as pack:
        pack.add(tmp_path / "module.py", "module.py")
    (tmp_path / "pack-0").mkdir()
    (tmp_path / "pack-0" / "of_before.py").write_text("")
    (site,) = standin.unpack(tmp_path, [tmp_path / f"site.{ending}"])
    assert [path.name for path in site.iterdir()] == ["module.py"]
    assert standin.main(["--pack", str(tmp_path / "none.tar.xz"), "--no-save"]) == 1
    assert "no pack" in capsys.readouterr().err
