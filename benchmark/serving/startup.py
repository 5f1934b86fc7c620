"""Measures the time to a server's first answer, started and restarted after Ctrl-C, and the work of
its processes when it is idle.

    python -m benchmark.serving.startup

Run it on a quiet machine: importing SGLang is most of a start, and takes all cores.
"""

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

import psutil

from benchmark.support.command import Command, Options, Report, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.process_kinds import process_kind

_REQUEST = b'{"text": "What is 17 + 25?", "sampling_params": {"max_new_tokens": 4}}'
_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.05
_SETTLING_S = 3.0


@dataclasses.dataclass(frozen=True)
class Start:
    """From the command to the first answer, and from Ctrl-C to the end of the last process.
    `idle_cpu` is the share of a core that each process took, by what it is."""

    first_answer_s: float
    stop_s: float
    idle_cpu: dict[str, float]


def measure(flags: Sequence[str], port: int, idle_s: float) -> Start:
    """One server from start to end; it is left idle for `idle_s` once it has answered."""
    command = [sys.executable, "-m", "sgl_pipeline.launch_server", "--port", str(port), *flags]
    started_s = time.monotonic()
    with psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _answers(port):
                if server.poll() is not None or time.monotonic() - started_s > _TIMEOUT_S:
                    raise SystemExit(f"{command} did not come up")
                time.sleep(_POLL_INTERVAL_S)
            first_answer_s = time.monotonic() - started_s
            processes = [server, *server.children(recursive=True)]
            idle_cpu = _cpu_shares(processes, idle_s) if idle_s else {}
            stopped_s = time.monotonic()
            server.send_signal(signal.SIGINT)
            server.wait(_TIMEOUT_S)
            psutil.wait_procs(processes, _TIMEOUT_S)
            return Start(first_answer_s, time.monotonic() - stopped_s, idle_cpu)
        finally:
            if server.poll() is None:
                server.kill()


def _answers(port: int) -> bool:
    url = f"http://127.0.0.1:{port}/generate"
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, _REQUEST, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _cpu_shares(processes: Sequence[psutil.Process], seconds: float) -> dict[str, float]:
    time.sleep(_SETTLING_S)
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(seconds)
    return {
        f"{process_kind(process.cmdline(), process.pid)} ({process.pid})": (
            sum(process.cpu_times()[:2]) - spent_s
        )
        / seconds
        for process, spent_s in zip(processes, before, strict=True)
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31900)
    command.add("--pp", default="4")
    command.add("--idle-s", type=float, default=10.0, help="of the last round; 0: none")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    load_before = f"{os.getloadavg()[0]:.2f}"
    starts = []
    # Each round but the first is a restart, on the port that Ctrl-C has just freed.
    with progress(options.rounds, "starts") as bar:
        for number in range(options.rounds):
            idle_s = options.idle_s if number == options.rounds - 1 else 0.0
            starts.append(measure(("--pp", options.pp), options.port, idle_s))
            bar.update()
    rows = [
        [str(number), f"{start.first_answer_s:.1f}", f"{start.stop_s:.1f}"]
        for number, start in enumerate(starts, 1)
    ]
    times = markdown_table(["start", "first answer after s", "Ctrl-C to the end s"], rows)
    shares = [[name, f"{share:.2%}"] for name, share in starts[-1].idle_cpu.items()]
    idle = markdown_table(["idle process", "of a core"], shares) if shares else ""
    median_s = statistics.median(start.first_answer_s for start in starts)
    facts = {
        "stages": options.pp,
        "load before": load_before,
        "median first answer": f"{median_s:.1f} s",
    }
    return Report(
        name="startup",
        texts=[times, idle],
        facts={"run": facts},
        record={"starts": [dataclasses.asdict(start) for start in starts]},
    )


if __name__ == "__main__":
    sys.exit(main())
