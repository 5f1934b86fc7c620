"""The Ray driver of `--use-ray`: has Ray start the other hosts' agents, and replace lost ones.

A process of its own, which `ray_driver.py` starts, because Ray's threads would not survive the
forks of the server's main process; detached, because upstream kills that one's descendants. Ray
starts, places and restarts agents; they dial the head's port as any other agent does, and nothing
of Ray is in the way of requests. All that Ray was asked for belongs to this driver's job and goes
with it, however it ends.
"""

import logging
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_pipeline import __version__
from sgl_pipeline.cluster.interfaces import is_own_address
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.detached_child import detach

logger = logging.getLogger(__name__)

# What the driver answers on its standard output, in this order, else a line that says why not.
CONNECTED, PLACED = "connected", "placed"
# Between the end of an agent and the next request for one.
RETRY_S = 5.0
SAY_AGAIN_S = 30.0
# What giving back may take; a driver that hangs is killed then, and Ray does it.
END_LIMIT_S = 10
# Ray's client server forks beside gRPC's threads for each new client, which now and then ends the
# child (github.com/ray-project/ray/issues/63202, open in Ray 2.60).
_CLIENT_ATTEMPTS = 4
_POLL_S = 0.5


class RaySetup(msgspec.Struct, frozen=True):
    """Setup that the driver reads at its start: a line of JSON on its standard input.

    `cpus` and `flags` are by rank, from 1 on: the CPUs that a host's stages take, and the command
    line of its agent. `secret` is the cluster's key.
    """

    address: str
    wait_s: float
    cpus: Sequence[int]
    flags: Sequence[Sequence[str]]
    secret: bytes


