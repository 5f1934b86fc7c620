"""The agent of a host that is not the head: dials it, runs workers for it, and tries again.

`python -m sgl_pipeline.launch_server ... --node-rank 1` ends up here. It imports neither torch nor
sglang. Workers live as long as the connection to the head that asked for them: a head that is gone
has no use for what they hold, and one that lost sight of this host has given them up. On SIGTERM
the agent stays until the head has had its stages handed over to other hosts; a second one ends it.
"""

import asyncio
import logging
import signal
import time

import msgspec

from sgl_pipeline.args import ClusterArgs
from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import AGENTS_DOOR, DialError, join_address, split_address
from sgl_pipeline.cluster.host_messages import (
    AgentExit,
    DumpWorker,
    HostHello,
    HostLeaves,
    Ping,
    Pong,
    Rejected,
    StartWorker,
    StopWorker,
    ToAgent,
    Welcome,
    WorkerEnded,
    WorkerStarted,
)
from sgl_pipeline.cluster.interfaces import agent_own_address
from sgl_pipeline.cluster.keys import read_secret, write_identity
from sgl_pipeline.cluster.model_digest import model_digest
from sgl_pipeline.cluster.secure_stream import StreamClosed
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.early_options import EarlyOptions
from sgl_pipeline.managers.hosts.host_facts import host_hello
from sgl_pipeline.managers.hosts.host_stream import HostStream, dial_stream
from sgl_pipeline.managers.stages.stage_processes import StageProcesses, WorkerPlace
from sgl_pipeline.process_lifetime import WatchedProcess

logger = logging.getLogger(__name__)

REDIAL_S = 1.0
# What stays the same is said again now and then.
SAY_AGAIN_S = 10.0

_decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


def run_agent(options: EarlyOptions, model_path: str, run_directory: str) -> int:
    """Serves the head until it says farewell. Returns the exit code, 0.

    Raises ConfigurationError for what the user has to change first, KeyboardInterrupt at the end
    that a signal asks for.
    """
    cluster = options.cluster
    logging.basicConfig(format=f"[host {cluster.rank}] %(message)s", level=logging.INFO)
    assert cluster.head_address is not None
    own = agent_own_address(cluster.head_address)
    write_identity(read_secret(cluster.key_file), run_directory)
    port = split_address(cluster.head_address)[1]
    address = join_address(own.host, port)
    digest = model_digest(model_path, options.load_format)
    hello = host_hello(cluster, address, own.interface, digest)
    logger.info(
        "cluster port %s on interface %s, because %s; the head is %s",
        address,
        own.interface,
        own.reason,
        cluster.head_address,
    )
    place = WorkerPlace(cluster.head_address, address, model_path, own.interface)
    stages = StageProcesses(run_directory, place)
    try:
        asyncio.run(_serve(cluster, hello, ClusterPort(own.host, port, run_directory), stages))
    finally:
        stages.close()
    return 0


async def _serve(
    cluster: ClusterArgs, hello: HostHello, port: ClusterPort, stages: StageProcesses
) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None and cluster.head_address is not None
    session: _AgentSession | None = None

    def leave() -> None:
        """The first SIGTERM."""
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        if session is None or not session.leave():
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, leave)
    serving = loop.create_task(port.serve())
    complaints = _Complaints()
    try:
        while True:
            try:
                stream = await dial_stream(
                    cluster.head_address,
                    AGENTS_DOOR,
                    stages.run_directory,
                    _decoder,
                    redial_s=REDIAL_S,
                    on_failure=lambda error: complaints.say(f"waiting for the head: {error}"),
                )
            except DialError as error:
                raise ConfigurationError(f"the head at {error}") from error
            session = _AgentSession(stream, hello, stages, complaints)
            if await session.run() or session.is_leaving:
                return
            session = None
            await asyncio.sleep(REDIAL_S)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        serving.cancel()
        port.close()


