"""Real workers get ready over real sockets, and another one comes when it is asked for."""

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from support.forked_workers import forked_workers  # noqa: F401 - a fixture
from support.tiny_models import NUM_LAYERS, tiny_model
from support.worker_messages import hello

from sgl_pipeline.args import PipelineArgs, StageArgs
from sgl_pipeline.errors import ConfigurationError, StageFailure
from sgl_pipeline.managers.stages import worker_processes
from sgl_pipeline.managers.stages.main_process_workers import (
    MainProcessWorkers,
    serve_worker_requests,
)
from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.managers.stages.stage_processes import StageProcesses
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.pipeline.worker_source import RefusedWorker
from sgl_pipeline.process_lifetime import WatchedProcess
from sgl_pipeline.wire.channels import WorkerChannel
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    PoolSize,
    Regrouped,
    Shutdown,
    StageAssignment,
    WorkerLeaves,
)
from sgl_pipeline.wire.stage_orders import OrderStream
from sgl_pipeline.wire.step_order import MirrorSnapshot

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("forked_workers")]

TIMEOUT_S = 60.0


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[StageProcesses]:
    processes = StageProcesses(str(tmp_path))
    processes.start(1, 1)
    yield processes
    processes.close()


@contextmanager
def launched(
    processes: StageProcesses,
    run_directory: Path,
    kind: type[StageLauncher] = StageLauncher,
    source: type[MainProcessWorkers] = MainProcessWorkers,
    **options: object,
) -> Iterator[Any]:
    """A launcher of stages of the tiny model, `processes` of which are started."""
    path = tiny_model("qwen3")
    stages = StageArgs(model_path=str(path), dtype="float32", max_total_tokens=64, **options)
    args = PipelineArgs(stages=stages, run_directory=str(run_directory))
    own_end, scheduler_end = multiprocessing.Pipe()
    serve_worker_requests(own_end, processes)
    with zmq.Context() as context:
        launcher = kind(args, NUM_LAYERS, processes.pids, context, source(scheduler_end))
        try:
            yield launcher
        finally:
            launcher.stop()


def end_of(pid: int) -> str:
    with closing(WatchedProcess(pid)) as process:
        assert process.wait(TIMEOUT_S)
        return process.end()


def test_another_worker_comes_when_it_is_asked_for_and_waits_as_a_spare(
    processes: StageProcesses, tmp_path: Path
) -> None:
    with launched(processes, tmp_path) as launcher:
        capacity = launcher.start()
        assert (capacity.num_pages, capacity.plan.num_stages) == (4, 1)
        assert launcher.ask_for_worker() == 1
        deadline_s = time.monotonic() + TIMEOUT_S
        while not launcher.roster.spare_workers and time.monotonic() < deadline_s:
            launcher.channel.socket.poll(200)
            launcher.check({})
            for _, message in launcher.receive():
                launcher.take(message)
        assert launcher.roster.spare_workers == (1,)
        assert len(processes.pids) == 2
        # One that stands still while it should load is noticed by its silence.
        psutil.Process(processes.pids[1]).suspend()
        launcher.tell([(1, PoolSize(4))])
        now_s = time.monotonic()
        assert launcher.silent_newcomers(now_s) == []
        late = launcher.silent_newcomers(now_s + 1e6)  # the bound grows on a busy machine
        assert [worker for worker, _ in late] == [1] and "while it loaded" in late[0][1]
        # It is watched like the first ones: its end is noticed.
        os.kill(processes.pids[1], 9)
        with pytest.raises(StageFailure, match="killed by signal 9"):
            while time.monotonic() < deadline_s:
                launcher.check({})


