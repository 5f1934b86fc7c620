"""Starts a client of `install.py`'s environments, offline, and says which version it is."""

import os
import subprocess
from pathlib import Path

from benchmark.clients.install import CLIENTS_DIRECTORY
from benchmark.support.engine import EngineFailure
from sgl_pipeline.errors import ConfigurationError

_CLIENT_TIMEOUT_S = 3600  # beside other work on the same cores; alone it takes a minute
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def run_client(name: str, command: list[str], directory: Path) -> None:
    """Runs the program `command[0]` of the client `name` in `directory`.

    Raises:
        ConfigurationError: where the client is not installed.
        EngineFailure: when it fails, with the end of its output, or takes too long.
    """
    path = program(name, command[0])
    try:
        done = subprocess.run(
            [str(path), *command[1:]],
            cwd=directory,
            env=os.environ | _OFFLINE | {"HF_HOME": str(directory / "hugging_face")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_CLIENT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFailure(f"{name} was not done after {_CLIENT_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise EngineFailure(f"{name} failed:\n{done.stdout[-4000:]}")


def program(client: str, program: str) -> Path:
    """Raises ConfigurationError where the client is not installed."""
    path = CLIENTS_DIRECTORY / client / "bin" / program
    if not path.exists():
        raise ConfigurationError(f"{client} is missing; run python -m benchmark.clients.install")
    return path


def version(client: str) -> str:
    """The version of an installed client, else "missing"."""
    packages = CLIENTS_DIRECTORY / client
    for folder in packages.glob(f"lib/python3*/site-packages/{client}-*.dist-info"):
        return folder.name.removeprefix(f"{client}-").removesuffix(".dist-info")
    return "missing"
