"""A process that is not a descendant of the server's main process, and yet ends with it.

Upstream kills all descendants of the main process. A detached child has init as its parent; its
standard input, which only the main process holds open, ends with that.
"""

import os
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import TypeVar

import msgspec

Setup = TypeVar("Setup", bound=msgspec.Struct)


class DetachedChild:
    """Both ends of a child's pipes, as its starter has them.

    Args:
        module: runs as `python -m`, and calls `detach` first.
        setup: what the child is started with: a line of JSON on its standard input.
    """

    def __init__(
        self, module: str, setup: msgspec.Struct, environment: Mapping[str, str] | None = None
    ) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        _children.add(self)
        self._input.write(msgspec.json.encode(setup) + b"\n")
        process.wait()  # it has forked, and this was the parent

    def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when the child has ended."""
        self._input.write(data)

    def close_input(self) -> None:
        """Lets the child know that it is to end."""
        self._input.close()

    def has_output(self, limit_s: float | None) -> bool:
        """Waits up to `limit_s` (None: without end); True if the child has written something or has
        ended."""
        return bool(select.select([self._output], [], [], limit_s)[0])

    def read_line(self) -> str:
        """The next line, waited for, without spaces around it; "" when the child has ended."""
        return self._output.readline().decode(errors="replace").strip()

    def let_go(self) -> None:
        """Closes both pipes."""
        self._input.close()
        self._output.close()


# A child's standard input stands for the life of this process, not of its forks.
_children: "weakref.WeakSet[DetachedChild]" = weakref.WeakSet()


def _let_all_go() -> None:
    for child in [*_children]:
        child.let_go()


os.register_at_fork(after_in_child=_let_all_go)


def detach(kind: type[Setup]) -> tuple[Setup, int]:
    """Detaches this process from its starter; what it was started with, and the file descriptor
    that can be read when the starter has written something or has ended."""
    descriptor = sys.stdin.fileno()
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as lines:
        setup = msgspec.json.decode(lines.readline(), type=kind)
    if os.fork():
        os._exit(0)
    os.setsid()
    return setup, descriptor
