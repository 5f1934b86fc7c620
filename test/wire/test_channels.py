"""The scheduler's and the workers' ends of a channel understand each other, and nobody else."""

import os

import msgspec
import pytest
import zmq
from support.malformed_data import MSGPACK
from support.worker_messages import hello

from sgl_pipeline.args import StageArgs
from sgl_pipeline.errors import ProtocolError, WorkerFault
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.channels import SchedulerChannel, WorkerChannel
from sgl_pipeline.wire.stage_messages import PoolSize, Shutdown, StageAssignment, StageReport


@pytest.fixture
def channels(tmp_path):
    context = zmq.Context()
    address = f"ipc://{tmp_path}/stages"
    with SchedulerChannel(context, address) as scheduler:
        workers = [WorkerChannel(context, address, worker) for worker in range(2)]
        for worker, channel in enumerate(workers):
            channel.send(hello(worker))
        hellos = [wait_for(scheduler) for _ in workers]
        # Each message comes with the number of its worker.
        assert dict(hellos) == {0: hello(0), 1: hello(1)}
        yield scheduler, workers
        for channel in workers:
            channel.close()
    context.term()


def wait_for(scheduler):
    assert scheduler.socket.poll(5000)
    return scheduler.receive()


def test_messages_reach_the_worker_they_are_meant_for(channels):
    scheduler, (first, second) = channels
    scheduler.send(1, PoolSize(7))
    scheduler.broadcast(range(2), Shutdown())
    assert first.receive(5000) == Shutdown()
    assert [second.receive(5000), second.receive(5000)] == [PoolSize(7), Shutdown()]
    assert first.receive(0) is None


def test_reports_come_back_equal(channels):
    scheduler, (first, _) = channels
    timing = StageTiming(0.5, 0.5, 0.75, 1.0, 2.0, 2.5, 2.5)
    report = StageReport(stage=0, step_id=3, epoch=1, timing=timing, token_ids=(4, 5))
    first.send(report)
    assert wait_for(scheduler) == (0, report)
    assert scheduler.receive() is None


REPORT = {"type": "StageReport", "stage": 0, "step_id": 3, "epoch": 0, "timing": {}}


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x80garbage"],
        [b""],
        [b"\xa1\xff"],
        [msgspec.msgpack.encode(Shutdown()), b"and more"],
        [msgspec.msgpack.encode(REPORT)[:-3]],
        [msgspec.msgpack.encode(REPORT)],
        [msgspec.msgpack.encode({"type": "StageLoaded", "stage": 0, "num_pages": -1})],
        *([message] for message in MSGPACK.values()),
    ],
)
def test_a_malformed_message_is_the_fault_of_its_worker(channels, frames):
    scheduler, (first, second) = channels
    first.socket.send_multipart(frames)
    with pytest.raises(WorkerFault) as found:
        wait_for(scheduler)
    assert found.value.worker == 0
    second.send(hello(1))
    assert wait_for(scheduler) == (1, hello(1))


def test_what_nobody_can_have_sent_is_dropped(channels):
    scheduler, (first, _) = channels
    for identity in (b"stranger", b"worker-", b"worker-x1"):
        socket = first.socket.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(scheduler.socket.last_endpoint.decode())
        socket.send(msgspec.msgpack.encode(hello(0)))
        assert scheduler.socket.poll(5000)
        assert scheduler.receive() is None
        socket.close()


ASSIGNMENT = msgspec.to_builtins(
    StageAssignment(
        stage=0,
        plan=StagePlan(0, (1,)),
        args=StageArgs(model_path="model", dtype="float32"),
        page_size=16,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )
)
UNKNOWN_GRAPHS = ASSIGNMENT | {"args": ASSIGNMENT["args"] | {"graphs": "on"}}


@pytest.mark.parametrize(
    "payload",
    [
        *(msgspec.msgpack.encode(one) for one in ({"type": "Unknown"}, UNKNOWN_GRAPHS)),
        *MSGPACK.values(),
    ],
    ids=["unknown type", "unknown graphs", *MSGPACK],
)
def test_a_malformed_message_is_a_protocol_error_at_a_worker(channels, payload):
    scheduler, (first, _) = channels
    scheduler.socket.send_multipart([b"worker-0", payload])
    with pytest.raises(ProtocolError, match="malformed"):
        first.receive(5000)


def test_sending_to_a_worker_that_is_gone_is_no_error(channels):
    scheduler, _ = channels
    scheduler.send(9, Shutdown())


def test_a_worker_waits_for_a_message_or_for_what_else_it_may_read(channels):
    scheduler, (first, _) = channels
    reader, writer = os.pipe()
    try:
        first.wait([reader], 0.0)
        os.write(writer, b"rows")
        first.wait([reader])
        os.read(reader, 4)
        scheduler.send(0, PoolSize(7))
        first.wait([reader])
        assert first.receive(0) == PoolSize(7)
        first.wait([], 0.0)
    finally:
        os.close(reader)
        os.close(writer)
