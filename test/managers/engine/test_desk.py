"""The desk at one end of a socket pair, with a front that does what its prompt says."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import HTTPException

from sgl_pipeline.managers.engine.channel import (
    LENGTH_BYTES,
    Ask,
    Cancel,
    Done,
    EndEngine,
    EngineFailed,
    FromEngine,
    Generate,
    Refused,
    Reply,
    ToEngine,
    encode_frame,
)
from sgl_pipeline.managers.engine.desk import EngineDesk, read_request
from sgl_pipeline.managers.upstream.request_checks import RefusedRequestError

_decoder = msgspec.msgpack.Decoder(FromEngine)


class Front:
    """In the place of the TokenizerManager."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def generate_request(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        text = request.text
        yield {"text": "a", "meta_info": {"finish_reason": None}}
        if text == "abort":
            finish = {"type": "abort", "message": "stage 1 failed", "status_code": 500}
            yield {"text": "a", "meta_info": {"finish_reason": finish}}
        elif text == "full":
            raise HTTPException(503, "the queue is full")
        elif text == "bug":
            raise ZeroDivisionError("wibble")
        elif text == "wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.append(text)

    async def flush_cache(self) -> Any:
        return SimpleNamespace(success=True, message="done")

    async def stop_profile(self) -> None:
        raise RuntimeError("no profile runs")


class Program:
    """The other end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def open(self) -> None:
        self._reader, self.writer = await asyncio.open_unix_connection(sock=self._connection)

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.writer.write(encode_frame(message))

    async def receive(self) -> FromEngine:
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
        return _decoder.decode(await self._reader.readexactly(length))


def talk(script: Callable[[Program, Front, EngineDesk], Awaitable[None]]) -> None:
    """Runs `script` against a desk, which then has to end."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        program, front = Program(ours), Front()
        await program.open()
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        desk = EngineDesk(front, {}, reader, writer)
        serving = asyncio.create_task(desk.serve())
        await script(program, front, desk)
        await asyncio.wait_for(serving, 30)
        program.writer.close()
        writer.close()

    asyncio.run(run())


def test_replies_come_in_order_and_a_last_answer_ends_each_call() -> None:
    async def script(program: Program, front: Front, desk: EngineDesk) -> None:
        program.send(Generate(7, {"text": "x"}), Ask(8, "flush_cache", {}))
        answers = [await program.receive() for _ in range(4)]
        assert [one for one in answers if one.call == 7] == [
            Reply(7, {"text": "a", "meta_info": {"finish_reason": None}}),
            Done(7),
        ]
        assert [one for one in answers if one.call == 8] == [Reply(8, [True, "done"]), Done(8)]
        program.send(EndEngine())

    talk(script)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("abort", ("stage 1 failed", 500)),
        ("full", ("the queue is full", 503)),
        ("bug", ("internal error: ZeroDivisionError('wibble'); see the log", 500)),
    ],
)
def test_a_failed_request_ends_with_the_reason(text: str, refusal: tuple[str, int]) -> None:
    async def script(program: Program, front: Front, desk: EngineDesk) -> None:
        program.send(Generate(1, {"text": text}))
        assert isinstance(await program.receive(), Reply)
        assert await program.receive() == Refused(1, *refusal)
        program.send(EndEngine())

    talk(script)


def test_a_refused_question_is_no_internal_error() -> None:
    async def script(program: Program, front: Front, desk: EngineDesk) -> None:
        program.send(Ask(1, "stop_profile", {}))
        assert await program.receive() == Refused(1, "no profile runs", 400)
        program.send(EndEngine())

    talk(script)


def test_a_cancelled_call_is_aborted_and_gets_no_answer() -> None:
    async def script(program: Program, front: Front, desk: EngineDesk) -> None:
        program.send(Generate(1, {"text": "wait"}))
        await program.receive()
        program.send(Cancel(1), Cancel(5), Ask(2, "flush_cache", {}))
        assert await program.receive() == Reply(2, [True, "done"])
        assert front.cancelled == ["wait"]
        program.send(EndEngine())

    talk(script)


def test_the_desk_closes_when_the_program_is_gone() -> None:
    async def script(program: Program, front: Front, desk: EngineDesk) -> None:
        program.writer.close()

    talk(script)


def test_a_failure_is_told_while_a_call_waits() -> None:
    async def script(program: Program, front: Front, desk: EngineDesk) -> None:
        program.send(Generate(1, {"text": "wait"}))
        await program.receive()
        desk.fail("the scheduler was killed")
        desk.fail("later")
        assert await program.receive() == EngineFailed("the scheduler was killed")

    talk(script)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a", "temprature": 0}, "generate\\(\\) has no argument 'temprature'"),
        ({"text": 5}, "text"),
        ({"text": "a", "stream": "maybe"}, "stream"),
    ],
)
def test_fields_that_make_no_request_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedRequestError, match=message) as caught:
        read_request(fields)
    assert caught.value.status_code == HTTPStatus.BAD_REQUEST


def test_fields_become_upstreams_request() -> None:
    request = read_request({"text": ["a", "b"], "return_logprob": True, "stream": True})
    assert (request.text, request.return_logprob, request.stream) == (["a", "b"], True, True)
