"""The command `sgl-pipeline`, or `python -m sgl_pipeline`: one word for each task.

Without such a word, all arguments are the server's: `sgl-pipeline --pp 4`.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_pipeline import __version__


@dataclass(frozen=True, slots=True)
class Command:
    """`module` has the function `main(argv) -> exit code`, and is imported only when it runs."""

    module: str
    text: str


COMMANDS = {
    "serve": Command("sgl_pipeline.launch_server", "serve a model (--help lists all flags)"),
    "plan": Command(
        "sgl_pipeline.managers.planning.plan_command", "show layer splits; starts no server"
    ),
    "fit": Command(
        "sgl_pipeline.managers.planning.fit_command", "measure what a layer and the head cost here"
    ),
    "simulate": Command(
        "sgl_pipeline.simulator.__main__", "serve a load in virtual time, or tune a policy for it"
    ),
    "capacity": Command(
        "sgl_pipeline.capacity.command", "find the highest request rate that holds latency targets"
    ),
    "bench": Command(
        "sgl_pipeline.managers.bench_command",
        "put a load on a running server (SGLang's bench_serving and its flags)",
    ),
    "doctor": Command(
        "sgl_pipeline.managers.doctor.command",
        "compare hosts and measure their links before a server runs on them",
    ),
    "completion": Command("sgl_pipeline.completion", "print the completions for a shell"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code, 2 for an unknown one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name in COMMANDS:
        arguments = arguments[1:]
    elif name.startswith("-"):
        name = "serve"
    else:
        print(f"sgl-pipeline: there is no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    if name == "serve":
        from sgl_pipeline.launch_server import run_and_exit

        run_and_exit(arguments)
    return int(importlib.import_module(COMMANDS[name].module).main(arguments) or 0)


def _usage() -> str:
    lines = [f"  {name:<12}{command.text}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: sgl-pipeline COMMAND [flags]", "", *lines, "", "  --version"])


if __name__ == "__main__":
    sys.exit(main())
