"""The doctor of a host other than rank 0: dials rank 0, and measures links for it."""

import asyncio
import logging
import time

import msgspec

from sgl_pipeline.cluster.doors import DialError
from sgl_pipeline.cluster.host_messages import Ping, Pong, Rejected
from sgl_pipeline.cluster.secure_stream import StreamClosed
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.doctor.doctor_messages import (
    DOCTOR_DOOR,
    HostFacts,
    ProbeHost,
    ToHost,
    Verdict,
)
from sgl_pipeline.managers.doctor.host_end import SILENCE_S, probe
from sgl_pipeline.managers.hosts.host_stream import HostStream, dial_stream

logger = logging.getLogger(__name__)

REDIAL_S = 0.5

_decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)


async def answer_doctor(
    head_address: str, own: HostFacts, run_directory: str, limit_s: float
) -> Verdict:
    """Greets rank 0, which may take `limit_s` to come, and does as it asks; returns its verdict.

    Raises ConfigurationError for what has to be changed first, and where rank 0 is not there or is
    lost.
    """
    try:
        stream = await dial_stream(
            head_address,
            DOCTOR_DOOR,
            run_directory,
            _decoder,
            redial_s=REDIAL_S,
            until_s=time.monotonic() + limit_s,
        )
    except DialError as error:
        advice = "" if error.is_final else f"; start the doctor there within {limit_s:g} s"
        raise ConfigurationError(f"rank 0 at {error}{advice}") from error
    return await _HeadSession(stream, own, run_directory).run()


class _HeadSession:
    """One connection to rank 0."""

    def __init__(self, stream: HostStream[ToHost], own: HostFacts, run_directory: str) -> None:
        self._run_directory = run_directory
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Verdict] = self._loop.create_future()
        self._probing: asyncio.Task[None] | None = None
        self._stream = stream
        self._stream.send(own)

    async def run(self) -> Verdict:
        try:
            return await self._stream.converse(self._take, self._verdict, lambda: SILENCE_S)
        except StreamClosed as ending:
            text = f"rank 0 is lost: {ending}; look at its output"
            raise ConfigurationError(text) from ending

    def _take(self, message: ToHost) -> None:
        if isinstance(message, Ping):
            self._stream.send(Pong(message.sent_s, self._stream.heard_s, time.monotonic()))
        elif isinstance(message, ProbeHost):
            self._probing = self._loop.create_task(self._probe(message))
        elif isinstance(message, Rejected):
            if not self._verdict.done():
                self._verdict.set_exception(ConfigurationError(message.reason))
        elif not self._verdict.done():
            self._verdict.set_result(message)

    async def _probe(self, order: ProbeHost) -> None:
        logger.info("measuring the link to host %d", order.rank)
        found = await probe(order.rank, order.address, self._run_directory, order.window_s)
        self._stream.send(found)
