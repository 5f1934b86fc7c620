"""The head's side of the cluster: its port, the agents of the other hosts, their clocks.

A process of its own beside the server's main process (`head_client.py` starts it), so that agents
are answered from the first second on, and pings do not wait for a decision of the scheduler. The
scheduler process connects when it comes up (`cluster_workers.py`) and learns what has happened.
Imports neither torch nor sglang.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import msgspec

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.clock import HostClock
from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import AGENTS_DOOR, split_address
from sgl_pipeline.cluster.host_messages import (
    AgentExit,
    ClockNews,
    ForHost,
    FromAgent,
    FromHead,
    HostHello,
    HostJoined,
    HostLeaves,
    HostLost,
    OfHost,
    Pong,
    Rejected,
    StartWorker,
    Welcome,
    WorkerEnded,
    WorkerStarted,
)
from sgl_pipeline.cluster.interfaces import head_own_address
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.detached_child import detach
from sgl_pipeline.managers.hosts.host_checks import (
    count_fault,
    how_to_bring,
    model_fault,
    rank_fault,
    version_fault,
)
from sgl_pipeline.managers.hosts.host_gathering import GatheredHost, HostGathering
from sgl_pipeline.managers.hosts.host_stream import HostStream
from sgl_pipeline.managers.hosts.scheduler_end import SchedulerEnd, listen_for_scheduler
from sgl_pipeline.pipeline.assignment import num_threads, split_cores, workers_of_host

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 0.25
# How often a host that has not come is named, and when the first time.
MISSING_INTERVAL_S = 8.0
_FIRST_MISSING_S = 2.0
# Its line when it listens, and the server's when that ends in good order.
LISTENING = "listening"
FAREWELL = b"farewell"


class HeadSetup(msgspec.Struct, frozen=True):
    """Setup that the process reads at its start: a line of JSON on its standard input."""

    run_directory: str
    cluster: ClusterArgs
    num_stages: int
    cpu_threads: int | None
    model_digest: str

    @property
    def title(self) -> str:
        """The name of this host in messages to people."""
        return f"host 0 ({socket.gethostname()}, {self.cluster.head_address})"


@dataclass(slots=True, eq=False, kw_only=True)
class _Agent(GatheredHost):
    """A host's agent. `workers` are those that run there, as far as is known, and their pids."""

    clock: HostClock = field(default_factory=HostClock)
    workers: dict[int, int] = field(default_factory=dict)
    leaves: bool = False  # it was asked to go


