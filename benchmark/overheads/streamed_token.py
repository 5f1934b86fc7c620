"""Measures the processor time that a streamed token takes beside the stages, by route and process.

    python -m benchmark.overheads.streamed_token
    python -m benchmark.overheads.streamed_token --engine "ours --pp 1" --engine "ours@main --pp 1"

Run by hand on a quiet machine, a minute for each engine and round. The demo model streams answers
of equal length to several clients together. The same requests for one token come before: their time
is that of a request, and is left out of that of its further tokens. Engines take turns, each
started afresh.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import turns
from benchmark.support.paths import DEMO_MODEL, SCRATCH
from benchmark.support.serving_report import spread
from sgl_pipeline.capacity.processor_use import ProcessorMeter

ENGINES = ("ours --pp 1",)
KINDS = ("front", "detokenizer", "scheduler")
_PROMPT = "How is a pipeline measured?"
_OPENAI = {"model": "demo", "temperature": 0, "ignore_eos": True, "stream": True}
_OPENAI |= {"stream_options": {"include_usage": True}}


def body_of(route: str, num_tokens: int) -> dict[str, Any]:
    """A request to one of `ROUTES` for a stream of `num_tokens` tokens."""
    if route == "/generate":
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": num_tokens}
        return {"text": _PROMPT, "sampling_params": sampling, "stream": True}
    if route == "/v1/completions":
        return _OPENAI | {"prompt": _PROMPT, "max_tokens": num_tokens}
    return _OPENAI | {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": num_tokens}


ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteUse:
    """One run of one route: microseconds of processor time by kind of process, for a request of one
    token and for each further token, and the events that a stream had for each of its tokens."""

    engine: str
    round_number: int
    route: str
    request_us: dict[str, float]
    token_us: dict[str, float]
    events_per_token: float

    @property
    def whole_us(self) -> float:
        """The time of a further token in all `KINDS`."""
        return sum(self.token_us.values())


async def stream(port: int, route: str, num_tokens: int) -> bytes:
    """All bytes of one answer. Raises EngineFailure unless it has `num_tokens` tokens."""
    body = json.dumps(body_of(route, num_tokens)).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    counts = re.findall(rb'"completion_tokens":(\d+)', answer)
    if not counts or int(counts[-1]) != num_tokens:
        raise EngineFailure(f"{route}: not {num_tokens} tokens: {answer[-500:].decode()}")
    return answer


async def stream_together(port: int, route: str, num_streams: int, num_tokens: int) -> list[bytes]:
    """The answers to `num_streams` equal requests that run together."""
    asked = (stream(port, route, num_tokens) for _ in range(num_streams))
    return await asyncio.gather(*asked)


def measure(
    engine: Engine, server: psutil.Process, route: str, options: Options, round_number: int
) -> RouteUse:
    """Runs `--streams` requests together: `--repeats` times for one token, once for `--tokens`."""
    num_streams, num_tokens = options.streams, options.tokens

    def run(length: int) -> list[bytes]:
        return asyncio.run(stream_together(options.port, route, num_streams, length))

    meter = ProcessorMeter(server.pid)
    for _ in range(options.repeats):
        run(1)
    num_requests = num_streams * options.repeats
    request_us = {kind: meter.used().seconds[kind] * 1e6 / num_requests for kind in KINDS}
    meter = ProcessorMeter(server.pid)
    answers = run(num_tokens)
    of_stream_us = {kind: meter.used().seconds[kind] * 1e6 / num_streams for kind in KINDS}
    return RouteUse(
        engine=engine.label,
        round_number=round_number,
        route=route,
        request_us=request_us,
        token_us={
            kind: (of_stream_us[kind] - request_us[kind]) / (num_tokens - 1) for kind in KINDS
        },
        events_per_token=sum(one.count(b"data: ") for one in answers) / (num_streams * num_tokens),
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31980)
    command.add("--engine", action="append", help=f"(default: {ENGINES})")
    command.add("--streams", type=at_least_one, default=16, help="requests that run together")
    command.add("--tokens", type=at_least_two, default=400, help="of each answer")
    command.add("--repeats", type=at_least_one, default=5, help="runs of requests for one token")
    return command.run(_measure, argv)


def at_least_two(text: str) -> int:
    """The tokens of an answer that has further ones."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text} must be at least 2")
    return number


def _measure(options: Options) -> Report:
    texts = options.engine or ENGINES
    engines = [
        parse_engine(text, DEMO_MODEL, options.port, SCRATCH, usable_cores()) for text in texts
    ]
    uses: list[RouteUse] = []
    with progress(len(engines) * options.rounds, "servers") as bar:
        for round_number, engine in turns(engines, options.rounds):
            with running(engine, SCRATCH / "streamed_token.log") as server:
                assert server is not None
                for route in ROUTES:  # what is compiled or loaded at first use is not measured
                    asyncio.run(stream_together(options.port, route, options.streams, 20))
                for route in ROUTES:
                    uses.append(measure(engine, server, route, options, round_number))
                    say(f"round {round_number}, {engine.label}, {route}: {_line(uses[-1])}")
            bar.update()
    return Report(
        name="streamed_token",
        texts=[use_table(uses)],
        facts={
            "load": {
                "model": "demo",
                "requests": f"{options.streams} together, {options.tokens} tokens out",
                "figures": f"medians (smallest to largest) of {options.rounds} rounds",
            }
        },
        record={"uses": [asdict(one) for one in uses]},
    )


def use_table(uses: Sequence[RouteUse]) -> str:
    """Markdown: processor time by route and engine, and that of a further token beside the first
    engine's in the same round."""
    whole_us = {(one.route, one.engine, one.round_number): one.whole_us for one in uses}
    base = uses[0].engine
    groups: dict[tuple[str, str], list[RouteUse]] = {}
    for one in uses:
        groups.setdefault((one.route, one.engine), []).append(one)
    rows = []
    for (route, engine), of_kind in sorted(groups.items()):
        ratios = [one.whole_us / whole_us[route, base, one.round_number] for one in of_kind]
        rows.append(
            [
                route,
                engine,
                *(str(spread([one.token_us[kind] for one in of_kind])) for kind in KINDS),
                f"{statistics.median(ratios):.2f}",
                str(spread([sum(one.request_us.values()) / 1e3 for one in of_kind])),
                f"{statistics.median(one.events_per_token for one in of_kind):.2f}",
            ]
        )
    heads = ["route", "engine", *(f"{kind}, us a token" for kind in KINDS), f"all, of {base}"]
    return markdown_table([*heads, "a request, ms", "events a token"], rows)


def _line(use: RouteUse) -> str:
    return ", ".join(f"{kind} {use.token_us[kind]:.0f} us" for kind in KINDS)


if __name__ == "__main__":
    sys.exit(main())
