"""Clients that put a mixed load on the servers at an address, and keep when each token came."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import msgspec
import requests

from benchmark.disaggregation.mixed_load import Kind, MixedLoad, Place, arrivals_s
from benchmark.support.engine import EngineFailure

_TIMEOUT_S = 300.0
_DATA = b"data: "


class _Part(msgspec.Struct):
    """The part of a streamed answer that counts: all tokens so far."""

    output_ids: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request and when, in seconds from the beginning of the load, it was sent and how many
    tokens of its answer there were at which moments. The answer may be cut: clients give up at the
    end of a load."""

    place: Place
    input_tokens: int
    sent_s: float
    moments_s: tuple[float, ...]
    tokens: tuple[int, ...]
    output: tuple[int, ...]


def run_load(
    url: str,
    vocab_size: int,
    load: MixedLoad,
    round_number: int,
    seconds: float,
    prefill_s: Mapping[str, float],
) -> list[Answered]:
    """The answers to all that was asked of `url` within `seconds`, in the order of their places.

    After them a client leaves when it has its first token, so that no slow one is left out.

    Raises EngineFailure for a request that fails.
    """
    return _Run(url, vocab_size, load, round_number, seconds).answers(prefill_s)


def prefill_seconds(url: str, vocab_size: int, kind: Kind, times: int) -> list[float]:
    """The time to the first token of such prompts, asked one after the other.

    Raises EngineFailure as `run_load`.
    """
    load = MixedLoad("prefill alone", (kind,))
    run = _Run(url, vocab_size, load, 0, seconds=0.0)
    with requests.Session() as session:
        for number in range(times):
            run.take(session, kind, 0, number)
    return [one.moments_s[0] - one.sent_s for one in run.taken()]


class _Run:
    """One load, from its beginning to its last answer."""

    def __init__(
        self, url: str, vocab_size: int, load: MixedLoad, round_number: int, seconds: float
    ) -> None:
        self._url = f"{url}/generate"
        self._vocab_size = vocab_size
        self._load, self._round, self._seconds = load, round_number, seconds
        self._done: SimpleQueue[Answered | Exception] = SimpleQueue()
        self._is_over = Event()
        self._started_s = time.monotonic()

    def answers(self, prefill_s: Mapping[str, float]) -> list[Answered]:
        threads = []
        for kind in self._load.kinds:
            clients = range(kind.clients)
            threads += [Thread(target=self._closed_loop, args=(kind, client)) for client in clients]
            if not kind.clients:
                moments_s = enumerate(arrivals_s(kind, self._seconds, prefill_s))
                threads += [Thread(target=self._arrival, args=(kind, *one)) for one in moments_s]
        self._started_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.taken()

    def taken(self) -> list[Answered]:
        """All answers so far. Raises EngineFailure where a request failed."""
        found: list[Answered] = []
        while not self._done.empty():
            one = self._done.get()
            if isinstance(one, Exception):
                raise EngineFailure(f"{self._load.name}, round {self._round}: {one}") from one
            found.append(one)
        return sorted(found, key=lambda one: one.place)

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _closed_loop(self, kind: Kind, client: int) -> None:
        number = 0
        with requests.Session() as session:
            while self._now_s() < self._seconds and not self._is_over.is_set():
                self.take(session, kind, client, number)
                number += 1

    def _arrival(self, kind: Kind, number: int, moment_s: float) -> None:
        if not self._is_over.wait(max(0.0, moment_s - self._now_s())):
            with requests.Session() as session:
                self.take(session, kind, 0, number)

    def take(self, session: requests.Session, kind: Kind, client: int, number: int) -> None:
        """Asks one request, and keeps its answer or what came in its place."""
        place = Place(self._load.name, self._round, kind.name, client, number)
        try:
            self._done.put(self._ask(session, kind, place))
        except (requests.RequestException, ValueError) as error:
            self._is_over.set()
            self._done.put(error)

    def _ask(self, session: requests.Session, kind: Kind, place: Place) -> Answered:
        """Raises ValueError for an answer that ends too early."""
        num_tokens = kind.output_tokens_of(place.client, place.number)
        sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {
            "input_ids": place.prompt(kind.input_tokens, self._vocab_size),
            "sampling_params": sampling,
            "stream": True,
        }
        headers = {"X-Tenant": kind.name}  # for a server that tells tenants apart
        sent_s, moments_s, lines = self._now_s(), [], []
        with session.post(
            self._url, json=body, headers=headers, stream=True, timeout=_TIMEOUT_S
        ) as reply:
            if reply.status_code != 200:
                raise ValueError(f"status {reply.status_code}: {reply.text[:300]}")
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    moments_s.append(self._now_s())
                    lines.append(line)
                    if moments_s[-1] >= self._seconds:
                        break
        parts = _parts(lines)
        output, was_left = parts[-1] if parts else [], moments_s[-1:] >= [self._seconds]
        if not output or (len(output) != num_tokens and not was_left):
            raise ValueError(f"{len(output)} of {num_tokens} tokens, then {lines[-1:]!r:.300}")
        return Answered(
            place=place,
            input_tokens=kind.input_tokens,
            sent_s=sent_s,
            moments_s=tuple(moments_s),
            tokens=tuple(len(part) for part in parts),
            output=tuple(output),
        )


def _parts(lines: Sequence[bytes]) -> list[list[int]]:
    """All tokens of an answer so far, by line of it."""
    decoder = msgspec.json.Decoder(_Part)
    return [decoder.decode(line.removeprefix(_DATA)).output_ids for line in lines]
