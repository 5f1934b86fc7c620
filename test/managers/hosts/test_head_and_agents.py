"""Agents greet the head, start what it asks for, and every trouble has its line."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from msgspec.msgpack import Decoder
from support.clusters import host_directory
from support.malformed_data import MSGPACK
from support.weight_files import sharded_model, whole_model

from sgl_pipeline import __version__
from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import AGENTS_DOOR, dial
from sgl_pipeline.cluster.framed_stream import LENGTH, MAX_FRAME_BYTES
from sgl_pipeline.cluster.host_messages import (
    ClockNews,
    ForHost,
    FromHead,
    HostHello,
    HostJoined,
    HostLeaves,
    HostLost,
    OfHost,
    Rejected,
    StartWorker,
    StopWorker,
    ToAgent,
    WorkerEnded,
    WorkerStarted,
)
from sgl_pipeline.cluster.keys import tls_context
from sgl_pipeline.cluster.model_digest import model_digest
from sgl_pipeline.cluster.secure_stream import StreamClosed
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.agent import _AgentSession, _Complaints
from sgl_pipeline.managers.hosts.head_process import Head, HeadSetup
from sgl_pipeline.managers.hosts.host_stream import HostStream, dial_stream
from sgl_pipeline.managers.hosts.scheduler_end import MAX_MESSAGE_BYTES

DIGEST = "config-tensors-values"
TIMEOUT_S = 20.0


def hello_of(rank: int, **changes: Any) -> HostHello:
    hello = HostHello(
        rank=rank,
        num_hosts=3,
        name=f"name{rank}",
        address=f"10.0.0.{rank}:5000",
        interface="eth0",
        cores=(0, 1, 2),
        num_numa_nodes=1,
        num_gpus=0,
        memory_bytes=2**33,
        version=__version__,
        model_digest=DIGEST,
    )
    return structs.replace(hello, **changes)


class SleepingStages:
    """Stands in for `StageProcesses`: its workers sleep."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.threads: dict[int, int] = {}

    def start_another(self, worker: int, threads: int) -> int:
        if worker == 99:
            raise OSError(12, os.strerror(12))
        self.threads[worker] = threads
        self.processes[worker] = subprocess.Popen(["sleep", "60"])
        return self.processes[worker].pid

    def stop_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class Cluster:
    """A head of three hosts and five stages; hosts 1 and 2 start with two each."""

    def __init__(self, directory: str, address: str, head: Head) -> None:
        self.directory = directory
        self.address = address
        self.head = head
        self.sessions: list[_AgentSession] = []

    async def agent(self, hello: HostHello) -> tuple[SleepingStages, "asyncio.Task[bool]"]:
        stages: Any = SleepingStages()
        session = _AgentSession(await self.dial(), hello, stages, _Complaints())
        self.sessions.append(session)
        return stages, asyncio.create_task(session.run())

    async def dial(self) -> HostStream[ToAgent]:
        return await dial_stream(
            self.address, AGENTS_DOOR, self.directory, Decoder(ToAgent), redial_s=0.1
        )

    def scheduler(self) -> "Scheduler":
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.head.connect_scheduler(other)
        return Scheduler(own)


