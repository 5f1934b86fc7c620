"""Installs the clients into virtual environments of their own: `build/clients/<name>`.

Run once by hand, `python -m benchmark.clients.install` (a few minutes); `run.py` then starts them.
Each gets the frozen set in `<name>_requirements.txt`. It must never touch `.venv`.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

CLIENTS = ("lm_eval", "guidellm")
CLIENTS_DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "clients"


def install(client: str) -> None:
    """Creates the environment anew and installs its set. Raises CalledProcessError."""
    directory = CLIENTS_DIRECTORY / client
    print(f"Installing {client} into {directory}", flush=True)
    venv.create(directory, clear=True, with_pip=True)
    requirements = Path(__file__).with_name(f"{client}_requirements.txt")
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps"]
    subprocess.run([*command, "-r", str(requirements)], check=True)


if __name__ == "__main__":
    # No options but --help, which must not install.
    argparse.ArgumentParser(
        prog="python -m benchmark.clients.install", description=__doc__
    ).parse_args()
    try:
        for name in CLIENTS:
            install(name)
    except subprocess.CalledProcessError as error:
        sys.exit(f"install: error: {error}")
