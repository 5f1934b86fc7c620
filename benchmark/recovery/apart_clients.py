"""Clients that stream answers while servers apart are killed, and say how each request has ended.

Used by `kill_apart.py`. The oracle is what one server of one stage answered before, in fp32.
"""

import enum
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import requests

from benchmark.recovery.kill_clients import Prompt, body_of

# Every request must have ended by then.
LIMIT_S = 120.0
# Before a client whose request has failed asks again.
_REST_S = 1.0


class Outcome(enum.StrEnum):
    """The end of a request, as its client sees it."""

    RIGHT = "right tokens"
    NAMED = "named error"
    CUT = "cut off"  # the connection ended without a word
    WRONG = "wrong tokens"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One request. `reason` is the error's status and message; `num_tokens` had come before."""

    began_s: float
    ended_s: float
    outcome: Outcome
    reason: str = ""
    num_tokens: int = 0


def ask(url: str, prompt: Prompt, expected: Sequence[int]) -> Ending:
    """Streams the answer to `prompt` and judges it against its `expected` tokens."""
    began_s = time.monotonic()
    ids: list[int] = []
    try:
        outcome, reason = _stream(url, prompt, expected, ids, began_s + LIMIT_S)
    except requests.RequestException as error:
        # A timeout in the middle of a stream comes as a ConnectionError.
        is_late = isinstance(error, requests.Timeout) or "Read timed out" in str(error)
        outcome = Outcome.HUNG if is_late else Outcome.CUT
        reason = type(error).__name__
    return Ending(
        began_s=began_s,
        ended_s=time.monotonic(),
        outcome=outcome,
        reason=reason,
        num_tokens=len(ids),
    )


def _stream(
    url: str, prompt: Prompt, expected: Sequence[int], ids: list[int], deadline_s: float
) -> tuple[Outcome, str]:
    """The outcome and its reason; `ids` gets the tokens that have come."""
    body = body_of(prompt) | {"stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=LIMIT_S) as reply:
        if reply.status_code != 200:
            return _judge_error(reply.status_code, reply.text)
        for line in reply.iter_lines():
            if time.monotonic() > deadline_s:
                return Outcome.HUNG, "tokens still come"
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return Outcome.NAMED, f"in the stream: {_words_of(chunk)}"
            ids[:] = chunk["output_ids"]
            if ids != expected[: len(ids)]:
                return Outcome.WRONG, f"after {len(ids)} tokens"
            finish = chunk["meta_info"]["finish_reason"]
            if finish is not None and finish["type"] == "abort":
                return Outcome.NAMED, f"in the stream: {finish.get('message')}"
    if len(ids) == len(expected):
        return Outcome.RIGHT, ""
    return Outcome.CUT, "the stream ended early"


def _judge_error(status: int, text: str) -> tuple[Outcome, str]:
    """The outcome of a request that has an error for an answer; one without words is no name."""
    try:
        words = _words_of(json.loads(text))
    except ValueError:
        words = ""
    return (Outcome.NAMED if words else Outcome.CUT), f"{status}: {words}"


def _words_of(reply: Any) -> str:
    """The message of an error, as the router or a server writes it."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    message = error.get("message", "") if isinstance(error, dict) else error
    return str(message)


class ApartClients:
    """`count` clients at `url`, each with one prompt of `expected` after the other.

    Args:
        expected: each prompt with the token ids of its answer.
    """

    def __init__(
        self, url: str, expected: Mapping[Prompt, Sequence[int]], count: int, seed: int
    ) -> None:
        self._url, self._expected = url, expected
        self._is_over = threading.Event()
        self.endings: list[Ending] = []
        self._threads = [
            threading.Thread(target=self._run, args=(Random(seed + number),), daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when every answer that was begun has ended, or should have."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * LIMIT_S)
            if thread.is_alive():
                now_s = time.monotonic()
                began_s = now_s - 2 * LIMIT_S
                self.endings.append(Ending(began_s=began_s, ended_s=now_s, outcome=Outcome.HUNG))

    def _run(self, rng: Random) -> None:
        prompts = list(self._expected)
        while not self._is_over.is_set():
            prompt = rng.choice(prompts)
            ending = ask(self._url, prompt, self._expected[prompt])
            self.endings.append(ending)  # atomic
            if ending.outcome is not Outcome.RIGHT:
                self._is_over.wait(_REST_S)
