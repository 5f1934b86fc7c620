"""Installs the clients into virtual environments of their own: `build/clients/<name>`.

Run once by hand, `python -m benchmark.clients.install` (a few minutes); `run.py` then starts them.
Each gets the frozen set in `<name>_requirements.txt`. It must never touch `.venv`.
"""

import sys
from pathlib import Path

from benchmark.support.command import Command, Options
from benchmark.support.environments import install_set
from benchmark.support.paths import BUILD

CLIENTS = ("lm_eval", "guidellm")
CLIENTS_DIRECTORY = BUILD / "clients"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return Command(__spec__.name, __doc__, saves=False).run(_install_all, argv)


def _install_all(options: Options) -> None:
    for name in CLIENTS:
        requirements = Path(__file__).with_name(f"{name}_requirements.txt")
        install_set(CLIENTS_DIRECTORY / name, requirements)


if __name__ == "__main__":
    sys.exit(main())
