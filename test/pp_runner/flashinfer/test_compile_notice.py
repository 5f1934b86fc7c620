"""The one line that is shown while FlashInfer compiles, and only then."""

import importlib
import itertools
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from support.bare_machine import BareMachine
from support.real_flashinfer import import_flashinfer

from sgl_pipeline.pp_runner.flashinfer import compile_notice, kernel_builds
from sgl_pipeline.pp_runner.flashinfer.compile_notice import NOTICE, CompileNotice
from sgl_pipeline.pp_runner.flashinfer.kernel_builds import building_kernels

pytestmark = pytest.mark.multiproc


class Looks:
    """What each look at this process's children has found."""

    def __init__(self) -> None:
        self.look = compile_notice._children_that_compile
        self.found: list[set[int]] = []

    def __call__(self) -> set[int]:
        self.found.append(self.look())
        return self.found[-1]

    def wait(self, number: int) -> None:
        """For so many further looks."""
        wanted, deadline_s = len(self.found) + number, time.monotonic() + 60
        while len(self.found) < wanted:
            assert time.monotonic() < deadline_s, "no look comes"
            time.sleep(0.005)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(compile_notice, "_children_that_compile", looks)
    monkeypatch.setattr(compile_notice, "LOOK_INTERVAL_S", 0.01)
    return looks


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BareMachine:
    """One whose ninja runs until the pipe `go` has a line."""
    machine = BareMachine(tmp_path, monkeypatch)
    os.mkfifo(tmp_path / "go")
    machine.add_command("ninja", f"read -r line < {tmp_path}/go")
    return machine


def let_go(machine: BareMachine) -> None:
    (machine.root / "go").write_text("line\n")


def wait_for_the_notice() -> None:
    """The thread that looks ends when it has said it."""
    for thread in threading.enumerate():
        if thread.name == "compile-notice":
            thread.join(60)
            assert not thread.is_alive(), "no ninja was seen twice"


def test_a_ninja_that_stays_is_reported_once(
    machine: BareMachine, looks: Looks, capsys: pytest.CaptureFixture[str]
) -> None:
    notice = CompileNotice()
    with notice.watching(), subprocess.Popen("ninja"):
        wait_for_the_notice()
        let_go(machine)
    assert capsys.readouterr().err == f"{NOTICE}\n"
    num_looks = len(looks.found)
    with notice.watching(), subprocess.Popen("ninja"):
        let_go(machine)
    assert capsys.readouterr().err == ""
    assert len(looks.found) == num_looks


@pytest.mark.parametrize("script", ["read -r line < {go}", "ninja\nexit 0"])
def test_nothing_is_said_of_other_children_and_of_their_ninjas(
    script: str, machine: BareMachine, looks: Looks, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.add_command("stage", script.format(go=machine.root / "go"))
    with CompileNotice().watching(), subprocess.Popen("stage"):
        looks.wait(5)
        let_go(machine)
    assert capsys.readouterr().err == ""
    assert not any(looks.found)


def test_nothing_is_said_of_ninjas_that_are_seen_once(
    looks: Looks, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have had nothing to do."""
    process_ids = itertools.count(2)
    looks.look = lambda: {next(process_ids)}
    with CompileNotice().watching():
        looks.wait(5)
    assert capsys.readouterr().err == ""


def test_what_flashinfer_itself_starts_is_seen(
    machine: BareMachine,
    looks: Looks,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its own function around ninja; it starts nothing else to compile with."""
    package = import_flashinfer().__name__
    run_ninja = importlib.import_module(f"{package}.jit.cpp_ext").run_ninja
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")  # asks for no compiler
    monkeypatch.setattr(kernel_builds, "_notice", CompileNotice())

    def go_on() -> None:
        wait_for_the_notice()
        let_go(machine)

    helper = threading.Thread(target=go_on)
    with building_kernels():
        helper.start()
        run_ninja(machine.root / "build", machine.root / "build.ninja", verbose=False)
    helper.join()
    assert capsys.readouterr().err == f"{NOTICE}\n"
