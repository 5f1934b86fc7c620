"""Virtual environments of other engines and clients, each with a frozen set of its own."""

import subprocess
import sys
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError


def install_set(directory: Path, *requirements: Path, python: str = sys.executable) -> None:
    """Creates the environment `directory` anew and installs the files as they are written.

    Args:
        python: the program whose environment it is.

    Raises ConfigurationError: before it begins, where this Python cannot make environments.
    """
    if subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode != 0:
        raise ConfigurationError(f"{python} has no ensurepip; install it (Debian: python3-venv)")
    names = " and ".join(path.name for path in requirements)
    print(f"Installing {names} into {directory}", flush=True)
    subprocess.run([python, "-m", "venv", "--clear", str(directory)], check=True)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps"]
    command += [word for path in requirements for word in ("-r", str(path))]
    if subprocess.run(command).returncode != 0:
        raise ConfigurationError(f"{names} could not be installed; pip says why above")
