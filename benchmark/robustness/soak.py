"""Lets many clients ask all sorts of things for minutes; a third of the requests set out to leave.

    python -m benchmark.robustness.soak --clients 200 --duration-s 120

Run by hand. Afterwards every page must be back, no request may be stuck, none may have failed, and
the memory of every process must have stayed flat since the warm-up; otherwise the exit code is 1.
"""

import asyncio
import dataclasses
import shlex
import sys
import time
from typing import Any

import psutil
import requests

from benchmark.robustness.process_memory import MemorySeries
from benchmark.robustness.soak_clients import SoakClients
from benchmark.support.command import Command, Options, Report, at_least_one
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine
from benchmark.support.engines import running
from benchmark.support.paths import SCRATCH
from sgl_pipeline.args import require

DEFAULT_FLAGS = "--pp 2 --dtype float32 --enable-priority-scheduling --default-priority-value 0"
_PAGES_TIMEOUT_S = 10.0
_PROGRESS_INTERVAL_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One check of a soak, and what the check saw."""

    what: str
    seen: str
    passed: bool


class Soak:
    """One soak of a server that is up. `process` is its main process, None when not ours."""

    def __init__(self, base_url: str, clients: SoakClients, process: psutil.Process | None) -> None:
        self._base_url = base_url
        self._clients = clients
        self._process = process
        self._next_progress_s = 0.0
        self.memory = MemorySeries()

    def run(self, duration_s: float) -> None:
        """Blocks until the last request has ended; prints a line now and then."""
        asyncio.run(self._clients.run(duration_s, self._every_second))

    def verdicts(self, warm_up_s: float, most_growth: float) -> list[Verdict]:
        """To be asked after `run`."""
        outcomes = self._clients.tally.outcomes
        state = self._idle_state()
        pages = f"{state['free_pages']} of {state['total_pages']}"
        busy = state["num_running_requests"] + state["num_waiting_requests"]
        found = [
            Verdict("requests that failed", str(outcomes["failed"]), not outcomes["failed"]),
            Verdict("requests stuck at the client", str(outcomes["stuck"]), not outcomes["stuck"]),
            Verdict("requests left in the server", str(busy), busy == 0),
            Verdict("pages free again", pages, state["free_pages"] == state["total_pages"]),
        ]
        for name, growth in self.memory.growth(warm_up_s).items():
            seen = f"{growth.after_warm_up_mib:.0f} -> {growth.last_mib:.0f} MiB"
            seen += f", {growth.slope_mib_per_minute:+.1f} MiB/min"
            found.append(Verdict(f"memory of {name}", seen, growth.is_flat(most_growth)))
        return found

    def _every_second(self, elapsed_s: float) -> None:
        if self._process is not None:
            self.memory.sample(self._process, elapsed_s)
        if elapsed_s >= self._next_progress_s:
            self._next_progress_s += _PROGRESS_INTERVAL_S
            state = server_state(self._base_url)
            outcomes = self._clients.tally.outcomes.items()
            told = ", ".join(f"{number} {what}" for what, number in outcomes if number)
            memory = ", ".join(
                f"{name} {samples[-1][1]:.0f}" for name, samples in self.memory.samples.items()
            )
            print(
                f"{elapsed_s:4.0f} s: {told or 'none ended'}; "
                f"{state['num_running_requests']} running, "
                f"{state['num_waiting_requests']} waiting; MiB: {memory}",
                flush=True,
            )

    def _idle_state(self) -> dict[str, Any]:
        """The server's state once it has nothing to do, or what it says after a while."""
        deadline_s = time.monotonic() + _PAGES_TIMEOUT_S
        while True:
            state = server_state(self._base_url)
            is_idle = not state["num_running_requests"] and not state["num_waiting_requests"]
            if is_idle and state["free_pages"] == state["total_pages"]:
                return state
            if time.monotonic() > deadline_s:
                return state
            time.sleep(0.2)


def server_state(base_url: str) -> dict[str, Any]:
    """The scheduler's part of /server_info; `free_pages` counts the evictable ones."""
    response = requests.get(f"{base_url}/server_info", timeout=60)
    response.raise_for_status()
    state: dict[str, Any] = response.json()["internal_states"][0]
    return state


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31950)
    add = command.add
    add("--clients", type=at_least_one, default=200, help="at once (default: 200)")
    add("--duration-s", type=float, default=120.0, help="seconds of load (default: 120)")
    add(
        "--departing-share",
        type=float,
        default=1 / 3,
        help="of the requests, less the probes (default: 1/3)",
    )
    add("--warm-up-s", type=float, default=40.0, help="before memory is judged (default: 40)")
    add("--most-growth", type=float, default=0.05, help="share of memory since (default: 0.05)")
    add("--seed", type=int, default=1, help="of the requests (default: 1)")
    add("--server-flags", default=DEFAULT_FLAGS, help=f"(default: {DEFAULT_FLAGS})")
    add("--name", default="soak", help="of the result files (default: soak)")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    require(0 <= options.departing_share <= 1, "--departing-share must be between 0 and 1")
    require(
        options.duration_s > options.warm_up_s,
        "--duration-s must be longer than --warm-up-s, or memory is not judged",
    )
    engine = Engine(
        label="ours " + options.server_flags,
        client_backend="sglang",
        base_url=f"http://127.0.0.1:{options.port}",
        command=(
            *(sys.executable, "-m", "sgl_pipeline.launch_server", "--port", str(options.port)),
            *shlex.split(options.server_flags),
        ),
    )
    clients = SoakClients(
        engine.base_url,
        num_clients=options.clients,
        departing_share=options.departing_share,
        seed=options.seed,
        # So that steps of every size are seen before memory is judged.
        ramp_s=options.warm_up_s / 2,
    )
    with running(engine, SCRATCH / "soak.log") as process:
        soak = Soak(engine.base_url, clients, process)
        soak.run(options.duration_s)
        verdicts = soak.verdicts(options.warm_up_s, options.most_growth)
    load = ("clients", "duration_s", "departing_share", "warm_up_s", "seed")
    return Report(
        name=options.name,
        texts=[_report(clients, verdicts)],
        facts={
            "server": {"flags": engine.label},
            "load": {name: str(getattr(options, name)) for name in load},
        },
        record={
            "outcomes": dict(clients.tally.outcomes),
            "failures": clients.tally.failures,
            "resident_mib": {
                name: [(round(t), round(mib)) for t, mib in samples]
                for name, samples in soak.memory.samples.items()
            },
        },
        problems=[f"{one.what}: {one.seen}" for one in verdicts if not one.passed],
    )


def _report(clients: SoakClients, verdicts: list[Verdict]) -> str:
    tally = clients.tally
    checks = [[v.what, v.seen, "ok" if v.passed else "FAILED"] for v in verdicts]
    parts = [
        markdown_table(list(tally.outcomes), [[str(n) for n in tally.outcomes.values()]]),
        f"optional features asked for: {', '.join(clients.features) or 'none'}",
        markdown_table(["check", "seen", ""], checks),
        *(f"- {failure}" for failure in tally.failures),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
