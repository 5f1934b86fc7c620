"""The kinds of processes that a server has."""

from collections.abc import Sequence

ROUTER = "router"

_STAGE_MODULE = "sgl_pipeline.pp_runner.stage_process"
# What a command line that has one of these words is.
_KINDS = {
    "::router": ROUTER,
    "grammars.compiler": "grammar compiler",
    "resource_tracker": "resource tracker",
    "::scheduler": "scheduler",
    "detokenizer": "detokenizer",
    "nursery": "nursery",
    "janitor": "janitor",
    "launch_server": "main",
}


def process_kind(command_line: Sequence[str], pid: int) -> str:
    """The kind of a process, a stage's with the worker's number.

    Args:
        command_line: as psutil has it; some processes, such as forks, have replaced theirs by a
            title, which is a single word with blanks.
        pid: names a process of no known kind.
    """
    line = " ".join(command_line)
    words = line.split()
    if _STAGE_MODULE in words:
        return f"stage {words[words.index('--worker') + 1]}"
    return next((kind for word, kind in _KINDS.items() if word in line), f"process {pid}")
