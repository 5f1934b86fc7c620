"""Runs a command on a host of namespaces: `python -m benchmark.hosts.enter HOST DIRECTORY ...`.

Beside the network the host has its own name, shared memory, directory for temporary files and, if
asked, its own monotonic clock: nothing but the network joins processes of two hosts, files that
both may read apart. The command takes this process's place and dies with whoever started it.
"""

import argparse
import ctypes
import os
import signal
import socket
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x40000000,
)
_CLONE_NEWTIME = 0x80
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _join(path: str, kind: int) -> None:
    file = os.open(path, os.O_RDONLY)
    _check(_libc.setns(file, kind), f"entering {path}")
    os.close(file)


def enter(namespace: str, name: str, directory: Path, clock_offset_s: float) -> None:
    """Makes this process one of the host: afterwards `/dev/shm` and `directory` are empty."""
    _join(f"/run/netns/{namespace}", _CLONE_NEWNET)
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC), "unshare")
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
    for place in ("/dev/shm", os.fspath(directory)):
        _check(_libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, None), f"mounting {place}")
    socket.sethostname(name)
    if clock_offset_s:
        _check(_libc.unshare(_CLONE_NEWTIME), "unshare of the clock")
        seconds, nanoseconds = divmod(round(clock_offset_s * 1e9), 10**9)
        Path("/proc/self/timens_offsets").write_text(
            f"monotonic {seconds} {nanoseconds}\nboottime {seconds} {nanoseconds}\n"
        )
        _join("/proc/self/ns/time_for_children", _CLONE_NEWTIME)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmark.hosts.enter")
    parser.add_argument("namespace")
    parser.add_argument("name")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--clock-offset-s", type=float, default=0.0)
    parser.add_argument("--cores", default="")
    parser.add_argument("--parent", type=int, help="its end ends the command")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != options.parent:
        return
    enter(options.namespace, options.name, options.directory, options.clock_offset_s)
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    os.environ["TMPDIR"] = os.fspath(options.directory)
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()
