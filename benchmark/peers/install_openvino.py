"""Installs OpenVINO GenAI and its converter in an environment of its own: `build/peers/openvino`.

Run once by hand, `python -m benchmark.peers.install_openvino` (two to five minutes);
`make_openvino` then converts with it, and `engines.py` starts `openvino_serve` with its Python.
"""

import sys
from pathlib import Path

from benchmark.support.command import Command, Options
from benchmark.support.environments import install_set
from benchmark.support.paths import OPENVINO_DIRECTORY
from sgl_pipeline.errors import ConfigurationError

_REQUIREMENTS = Path(__file__).with_name("openvino_requirements.txt")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return Command(__spec__.name, __doc__, saves=False).run(_install_ours, argv)


def _install_ours(options: Options) -> None:
    install_set(OPENVINO_DIRECTORY, _REQUIREMENTS)
    print(f"Done: {openvino_python(OPENVINO_DIRECTORY)}")


def openvino_python(directory: Path) -> Path:
    """The Python of an installation.

    Raises ConfigurationError where it is missing.
    """
    if not any(directory.glob("lib/python3*/site-packages/openvino_genai")):
        raise ConfigurationError(
            f"OpenVINO GenAI is not installed in {directory}; "
            "run python -m benchmark.peers.install_openvino"
        )
    return directory / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main())