def test_a_worker_that_is_dismissed_ends_by_itself_and_is_no_loss(
    processes: StageProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine that is busy it takes longer to end than a server waits.
    monkeypatch.setattr(worker_processes, "STOP_TIMEOUT_S", TIMEOUT_S)
    with launched(processes, tmp_path) as launcher:
        launcher.start()
        process = psutil.Process(processes.pids[0])
        # One that serves is asked to leave: it says so, once, and goes on.
        process.terminate()
        deadline_s = time.monotonic() + TIMEOUT_S
        heard: list[tuple[int, FromWorker]] = []
        while not heard and time.monotonic() < deadline_s:
            launcher.channel.socket.poll(200)
            heard += launcher.receive()
        assert heard == [(0, WorkerLeaves(0))] and [*launcher.take_lost()] == []
        launcher.tell([(0, Shutdown())])
        while launcher._processes.numbers and time.monotonic() < deadline_s:
            assert [*launcher.take_lost()] == []
            time.sleep(0.05)
        assert launcher._processes.numbers == []
        assert end_of(processes.pids[0]) == "its process ended, exit code 0"


def test_a_dismissed_worker_that_stands_still_is_killed(
    processes: StageProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "STOP_TIMEOUT_S", 0.0)
    with launched(processes, tmp_path) as launcher:
        launcher.start()
        psutil.Process(processes.pids[0]).suspend()
        launcher.tell([(0, Shutdown())])
        assert [*launcher.take_lost()] == [] and launcher._processes.numbers == []
        assert end_of(processes.pids[0]) == "its process ended, killed by signal 9"


class HostThatReturns(MainProcessWorkers):
    """Its worker 1 counts as one of another host, which is away for three looks at it."""

    num_looks = 0

    def is_lost_with_host(self, worker: int) -> bool:
        return worker == 1

    def are_hosts_there(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 3


class UnluckyLauncher(StageLauncher):
    """Loses worker 1 once, when that has been sent a message of type `moment`."""

    moment: type = PoolSize
    is_unlucky = True

    def tell(self, messages: Iterable[Addressed]) -> None:
        told = [*messages]
        super().tell(told)
        if self.is_unlucky and any(isinstance(message, self.moment) for _, message in told):
            self.is_unlucky = False
            process = self._processes.get(1)
            assert process is not None
            os.kill(process.pid, 9)


@contextmanager
def unlucky(run_directory: Path) -> Iterator[UnluckyLauncher]:
    """Two stages; worker 1 is on a host that is lost."""
    processes = StageProcesses(str(run_directory))
    processes.start(2, 1)
    two = {"num_stages": 2, "layer_partition": "even"}
    with (
        closing(processes),
        launched(processes, run_directory, UnluckyLauncher, HostThatReturns, **two) as launcher,
    ):
        yield launcher


@pytest.mark.parametrize("moment", [StageAssignment, PoolSize])
def test_a_worker_that_is_lost_with_its_host_during_the_start_is_waited_for(
    tmp_path: Path, moment: type
) -> None:
    with unlucky(tmp_path) as launcher:
        launcher.moment = moment
        capacity = launcher.start()
        assert isinstance(launcher._source, HostThatReturns)
        assert not launcher.is_unlucky and launcher._source.num_looks > 3
        assert capacity.num_pages == 4
        assert launcher.roster.workers_of_stages == [0, 2]
        # The stream that all have joined begins with this order, and is no error to any.
        assert launcher.roster.incarnation == 1
        launcher.broadcast(OrderStream().start_over(MirrorSnapshot((), ()), 1))
        launcher.channel.socket.poll(500)
        launcher.check({})


def test_a_host_lost_during_the_start_ends_it_where_links_are_joined_for_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerRoster, "can_regroup", False)
    with unlucky(tmp_path) as launcher, pytest.raises(StageFailure, match=r"stage 1 .*NCCL"):
        launcher.start()


def test_a_worker_whose_process_cannot_be_started_is_refused_with_the_reason(
    processes: StageProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(worker: int) -> int:
        raise OSError("no more processes")

    monkeypatch.setattr(processes, "start_another", refuse)
    with launched(processes, tmp_path) as launcher:
        assert launcher.ask_for_worker() == 1
        refused: list[RefusedWorker] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while not refused and time.monotonic() < deadline_s:
            assert list(launcher.take_lost()) == []
            refused = launcher.take_refused()
        assert refused == [RefusedWorker(1, "its process cannot be started: no more processes")]
        assert launcher.take_refused() == []
        # Nobody waits for its word.
        assert launcher.silent_newcomers(time.monotonic() + 1e6) == []


def test_a_stage_that_does_not_fit_names_the_flag(
    processes: StageProcesses, tmp_path: Path
) -> None:
    refused = pytest.raises(ConfigurationError, match="stage 0: --stage-attention-backend")
    with launched(processes, tmp_path, attention_backend="flashinfer") as launcher, refused:
        launcher.start()


def test_no_worker_is_started_when_the_server_is_about_to_end(processes: StageProcesses) -> None:
    processes.close()
    assert processes.start_another(1) is None


def test_what_a_lost_worker_has_said_is_not_heard_and_the_others_are(
    processes: StageProcesses, tmp_path: Path
) -> None:
    with launched(processes, tmp_path) as launcher:
        launcher.start()
        assert launcher.stage_pids == [processes.pids[0]]
        other = WorkerChannel(launcher.channel.socket.context, f"ipc://{tmp_path}/stages", 7)
        other.send(hello(7))
        while not launcher.channel.socket.poll(100):
            pass
        # Nothing has ended: the message stays where it wakes whoever waits for one.
        assert list(launcher.take_lost()) == [] and launcher.channel.socket.poll(0)
        launcher.give_up(7)
        assert list(launcher.receive()) == []
        os.kill(processes.pids[0], 9)
        lost: list[tuple[int, str]] = []
        poller = zmq.Poller()
        poller.register(launcher.ends_descriptor, zmq.POLLIN)
        assert poller.poll(10_000)
        lost += launcher.take_lost()
        assert lost == [(0, "its process ended, killed by signal 9")]
        # Once, and whoever waits for the next is not woken by this one.
        assert list(launcher.take_lost()) == [] and not poller.poll(0)
        other.close()


def test_a_worker_that_says_what_it_may_not_is_lost(
    processes: StageProcesses, tmp_path: Path
) -> None:
    with launched(processes, tmp_path) as launcher:
        launcher.start()
        address = f"ipc://{tmp_path}/stages"
        context = launcher.channel.socket.context
        others = {number: WorkerChannel(context, address, number) for number in range(7, 11)}
        others[7].send(Regrouped(0, 1))
        others[8].send(hello(7))
        others[9].socket.send(b"garbage")
        others[10].send(hello(10))
        heard: list[int] = []
        lost: dict[int, str] = {}
        deadline_s = time.monotonic() + TIMEOUT_S
        while (len(lost) < 3 or not heard) and time.monotonic() < deadline_s:
            launcher.channel.socket.poll(200)
            heard += [worker for worker, _ in launcher.receive()]
            lost |= dict(launcher.take_lost())
        assert heard == [10]
        assert lost[7] == "it sent a Regrouped of stage 0, it fills no stage"
        assert lost[8] == "it sent a WorkerHello of worker 7"
        assert lost[9].startswith("it sent a malformed message")
        for channel in others.values():
            channel.close()


def test_a_worker_that_fails_is_lost_with_its_own_words(
    processes: StageProcesses, tmp_path: Path
) -> None:
    with launched(processes, tmp_path) as launcher:
        launcher.start()
        stream = OrderStream()
        stream.seal(MirrorSnapshot((), ()))
        launcher.broadcast(stream.seal(MirrorSnapshot((), ())))
        deadline_s = time.monotonic() + TIMEOUT_S
        lost: list[tuple[int, str]] = []
        while not lost and time.monotonic() < deadline_s:
            launcher.channel.socket.poll(200)
            assert list(launcher.receive()) == []
            lost += launcher.take_lost()
        ((worker, reason),) = lost
        assert worker == 0 and reason.startswith("ProtocolError: order 1 of stream 0 arrived")
        assert "lost or repeated" in reason
