"""The folder in which this user's processes keep files for later starts."""

import os
from pathlib import Path


def user_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/sgl_pipeline`, or `~/.cache/sgl_pipeline`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "sgl_pipeline"


def make_private(directory: Path) -> None:
    """Creates `directory` where it is missing; only this user may own it or write to it.

    Raises OSError where it cannot be made, PermissionError where others could have put into it
    what is trusted later.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{directory} belongs to or is writable by others, so nothing in it is trusted; "
            f"run `chmod 700 {directory}`"
        )
