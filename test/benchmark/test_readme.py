"""benchmark/README.md has every command, and each says what it does."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmark"
# Processes that a command starts.
STARTED = {"faulty_server", "faulty_nursery", "page_viewers", "load_client", "enter", "switch"}
STARTED |= {"sglang_cpu", "transformers_serve", "openvino_serve"}
COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted(FOLDER.glob("*/*.py"))
    if '\nif __name__ == "__main__"' in path.read_text() and path.stem not in {*STARTED, "__main__"}
]


def test_every_command_is_in_its_folders_row() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", (FOLDER / "README.md").read_text(), re.M)
    named = {
        f"benchmark.{folder}.{command}"
        for folder, commands in rows
        for command in re.findall(r"`(\w+)`", commands)
    }
    assert named == set(COMMANDS)


def test_every_folder_has_a_row() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    rows = re.findall(r"^\| `(\w+)/` \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted(folders - {"support"})


@pytest.mark.parametrize("name", [one for one in COMMANDS if ".demo_model." not in one])
def test_the_help_of_a_command_is_its_docstring(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    help_text = capsys.readouterr().out
    assert module.__doc__ is not None
    assert module.__doc__.splitlines()[0] in help_text.replace("\n", " ")
