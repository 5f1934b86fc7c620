"""The scheduler's source of workers: whom it asks, what it watches, whose clock it knows."""

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sgl_pipeline.args import ClusterArgs, PipelineArgs, StageArgs
from sgl_pipeline.cluster.host_messages import (
    ClockNews,
    ForHost,
    FromHead,
    HostHello,
    HostJoined,
    HostLeaves,
    HostLost,
    OfHost,
    StartWorker,
    StopWorker,
    WorkerEnded,
    WorkerStarted,
)
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.managers.hosts.cluster_workers import ClusterWorkers
from sgl_pipeline.managers.hosts.scheduler_end import scheduler_end_path
from sgl_pipeline.pipeline.worker_source import StartedWorker

HELLO = HostHello(
    rank=1,
    num_hosts=2,
    name="name1",
    address="10.0.0.1:5000",
    interface="eth0",
    cores=(0, 1, 2, 3),
    num_numa_nodes=1,
    num_gpus=0,
    memory_bytes=2**33,
    version="1",
    model_digest="d",
)


class LocalWorkers:
    """Stands in for the main process."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def start_worker(self, worker: int) -> None:
        self.asked.append(worker)

    def started(self) -> list[StartedWorker]:
        return []


class Source:
    """Three stages on two hosts: worker 0 here, 1 and 2 on host 1."""

    def __init__(self, directory: Path) -> None:
        stages = StageArgs(num_stages=3, model_path="m", dtype="float32")
        cluster = ClusterArgs(num_hosts=2, head_address="h:1")
        args = PipelineArgs(stages=stages, cluster=cluster, run_directory=os.fspath(directory))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(scheduler_end_path(os.fspath(directory)))
        listener.listen(1)
        self.local = LocalWorkers()
        self.workers = ClusterWorkers(args, self.local)  # type: ignore[arg-type]
        self.head = listener.accept()[0]
        listener.close()

    def tell(self, *messages: FromHead) -> None:
        for message in messages:
            self.head.send(msgspec.msgpack.encode(message))

    def order(self) -> ForHost:
        return msgspec.msgpack.decode(self.head.recv(65536), type=ForHost)

    def start(self) -> None:
        """The workers of host 1 run."""
        self.tell(HostJoined(HELLO), *(OfHost(1, WorkerStarted(n, 100 + n)) for n in (1, 2)))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    source = Source(tmp_path)
    yield source
    source.head.close()
    source.workers._socket.close()


def is_readable(process: object) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def test_the_first_workers_of_other_hosts_come_by_themselves(source: Source) -> None:
    source.start()
    assert [*source.workers.started()] == [StartedWorker(1, 101), StartedWorker(2, 102)]
    assert [*source.workers.started()] == []


def test_the_end_of_a_process_elsewhere_is_noticed_and_its_host_asked_for_another(
    source: Source,
) -> None:
    source.start()
    first, second = map(source.workers.watch, source.workers.started())
    assert first.pid == 101 and not first.wait(0) and not is_readable(first)
    source.tell(OfHost(1, WorkerEnded(1, "killed")))
    assert first.wait(1.0) and is_readable(first) and first.end() == "killed"
    assert not second.wait(0)
    source.workers.forget(1, has_served=True)
    first.close()
    source.workers.start_worker(3)
    assert source.order() == ForHost(1, StartWorker(3, 2))  # four cores, two stages
    second.kill()
    assert source.order() == ForHost(1, StopWorker(2))


def test_a_lost_host_loses_all_its_workers_and_this_one_is_asked_instead(source: Source) -> None:
    source.start()
    processes = [*map(source.workers.watch, source.workers.started())]
    source.tell(HostLost(1, "host 1 is lost: silent"))
    for number, process in enumerate(processes, 1):
        assert process.wait(1.0) and process.end() == "host 1 is lost: silent"
        source.workers.forget(number, has_served=False)
    source.workers.start_worker(3)
    assert source.local.asked == [3]
    assert (
        all(map(source.workers.is_lost_with_host, (1, 2))) and not source.workers.are_hosts_there()
    )
    # When it is back it is asked again.
    source.tell(HostJoined(HELLO))
    assert source.workers.are_hosts_there()
    source.workers.start_worker(4)
    assert source.order() == ForHost(1, StartWorker(4, 2))


def test_a_host_that_leaves_gives_its_workers_and_is_asked_for_no_other(source: Source) -> None:
    source.start()
    processes = [*map(source.workers.watch, source.workers.started())]
    assert source.workers.take_leavers() == []
    source.tell(OfHost(1, HostLeaves()))
    assert source.workers.take_leavers() == [1, 2] and source.workers.take_leavers() == []
    for number in (3, 4):
        source.workers.start_worker(number)
    assert source.local.asked == [3, 4]
    assert not any(process.wait(0) for process in processes)
    # It is a host like others when it comes again.
    source.tell(HostLost(1, "host 1 has left"), HostJoined(HELLO))
    assert [process.end() for process in processes if process.wait(1.0)] == ["host 1 has left"] * 2
    for number in (1, 2):
        source.workers.forget(number, has_served=True)
    source.workers.start_worker(5)
    assert source.order() == ForHost(1, StartWorker(5, 2))


def test_a_host_whose_newcomer_never_served_is_not_asked_while_there_is_another(
    source: Source,
) -> None:
    source.start()
    assert len([*source.workers.started()]) == 2
    source.workers.forget(1, has_served=True)
    source.workers.start_worker(3)
    assert source.order() == ForHost(1, StartWorker(3, 2))
    source.workers.forget(3, has_served=False)
    source.workers.start_worker(4)
    assert source.local.asked == [4]
    # Where no host has done better, all are asked again, the one that lacks most first.
    source.workers.forget(4, has_served=False)
    source.workers.start_worker(5)
    assert source.order() == ForHost(1, StartWorker(5, 2))
    # A host that comes back may have changed.
    source.workers.forget(5, has_served=False)
    source.tell(HostLost(1, "host 1 is lost: silent"), HostJoined(HELLO))
    source.workers.start_worker(6)
    assert source.order() == ForHost(1, StartWorker(6, 2))


def test_a_worker_that_cannot_be_started_is_one_that_has_ended(source: Source) -> None:
    source.start()
    assert len([*source.workers.started()]) == 2
    source.workers.forget(1, has_served=True)
    source.workers.start_worker(5)
    source.tell(OfHost(1, WorkerEnded(5, "it cannot be started")))
    (started,) = source.workers.started()
    process = source.workers.watch(started)
    assert started.worker == 5 and process.wait(0) and process.end() == "it cannot be started"


def test_clocks_are_known_by_worker_and_shown_by_host(source: Source) -> None:
    source.start()
    for started in source.workers.started():
        source.workers.watch(started)
    assert source.workers.clock_offsets_s() == {}
    source.tell(ClockNews(1, -3.25, 0.0005, 12.0))
    source.workers.hear(1.0)
    assert source.workers.clock_offsets_s() == {1: -3.25, 2: -3.25}
    here, there = source.workers.hosts()
    assert here == {"rank": 0, "is_there": True}
    assert (there["name"], there["interface"], there["cores"]) == ("name1", "eth0", [0, 1, 2, 3])
    assert (there["clock_offset_ms"], there["clock_error_ms"]) == (-3250.0, 0.5)
    source.tell(HostLost(1, "gone"))
    source.workers.hear(1.0)
    assert source.workers.hosts()[1] == {"rank": 1, "is_there": False}


def test_without_the_head_process_the_server_cannot_go_on(source: Source) -> None:
    source.head.close()
    with pytest.raises(ProtocolError, match="cluster port"):
        source.workers.hear(1.0)
