"""Workloads from trace files, recorded or made up (data/README.md has their origin).

A trace file is a CSV with a header or Mooncake's JSON lines; its columns show which kind it is, so
that a user's own CSV of arrivals, inputs and outputs needs no conversion.
"""

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import IO, Any

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest, TokenIds

DATA = Path(__file__).parent / "data" / "traces"
SHIPPED = {path.name.split(".")[0]: path for path in sorted(DATA.glob("*.gz"))}
MOONCAKE_BLOCK_TOKENS = 512


def load_trace(name: str, num_requests: int | None = None) -> list[SimulatedRequest]:
    """The first `num_requests` of a shipped trace or of the user's file `name`, in its order.

    Columns `input_tokens` and `output_tokens` are needed; `arrival_s` defaults to 0 for all. With
    `session`, `turn` and `prefix_tokens` a turn is the follow-up of the one before it and shares
    its prompt and answer. Requests of a conversation count one each.

    Raises ConfigurationError that names the file, and the line, when it cannot be read.
    """
    path = SHIPPED.get(name) or Path(name)
    if not path.is_file():
        raise ConfigurationError(
            f"there is no trace {name!r}: neither a file nor one of {', '.join(SHIPPED)}"
        )
    with _open(path) as lines:
        if ".jsonl" in path.name:
            requests = _mooncake(path, lines, num_requests)
        else:
            requests = _csv(path, lines, num_requests)
    if not requests:
        raise ConfigurationError(f"{path} holds no request")
    return requests


def shared_prefixes(
    requests: Iterable[SimulatedRequest], hit_rate: float, group_size: int
) -> list[SimulatedRequest]:
    """The same lengths, but the first `hit_rate` of each prompt is shared by `group_size` requests.

    Groups are interleaved, as many users of as many system prompts would be.
    """
    requests = list(requests)
    ids = TokenIds()
    longest = max(request.input_tokens for request in requests)
    num_groups = max(1, -(-len(requests) // group_size))
    prefixes = [ids.fresh(longest) for _ in range(num_groups)]
    shared = []
    for number, request in enumerate(requests):
        # One token at least is the request's own.
        length = min(int(request.input_tokens * hit_rate), request.input_tokens - 1)
        prefix = Segment(prefixes[number % num_groups].first, length)
        rest = ids.fresh(request.input_tokens - length)
        prompt = (prefix, rest) if length else (rest,)
        shared.append(replace(request, prompt=prompt, output=ids.fresh(request.output_tokens)))
    return shared


def thinking(
    requests: Iterable[SimulatedRequest], mean_think_s: float, random: Random
) -> list[SimulatedRequest]:
    """The same conversations, with an exponential pause before each further turn."""
    return [
        SimulatedRequest.chain(
            [
                replace(turn, think_s=random.expovariate(1.0 / mean_think_s))
                for turn in request.with_follow_ups()
            ]
        )
        for request in requests
    ]


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8", newline="")


def _csv(path: Path, lines: Iterable[str], limit: int | None) -> list[SimulatedRequest]:
    reader = csv.DictReader(lines)
    columns = set(reader.fieldnames or ())
    if missing := {"input_tokens", "output_tokens"} - columns:
        raise ConfigurationError(f"{path} has no column {' and '.join(sorted(missing))}")
    rows = _checked(path, islice(reader, limit), first_line=2)
    if {"session", "turn", "prefix_tokens"} <= columns:
        return _conversations(rows)
    ids = TokenIds()
    return [
        SimulatedRequest(
            arrival_s=number(row.get("arrival_s") or 0, float),
            prompt=(ids.fresh(number(row["input_tokens"])),),
            output=ids.fresh(number(row["output_tokens"])),
        )
        for row, number in rows
    ]


_Number = Callable[..., Any]


def _checked(
    path: Path, rows: Iterable[dict[str, str]], first_line: int
) -> Iterator[tuple[dict[str, str], _Number]]:
    """Each row, and how to read its numbers: token counts from 1, times from 0."""
    for line, row in enumerate(rows, first_line):

        def number(text: Any, kind: type = int, line: int = line) -> Any:
            try:
                value = kind(text)
            except (TypeError, ValueError):
                raise ConfigurationError(f"{path}, line {line}: {text!r} is not a number") from None
            if not (1 if kind is int else 0) <= value < 1e9:
                raise ConfigurationError(f"{path}, line {line}: {text} is out of range")
            return value

        yield row, number


def _conversations(
    rows: Iterable[tuple[dict[str, str], _Number]],
) -> list[SimulatedRequest]:
    """Chains of turns; a turn's prompt is the last one's prompt and answer and something new."""
    ids = TokenIds()
    sessions: dict[str, list[SimulatedRequest]] = {}
    for row, number in rows:
        turns = sessions.setdefault(row["session"], [])
        input_tokens = number(row["input_tokens"])
        history = (*turns[-1].prompt, turns[-1].output) if turns else ()
        num_new = input_tokens - sum(segment.length for segment in history)
        turns.append(
            SimulatedRequest(
                arrival_s=0.0,
                prompt=(*history, ids.fresh(max(1, num_new))),
                output=ids.fresh(number(row["output_tokens"])),
            )
        )
    return [SimulatedRequest.chain(turns) for turns in sessions.values()]


def _mooncake(path: Path, lines: Iterable[str], limit: int | None) -> list[SimulatedRequest]:
    """Equal block ids are equal prefixes; the last block may be partial."""
    ids = TokenIds()
    blocks: dict[int, Segment] = {}
    requests = []
    for line, text in enumerate(islice(lines, limit), 1):
        try:
            row = json.loads(text)
            left, prompt = int(row["input_tokens"]), []
            for block in row["hash_ids"]:
                length = min(left, MOONCAKE_BLOCK_TOKENS)
                if block not in blocks:
                    blocks[block] = ids.fresh(MOONCAKE_BLOCK_TOKENS)
                prompt.append(Segment(blocks[block].first, length))
                left -= length
            arrival_s, output_tokens = row["timestamp_ms"] / 1e3, int(row["output_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path}, line {line}: {error!r}") from None
        if left or output_tokens < 1:
            raise ConfigurationError(f"{path}, line {line}: the blocks do not hold input_tokens")
        requests.append(
            SimulatedRequest(
                arrival_s=arrival_s, prompt=tuple(prompt), output=ids.fresh(output_tokens)
            )
        )
    return requests
