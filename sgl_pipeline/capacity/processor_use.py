"""The processor time of a server on this host, by kind of process, and of its clients.

Where stages compute on the cores on which the other processes run as well, this says what the
others took.
"""

import contextlib
import time
from collections.abc import Sequence

import msgspec
import psutil

_FRONT, _CLIENTS, _OTHERS = "front", "clients", "others"
# By what is in the title or the command line of a process.
_KINDS = {
    "sgl_pipeline::scheduler": "scheduler",
    "sglang::detokenizer": "detokenizer",
    "stage_process": "stages",
}


class ProcessorUse(msgspec.Struct, frozen=True):
    """Seconds of user and system time within `duration_s`, by kind of process.

    `front` is the server's main process: HTTP and the tokenizer. `clients` is the process that
    measures, `others` are the processes of the server that do nothing while requests are served.
    """

    duration_s: float
    seconds: dict[str, float]

    @property
    def cores(self) -> dict[str, float]:
        """The mean number of cores that each kind took."""
        return {kind: seconds / self.duration_s for kind, seconds in self.seconds.items()}

    @classmethod
    def total(cls, uses: Sequence["ProcessorUse"]) -> "ProcessorUse":
        """The sum of several measurements."""
        kinds = [kind for one in uses for kind in one.seconds]
        seconds = {
            kind: sum(one.seconds.get(kind, 0.0) for one in uses) for kind in dict.fromkeys(kinds)
        }
        return cls(sum(one.duration_s for one in uses), seconds)


class ProcessorMeter:
    """Measures from when it is made. Raises psutil.NoSuchProcess where the server has ended.

    Args:
        server_pid: of the server's main process.
    """

    def __init__(self, server_pid: int) -> None:
        self._server = psutil.Process(server_pid)
        self._began_s = time.monotonic()
        self._before = self._busy_s()

    def used(self) -> ProcessorUse:
        """Until now, without processes that have ended."""
        seconds: dict[str, float] = {}
        for (kind, pid), busy_s in self._busy_s().items():
            spent_s = busy_s - self._before.get((kind, pid), 0.0)
            seconds[kind] = seconds.get(kind, 0.0) + spent_s
        return ProcessorUse(time.monotonic() - self._began_s, seconds)

    def _busy_s(self) -> dict[tuple[str, int], float]:
        """Processor seconds of each process since it began, by kind and id."""
        own = psutil.Process()
        found = {(_CLIENTS, own.pid): own, (_FRONT, self._server.pid): self._server}
        for process in self._server.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[_kind(" ".join(process.cmdline())), process.pid] = process
        busy_s = {}
        for place, process in found.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                busy_s[place] = float(times.user + times.system)
        return busy_s


def _kind(title: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in title), _OTHERS)