class Scheduler:
    """The scheduler process's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self.clocks: list[ClockNews] = []

    async def next(self) -> Any:
        """What it is told next, clocks apart."""
        loop = asyncio.get_running_loop()
        while True:
            reading = loop.sock_recv(self._connection, MAX_MESSAGE_BYTES)
            packet = await asyncio.wait_for(reading, TIMEOUT_S)
            message = msgspec.msgpack.decode(packet, type=FromHead)
            if not isinstance(message, ClockNews):
                return message
            self.clocks.append(message)

    def order(self, rank: int, message: Any) -> None:
        self._connection.send(msgspec.msgpack.encode(ForHost(rank, message)))


@asynccontextmanager
async def cluster_of(
    tmp_path: Path, silence_s: float, digest: str = DIGEST
) -> AsyncIterator[Cluster]:
    directory = host_directory(tmp_path / "head")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    port = ClusterPort("127.0.0.1", number, directory)
    args = ClusterArgs(num_hosts=3, head_address=f"head:{number}", silence_s=silence_s)
    head = Head(HeadSetup(directory, args, 5, None, digest))
    tasks = [asyncio.create_task(port.serve()), asyncio.create_task(head.serve())]
    try:
        yield Cluster(directory, f"127.0.0.1:{number}", head)
    finally:
        head.farewell("the test has ended")
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        port.close()


def play(
    tmp_path: Path,
    scenario: Callable[[Cluster], Awaitable[None]],
    silence_s: float = 30.0,
    digest: str = DIGEST,
) -> None:
    async def run() -> None:
        async with cluster_of(tmp_path, silence_s, digest) as cluster:
            await asyncio.wait_for(scenario(cluster), TIMEOUT_S)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_host_starts_its_share_before_the_scheduler_is_there_which_then_hears_of_it(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        stages, session = await cluster.agent(hello_of(2))
        await until(lambda: len(stages.processes) == 2)
        assert stages.threads == {3: 1, 4: 2}  # the host's three cores, split over its stages
        await asyncio.sleep(0.05)
        scheduler = cluster.scheduler()
        assert await scheduler.next() == HostJoined(hello_of(2))
        told = [await scheduler.next() for _ in range(2)]
        assert told == [
            OfHost(2, WorkerStarted(worker, stages.processes[worker].pid)) for worker in (3, 4)
        ]
        os.kill(stages.processes[4].pid, signal.SIGKILL)
        ending = WorkerEnded(4, "its process ended, killed by signal 9")
        assert await scheduler.next() == OfHost(2, ending)
        cluster.head.farewell("the end")
        assert await session

    play(tmp_path, scenario)


def test_the_scheduler_has_workers_started_and_ended_on_a_host(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        scheduler = cluster.scheduler()
        stages, _ = await cluster.agent(hello_of(1))
        told = [await scheduler.next() for _ in range(3)]
        assert [type(message) for message in told] == [HostJoined, OfHost, OfHost]
        scheduler.order(1, StartWorker(7, 3))
        assert await scheduler.next() == OfHost(1, WorkerStarted(7, stages.processes[7].pid))
        assert stages.threads[7] == 3
        scheduler.order(1, StopWorker(7))
        ending = WorkerEnded(7, "its process ended, killed by signal 9")
        assert await scheduler.next() == OfHost(1, ending)
        scheduler.order(1, StartWorker(99, 1))
        ending = WorkerEnded(99, "it cannot be started: Cannot allocate memory")
        assert await scheduler.next() == OfHost(1, ending)
        scheduler.order(2, StartWorker(8, 1))
        assert await scheduler.next() == OfHost(2, WorkerEnded(8, "its host is lost"))
        await until(lambda: bool(scheduler.clocks) or not asyncio.create_task(scheduler.next()))

    play(tmp_path, scenario)


def test_a_host_that_was_asked_to_leave_stays_until_it_has_no_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(cluster: Cluster) -> None:
        stages, running = await cluster.agent(hello_of(1))
        await until(lambda: len(stages.processes) == 2)
        session = cluster.sessions[-1]
        assert session.leave()
        # The scheduler hears of it whenever it comes.
        scheduler = cluster.scheduler()
        told = [await scheduler.next() for _ in range(4)]
        assert told[0] == HostJoined(hello_of(1)) and told[3] == OfHost(1, HostLeaves())
        scheduler.order(1, StartWorker(7, 1))
        assert await scheduler.next() == OfHost(1, WorkerEnded(7, "its host leaves"))
        scheduler.order(1, StopWorker(1))
        assert isinstance(await scheduler.next(), OfHost) and not running.done()
        scheduler.order(1, StopWorker(2))
        assert await running
        assert [type(await scheduler.next()) for _ in range(2)] == [OfHost, HostLost]
        assert "the head says: its stages are served elsewhere" in caplog.text
        assert "host 1 (name1, 10.0.0.1:5000) has left" in caplog.text

    play(tmp_path, scenario)


def test_a_host_without_workers_need_not_be_waited_for(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.agent(hello_of(1))
        assert not cluster.sessions[-1].leave()

    play(tmp_path, scenario)


def test_an_agent_that_comes_back_is_a_new_host_whose_workers_are_gone(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        scheduler = cluster.scheduler()
        first, session = await cluster.agent(hello_of(1))
        for _ in range(3):
            await scheduler.next()
        second, _ = await cluster.agent(hello_of(1))
        lost = await scheduler.next()
        assert isinstance(lost, HostLost)
        assert lost.reason.endswith("is lost: its agent was started again")
        assert await scheduler.next() == HostJoined(hello_of(1))
        assert await session is False
        assert all(process.poll() is not None for process in first.processes.values())
        # What it starts now is the scheduler's to say.
        assert second.processes == {}

    play(tmp_path, scenario)


def test_a_host_lost_before_the_scheduler_is_there_starts_its_share_again(
    tmp_path: Path,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        first, _ = await cluster.agent(hello_of(1))
        await until(lambda: len(first.processes) == 2)
        second, _ = await cluster.agent(hello_of(1))
        await until(lambda: len(second.processes) == 2)
        assert second.threads.keys() == first.threads.keys() == {1, 2}

    play(tmp_path, scenario)


REFUSALS = [
    ({"version": "0.0.1"}, r"runs sgl_pipeline 0\.0\.1, the head .*; install the same version"),
    ({"num_hosts": 4}, r"started with --nnodes 4, the head with --nnodes 3"),
    (
        {"model_digest": "config-tensors-others"},
        r"host 1 \(name1, 10\.0\.0\.1:5000\): its model is not that of host 0 \(.*, head:\d+\): "
        r"tensors of the same names and shapes have other values \(digest config-tensors-others, "
        r"the head's config-tensors-values\); put the same files at --model-path",
    ),
    ({"rank": 0}, r"--node-rank 0 is the head"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
def test_a_host_that_does_not_fit_is_refused_and_both_sides_say_why(
    tmp_path: Path, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster) -> None:
        stages, session = await cluster.agent(structs.replace(hello_of(1), **changes))
        with pytest.raises(ConfigurationError, match=reason):
            await session
        assert stages.processes == {}

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scenario)
    (line,) = [line for line in caplog.messages if "is not taken in" in line]
    assert "(name1, 10.0.0.1:5000)" in line


def test_a_host_with_other_weights_of_the_same_shapes_is_refused_and_one_with_the_same_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large = bytes(range(256)) * 1024
    tensors = {"norm": bytes(64), "head": large}
    own = whole_model(tmp_path / "own", tensors)
    same = sharded_model(tmp_path / "same", {"head": large}, {"norm": bytes(64)})
    other = whole_model(tmp_path / "other", tensors | {"head": large[::-1]})

    async def scenario(cluster: Cluster) -> None:
        taken, _ = await cluster.agent(hello_of(1, model_digest=model_digest(str(same))))
        await until(lambda: len(taken.processes) == 2)
        refused, session = await cluster.agent(hello_of(2, model_digest=model_digest(str(other))))
        with pytest.raises(ConfigurationError, match="other values"):
            await session
        assert refused.processes == {}

    play(tmp_path, scenario, digest=model_digest(str(own)))


def test_two_hosts_of_one_rank_do_not_push_each_other_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster) -> None:
        _, first = await cluster.agent(hello_of(1))
        await asyncio.sleep(0.1)
        _, second = await cluster.agent(hello_of(1, address="10.0.0.9:5000"))
        assert await second is False  # and may try again
        assert not first.done()

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scenario)
    assert "--node-rank 1 belongs to host 1 (name1, 10.0.0.1:5000)" in caplog.text


def test_a_silent_host_is_lost_and_a_missing_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: Cluster) -> None:
        scheduler = cluster.scheduler()
        await cluster.agent(hello_of(1))
        for _ in range(3):
            await scheduler.next()
        stream = cluster.head.hosts[1].stream
        # The head reads nothing of it any more, and the past is long.
        monkeypatch.setattr(stream, "receive", lambda: asyncio.sleep(TIMEOUT_S))
        await asyncio.sleep(0.3)
        stream.heard_s -= 60.0
        lost = await scheduler.next()
        assert isinstance(lost, HostLost) and "it has been silent for" in lost.reason
        await until(lambda: "waiting for host 2: no agent has come" in caplog.text)

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scenario)
    assert "run the same command on it with --node-rank 2" in caplog.text


@pytest.mark.parametrize("kind", MSGPACK)
def test_a_host_of_another_version_is_refused_and_the_head_serves_on(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster) -> None:
        stream = await cluster.dial()
        stream._writer.write(LENGTH.pack(len(MSGPACK[kind])) + MSGPACK[kind])
        rejection = await stream.receive()
        assert isinstance(rejection, Rejected) and "another version" in rejection.reason
        stream.close()
        stages, _ = await cluster.agent(hello_of(1))
        await until(lambda: len(stages.processes) == 2)

    play(tmp_path, scenario)
    assert "another version" in caplog.text


@pytest.mark.parametrize("kind", MSGPACK)
def test_a_host_that_sends_a_malformed_message_later_is_lost(tmp_path: Path, kind: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        scheduler = cluster.scheduler()
        await cluster.agent(hello_of(1))
        for _ in range(3):
            await scheduler.next()
        writer = cluster.sessions[-1]._stream._writer
        writer.write(LENGTH.pack(len(MSGPACK[kind])) + MSGPACK[kind])
        lost = await scheduler.next()
        assert isinstance(lost, HostLost) and "malformed message" in lost.reason

    play(tmp_path, scenario)


def test_a_frame_beyond_the_limit_ends_the_connection_before_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster) -> None:
        stream = await cluster.dial()
        stream._writer.write(LENGTH.pack(MAX_FRAME_BYTES + 1))
        with pytest.raises(StreamClosed):
            await stream.receive()

    play(tmp_path, scenario)
    assert f"the limit is {MAX_FRAME_BYTES}" in caplog.text


def test_whoever_does_not_greet_with_a_hello_is_let_go(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        stream = await cluster.dial()
        stream.send(HostLeaves())
        with pytest.raises(StreamClosed):
            await stream.receive()
        assert cluster.head.hosts == {}

    play(tmp_path, scenario)


def test_whoever_repeats_a_greeting_without_the_secret_gets_no_further_than_the_handshake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = host_directory(tmp_path / "stranger", b"another secret, which is as long as that")

    async def scenario(cluster: Cluster) -> None:
        # The greeting is the cluster's own; the certificate is another.
        connection = await asyncio.to_thread(dial, cluster.address, AGENTS_DOOR, cluster.directory)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(os.path.join(stranger, "cluster-identity.pem"))
        reader, writer = await asyncio.open_connection(
            sock=connection, ssl=context, server_hostname=""
        )
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        await until(lambda: "TLS handshake" in caplog.text)
        assert cluster.head.hosts == {}

    play(tmp_path, scenario)


def test_an_agent_does_not_talk_to_a_head_without_the_secret(tmp_path: Path) -> None:
    stranger = host_directory(tmp_path / "stranger", b"another secret, which is as long as that")

    async def scenario(cluster: Cluster) -> None:
        connection = await asyncio.to_thread(dial, cluster.address, AGENTS_DOOR, cluster.directory)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.open_connection(
                sock=connection, ssl=tls_context(stranger, is_server=False), server_hostname=""
            )

    play(tmp_path, scenario)
