"""New workers from all hosts: the scheduler's end of its connection to the head process.

A `WorkerSource` above the main process's (`main_process_workers.py`), which starts the workers of
the head's own host. Which host is asked for a worker is decided by `pipeline/host_choice.py`.
"""

import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.cluster.host_messages import (
    ClockNews,
    DumpWorker,
    ForHost,
    FromHead,
    HostHello,
    HostJoined,
    HostLeaves,
    HostLost,
    StartWorker,
    StopWorker,
    WorkerStarted,
)
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.managers.hosts.scheduler_end import MAX_MESSAGE_BYTES, scheduler_end_path
from sgl_pipeline.managers.stages.main_process_workers import MainProcessWorkers
from sgl_pipeline.pipeline.assignment import num_threads, split_cores, workers_of_host
from sgl_pipeline.pipeline.host_choice import HostLoad, choose_host
from sgl_pipeline.pipeline.worker_source import RefusedWorker, StartedWorker, WorkerProcess

_HEAD = 0


class RemoteProcess:
    """A worker's process on another host, as its agent reports it."""

    def __init__(self, source: "ClusterWorkers", rank: int, worker: int, pid: int) -> None:
        self._source = source
        self._rank = rank
        self._worker = worker
        self._pid = pid
        self._ending = ""
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def rank(self) -> int:
        return self._rank

    def fileno(self) -> int:
        """A descriptor that can be read once it is known that the process has ended."""
        return self._descriptor

    def has_ended(self, reason: str) -> None:
        """The agent has said so, or is gone."""
        if not self._ending:
            self._ending = reason
            os.eventfd_write(self._descriptor, 1)

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s`; True if the worker has ended, as far as the source has heard."""
        if timeout_s > 0.0 and not self._ending:
            self._source.hear(timeout_s)
        return bool(self._ending)

    def kill(self) -> None:
        if not self._ending:
            self._source.order(self._rank, StopWorker(self._worker))

    def ask_for_dump(self) -> None:
        self._source.order(self._rank, DumpWorker(self._worker))

    def state(self) -> str:
        return f"on host {self._rank}"

    def core_waits_s(self) -> dict[int, float]:
        """Not known here."""
        return {}

    def end(self) -> str:
        return self._ending

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(slots=True)
class _ClusterHost:
    """Until `avoided_until_s` others are asked for workers, where there are others; one that
    `leaves` is asked for none."""

    hello: HostHello | None = None
    clock: ClockNews | None = None
    avoided_until_s: float = 0.0
    leaves: bool = False


class ClusterWorkers:
    """The scheduler's end of the connection to the head process."""

    def __init__(self, args: PipelineArgs, local: MainProcessWorkers) -> None:
        self._args = args
        self._local = local
        self._hosts = {rank: _ClusterHost() for rank in range(args.cluster.num_hosts)}
        self._processes: dict[int, RemoteProcess] = {}
        self._arrived: list[WorkerStarted] = []
        # Hosts of workers that were asked for or run: the head's own are never known to end here.
        self._rank_of = {
            worker: rank
            for rank in self._hosts
            for worker in workers_of_host(args.stages.num_stages, args.cluster.num_hosts, rank)
        }
        self._ended: dict[int, str] = {}
        self._lost_with_host: set[int] = set()
        self._leavers: list[int] = []
        self._decoder = msgspec.msgpack.Decoder(FromHead)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(scheduler_end_path(args.run_directory))

    def start_worker(self, worker: int) -> None:
        self.hear(0.0)
        rank = choose_host(self._loads())
        self._rank_of[worker] = rank
        if rank == _HEAD:
            self._local.start_worker(worker)
            return
        hello = self._hosts[rank].hello
        assert hello is not None
        share = split_cores(hello.cores, max(1, self._share(rank)))[0]
        self.order(rank, StartWorker(worker, num_threads(share, self._args.stages.cpu_threads)))

    def started(self) -> Iterator[StartedWorker | RefusedWorker]:
        yield from self._local.started()
        self.hear(0.0)
        arrived, self._arrived = self._arrived, []
        for message in arrived:
            yield StartedWorker(message.worker, message.pid)

    def watch(self, started: StartedWorker) -> WorkerProcess:
        rank = self._rank_of[started.worker]
        if rank == _HEAD:
            return self._local.watch(started)
        process = RemoteProcess(self, rank, started.worker, started.pid)
        self._processes[started.worker] = process
        if (reason := self._ended.pop(started.worker, None)) is not None:
            process.has_ended(reason)
        return process

    def take_leavers(self) -> list[int]:
        self.hear(0.0)
        leavers, self._leavers = self._leavers, []
        return leavers

    def clock_offsets_s(self) -> Mapping[int, float]:
        offsets_s = {}
        for worker, process in self._processes.items():
            clock = self._hosts[process.rank].clock
            if clock is not None:
                offsets_s[worker] = clock.offset_s
        return offsets_s

    def hosts(self) -> list[dict[str, Any]]:
        return [self._describe(rank, host) for rank, host in self._hosts.items()]

    def order(self, rank: int, message: StartWorker | StopWorker | DumpWorker) -> None:
        """Sends an order to the agent of a host."""
        self._socket.send(msgspec.msgpack.encode(ForHost(rank, message)))

    def forget(self, worker: int, *, has_served: bool) -> None:
        self._processes.pop(worker, None)
        rank = self._rank_of.pop(worker, None)
        if rank is not None and not has_served and not self.is_lost_with_host(worker):
            # Its host may have no room for it.
            self._hosts[rank].avoided_until_s = time.monotonic() + self._args.recovery.retry_s

    def is_lost_with_host(self, worker: int) -> bool:
        return worker in self._lost_with_host

    def are_hosts_there(self) -> bool:
        self.hear(0.0)
        return all(host.hello is not None for rank, host in self._hosts.items() if rank != _HEAD)

    def hear(self, timeout_s: float) -> None:
        """Takes in what the head process has sent; waits for it at most `timeout_s`."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while poller.poll(timeout_s * 1000):
            timeout_s = 0.0
            packet = self._socket.recv(MAX_MESSAGE_BYTES)
            if not packet:
                raise ProtocolError("the process of the cluster port has ended; see the log")
            self._take(self._decoder.decode(packet))

    def _take(self, message: FromHead) -> None:
        if isinstance(message, HostJoined):
            self._hosts[message.hello.rank] = _ClusterHost(message.hello)
        elif isinstance(message, ClockNews):
            self._hosts[message.rank].clock = message
        elif isinstance(message, HostLost):
            self._hosts[message.rank] = _ClusterHost()
            for worker, rank in [*self._rank_of.items()]:
                if rank == message.rank:
                    self._lost_with_host.add(worker)
                    self._end(worker, message.reason)
        elif isinstance(message.message, WorkerStarted):
            self._arrived.append(message.message)
        elif isinstance(message.message, HostLeaves):
            self._hosts[message.rank].leaves = True
            self._leavers += [n for n, rank in self._rank_of.items() if rank == message.rank]
        else:
            self._end(message.message.worker, message.message.reason)

    def _end(self, worker: int, reason: str) -> None:
        process = self._processes.get(worker)
        if process is not None:
            process.has_ended(reason)
        elif worker in self._rank_of:
            # It was asked for, and the launcher has yet to hear that it was started.
            self._ended[worker] = reason
            if all(message.worker != worker for message in self._arrived):
                self._arrived.append(WorkerStarted(worker, 0))

    def _share(self, rank: int) -> int:
        """The number of stages with which a host starts."""
        num_stages, num_hosts = self._args.stages.num_stages, self._args.cluster.num_hosts
        return len(workers_of_host(num_stages, num_hosts, rank))

    def _loads(self) -> list[HostLoad]:
        ranks, now_s = [*self._rank_of.values()], time.monotonic()
        present = {
            rank: host
            for rank, host in self._hosts.items()
            if rank == _HEAD or (host.hello and not host.leaves)
        }
        asked = [rank for rank, host in present.items() if host.avoided_until_s <= now_s]
        return [HostLoad(rank, self._share(rank), ranks.count(rank)) for rank in asked or present]

    def _describe(self, rank: int, host: _ClusterHost) -> dict[str, Any]:
        facts: dict[str, Any] = {"rank": rank, "is_there": rank == _HEAD or host.hello is not None}
        if host.hello is not None:
            hello = msgspec.json.decode(msgspec.json.encode(host.hello))
            facts |= {key: hello[key] for key in ("name", "address", "interface", "cores")}
            facts |= {key: hello[key] for key in ("num_numa_nodes", "num_gpus", "memory_bytes")}
        if host.clock is not None:
            facts["clock_offset_ms"] = round(host.clock.offset_s * 1e3, 4)
            facts["clock_error_ms"] = round(host.clock.error_s * 1e3, 4)
            facts["clock_drift_ppm"] = round(host.clock.drift_ppm, 2)
        return facts
