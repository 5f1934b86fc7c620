"""Clients that stream answers all the time, each the next one when the last has ended."""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import requests

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 300
_TIMEOUT_S = 120.0


class Streams:
    """Clients in threads; `moments` are of all tokens, for each stream of its own."""

    def __init__(self, url: str, count: int) -> None:
        self.moments: list[list[float]] = [[] for _ in range(count)]
        self.errors: list[str] = []
        self._url = url + "/generate"
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for number, thread in enumerate(self._threads):
            thread.start()
            time.sleep(0.05 * (number % 4))  # so that their prompts do not come together

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def longest_gap_ms(self, start_s: float, end_s: float) -> float:
        """Between two tokens of one answer, of which the later came in that time; 0 if none did."""
        return max(self._gaps_s(start_s, end_s), default=0.0) * 1e3

    def usual_gap_ms(self, start_s: float, end_s: float) -> float:
        """The median of such gaps."""
        return statistics.median([*self._gaps_s(start_s, end_s)] or [0.0]) * 1e3

    def tokens_per_s(self, start_s: float, end_s: float) -> float:
        count = sum(start_s <= one < end_s for moments in self.moments for one in moments)
        return count / (end_s - start_s)

    def _gaps_s(self, start_s: float, end_s: float) -> Iterator[float]:
        for moments in list(self.moments):
            for earlier, later in pairwise(moments):
                if start_s <= later <= end_s and earlier > 0.0:
                    yield later - earlier

    def _run(self, number: int) -> None:
        answer = 0
        while not self._is_over.is_set():
            answer += 1
            first = number * 7919 + answer * 104_729
            prompt = [(first + place * 31) % 30_000 + 10 for place in range(PROMPT_TOKENS)]
            body = {
                "input_ids": prompt,
                "sampling_params": {
                    "max_new_tokens": OUTPUT_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                },
                "stream": True,
            }
            try:
                self._stream(number, body)
            except (requests.RequestException, ValueError) as error:
                self.errors.append(repr(error))
                return

    def _stream(self, number: int, body: dict[str, Any]) -> None:
        moments = self.moments[number]
        # Keeps the wait for an answer's first token out of the gaps.
        moments.append(0.0)
        with requests.post(self._url, json=body, stream=True, timeout=_TIMEOUT_S) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    moments.append(time.monotonic())
                    if "error" in json.loads(line[6:]):
                        raise ValueError(line.decode())
                if self._is_over.is_set():
                    return
