"""Clients that stream answers while stages are killed, and judge every token of them.

Used by `kill_stages.py`. The oracle is what the same server answered before anything was killed:
fp32 and greedy.
"""

import json
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import requests

_TIMEOUT_S = 120.0
_SHORTEST_STAY_S, _LONGEST_STAY_S = 0.005, 0.5


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how many tokens the answer has; greedy unless there is a `seed`."""

    ids: tuple[int, ...]
    num_new_tokens: int
    seed: int | None = None


def make_prompts(rng: Random, count: int, vocabulary: int) -> list[Prompt]:
    """Short and long ones, some of which share their first half."""
    shared = [rng.randrange(10, vocabulary) for _ in range(200)]
    prompts = []
    for number in range(count):
        own = [rng.randrange(10, vocabulary) for _ in range(rng.choice((5, 40, 200)))]
        ids = tuple(shared[: len(own)] + own if number % 3 == 0 else own)
        prompts.append(Prompt(ids, rng.choice((40, 120, 300))))
    return prompts


@dataclass(slots=True)
class Tally:
    """The sum of what all clients have seen. `moments` are of tokens, `gaps` pairs of an end and a
    length."""

    num_answers: int = 0
    num_aborted: int = 0
    failures: list[str] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def one_line(self) -> str:
        return f"{self.num_answers} answers, {self.num_aborted} left, {len(self.failures)} failed"

    def longest_gap_s(self, start_s: float, end_s: float) -> float:
        """Between two tokens of one answer, of which the later came in that time."""
        return max((length for end, length in self.gaps if start_s <= end <= end_s), default=0.0)


class KillClients:
    """`count` clients at `url`, each with one prompt of `expected` after the other; `leavers` are
    clients besides, who leave every stream at a random moment, also before its first token.

    Args:
        expected: each prompt with the token ids of its answer.
    """

    def __init__(
        self, url: str, expected: dict[Prompt, list[int]], count: int, leavers: int, seed: int
    ) -> None:
        self.tally = Tally()
        self._url = url
        self._expected = expected
        self._is_over = threading.Event()
        self._latest_s = [0.0] * count
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._run, args=(Random(seed + number), number, number >= count), daemon=True
            )
            for number in range(count + leavers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when every answer that was begun has ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
            if thread.is_alive():
                self.tally.failures.append("a stream never ended")

    def all_go_on_after(self, moment_s: float) -> bool:
        """True if every client that stays has got a token since, or nothing will ever come."""
        return bool(self.tally.failures) or min(self._latest_s) > moment_s

    def _run(self, rng: Random, number: int, leaves: bool) -> None:
        prompts = list(self._expected)
        while not self._is_over.is_set():
            stay_s = _SHORTEST_STAY_S + rng.random() * _LONGEST_STAY_S if leaves else None
            problem, moments = self._stream(rng.choice(prompts), number, stay_s)
            with self._lock:
                tally = self.tally
                tally.moments += moments
                tally.gaps += [(later, later - before) for before, later in pairwise(moments)]
                if problem is not None:
                    tally.failures.append(problem)
                elif leaves:
                    tally.num_aborted += 1
                else:
                    tally.num_answers += 1

    def _stream(
        self, prompt: Prompt, number: int, stay_s: float | None
    ) -> tuple[str | None, list[float]]:
        """Reads one stream; returns the answer's fault, if any, and the times of its tokens.

        Args:
            stay_s: the client leaves after so many seconds, or as long after its last token; None:
                it stays.
        """
        moments: list[float] = []
        expected = self._expected[prompt]
        last: dict[str, Any] = {}
        began_s = time.monotonic()
        timeouts_s = (_TIMEOUT_S, stay_s or _TIMEOUT_S)  # to connect, and between two reads
        try:
            body = body_of(prompt) | {"stream": True}
            with requests.post(
                self._url + "/generate", json=body, stream=True, timeout=timeouts_s
            ) as reply:
                if reply.status_code != 200:
                    return f"status {reply.status_code}: {reply.text[:200]}", moments
                for line in reply.iter_lines():
                    if not line.startswith(b"data: {"):
                        continue
                    last = json.loads(line[6:])
                    if "error" in last:
                        return f"error in the stream: {line[:200]!r}", moments
                    moments.append(time.monotonic())
                    if stay_s is None:
                        self._latest_s[number] = moments[-1]
                    ids = last["output_ids"]
                    if ids != expected[: len(ids)]:
                        return f"other tokens after {len(ids)}", moments
                    if stay_s is not None and time.monotonic() - began_s > stay_s:
                        return None, moments
        except (requests.RequestException, ValueError, KeyError) as error:
            if stay_s is not None and _is_timeout(error):
                return None, moments
            return repr(error), moments
        return _judge(last, expected, prompt), moments


def _is_timeout(error: Exception) -> bool:
    """True if nothing came for as long as the client would wait. In the middle of a stream requests
    wraps that as a ConnectionError."""
    return isinstance(error, requests.Timeout) or "Read timed out" in str(error)


def body_of(prompt: Prompt) -> dict[str, Any]:
    """The request for the answer."""
    sampling: dict[str, Any] = {"max_new_tokens": prompt.num_new_tokens, "ignore_eos": True}
    if prompt.seed is None:
        sampling["temperature"] = 0
    else:
        sampling |= {"temperature": 1, "sampling_seed": prompt.seed}
    return {"input_ids": list(prompt.ids), "sampling_params": sampling}


def _judge(last: dict[str, Any], expected: list[int], prompt: Prompt) -> str | None:
    if not last:
        return "a stream without a token"
    info = last["meta_info"]
    usage = (info["prompt_tokens"], info["completion_tokens"])
    if last["output_ids"] != expected:
        return f"{len(last['output_ids'])} of {len(expected)} tokens"
    if usage != (len(prompt.ids), len(expected)):
        return f"usage {usage}, {len(prompt.ids)} and {len(expected)} are due"
    if info["finish_reason"]["type"] != "length":
        return f"finish reason {info['finish_reason']}"
    return None