class HostAgent:
    """The actor: one on a node, with the agent as its child process.

    Ray gets it by value, as this module is `__main__` in the driver; so also a node without the
    package, or with another version, can say what it has. Nothing here uses this module's names.
    """

    def facts(self) -> tuple[str, str, str]:
        """The node's name, its version of Python, that of the package ("": not installed)."""
        import platform
        import socket

        try:
            from sgl_pipeline import __version__
        except ImportError:
            return socket.gethostname(), platform.python_version(), ""
        return socket.gethostname(), platform.python_version(), __version__

    def run(self, flags: Sequence[str], secret: bytes) -> tuple[int, str]:
        """Runs the agent; its exit code and the last line that it wrote when it has ended.

        The secret goes through a pipe: it is in no file, command line or environment. The agent
        dies with this process, whatever ends that.
        """
        import os
        import subprocess
        import sys

        from sgl_pipeline.process_lifetime import child_environment

        code = (
            "from sgl_pipeline.process_lifetime import die_with_parent\n"
            f"die_with_parent({os.getpid()})\n"
            "from sgl_pipeline.launch_server import run_and_exit\n"
            "run_and_exit()\n"
        )
        agent = subprocess.Popen(
            [sys.executable, "-c", code, *flags, "--cluster-key-file", "/dev/stdin"],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert agent.stdin is not None and agent.stderr is not None
        with agent.stdin:
            agent.stdin.write(secret)
        last = ""
        for line in agent.stderr:
            last = line.decode(errors="replace").strip() or last
            print(line.decode(errors="replace"), end="", file=sys.stderr, flush=True)
        return agent.wait(), last


@dataclass(slots=True)
class _Asked:
    """A host that Ray was asked for. `call` is the actor's answer that is awaited; where it is None
    the actor is called again at `retry_s`, or another one asked for if there is none."""

    actor: Any = None
    call: Any = None
    is_running: bool = False
    asked_s: float = 0.0
    retry_s: float = 0.0


class RayHosts:
    """The agents of one server.

    Args:
        ray: the module, connected.
        is_over: whether the server has ended.
    """

    def __init__(self, ray: Any, setup: RaySetup, is_over: Callable[[], bool]) -> None:
        self._ray = ray
        self._setup = setup
        self._is_over = is_over
        self._group: Any = None
        self._first_bundle = 0
        self._hosts = {rank: _Asked() for rank in range(1, len(setup.flags) + 1)}

    def place(self) -> None:
        """Reserves a node for each host, and has it say what it runs.

        Raises ConfigurationError where Ray cannot within the limit, or nodes do not fit.
        """
        deadline_s = time.monotonic() + self._setup.wait_s
        bundles: list[dict[str, float]] = [{"CPU": cpus} for cpus in self._setup.cpus]
        if (own := self._own_node()) is not None:
            # The head's host is taken: a bundle that only its node has keeps the others away.
            bundles.insert(0, {f"node:{own}": 0.001})
            self._first_bundle = 1
        self._group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._within(deadline_s, lambda: self._group.wait(_POLL_S)):
            raise ConfigurationError(self._why_not_placed())
        for rank in self._hosts:
            self._ask(rank)
        if not self._within(deadline_s, self._have_all_answered):
            missing = ", ".join(
                str(rank) for rank, host in self._hosts.items() if not host.is_running
            )
            raise ConfigurationError(
                f"Ray has nodes for all hosts, but did not start the agent of host {missing} "
                f"within {self._setup.wait_s:g} s; see Ray's logs, or raise --ray-wait-s"
            )

    def keep(self) -> None:
        """Asks for lost agents again, until the server has ended."""
        while not self._is_over():
            for rank, reason in self._step(_POLL_S):
                logger.warning("host %d: %s; Ray is asked for another agent", rank, reason)

    def end(self) -> None:
        """Gives back what Ray was asked for."""
        for host in self._hosts.values():
            if host.actor is not None:
                self._ray.kill(host.actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)

    def _within(self, deadline_s: float, is_done: Callable[[], bool]) -> bool:
        """Waits for `is_done`; False if it is not so at the deadline. Raises KeyboardInterrupt when
        the server has ended."""
        while not is_done():
            if self._is_over():
                raise KeyboardInterrupt
            if time.monotonic() > deadline_s:
                return False
        return True

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _own_node(self) -> str | None:
        """The address of this host's node, where it has one."""
        addresses = [str(node["NodeManagerAddress"]) for node in self._nodes()]
        return next((one for one in addresses if is_own_address(one)), None)

    def _why_not_placed(self) -> str:
        wanted, cpus = len(self._setup.cpus), max(self._setup.cpus)
        others = [one for one in self._nodes() if not is_own_address(one["NodeManagerAddress"])]
        fitting = [one for one in others if one["Resources"].get("CPU", 0) >= cpus]
        if len(fitting) < wanted:
            return (
                f"--nnodes {wanted + 1} needs {wanted} of Ray's nodes, other than the head's host "
                f"and with {cpus} CPUs each, and after {self._setup.wait_s:g} s Ray has "
                f"{len(fitting)} ({len(others)} of any size); start more with `ray start --address`"
            )
        return (
            f"Ray has not placed {wanted} hosts of {cpus} CPUs each, on a node each, within "
            f"{self._setup.wait_s:g} s: nodes are busy (`ray status`); free them, or raise "
            "--ray-wait-s"
        )

    def _ask(self, rank: int) -> None:
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, self._first_bundle + rank - 1
        )
        agent_class = self._ray.remote(HostAgent)
        actor = agent_class.options(
            num_cpus=self._setup.cpus[rank - 1], scheduling_strategy=place
        ).remote()
        self._hosts[rank] = _Asked(actor, actor.facts.remote(), asked_s=time.monotonic())

    def _have_all_answered(self) -> bool:
        for rank, reason in self._step(_POLL_S):
            raise ConfigurationError(f"host {rank}: {reason}")
        return all(host.is_running for host in self._hosts.values())

    def _step(self, timeout_s: float) -> list[tuple[int, str]]:
        """Takes answers, of which one is awaited for `timeout_s` at most, and asks again for hosts
        whose time has come. Returns the hosts whose agents have ended, and why."""
        now_s = time.monotonic()
        for rank, host in [*self._hosts.items()]:
            if host.call is None and now_s >= host.retry_s:
                if host.actor is None:
                    self._ask(rank)
                else:
                    self._run(rank, host)
            elif not host.is_running and now_s - host.asked_s >= SAY_AGAIN_S:
                host.asked_s = now_s
                logger.warning("host %d still waits for a node; Ray has none that is free", rank)
        calls = [host.call for host in self._hosts.values() if host.call is not None]
        if not calls:
            time.sleep(timeout_s)
            return []
        answered, _ = self._ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        ended = []
        for rank, host in [*self._hosts.items()]:
            if host.call in answered and (reason := self._advance(rank, host)) is not None:
                self._ray.kill(host.actor)
                self._hosts[rank] = _Asked(asked_s=now_s, retry_s=now_s + RETRY_S)
                ended.append((rank, reason))
        return ended

    def _advance(self, rank: int, host: _Asked) -> str | None:
        """Takes the next step after an actor's answer; returns why its agent has ended or is not
        wanted, if so."""
        try:
            answer = self._ray.get(host.call)
        except self._ray.exceptions.ActorUnavailableError:
            # Ray may reach it again, and its agent has not ended: a next call waits for that.
            host.call, host.retry_s = None, time.monotonic() + RETRY_S
            return None
        except self._ray.exceptions.RayError as error:
            return f"its actor is lost ({first_line(error)})"
        if host.is_running:
            code, last = answer
            if code != 0:
                return f"its agent has ended, exit code {code}: {last}"
            host.call, host.retry_s = None, float("inf")  # the head has said farewell
            return None
        if (objection := _objection(*answer)) is not None:
            return objection
        self._run(rank, host)
        logger.info("host %d is on Ray's node %s", rank, answer[0])
        return None

    def _run(self, rank: int, host: _Asked) -> None:
        # An argument of a call, unlike one of an actor's creation, is not kept by Ray's GCS.
        flags = [*self._setup.flags[rank - 1]]
        host.call = host.actor.run.remote(flags, self._setup.secret)
        host.is_running = True


