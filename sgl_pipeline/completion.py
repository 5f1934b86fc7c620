"""`sgl-pipeline completion bash`: prints the script by which a shell completes commands and flags.

The scripts are shtab's, made from the commands' own parsers. Making them imports SGLang, whose
flags `serve` has too; completing does not.
"""

import argparse
import sys
from collections.abc import Sequence

from sgl_pipeline.__main__ import COMMANDS
from sgl_pipeline.capacity.flags import make_parser as capacity_parser
from sgl_pipeline.managers.command_line.server_args import make_parser as serve_parser
from sgl_pipeline.managers.doctor.command import make_parser as doctor_parser
from sgl_pipeline.managers.planning.fit_command import make_parser as fit_parser
from sgl_pipeline.managers.planning.plan_command import make_parser as plan_parser
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim
from sgl_pipeline.simulator.__main__ import make_parser as simulate_parser

SHELLS = ("bash", "zsh", "tcsh")
_PARSERS = {
    "serve": serve_parser,
    "plan": plan_parser,
    "fit": fit_parser,
    "simulate": simulate_parser,
    "capacity": capacity_parser,
    "doctor": doctor_parser,
}


def main(argv: Sequence[str]) -> int:
    """Prints the script of the shell that `argv` names."""
    parser = argparse.ArgumentParser(
        prog="sgl-pipeline completion",
        description='Prints completions: eval "$(sgl-pipeline completion bash)"',
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(argv).shell
    try:
        import shtab
    except ImportError:
        print("sgl-pipeline completion needs shtab: pip install shtab", file=sys.stderr)
        return 1
    install_torchvision_shim()
    print(shtab.complete(command_parser(), shell=shell))
    return 0


def command_parser() -> argparse.ArgumentParser:
    """All commands as one parser; for completion alone, never to parse."""
    parser = argparse.ArgumentParser(prog="sgl-pipeline")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        make = _PARSERS.get(name)
        parents = [] if make is None else [make()]
        commands.add_parser(name, help=command.text, parents=parents, add_help=not parents)
    return parser
