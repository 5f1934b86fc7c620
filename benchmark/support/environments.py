"""Virtual environments of other engines and clients, each with a frozen set of its own."""

import importlib.util
import subprocess
import venv
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError


def install_set(directory: Path, *requirements: Path) -> None:
    """Creates the environment `directory` anew and installs the files as they are written.

    Raises ConfigurationError: before it begins, where this Python cannot make environments.
    """
    if importlib.util.find_spec("ensurepip") is None:
        raise ConfigurationError("this Python has no ensurepip; install it (Debian: python3-venv)")
    names = " and ".join(path.name for path in requirements)
    print(f"Installing {names} into {directory}", flush=True)
    venv.create(directory, clear=True, with_pip=True)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps"]
    command += [word for path in requirements for word in ("-r", str(path))]
    if subprocess.run(command).returncode != 0:
        raise ConfigurationError(f"{names} could not be installed; pip says why above")
