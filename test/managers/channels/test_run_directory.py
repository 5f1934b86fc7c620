import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.channels.run_directory import RunDirectory, sweep_stale

# Makes a run directory, says its path, and lives until its input ends.
OWNER = """
import os, sys
from sgl_pipeline.managers.channels.run_directory import RunDirectory
directory = RunDirectory()
print(directory.path, oct(os.stat(directory.path).st_mode & 0o777), flush=True)
if sys.stdin.readline():
    directory.remove()
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary directory: pytest's own are too long for Unix sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


class Owner:
    """A process with a run directory."""

    def __init__(self, parent: Path) -> None:
        self._ended, held_by_both = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env=dict(os.environ, TMPDIR=str(parent)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[held_by_both],
        )
        os.close(held_by_both)
        assert self.process.stdout is not None
        path, self.mode = self.process.stdout.readline().split()
        self.path = Path(path)

    def wait_for_janitor(self) -> None:
        """Returns when the process and its janitor, which inherits all its files, have ended."""
        assert os.read(self._ended, 1) == b""
        os.close(self._ended)


@pytest.mark.multiproc
def test_only_the_owner_can_enter_it_and_it_can_be_removed(parent: Path) -> None:
    owner = Owner(parent)
    assert (owner.path.parent, owner.mode) == (parent, "0o700")
    owner.process.communicate("remove\n")
    owner.wait_for_janitor()
    assert list(parent.iterdir()) == []


@pytest.mark.multiproc
def test_it_goes_away_when_its_owner_is_killed(parent: Path) -> None:
    owner = Owner(parent)
    (owner.path / "socket").touch()
    owner.process.kill()
    owner.process.communicate()
    owner.wait_for_janitor()
    assert list(parent.iterdir()) == []


@pytest.mark.multiproc
def test_a_sweep_spares_the_directories_of_living_servers(parent: Path) -> None:
    owner = Owner(parent)
    sweep_stale(str(parent))
    assert owner.path.exists()
    owner.process.communicate("")
    owner.wait_for_janitor()


def test_a_sweep_removes_what_a_dead_server_left(parent: Path) -> None:
    stale, being_made = parent / "sgl-pipeline-dead", parent / "sgl-pipeline-new"
    stale.mkdir()
    (stale / "lock").touch()
    being_made.mkdir()
    sweep_stale(str(parent))
    assert list(parent.iterdir()) == [being_made]


def test_a_path_too_long_for_sockets_is_refused(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = parent / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="TMPDIR"):
        RunDirectory()
    assert list(deep.iterdir()) == []
