"""The reason why the scheduler process has ended: a file in the run directory, for processes that
outlive it.

Upstream's main process learns that its scheduler is gone, never why.
"""

from pathlib import Path

_FILE = "last_words"


def write_last_words(run_directory: str, reason: str) -> None:
    Path(run_directory, _FILE).write_text(reason, encoding="utf-8")


def read_last_words(run_directory: str) -> str | None:
    """The words; None if the scheduler process lives, or was killed."""
    try:
        return Path(run_directory, _FILE).read_text(encoding="utf-8")
    except OSError:
        return None
