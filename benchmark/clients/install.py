"""Installs the clients into virtual environments of their own: `build/clients/<name>`.

Run once by hand, `python -m benchmark.clients.install` (a few minutes); `run.py` then starts them.
Each gets the frozen set in `<name>_requirements.txt`. It must never touch `.venv`.
"""

import subprocess
import sys
import venv
from pathlib import Path

from benchmark.support.command import Command, Options
from benchmark.support.paths import BUILD
from sgl_pipeline.errors import ConfigurationError

CLIENTS = ("lm_eval", "guidellm")
CLIENTS_DIRECTORY = BUILD / "clients"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return Command(__spec__.name, __doc__, saves=False).run(_install_all, argv)


def _install_all(options: Options) -> None:
    for name in CLIENTS:
        install(name)


def install(client: str) -> None:
    """Creates the environment anew and installs its set. Raises ConfigurationError."""
    directory = CLIENTS_DIRECTORY / client
    print(f"Installing {client} into {directory}", flush=True)
    venv.create(directory, clear=True, with_pip=True)
    requirements = Path(__file__).with_name(f"{client}_requirements.txt")
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps"]
    if subprocess.run([*command, "-r", str(requirements)]).returncode != 0:
        raise ConfigurationError(f"{client} could not be installed; pip says why above")


if __name__ == "__main__":
    sys.exit(main())
