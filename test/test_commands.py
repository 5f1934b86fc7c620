"""The command `sgl-pipeline`: what each word runs, and what a mistake reads like."""

import importlib
import re
from pathlib import Path

import pytest

from sgl_pipeline import launch_server
from sgl_pipeline.__main__ import COMMANDS, main
from sgl_pipeline.completion import SHELLS, command_parser
from sgl_pipeline.managers import main_process

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_entry(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name].module).main)


def test_an_unknown_command_is_named_beside_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["srve"]) == 2
    message = capsys.readouterr().err
    assert "no command 'srve'" in message
    assert all(name in message for name in COMMANDS)


def test_without_arguments_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["serve", "--pp", "2"], ["--pp", "2"]])
def test_flags_alone_are_the_servers(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def leave(arguments: list[str]) -> None:
        seen.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(launch_server, "run_and_exit", leave)
    with pytest.raises(SystemExit):
        main(argv)
    assert seen == [["--pp", "2"]]


@pytest.mark.parametrize("shell", SHELLS)
def test_completions_know_commands_and_flags(shell: str) -> None:
    shtab = pytest.importorskip("shtab")
    script = shtab.complete(command_parser(), shell=shell)
    assert all(name in script for name in COMMANDS)
    assert "--prefill-spread-steps" in script or "prefill-spread-steps" in script
    assert "chunked-prefill-size" in script


def test_what_is_missing_is_said_with_the_pins_of_the_set_up() -> None:
    pins = re.findall(r"^[\w-]+==\S+", (ROOT / "requirements/sglang-cpu.txt").read_text(), re.M)
    assert pins and all(pin in main_process._HOW_TO_INSTALL for pin in pins)