class Head(HostGathering[_Agent]):
    """The hosts of one server. Must be made in its event loop."""

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__(
            AGENTS_DOOR, setup.run_directory, FromAgent, PING_INTERVAL_S, setup.cluster.silence_s
        )
        self._setup = setup
        # First workers of hosts that have not been asked for them.
        self._unstarted = {
            rank: [*workers_of_host(setup.num_stages, setup.cluster.num_hosts, rank)]
            for rank in range(1, setup.cluster.num_hosts)
        }
        self._scheduler: SchedulerEnd | None = None
        self._has_come: set[int] = set()
        self._said_s: dict[str, float] = {}
        self._named_s = time.monotonic() - MISSING_INTERVAL_S + _FIRST_MISSING_S

    def connect_scheduler(self, connection: socket.socket) -> None:
        """The scheduler process is up: it learns what has happened so far."""
        self._scheduler = SchedulerEnd(connection, self._order, self._scheduler_gone)
        for rank, agent in self.hosts.items():
            self._report(HostJoined(agent.hello))
            for worker, pid in agent.workers.items():
                self._report(OfHost(rank, WorkerStarted(worker, pid)))
            if agent.leaves:
                self._report(OfHost(rank, HostLeaves()))

    def farewell(self, reason: str) -> None:
        """The agents end as well."""
        for agent in self.hosts.values():
            agent.send(AgentExit(reason))

    def _greeted(
        self, message: msgspec.Struct, stream: HostStream[msgspec.Struct]
    ) -> _Agent | None:
        return _Agent(hello=message, stream=stream) if isinstance(message, HostHello) else None

    def _objection(self, host: _Agent, before: _Agent | None) -> Rejected | None:
        hello, setup = host.hello, self._setup
        fault = (
            version_fault("this host", hello.version)
            or count_fault(hello, setup.cluster.num_hosts)
            or model_fault(hello.model_digest, setup.model_digest, setup.title)
        )
        if fault:
            return Rejected(fault)
        fault = rank_fault(hello, None if before is None else before.hello)
        return Rejected(fault, is_final=False) if fault else None

    def _on_host(self, host: _Agent) -> None:
        hello = host.hello
        self._has_come.add(hello.rank)
        host.send(Welcome(self._setup.cluster.silence_s))
        logger.info(
            "%s is there: %d cores, %d NUMA nodes, %d GPUs, %.1f GiB of memory, interface %s",
            hello.title,
            len(hello.cores),
            hello.num_numa_nodes,
            hello.num_gpus,
            hello.memory_bytes / 2**30,
            hello.interface,
        )
        self._report(HostJoined(hello))
        first = self._unstarted.pop(hello.rank, [])
        shares = split_cores(hello.cores, len(first)) if first else []
        for worker, cores in zip(first, shares, strict=True):
            host.send(StartWorker(worker, num_threads(cores, self._setup.cpu_threads)))

    def _take(self, host: _Agent, message: msgspec.Struct) -> None:
        if isinstance(message, Pong):
            returned_s = host.stream.heard_s
            host.clock.add(message.sent_s, message.received_s, message.answered_s, returned_s)
        elif isinstance(message, WorkerStarted | WorkerEnded | HostLeaves):
            if isinstance(message, WorkerStarted):
                host.workers[message.worker] = message.pid
            elif isinstance(message, WorkerEnded):
                host.workers.pop(message.worker, None)
            else:
                host.leaves = True
                logger.info("%s was asked to leave", host.hello.title)
            self._report(OfHost(host.hello.rank, message))
            if host.leaves and not host.workers:
                host.send(AgentExit("its stages are served elsewhere"))

    def _on_lost(self, host: _Agent, reason: str) -> None:
        rank, title = host.hello.rank, host.hello.title
        if host.leaves and not host.workers:
            logger.info("%s has left", title)
        else:
            logger.warning("%s is lost: %s", title, reason)
        if self._scheduler is None:
            # Nobody has heard of its workers: the host may start them again.
            self._unstarted[rank] = [
                *workers_of_host(self._setup.num_stages, self._setup.cluster.num_hosts, rank)
            ]
        self._report(HostLost(rank, f"{title} is lost: {reason}"))

    def _complain(self, text: str) -> None:
        """Logs a warning; the same one again only after a while."""
        now_s = time.monotonic()
        if now_s - self._said_s.get(text, -MISSING_INTERVAL_S) >= MISSING_INTERVAL_S:
            self._said_s = {text: now_s}
            logger.warning("%s", text)

    def _on_ping(self) -> None:
        now_s = time.monotonic()
        for rank, agent in self.hosts.items():
            reading = agent.clock.read(now_s)
            if reading is not None:
                self._report(ClockNews(rank, reading.offset_s, reading.error_s, reading.drift_ppm))
        if now_s - self._named_s >= MISSING_INTERVAL_S:
            self._named_s = now_s
            self._name_missing()

    def _name_missing(self) -> None:
        for rank in range(1, self._setup.cluster.num_hosts):
            if rank not in self.hosts and rank not in self._has_come:
                cluster = self._setup.cluster
                logger.warning(
                    "waiting for host %d: no agent has come; %s",
                    rank,
                    how_to_bring(rank, cluster.head_address, by_ray=cluster.use_ray),
                )

    def _report(self, message: FromHead) -> None:
        if self._scheduler is not None:
            self._scheduler.send(message)

    def _order(self, order: ForHost) -> None:
        agent = self.hosts.get(order.rank)
        if agent is not None:
            agent.send(order.message)
        elif isinstance(order.message, StartWorker):
            self._report(OfHost(order.rank, WorkerEnded(order.message.worker, "its host is lost")))

    def _scheduler_gone(self) -> None:
        # The main process ends with it, and then this one.
        self._scheduler = None


async def _serve(setup: HeadSetup, server: int) -> None:
    """Runs until the server's main process ends, which closes its end of the pipe `server`."""
    assert setup.cluster.head_address is not None
    own = head_own_address(setup.cluster.head_address)
    port_number = split_address(setup.cluster.head_address)[1]
    port = ClusterPort(own.host, port_number, setup.run_directory)
    logger.info(
        "cluster port %s on interface %s, because %s; %d hosts are wanted",
        setup.cluster.head_address,
        own.interface,
        own.reason,
        setup.cluster.num_hosts,
    )
    head = Head(setup)
    loop = asyncio.get_running_loop()
    listen_for_scheduler(setup.run_directory, head.connect_scheduler)
    ending: asyncio.Future[None] = loop.create_future()

    def hear() -> None:
        loop.remove_reader(server)
        if os.read(server, len(FAREWELL)) == FAREWELL:
            head.farewell("the server has ended")
        ending.set_result(None)

    loop.add_reader(server, hear)
    print(LISTENING, flush=True)
    tasks = [loop.create_task(port.serve()), loop.create_task(head.serve())]
    await asyncio.wait([*tasks, ending], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
    await asyncio.sleep(0.1)  # for what the streams have not taken yet
    for task in tasks:
        task.cancel()


def main() -> int:
    """Runs as long as the server's main process; the exit code is 0, or 1 for an error."""
    setup, server = detach(HeadSetup)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="[head] %(message)s", level=logging.INFO)
    try:
        asyncio.run(_serve(setup, server))
    except ConfigurationError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
