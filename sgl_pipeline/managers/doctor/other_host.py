"""The doctor of any other host than rank 0: dials it, measures what it asks for, hears the end."""

import asyncio
import logging
import time

import msgspec

from sgl_pipeline.cluster.doors import DialError, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.host_messages import Ping, Pong, Rejected
from sgl_pipeline.cluster.secure_stream import SecureStream
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.doctor.doctor_messages import (
    DOCTOR_DOOR,
    HostFacts,
    ProbeHost,
    ToHost,
    Verdict,
)
from sgl_pipeline.managers.doctor.host_end import SILENCE_S, probe
from sgl_pipeline.managers.hosts.frame_pump import FramePump

logger = logging.getLogger(__name__)

REDIAL_S = 0.5


async def answer_doctor(
    head_address: str, own: HostFacts, run_directory: str, limit_s: float
) -> Verdict:
    """Greets rank 0, which may take `limit_s` to come, and does as it asks; returns its verdict.

    Raises ConfigurationError for what has to be changed first, and where rank 0 is not there or is
    lost.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            connection = await asyncio.to_thread(dial, head_address, DOCTOR_DOOR, run_directory)
            break
        except DialError as error:
            if error.is_final or time.monotonic() > deadline_s:
                advice = f"; start the doctor there within {limit_s:g} s"
                text = f"rank 0 at {error}{'' if error.is_final else advice}"
                raise ConfigurationError(text) from error
        await asyncio.sleep(REDIAL_S)
    stream = SecureStream(connection, run_directory, is_server=False)
    return await _HeadSession(FramedStream(stream), own, run_directory).run()


class _HeadSession:
    """One connection to rank 0."""

    def __init__(self, stream: FramedStream, own: HostFacts, run_directory: str) -> None:
        self._run_directory = run_directory
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Verdict] = self._loop.create_future()
        self._decoder = msgspec.msgpack.Decoder(ToHost)
        self._heard_s = time.monotonic()
        self._probing: asyncio.Task[None] | None = None
        self._pump = FramePump(stream, self._take, self._closed)
        self._pump.send(msgspec.msgpack.encode(own))

    async def run(self) -> Verdict:
        try:
            while not self._verdict.done():
                await asyncio.wait([self._verdict], timeout=0.25)
                if time.monotonic() - self._heard_s > SILENCE_S:
                    self._closed(f"it has been silent for {SILENCE_S:g} s")
            return self._verdict.result()
        finally:
            self._pump.close()

    def _closed(self, reason: str) -> None:
        self._refuse(f"rank 0 is lost: {reason}; look at its output")

    def _refuse(self, text: str) -> None:
        if not self._verdict.done():
            self._verdict.set_exception(ConfigurationError(text))

    def _take(self, frame: bytes) -> None:
        self._heard_s = received_s = time.monotonic()
        message = self._decoder.decode(frame)
        if isinstance(message, Ping):
            self._send(Pong(message.sent_s, received_s, time.monotonic()))
        elif isinstance(message, ProbeHost):
            self._probing = self._loop.create_task(self._probe(message))
        elif isinstance(message, Rejected):
            self._refuse(message.reason)
        elif not self._verdict.done():
            self._verdict.set_result(message)

    async def _probe(self, order: ProbeHost) -> None:
        logger.info("measuring the link to host %d", order.rank)
        self._send(await probe(order.rank, order.address, self._run_directory, order.window_s))

    def _send(self, message: msgspec.Struct) -> None:
        self._pump.send(msgspec.msgpack.encode(message))