def _objection(node: str, python: str, version: str) -> str | None:
    """The reason why a node cannot run our agent; None if it can."""
    if python.split(".")[:2] != platform.python_version().split(".")[:2]:
        return (
            f"Ray's node {node} runs Python {python}, the head {platform.python_version()}; use "
            "the same on every host"
        )
    if version != __version__:
        has = f"runs sgl_pipeline {version}" if version else "has no sgl_pipeline"
        return (
            f"Ray's node {node} {has}, the head {__version__}; install the same version on every "
            "host"
        )
    return None


def first_line(error: BaseException) -> str:
    """Ray's messages go on for pages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".: ")


def _in_a_line(error: BaseException) -> str:
    """All of a message, or of a traceback its end."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(" ".join(lines if len(lines) < 10 else lines[-1:]).split())


def _connect(address: str) -> Any:
    """The module `ray`, connected to the cluster. Raises ConfigurationError."""
    import ray

    try:
        for _ in range(_CLIENT_ATTEMPTS - 1):
            try:
                ray.init(address=address, logging_level=logging.WARNING)
                return ray
            except ConnectionAbortedError as error:
                reason = _in_a_line(error)
                logger.warning("Ray's client server failed, and is asked again: %s", reason)
        ray.init(address=address, logging_level=logging.WARNING)
    # Ray has no common class of what it raises here.
    except Exception as error:
        raise ConfigurationError(
            f"--use-ray finds no Ray cluster at {address!r}: {_in_a_line(error)}; "
            "start one with `ray start`, or name it in RAY_ADDRESS: HOST:PORT where this host is "
            "one of its nodes, ray://HOST:10001 where it is not"
        ) from error
    return ray


def main() -> int:
    """Runs as long as the server's main process; the exit code is 0, or 1 for an error."""
    setup, server = detach(RaySetup)
    # What Ray and the nodes print goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(format="[ray] %(message)s", level=logging.INFO)
    hosts: RayHosts | None = None
    try:
        ray = _connect(setup.address)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the main process says when
        print(CONNECTED, file=answers)
        hosts = RayHosts(ray, setup, lambda: bool(select.select([server], [], [], 0.0)[0]))
        hosts.place()
        print(PLACED, file=answers)
        hosts.keep()
    except ConfigurationError as error:
        print(error, file=answers)
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        signal.alarm(END_LIMIT_S)
        if hosts is not None:
            hosts.end()
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
