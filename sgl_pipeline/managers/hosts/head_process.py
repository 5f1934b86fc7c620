"""The head's side of the cluster: its port, the agents of the other hosts, their clocks.

A process of its own beside the server's main process (`head_client.py` starts it), so that agents
are answered from the first second on, and pings do not wait for a decision of the scheduler. The
scheduler process connects when it comes up (`cluster_workers.py`) and is told what has happened.
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
from functools import partial

import msgspec

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.clock import HostClock
from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import AGENTS_DOOR, Door, split_address
from sgl_pipeline.cluster.framed_stream import FramedStream
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
    Ping,
    Pong,
    Rejected,
    StartWorker,
    ToAgent,
    Welcome,
    WorkerEnded,
    WorkerStarted,
)
from sgl_pipeline.cluster.interfaces import head_own_address
from sgl_pipeline.cluster.secure_stream import SecureStream
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.frame_pump import FramePump
from sgl_pipeline.managers.hosts.host_checks import (
    count_fault,
    how_to_bring,
    model_fault,
    rank_fault,
    version_fault,
)
from sgl_pipeline.managers.hosts.scheduler_end import SchedulerEnd, listen_for_scheduler
from sgl_pipeline.pipeline.assignment import num_threads, split_cores, workers_of_host

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 0.25
# Of a connection that has passed the port, until the agent has greeted.
HELLO_TIMEOUT_S = 5.0
# How often a host that has not come is named.
MISSING_INTERVAL_S = 8.0
# What it says when it listens, and what it is told when the server ends in good order.
LISTENING = "listening"
FAREWELL = b"farewell"

_encode = msgspec.msgpack.Encoder().encode


class HeadSetup(msgspec.Struct, frozen=True):
    """What the process is started with: a line of JSON on its standard input."""

    run_directory: str
    cluster: ClusterArgs
    num_stages: int
    cpu_threads: int | None
    model_digest: str

    @property
    def title(self) -> str:
        """How messages to people call this host."""
        return f"host 0 ({socket.gethostname()}, {self.cluster.head_address})"


@dataclass(slots=True, eq=False)
class _Agent:
    """A connection to an agent; `hello` is None until it has greeted."""

    sender: str
    since_s: float
    heard_s: float
    pump: FramePump | None = None
    hello: HostHello | None = None
    clock: HostClock = field(default_factory=HostClock)
    # Workers that run there, as far as is known, and their processes.
    workers: dict[int, int] = field(default_factory=dict)
    leaves: bool = False  # it was asked to go

    def send(self, message: ToAgent) -> None:
        assert self.pump is not None
        self.pump.send(_encode(message))

    def close(self) -> None:
        assert self.pump is not None
        self.pump.close()


class Head:
    """The hosts of one server. To be made in its event loop."""

    def __init__(self, setup: HeadSetup) -> None:
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(FromAgent)
        self._door = Door(setup.run_directory, AGENTS_DOOR)
        self._loop.add_reader(self._door, self._accept)
        self._strangers: set[_Agent] = set()
        self._agents: dict[int, _Agent] = {}
        # First workers of hosts that have not been asked for them.
        self._unstarted = {
            rank: [*workers_of_host(setup.num_stages, setup.cluster.num_hosts, rank)]
            for rank in range(1, setup.cluster.num_hosts)
        }
        self._scheduler: SchedulerEnd | None = None
        self._has_come: set[int] = set()
        self._said_s: dict[str, float] = {}

    async def serve(self) -> None:
        """Pings, and looks who is silent, until it is cancelled."""
        named_s = self._loop.time() - MISSING_INTERVAL_S + 2.0
        while True:
            now_s = time.monotonic()
            for agent in [*self._strangers]:
                if now_s - agent.since_s > HELLO_TIMEOUT_S:
                    self._strangers.discard(agent)
                    agent.close()
            for rank, agent in [*self._agents.items()]:
                silent_s = now_s - agent.heard_s
                if silent_s > self._setup.cluster.silence_s:
                    self._lose(rank, f"it has been silent for {silent_s:.1f} s")
                else:
                    agent.send(Ping(time.monotonic()))
                    self._tell_clock(rank, agent)
            if self._loop.time() - named_s >= MISSING_INTERVAL_S:
                named_s = self._loop.time()
                self._name_missing()
            await asyncio.sleep(PING_INTERVAL_S)

    def connect_scheduler(self, connection: socket.socket) -> None:
        """The scheduler process is up: it is told what has happened so far."""
        self._scheduler = SchedulerEnd(connection, self._order, self._scheduler_gone)
        for rank, agent in self._agents.items():
            assert agent.hello is not None
            self._report(HostJoined(agent.hello))
            for worker, pid in agent.workers.items():
                self._report(OfHost(rank, WorkerStarted(worker, pid)))
            if agent.leaves:
                self._report(OfHost(rank, HostLeaves()))

    def farewell(self, reason: str) -> None:
        """The agents end as well."""
        for agent in self._agents.values():
            agent.send(AgentExit(reason))

    def _accept(self) -> None:
        while (accepted := self._door.accept()) is not None:
            connection, sender = accepted
            now_s = time.monotonic()
            agent = _Agent(sender, now_s, now_s)
            stream = SecureStream(connection, self._setup.run_directory, is_server=True)
            agent.pump = FramePump(
                FramedStream(stream), partial(self._take, agent), partial(self._closed, agent)
            )
            self._strangers.add(agent)

    def _take(self, agent: _Agent, frame: bytes) -> None:
        agent.heard_s = time.monotonic()
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            # It has the key, and speaks another version.
            reason = version_fault(f"the host at {agent.sender}", "another version")
            self._say(reason)
            agent.send(Rejected(reason))
            return
        if isinstance(message, HostHello):
            if agent.hello is None:
                self._greet(agent, message)
        elif agent.hello is None:
            agent.close()
            self._strangers.discard(agent)
        elif isinstance(message, Pong):
            agent.clock.add(message.sent_s, message.received_s, message.answered_s, agent.heard_s)
        else:
            if isinstance(message, WorkerStarted):
                agent.workers[message.worker] = message.pid
            elif isinstance(message, WorkerEnded):
                agent.workers.pop(message.worker, None)
            else:
                agent.leaves = True
                logger.info("%s was asked to leave", agent.hello.title)
            self._report(OfHost(agent.hello.rank, message))
            if agent.leaves and not agent.workers:
                agent.send(AgentExit("its stages are served elsewhere"))

    def _greet(self, agent: _Agent, hello: HostHello) -> None:
        before = self._agents.get(hello.rank)
        rejection = self._objection(hello, None if before is None else before.hello)
        if rejection is not None:
            self._say(f"{hello.title} is not taken in: {rejection.reason}")
            self._strangers.discard(agent)
            agent.send(rejection)
            self._loop.call_later(HELLO_TIMEOUT_S, agent.close)
            return
        if before is not None:
            self._lose(hello.rank, "its agent was started again")
        self._strangers.discard(agent)
        agent.hello = hello
        self._agents[hello.rank] = agent
        self._has_come.add(hello.rank)
        agent.send(Welcome(self._setup.cluster.silence_s))
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
            agent.send(StartWorker(worker, num_threads(cores, self._setup.cpu_threads)))

    def _objection(self, hello: HostHello, before: HostHello | None) -> Rejected | None:
        """Why a host cannot be taken in; `before` is the one that has its rank."""
        setup = self._setup
        fault = (
            version_fault("this host", hello.version)
            or count_fault(hello, setup.cluster.num_hosts)
            or model_fault(hello.model_digest, setup.model_digest, setup.title)
        )
        if fault:
            return Rejected(fault)
        fault = rank_fault(hello, before)
        return Rejected(fault, is_final=False) if fault else None

    def _say(self, text: str) -> None:
        """Logs a warning that may come again and again, and is said now and then."""
        now_s = time.monotonic()
        if now_s - self._said_s.get(text, -MISSING_INTERVAL_S) >= MISSING_INTERVAL_S:
            self._said_s = {text: now_s}
            logger.warning("%s", text)

    def _closed(self, agent: _Agent, reason: str) -> None:
        if agent.hello is None:
            if agent in self._strangers:
                self._say(f"the connection of {agent.sender} ended before it greeted: {reason}")
            self._strangers.discard(agent)
        elif self._agents.get(agent.hello.rank) is agent:
            self._lose(agent.hello.rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        agent = self._agents.pop(rank)
        agent.close()
        assert agent.hello is not None
        if agent.leaves and not agent.workers:
            logger.info("%s has left", agent.hello.title)
        else:
            logger.warning("%s is lost: %s", agent.hello.title, reason)
        if self._scheduler is None:
            # Nobody has heard of its workers: the host may start them again.
            self._unstarted[rank] = [
                *workers_of_host(self._setup.num_stages, self._setup.cluster.num_hosts, rank)
            ]
        self._report(HostLost(rank, f"{agent.hello.title} is lost: {reason}"))

    def _name_missing(self) -> None:
        for rank in range(1, self._setup.cluster.num_hosts):
            if rank not in self._agents and rank not in self._has_come:
                cluster = self._setup.cluster
                logger.warning(
                    "waiting for host %d: no agent has come; %s",
                    rank,
                    how_to_bring(rank, cluster.head_address, by_ray=cluster.use_ray),
                )

    def _tell_clock(self, rank: int, agent: _Agent) -> None:
        reading = agent.clock.read(time.monotonic())
        if reading is not None:
            self._report(ClockNews(rank, reading.offset_s, reading.error_s, reading.drift_ppm))

    def _report(self, message: FromHead) -> None:
        if self._scheduler is not None:
            self._scheduler.send(message)

    def _order(self, order: ForHost) -> None:
        agent = self._agents.get(order.rank)
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
    server = sys.stdin.fileno()
    with os.fdopen(os.dup(server), "rb", buffering=0) as lines:
        setup = msgspec.json.decode(lines.readline(), type=HeadSetup)
    if os.fork():
        os._exit(0)
    os.setsid()
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
