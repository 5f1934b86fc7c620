"""A prefill server, a decode server and SGLang's router before them, on this machine: one command.

`make serve-pd` runs it. The router listens at `--port`; the four ports after it are those of the
two servers, the bootstrap port and that of the router's metrics. The end of one of the three is the
end of all.
"""

import argparse
import functools
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sgl_pipeline.cluster.keys import KEY_VARIABLE
from sgl_pipeline.process_lifetime import child_environment, die_with_parent

HOST = "127.0.0.1"
_POLL_S = 0.2
# For what a server drains, and a little more.
_END_S = 40.0
# A dead prefill server would open the circuit breakers of both; see docs/disaggregation.md.
ROUTER_FLAGS = ("--policy", "cache_aware", "--disable-circuit-breaker")


class Ports(NamedTuple):
    """Ports of this machine."""

    router: int
    prefill: int
    decode: int
    bootstrap: int
    metrics: int  # the router's

    @classmethod
    def from_first(cls, first: int) -> "Ports":
        """Five in a row."""
        return cls(*range(first, first + len(cls._fields)))

    @property
    def servers(self) -> tuple[str, str]:
        """The addresses of the prefill and the decode server."""
        return f"http://{HOST}:{self.prefill}", f"http://{HOST}:{self.decode}"


def server_command(mode: str, port: int, ports: Ports, flags: Sequence[str]) -> list[str]:
    """The command of the prefill or the decode server."""
    command = [sys.executable, "-m", "sgl_pipeline.launch_server", "--host", HOST]
    command += ["--port", str(port), "--disaggregation-mode", mode]
    return [*command, "--disaggregation-bootstrap-port", str(ports.bootstrap), *flags]


def router_command(ports: Ports, flags: Sequence[str]) -> list[str]:
    """The command of SGLang's router."""
    prefill, decode = ports.servers
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", prefill, str(ports.bootstrap), "--decode", decode]
    command += ["--host", HOST, "--port", str(ports.router)]
    command += ["--prometheus-host", HOST, "--prometheus-port", str(ports.metrics)]
    return [*command, *ROUTER_FLAGS, *flags]


def router_environment(folder: str | None) -> dict[str, str]:
    """This environment, with the router's own folder, if it has one, on Python's path."""
    paths = filter(None, [folder, os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Group:
    """Processes that end together, and with this one."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._processes.append(
            subprocess.Popen(
                command,
                env=environment,
                # Ctrl-C is ours alone: the router ends before the servers.
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        )

    @property
    def ended(self) -> bool:
        """True if any has ended."""
        return any(process.poll() is not None for process in self._processes)

    def end(self) -> None:
        """Asks all to end, the last one first, and ends what does not."""
        for process in reversed(self._processes):
            process.terminate()
        end_s = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_healthy(url: str) -> bool:
    """True if a server answers `GET /health` with 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def has_both(router: str) -> bool:
    """True if a router has found both servers, which takes it some seconds."""
    try:
        with urllib.request.urlopen(f"{router}/workers", timeout=5.0) as answer:
            workers = json.load(answer)["workers"]
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
    return sum(worker["is_healthy"] for worker in workers) == 2


class StopRequest:
    """Notes Ctrl-C or a SIGTERM, which from now on interrupt nothing."""

    def __init__(self) -> None:
        self.has_come = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.has_come = True


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C, a SIGTERM, or the end of one of the three. Returns the exit code."""
    options = _parser().parse_args(argv)
    stop, group = StopRequest(), Group()
    try:
        _start(options, group, stop)
        _wait(group, stop, lambda: False)
    finally:
        is_asked, has_failed = stop.has_come, group.ended
        group.end()
    return int(has_failed and not is_asked)


def _start(options: argparse.Namespace, group: Group, stop: StopRequest) -> None:
    """Starts the servers, and the router once both are there; says when it serves."""
    ports = Ports.from_first(options.port)
    key = os.environ.get(KEY_VARIABLE) or secrets.token_hex(32)
    for mode, port in (("prefill", ports.prefill), ("decode", ports.decode)):
        flags = [*options.flags, *shlex.split(getattr(options, mode))]
        command = server_command(mode, port, ports, flags)
        group.start(command, child_environment(**{KEY_VARIABLE: key}))
    if not _wait(group, stop, lambda: all(is_healthy(url) for url in ports.servers)):
        return
    command = router_command(ports, shlex.split(options.router))
    group.start(command, router_environment(options.router_folder))
    router = f"http://{HOST}:{ports.router}"
    if _wait(group, stop, lambda: has_both(router)):
        print(f"Router: {router}", flush=True)


def _wait(group: Group, stop: StopRequest, condition: Callable[[], bool]) -> bool:
    """Waits for `condition`; False where one of the group has ended or all shall end before."""
    while not (group.ended or stop.has_come):
        if condition():
            return True
        time.sleep(_POLL_S)
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-pd", description=__doc__)
    parser.add_argument("--port", type=int, default=30000, help="Of the router; four more follow.")
    parser.add_argument("--prefill", default="", help="Flags of the prefill server alone.")
    parser.add_argument("--decode", default="", help="Flags of the decode server alone.")
    parser.add_argument("--router", default="", help="Flags of the router.")
    parser.add_argument("--router-folder", help="Where the router is, if not on Python's path.")
    parser.add_argument("flags", nargs="*", help="After --: flags of both servers.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
