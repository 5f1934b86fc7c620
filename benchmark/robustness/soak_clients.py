"""The clients of a soak: many at once, each asking one request after the other.

Run by `soak.py` and, for a few seconds, by the live tests. Every request ends in exactly one
outcome; the clients trust nothing that the server says of itself.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import aiohttp

from benchmark.robustness.soak_mix import (
    DEPARTURES,
    OPTIONAL_FEATURES,
    PROBES,
    Ask,
    Departure,
    RequestMix,
    probe,
    read_answer,
    what_is_wrong,
)

Outcome = Literal["served", "left", "aborted", "failed", "stuck"]
DRAIN_TIMEOUT_S = 90.0
_EXAMPLES_KEPT = 10


@dataclass(slots=True)
class Tally:
    """Counts of the requests' ends, and the fault of the first that failed."""

    outcomes: Counter[Outcome] = field(
        default_factory=lambda: Counter(dict.fromkeys(get_args(Outcome), 0))
    )
    failures: list[str] = field(default_factory=list)

    def fail(self, ask: Ask, why: str) -> None:
        self.outcomes["failed"] += 1
        if len(self.failures) < _EXAMPLES_KEPT:
            self.failures.append(f"{why[:300]} <- {ask.path} {str(ask.body)[:300]}")


class SoakClients:
    """Clients of the server at `base_url`.

    Args:
        departing_share: of the requests, how many the client leaves before the end.
        ramp_s: seconds over which the clients come one after the other.
        period_s: a client asks no sooner than this after it asked last, so that together they ask
            at a steady rate.
        departures: how those who depart do it, each as likely as another.
    """

    def __init__(
        self,
        base_url: str,
        *,
        num_clients: int,
        departing_share: float,
        seed: int,
        ramp_s: float = 0.0,
        period_s: float = 0.0,
        departures: Sequence[Departure] = DEPARTURES,
    ) -> None:
        self._base_url = base_url
        self._num_clients = num_clients
        self._departing_share = departing_share
        self._seed = seed
        self._ramp_s = ramp_s
        self._period_s = period_s
        self._departures = departures
        self.tally = Tally()
        self.features: tuple[str, ...] = ()

    async def run(
        self, duration_s: float, every_second: Callable[[float], Any] = lambda elapsed_s: None
    ) -> None:
        """Asks for `duration_s`, then waits until the last request has ended.

        Calls `every_second` with the seconds since the start until then.
        """
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            self._base_url, connector=connector, timeout=timeout
        ) as session:
            self.features = await self._find_features(session)
            answers = {question: await self._answer_alone(session, question) for question in PROBES}
            mix = RequestMix(
                self._seed, answers, self._departing_share, self.features, self._departures
            )
            started_s = time.monotonic()
            clients = [
                asyncio.create_task(
                    self._client(
                        session,
                        mix,
                        starts_after_s=self._ramp_s * client / self._num_clients,
                        end_s=started_s + duration_s,
                    )
                )
                for client in range(self._num_clients)
            ]
            pending = set(clients)
            while pending and time.monotonic() < started_s + duration_s + DRAIN_TIMEOUT_S:
                _, pending = await asyncio.wait(pending, timeout=1.0)
                await asyncio.to_thread(every_second, time.monotonic() - started_s)
            self.tally.outcomes["stuck"] = len(pending)
            for client in pending:
                client.cancel()
            await asyncio.wait(clients)
            for client in set(clients) - pending:
                client.result()

    async def _client(
        self,
        session: aiohttp.ClientSession,
        mix: RequestMix,
        *,
        starts_after_s: float,
        end_s: float,
    ) -> None:
        due_s = time.monotonic() + starts_after_s
        while max(due_s, time.monotonic()) < end_s:
            await asyncio.sleep(due_s - time.monotonic())
            due_s = time.monotonic() + self._period_s
            ask = mix.draw()
            try:
                if ask.departure == "leaves":
                    async with asyncio.timeout(ask.departs_after_s):
                        await self._ask(session, ask)
                else:
                    await self._ask(session, ask)
            except TimeoutError:
                self.tally.outcomes["left"] += 1
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self.tally.fail(ask, f"{type(error).__name__}: {error}")

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        aborting = None
        if ask.departure == "aborts":
            aborting = asyncio.create_task(self._abort_later(session, ask))
        status, payload = await _post(session, ask)
        if aborting is not None:
            aborting.cancel()
        if status != 200:
            if ask.departure == "aborts" and "abort" in payload.lower():
                self.tally.outcomes["aborted"] += 1
            else:
                self.tally.fail(ask, f"{status}: {payload}")
            return
        answer = read_answer(ask.path, payload, bool(ask.body.get("stream")))
        if ask.departure == "aborts" and "abort" in (*answer.finish_reasons, answer.error.lower()):
            self.tally.outcomes["aborted"] += 1
        elif wrong := what_is_wrong(ask, answer):
            self.tally.fail(ask, wrong)
        else:
            self.tally.outcomes["served"] += 1

    async def _abort_later(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        await asyncio.sleep(ask.departs_after_s)
        async with session.post("/abort_request", json={"rid": ask.body["rid"]}):
            pass

    async def _answer_alone(self, session: aiohttp.ClientSession, question: str) -> str:
        ask = probe(question)
        status, payload = await _post(session, ask)
        assert status == 200, payload
        return read_answer(ask.path, payload, is_stream=False).text

    async def _find_features(self, session: aiohttp.ClientSession) -> tuple[str, ...]:
        """The names of OPTIONAL_FEATURES that the server answers."""
        found = []
        for name, (path, extra) in OPTIONAL_FEATURES.items():
            body = {"text": "a", **extra}
            body["sampling_params"] = {"max_new_tokens": 2} | extra.get("sampling_params", {})
            status, _ = await _post(session, Ask(path=path, body=body))
            if status == 200:
                found.append(name)
        return tuple(found)


async def _post(session: aiohttp.ClientSession, ask: Ask) -> tuple[int, str]:
    async with session.post(ask.path, json=ask.body) as response:
        return response.status, await response.text()
