"""A prefill server, a decode server and SGLang's router before them, all by `serve_pd`.

Used by `soak.py` and `idle.py`, which look at each of their processes now and then.
"""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmark.support.engine import Engine
from benchmark.support.engines import running
from benchmark.support.paths import SCRATCH
from benchmark.support.process_kinds import process_kind
from benchmark.support.starts import wait_for_start
from benchmark.tiers.tiered_servers import router_folder
from sgl_pipeline.managers.serve_pd import HOST, Ports, has_both

ROLES = ("prefill", "decode")
_TIMEOUT_S = 60.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process: proportional set size (PSS), the part of it that is no page of a file, open
    descriptors, and processor time since its start.

    Pages of libraries count the less, the more servers of whatever kind the machine has: growth
    shows in the part without them.
    """

    pss_mib: float
    own_mib: float
    descriptors: int
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server's own account. `rooms` and `pages` are of requests that it shares with the other:
    rooms that have not ended, and pages held or promised for them."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    rooms: int
    pages: int
    transferred: int
    failed: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "ServerFacts":
        """From the scheduler's part of `/server_info`."""
        rooms = state["rooms"]
        return cls(
            running=state["num_running_requests"],
            waiting=state["num_waiting_requests"],
            free_pages=state["free_pages"],
            total_pages=state["total_pages"],
            rooms=rooms["bootstrap_requests"] + rooms["transfer_requests"],
            pages=rooms["held_pages"] + rooms["promised_pages"],
            transferred=rooms["transferred"],
            failed=rooms["bootstrap_failed"] + rooms["transfer_failed"],
        )

    @property
    def is_at_rest(self) -> bool:
        """True if nothing is under way or kept for a request."""
        busy = self.running or self.waiting or self.rooms or self.pages
        return not busy and self.free_pages == self.total_pages


@dataclass(frozen=True, slots=True)
class Pair:
    """Servers and router that are up, below `process`."""

    ports: Ports
    process: psutil.Process

    @property
    def url(self) -> str:
        """The address that clients ask."""
        return f"http://{HOST}:{self.ports.router}"

    def servers(self) -> dict[str, ServerFacts]:
        """The account that each gives of itself, by role."""
        facts = {}
        for role, url in zip(ROLES, self.ports.servers, strict=True):
            reply = requests.get(f"{url}/server_info", timeout=_TIMEOUT_S)
            reply.raise_for_status()
            facts[role] = ServerFacts.of(reply.json()["internal_states"][0])
        return facts

    def servers_at_rest(self, timeout_s: float) -> dict[str, ServerFacts]:
        """The same once both are at rest, or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            facts = self.servers()
            is_over = time.monotonic() > deadline_s
            if is_over or all(one.is_at_rest for one in facts.values()):
                return facts
            time.sleep(_POLL_S)

    def processes(self) -> dict[str, ProcessFacts]:
        """All that run, by name."""
        facts = {}
        for name, process in self._named():
            with contextlib.suppress(psutil.NoSuchProcess):
                facts[name] = _facts_of(process)
        return facts

    def _named(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "starter", self.process
        for child in self.process.children():
            role = role_of(child.cmdline())
            yield f"{role} main" if role else process_kind(child.cmdline(), child.pid), child
            for process in child.children(recursive=True):
                try:
                    kind = process_kind(process.cmdline(), process.pid)
                except psutil.NoSuchProcess:
                    continue
                yield f"{role} {kind}", process


def _facts_of(process: psutil.Process) -> ProcessFacts:
    """Raises psutil.NoSuchProcess where it has ended."""
    times, descriptors = process.cpu_times(), process.num_fds()
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(process.pid) from None
    pss_mib, own_mib = memory_mib(rollup)
    return ProcessFacts(
        pss_mib=pss_mib,
        own_mib=own_mib,
        descriptors=descriptors,
        cpu_s=times.user + times.system,
    )


def memory_mib(rollup: str) -> tuple[float, float]:
    """The PSS that a process's `smaps_rollup` names, and its part that is no page of a file."""
    sizes_kib = {
        line.split()[0]: int(line.split()[1]) for line in rollup.splitlines() if line.endswith("kB")
    }
    return sizes_kib["Pss:"] / 1024, (sizes_kib["Pss:"] - sizes_kib["Pss_File:"]) / 1024


def role_of(words: list[str]) -> str:
    """The role of the server with this command line; empty for another process."""
    flag = "--disaggregation-mode"
    return words[words.index(flag) + 1] if flag in words else ""


@contextlib.contextmanager
def serving_pair(
    port: int, log_path: Path, *, prefill: str = "", decode: str = "", both: str = ""
) -> Iterator[Pair]:
    """The three, the router at the loopback `port` and the rest at the four after it.

    Args:
        prefill, decode, both: flags of the prefill server, of the decode server, and of both.

    Raises EngineFailure where they do not come up.
    """
    ports = Ports.from_first(port)
    command = [sys.executable, "-m", "sgl_pipeline.managers.serve_pd", "--port", str(port)]
    command += ["--router-folder", str(router_folder()), f"--prefill={prefill}"]
    command += [f"--decode={decode}", "--", *shlex.split(both)]
    url = f"http://{HOST}:{port}"
    engine = Engine(
        label="a pair of servers", client_backend="sglang", base_url=url, command=tuple(command)
    )
    with running(engine, log_path) as process:
        assert process is not None
        wait_for_start("the router", lambda: has_both(url), [process], log_path)
        yield Pair(ports, process)


def log_path(name: str, port: int) -> Path:
    """The output of a pair, whose ports tell it from others."""
    return SCRATCH / f"{name}_{port}.log"
