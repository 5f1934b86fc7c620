"""Says in one line that FlashInfer compiles, which takes minutes at the first start on a machine.

FlashInfer runs ninja even if there is nothing to compile; ninja then ends in milliseconds. So only
a ninja that is seen twice compiles. Nothing of FlashInfer is changed.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_INTERVAL_S = 1.0
NOTICE = "sgl_pipeline: compiling FlashInfer's kernels for this GPU, once; it takes minutes ..."

_PROCESSES = Path("/proc")
_COMPILES = "ninja"


class CompileNotice:
    """Writes `NOTICE` to stderr at most once, however often it watches."""

    def __init__(self) -> None:
        self._is_said = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks once in `LOOK_INTERVAL_S` whether the code inside compiles."""
        if self._is_said:
            yield
            return
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended,), name="compile-notice")
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _watch(self, ended: threading.Event) -> None:
        before: set[int] = set()
        while not ended.wait(LOOK_INTERVAL_S):
            running = _children_that_compile()
            if running & before:
                self._is_said = True
                print(NOTICE, file=sys.stderr, flush=True)
                return
            before = running


def _children_that_compile() -> set[int]:
    """Process ids of this process's children whose name is ninja."""
    own_id = os.getpid()
    found = set()
    for path in _PROCESSES.glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue  # it has ended
        # "id (name) state parent ...", and a name may hold anything.
        head, _, fields = text.rpartition(")")
        parent_id = int(fields.split()[1])
        if parent_id == own_id and head.partition("(")[2] == _COMPILES:
            found.add(int(path.parent.name))
    return found
