"""Pieces are on the wire as h11 frames them, byte by byte, and h11 is not asked for them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_pipeline.managers.entrance.stream_pieces import StreamPieces

Answer = tuple[dict[str, Any], list[Message]]


def piece(body: bytes | memoryview, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


END = piece(b"", more=False)
EVENTS = [piece(b"data: a\n\n"), piece(b""), piece(memoryview("\u2603".encode() * 9)), END]
CHUNKED = (b"transfer-encoding", b"chunked")
# Each is a request's method and version, and what the application sends.
ANSWERS: dict[str, tuple[str, list[Message]]] = {
    "a stream": ("GET / HTTP/1.1", [start(), *EVENTS]),
    "a long piece": ("GET / HTTP/1.1", [start(), piece(b"x" * 300_000), *EVENTS]),
    "more in the last piece": ("GET / HTTP/1.1", [start(), piece(b"a"), piece(b"b", more=False)]),
    "an error's stream": ("POST / HTTP/1.1", [start(503), *EVENTS]),
    "chunks by name": ("GET / HTTP/1.1", [start(200, CHUNKED), *EVENTS]),
    "a length": ("GET / HTTP/1.1", [start(200, (b"Content-Length", b"2")), piece(b"ab"), END]),
    "nothing in pieces": ("GET / HTTP/1.1", [start(204), END]),
    "a head": ("HEAD / HTTP/1.1", [start(), *EVENTS]),
    "an old client": ("GET / HTTP/1.0", [start(), *EVENTS]),
    "a piece too many": ("GET / HTTP/1.1", [start(), *EVENTS, piece(b"late")]),
}
# Data that h11 frames itself: those of answers without chunks, and the last piece of others.
NUM_FRAMED_BY_H11 = {
    "a length": 2,
    "nothing in pieces": 1,
    "a head": 4,
    "an old client": 4,
}


def sending(messages: list[Message]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """uvicorn on h11 with `app`, without headers that tell the time; gives its port."""
    config = uvicorn.Config(
        app, http="h11", lifespan="off", log_config=None, date_header=False, access_log=False
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


def bytes_of(app: ASGIApp, line: str) -> bytes:
    """All bytes that come back for a request that begins with `line`."""

    async def ask() -> bytes:
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{line}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
        return answer

    return asyncio.run(ask())


@pytest.fixture
def framed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pieces that h11 has framed."""
    pieces: list[bytes] = []
    send: Callable[..., Any] = h11.Connection.send

    def noted(self: h11.Connection, event: Any) -> Any:
        if isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
        return send(self, event)

    monkeypatch.setattr(h11.Connection, "send", noted)
    return pieces


@pytest.mark.parametrize("name", ANSWERS)
def test_the_bytes_are_h11s(name: str, framed: list[bytes]) -> None:
    line, messages = ANSWERS[name]
    by_h11 = bytes_of(sending(messages), line)
    framed.clear()
    assert bytes_of(StreamPieces(sending(messages)), line) == by_h11
    assert by_h11.startswith(b"HTTP/1.1 ")
    assert len(framed) == NUM_FRAMED_BY_H11.get(name, 1)


def test_a_slow_reader_holds_the_application_back() -> None:
    """The transport's limit holds as with h11: no piece is made while it is full."""
    num_sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        await send(start())
        for _ in range(2000):
            await send(piece(b"x" * 65536))
            num_sent += 1
        await send(END)

    async def ask() -> tuple[int, int]:
        async with serving(StreamPieces(app)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.5)
            num_before = num_sent
            size = len(await reader.read())
            writer.close()
        return num_before, size

    num_before, size = asyncio.run(ask())
    assert 0 < num_before < 1000
    assert size == 2000 * (65536 + len(b"10000\r\n\r\n")) + len(b"0\r\n\r\n")


def test_a_reader_that_has_left_costs_nothing_more() -> None:
    """uvicorn drops what is sent to it, and the application ends as it does."""
    ended: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        while (await receive())["type"] != "http.disconnect":
            await send(piece(b"x"))
        for message in EVENTS:
            await send(message)
        ended.append(True)

    async def ask() -> None:
        async with serving(StreamPieces(app)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"x\r\n")
            writer.close()
            await writer.wait_closed()
            while not ended:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(ask(), 20))


def test_another_server_is_left_alone() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    messages = [start(), *EVENTS]
    scope = {"type": "http", "http_version": "1.1", "method": "GET"}
    asyncio.run(StreamPieces(sending(messages))(scope, receive, send))
    assert sent == messages
