"""Clients that send conversations turn by turn to `/generate`, and keep when each token came."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import requests

from benchmark.support.engine import EngineFailure
from benchmark.tiers.conversations import PlannedTurn

_TIMEOUT_S = 300.0

# Token ids of each session, answers included.
Transcripts = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTurn:
    """A turn as its client saw it. `cached_details` is the server's own account of
    `cached_tokens`, by tier; empty where it gives none."""

    session: int
    turn: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    ttft_ms: float
    gaps_ms: tuple[float, ...]
    cached_tokens: int
    cached_details: Mapping[str, int]

    @property
    def is_returning(self) -> bool:
        return self.turn > 1

    @property
    def transcript(self) -> tuple[int, ...]:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Answers:
    """All turns of a load, in the order in which they were sent, and how long it took."""

    turns: tuple[AnsweredTurn, ...]
    duration_s: float

    @property
    def transcripts(self) -> Transcripts:
        """The transcript of each session after its last turn."""
        return {one.session: one.transcript for one in self.turns}


class TurnClients:
    """Clients of the server at `base_url`; `most_at_once` turns are under way at a time, and each
    answer has `output_tokens`, greedy."""

    def __init__(self, base_url: str, most_at_once: int, output_tokens: int) -> None:
        self._url = f"{base_url}/generate"
        self._most_at_once = most_at_once
        self._sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": True}

    def send(self, planned: Sequence[PlannedTurn], before: Transcripts | None = None) -> Answers:
        """Returns when all turns are answered.

        Args:
            before: what the sessions have said before the first of these turns.

        Raises EngineFailure for a turn that is not answered as it was asked.
        """
        before, started_s = before or {}, time.monotonic()
        latest: dict[int, Future[AnsweredTurn]] = {}
        futures = []
        # Turns are taken up in their order, so the one that another waits for is under way.
        with ThreadPoolExecutor(self._most_at_once) as pool:
            for one in planned:
                said = before.get(one.session, ())
                future = pool.submit(self._take_turn, one, said, latest.get(one.session), started_s)
                latest[one.session] = future
                futures.append(future)
            try:
                turns = tuple(future.result() for future in futures)
            except EngineFailure:
                pool.shutdown(cancel_futures=True)
                raise
        return Answers(turns, time.monotonic() - started_s)

    def _take_turn(
        self,
        planned: PlannedTurn,
        said: tuple[int, ...],
        earlier: "Future[AnsweredTurn] | None",
        started_s: float,
    ) -> AnsweredTurn:
        if earlier is not None:
            said = earlier.result().transcript
        time.sleep(max(0.0, started_s + planned.at_s - time.monotonic()))
        prompt = said + planned.user_tokens
        sent_s = time.monotonic()
        try:
            moments_s, last = self._stream(prompt)
        except (requests.RequestException, ValueError) as error:
            name = f"session {planned.session}, turn {planned.turn}"
            raise EngineFailure(f"{name}: {error}") from None
        info = last["meta_info"]
        details = info.get("cached_tokens_details") or {}
        return AnsweredTurn(
            session=planned.session,
            turn=planned.turn,
            prompt=prompt,
            output=tuple(last["output_ids"]),
            ttft_ms=(moments_s[0] - sent_s) * 1e3,
            gaps_ms=tuple((later - first) * 1e3 for first, later in pairwise(moments_s)),
            cached_tokens=info["cached_tokens"],
            cached_details={tier: n for tier, n in details.items() if isinstance(n, int)},
        )

    def _stream(self, prompt: tuple[int, ...]) -> tuple[list[float], dict[str, Any]]:
        """The moments at which parts of the answer came, and the last part, which has all tokens.

        Raises ValueError where it has fewer.
        """
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": self._sampling,
            "stream": True,
        }
        moments_s, last = [], b"nothing"
        with requests.post(self._url, json=body, stream=True, timeout=_TIMEOUT_S) as reply:
            if reply.status_code != 200:
                raise ValueError(f"status {reply.status_code}: {reply.text[:300]}")
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    moments_s.append(time.monotonic())
                    last = line[6:]
        answer = json.loads(last) if moments_s else {}
        if len(answer.get("output_ids", ())) != self._sampling["max_new_tokens"]:
            raise ValueError(f"an answer that is not whole ended with {last[:300]!r}")
        return moments_s, answer
