"""Virtual environments of other engines and clients, each with a frozen set of its own."""

import importlib.util
import subprocess
import venv
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError


def install_set(directory: Path, requirements: Path) -> None:
    """Creates the environment `directory` anew and installs `requirements`, as they are written.

    Raises ConfigurationError: before it begins, where this Python cannot make environments.
    """
    if importlib.util.find_spec("ensurepip") is None:
        raise ConfigurationError("this Python has no ensurepip; install it (Debian: python3-venv)")
    print(f"Installing {requirements.name} into {directory}", flush=True)
    venv.create(directory, clear=True, with_pip=True)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps"]
    if subprocess.run([*command, "-r", str(requirements)]).returncode != 0:
        raise ConfigurationError(f"{requirements.name} could not be installed; pip says why above")