class _Complaints:
    """Logs a complaint when it is new, and repeats it now and then."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = "", 0.0

    def say(self, text: str) -> None:
        now_s = time.monotonic()
        if text != self._last[0] or now_s - self._last[1] >= SAY_AGAIN_S:
            self._last = text, now_s
            logger.warning("%s", text)


class _AgentSession:
    """One connection to the head, from the greeting to its end."""

    def __init__(
        self,
        stream: HostStream[ToAgent],
        hello: HostHello,
        stages: StageProcesses,
        complaints: _Complaints,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()
        self._title = hello.title
        self._stages = stages
        self._complaints = complaints
        self._workers: dict[int, WatchedProcess] = {}
        self._silence_s = ClusterArgs().silence_s
        self.is_leaving = False
        self._stream = stream
        self._stream.send(hello)

    async def run(self) -> bool:
        """Returns when the connection is over: True after a farewell. Raises ConfigurationError
        when the head wants nothing of this host."""
        try:
            return await self._stream.converse(self._take, self._ended, lambda: self._silence_s)
        except StreamClosed as ending:
            logger.warning("the head is lost: %s; its workers here are ended", ending)
            return False
        finally:
            for worker in [*self._workers]:
                self._forget(worker)
            self._stages.stop_all()

    def leave(self) -> bool:
        """Lets the head know that this host is to go; False where it has no worker."""
        if self._ended.done() or not self._workers:
            return False
        self.is_leaving = True
        logger.info(
            "asked to leave: the %d workers here serve on until other hosts have their stages; a "
            "second SIGTERM ends them at once",
            len(self._workers),
        )
        self._stream.send(HostLeaves())
        return True

    def _take(self, message: ToAgent) -> None:
        if isinstance(message, Ping):
            self._stream.send(Pong(message.sent_s, self._stream.heard_s, time.monotonic()))
        elif isinstance(message, Welcome):
            self._silence_s = message.silence_s
            logger.info("the head has taken this host in")
        elif isinstance(message, Rejected):
            self._reject(message)
        elif isinstance(message, StartWorker):
            self._start(message)
        elif isinstance(message, StopWorker):
            if (process := self._workers.get(message.worker)) is not None:
                process.kill()
        elif isinstance(message, DumpWorker):
            if (process := self._workers.get(message.worker)) is not None:
                process.ask_for_dump()
        elif isinstance(message, AgentExit) and not self._ended.done():
            logger.info("the head says: %s", message.reason)
            self._ended.set_result(True)

    def _reject(self, message: Rejected) -> None:
        if self._ended.done():
            return
        if message.is_final:
            self._ended.set_exception(
                ConfigurationError(f"the head does not take in {self._title}: {message.reason}")
            )
        else:
            self._complaints.say(f"the head cannot take this host in now: {message.reason}")
            self._ended.set_result(False)

    def _start(self, order: StartWorker) -> None:
        if self.is_leaving:
            self._stream.send(WorkerEnded(order.worker, "its host leaves"))
            return
        try:
            pid = self._stages.start_another(order.worker, order.num_threads)
            assert pid is not None, "the agent closes it last"
            process = WatchedProcess(pid)
        except OSError as error:
            reason = f"it cannot be started: {error.strerror or error}"
            self._stream.send(WorkerEnded(order.worker, reason))
            return
        self._workers[order.worker] = process
        self._loop.add_reader(process, self._worker_ended, order.worker)
        self._stream.send(WorkerStarted(order.worker, pid))

    def _worker_ended(self, worker: int) -> None:
        # After the last one of a host that leaves, the head says farewell: an agent that ended by
        # itself might close the connection before the head has read this.
        reason = self._workers[worker].end()
        self._forget(worker)
        self._stream.send(WorkerEnded(worker, reason))

    def _forget(self, worker: int) -> None:
        process = self._workers.pop(worker)
        self._loop.remove_reader(process)
        process.close()
