"""Workers of other hosts talk to the scheduler through the cluster port, as those of its own do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.clusters import host_directory, open_port, until
from support.malformed_data import MSGPACK
from support.worker_messages import hello

from sgl_pipeline.cluster import remote_workers
from sgl_pipeline.cluster.remote_workers import RemoteWorkerChannel, RemoteWorkers
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.wire.channels import SchedulerChannel, WorkerChannel
from sgl_pipeline.wire.stage_messages import FromWorker, PoolSize, Shutdown


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The head's run directory and cluster port."""
    directory = host_directory(tmp_path / "head")
    with open_port(directory) as (address, _):
        yield directory, address


def next_of(scheduler: SchedulerChannel, worker: RemoteWorkerChannel) -> tuple[int, FromWorker]:
    found: list[tuple[int, FromWorker]] = []

    def look() -> bool:
        worker._stream.flush()  # as it does while it waits
        if (received := scheduler.receive()) is not None:
            found.append(received)
        return bool(found)

    until(look)
    return found[0]


def meet(workers: RemoteWorkers, *channels: RemoteWorkerChannel) -> list[int]:
    """Has the ends of channels find each other; which workers the scheduler has heard."""
    told: list[int] = []

    def look() -> bool:
        for channel in channels:
            channel._stream.flush()
        told.extend(worker for worker, _ in workers.receive())
        return len(told) == len(channels)

    until(look)
    return told


def test_workers_here_and_elsewhere_are_alike(place: tuple[str, str]) -> None:
    directory, address = place
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    here_address = f"ipc://{directory}/stages"
    with SchedulerChannel(context, here_address, RemoteWorkers(directory)) as scheduler:
        here = WorkerChannel(context, here_address, 0)
        there = RemoteWorkerChannel(address, directory)
        for worker, channel in enumerate((here, there)):
            channel.send(hello(worker))
        assert dict([next_of(scheduler, there), next_of(scheduler, there)]) == {
            0: hello(0),
            1: hello(1),
        }
        scheduler.broadcast((0, 1), PoolSize(7))
        scheduler.send(1, Shutdown())
        assert here.receive(5000) == PoolSize(7)
        assert there.receive(5000) == PoolSize(7)
        there.wait([], 5.0)
        assert there.receive(5000) == Shutdown()
        assert there.receive(0) is None
        there.send(hello(1))
        assert scheduler.wait(5000)
        assert next_of(scheduler, there) == (1, hello(1))
        here.close()
        there.close()
    context.term()


def test_a_connection_that_breaks_is_told_after_a_while_unless_the_worker_was_given_up(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_workers, "BROKEN_GRACE_S", 0.05)
    directory, address = place
    workers = RemoteWorkers(directory)
    channels = [RemoteWorkerChannel(address, directory) for _ in range(2)]
    for number, channel in enumerate(channels):
        channel.send(hello(number))
    assert sorted(meet(workers, *channels)) == [0, 1]
    for channel in channels:
        channel.close()
    until(lambda: not [*workers.receive()] and not (workers.knows(0) or workers.knows(1)))
    assert workers.take_broken() == {}
    workers.forget(0)
    told: dict[int, str] = {}
    until(lambda: told.update(workers.take_broken()) is None and bool(told))
    assert [*told] == [1] and told[1].startswith("its connection ended: ")
    assert workers.take_broken() == {}
    workers.close()


def test_a_worker_without_its_scheduler_leaves(place: tuple[str, str]) -> None:
    directory, address = place
    workers = RemoteWorkers(directory)
    channel = RemoteWorkerChannel(address, directory)
    channel.send(hello(3))
    meet(workers, channel)
    workers.forget(3)
    with pytest.raises(SystemExit, match="the scheduler is gone"):
        channel.receive()
    channel.close()
    workers.close()


@pytest.mark.parametrize("frame", [b"no message", *MSGPACK.values()])
def test_whoever_has_the_key_and_is_no_worker_is_let_go(
    place: tuple[str, str], frame: bytes
) -> None:
    directory, address = place
    workers = RemoteWorkers(directory)
    channel = RemoteWorkerChannel(address, directory)
    channel._stream.send(frame)
    with pytest.raises(SystemExit):
        until(lambda: bool([*workers.receive()]) or channel.receive(1) is not None)
    assert not workers._strangers and not workers._workers
    channel.close()
    workers.close()


@pytest.mark.parametrize("kind", MSGPACK)
def test_a_malformed_message_of_the_scheduler_is_a_protocol_error(
    place: tuple[str, str], kind: str
) -> None:
    directory, address = place
    workers = RemoteWorkers(directory)
    channel = RemoteWorkerChannel(address, directory)
    channel.send(hello(0))
    meet(workers, channel)
    workers.send(0, MSGPACK[kind])
    with pytest.raises(ProtocolError, match="malformed"):
        channel.receive(5000)
    channel.close()
    workers.close()
