"""A prefill and a decode server behind SGLang's router, whose processes are killed and replaced.

Used by `kill_apart.py`. Servers that die are started again at the same ports; the router is not.
"""

import contextlib
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import requests

from benchmark.recovery.kill_stages import facts_of
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.paths import DEMO_MODEL, SCRATCH
from benchmark.support.process_kinds import process_kind
from benchmark.tiers.tiered_servers import router_folder
from sgl_pipeline.cluster.keys import KEY_VARIABLE
from sgl_pipeline.managers.serve_pd import (
    HOST,
    Ports,
    has_both,
    router_command,
    router_environment,
)

# Those that docs/disaggregation.md names, and a short look-out.
ROUTER_FLAGS = ("--retry-max-retries", "2", "--health-check-interval-secs", "1")
ROUTER_START_FLAGS = ("--worker-startup-check-interval", "1")
# A room whose decode server died before it had heard of it is kept for so long.
PATIENCE = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60"}
_REST_TIMEOUT_S = 80.0
ROOM_FACTS = ("bootstrap_requests", "transfer_requests", "held_pages", "promised_pages")
_TIMEOUT_S = 120.0
_POLL_S = 0.05
_STOP_TIMEOUT_S = 20.0


@dataclass(eq=False)
class Side:
    """The server of one role. `num_starts` is the number of its log, too."""

    role: str
    engine: Engine
    num_starts: int = 0
    _life: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _main: psutil.Process | None = None

    @property
    def url(self) -> str:
        return self.engine.base_url

    def facts(self) -> dict[str, Any]:
        return facts_of(self.url)

    def rooms(self) -> dict[str, int]:
        """Requests between the two servers, and their pages on this one, by names of ROOM_FACTS."""
        rooms = self.facts()["rooms"]
        return {name: rooms[name] for name in ROOM_FACTS if rooms[name]}

    def start(self) -> None:
        """Returns when the server answers. Raises EngineFailure."""
        self.num_starts += 1
        log_path = SCRATCH / f"kill_apart_{self.role}_{self.num_starts}.log"
        self._main = self._life.enter_context(running(self.engine, log_path))

    def stop(self) -> None:
        """Ends what is left of the server."""
        self._life.close()

    def kill_stage(self, stage: int) -> "Wound":
        """Kills a stage; mended when another process has taken its place."""
        before = self.facts()
        killed_s = time.monotonic()
        psutil.Process(before["stage_pids"][stage]).kill()

        def is_replaced() -> bool:
            facts = self.facts()
            pids = before["stage_pids"]
            return pids[stage] not in facts["stage_pids"] and not facts["is_recovering"]

        otherwise = f"{self.role} does not replace stage {stage}"
        return Wound(killed_s, lambda: wait_until(is_replaced, otherwise))

    def kill_scheduler(self) -> "Wound":
        """Kills the scheduler, with which the server ends; mended by another start."""
        assert self._main is not None
        main = self._main
        (scheduler,) = [
            one
            for one in main.children(recursive=True)
            if process_kind(one.cmdline(), one.pid) == "scheduler"
        ]
        killed_s = time.monotonic()
        scheduler.kill()

        def start_again() -> None:
            # Not all at once: that the main process ends by itself is part of what is tried.
            main.wait(_TIMEOUT_S)
            self.stop()
            self.start()

        return Wound(killed_s, start_again)


@dataclass(frozen=True, slots=True)
class Wound:
    """Something that was killed, and what mends it or waits until it is mended."""

    killed_s: float
    mend: Callable[[], None]


@dataclass(frozen=True)
class ServersApart:
    """Both servers, and the address of the router before them."""

    router_url: str
    prefill: Side
    decode: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    def wait_until_found(self) -> None:
        """Returns when the router sends requests to both servers."""
        wait_until(lambda: has_both(self.router_url), "the router does not find both servers")

    def kept_rooms(self) -> list[str]:
        """All that is still held, promised or in use once clients have had their answers."""
        wait_s = time.monotonic() + _REST_TIMEOUT_S
        while (found := self._kept_rooms()) and time.monotonic() < wait_s:
            time.sleep(0.2)
        return found

    def _kept_rooms(self) -> list[str]:
        found = []
        for side in self.sides:
            facts = side.facts()
            counts = side.rooms()
            counts["running"] = facts["num_running_requests"]
            counts["used_pages"] = facts["total_pages"] - facts["free_pages"]
            found += [f"{side.role}: {count} {name}" for name, count in counts.items() if count]
        return found


@contextlib.contextmanager
def servers_apart(
    first_port: int, prefill_flags: str, decode_flags: str, flags: str
) -> Iterator[ServersApart]:
    """Both servers and the router, ready.

    Args:
        first_port: the router's; the next four are taken too.
        prefill_flags: of the prefill server alone, `--pp` among them.
        decode_flags: those of the decode server.
        flags: of both.
    """
    ports, key = Ports.from_first(first_port), secrets.token_hex(32)
    sides = []
    for role, port, more in (
        ("prefill", ports.prefill, prefill_flags),
        ("decode", ports.decode, decode_flags),
    ):
        roles = f"--disaggregation-mode {role} --disaggregation-bootstrap-port {ports.bootstrap}"
        engine = parse_engine(
            f"ours {more} {roles} {flags}",
            DEMO_MODEL,
            port,
            SCRATCH,
            usable_cores(),
            prefix_cache=True,
        )
        sides.append(Side(role, replace(engine, environment={KEY_VARIABLE: key} | PATIENCE)))
    with contextlib.ExitStack() as stack:
        for side in sides:
            stack.callback(side.stop)
            side.start()
        router_url = stack.enter_context(_router(ports))
        found = ServersApart(router_url, *sides)
        found.wait_until_found()
        yield found


@contextlib.contextmanager
def _router(ports: Ports) -> Iterator[str]:
    command = router_command(ports, [*ROUTER_FLAGS, *ROUTER_START_FLAGS])
    environment = router_environment(str(router_folder()))
    with (SCRATCH / "kill_apart_router.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://{HOST}:{ports.router}"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Raises EngineFailure with `otherwise` where it does not come true in time."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not _holds(condition):
        if time.monotonic() > deadline_s:
            raise EngineFailure(f"{otherwise} within {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except requests.RequestException:
        return False  # a server that is busy with a recovery may answer late
