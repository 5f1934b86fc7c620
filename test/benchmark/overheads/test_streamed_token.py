"""Tokens are counted, and a request's own time is left out of that of its further tokens."""

import argparse
import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.overheads import streamed_token
from benchmark.overheads.streamed_token import KINDS, ROUTES, RouteUse, at_least_two, use_table
from benchmark.support.engine import EngineFailure
from sgl_pipeline.capacity.processor_use import ProcessorUse


def use(engine: str, round_number: int, front_us: float) -> RouteUse:
    return RouteUse(
        engine=engine,
        round_number=round_number,
        route="/generate",
        request_us=dict.fromkeys(KINDS, 1000.0),
        token_us={"front": front_us, "detokenizer": 20.0, "scheduler": 80.0},
        events_per_token=1.0,
    )


def test_engines_are_compared_within_a_round() -> None:
    # The machine is half as fast in the second round.
    uses = [use("a", 1, 100.0), use("b", 1, 50.0), use("a", 2, 300.0), use("b", 2, 200.0)]
    table = use_table(uses)
    assert "| /generate | a | 200 (100 to 300) | 20.0 | 80.0 | 1.00 | 3.0 | 1.00 |" in table
    assert "| /generate | b | 125 (50 to 200) | 20.0 | 80.0 | 0.75 | 3.0 | 1.00 |" in table


def test_a_token_has_no_share_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Meter:
        """A request takes 2 ms, each further token 0.5 ms."""

        def __init__(self, pid: int) -> None:
            asked.clear()

        def used(self) -> ProcessorUse:
            seconds = sum(2 * (2e-3 + (length - 1) * 5e-4) for length in asked)
            return ProcessorUse(1.0, dict.fromkeys(KINDS, seconds))

    async def answer(port: int, route: str, num_streams: int, num_tokens: int) -> list[bytes]:
        asked.append(num_tokens)
        return [b"data: x\n\n" * num_tokens] * num_streams

    monkeypatch.setattr(streamed_token, "ProcessorMeter", Meter)
    monkeypatch.setattr(streamed_token, "stream_together", answer)
    options = argparse.Namespace(port=1, streams=2, tokens=5, repeats=3)
    engine, server = SimpleNamespace(label="a"), SimpleNamespace(pid=1)
    found = streamed_token.measure(engine, server, "/generate", options, 1)
    assert found.request_us == pytest.approx(dict.fromkeys(KINDS, 2000.0))
    assert found.token_us == pytest.approx(dict.fromkeys(KINDS, 500.0))
    assert (found.whole_us, found.events_per_token) == (pytest.approx(1500.0), 1.0)


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_of_another_length_is_an_error(route: str) -> None:
    async def answer(reader: Any, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith(f"POST {route} HTTP/1.1\r\n")
        writer.write(b'data: {"completion_tokens":3}\n\ndata: {"completion_tokens":7}\n\n')
        writer.close()

    async def ask(num_tokens: int) -> list[bytes]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await streamed_token.stream_together(port, route, 2, num_tokens)

    assert [one.count(b"data: ") for one in asyncio.run(ask(7))] == [2, 2]
    with pytest.raises(EngineFailure, match="not 8 tokens"):
        asyncio.run(ask(8))


def test_an_answer_has_further_tokens() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 2"):
        at_least_two("1")
    assert at_least_two("2") == 2
