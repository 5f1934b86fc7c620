"""A client that streams the same answer again and again, and notes what it got and when.

It stands for the other users of a server: `hurtful_requests.py` and its test in `test/server` look
at what happens to them while another client sends what may hurt.
"""

import json
import threading
import time
from types import TracebackType
from typing import Any

import requests

REQUEST: Any = {
    "text": "<|user|>Hello",
    "sampling_params": {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True},
    "stream": True,
}
TIMEOUT_S = 60.0


class Neighbor:
    """Streams in a thread of its own between `__enter__` and `__exit__`, whole answers only.

    Attributes:
        texts: of the answers, each complete.
        gaps_ms: time between a token and the next, of all answers.
        error: what ended it early, or None.
    """

    def __init__(self, url: str, min_answers: int = 1) -> None:
        self.texts: list[str] = []
        self.gaps_ms: list[float] = []
        self.error: Exception | None = None
        self._url = url + "/generate"
        self._min_answers = min_answers
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Neighbor":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while len(self.texts) < self._min_answers or not self._is_over.is_set():
                self.texts.append(self._one_answer())
        except (requests.RequestException, ValueError, KeyError) as error:
            self.error = error

    def _one_answer(self) -> str:
        text, last_s = "", None
        with requests.post(self._url, json=REQUEST, stream=True, timeout=TIMEOUT_S) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.perf_counter()
                if last_s is not None:
                    self.gaps_ms.append((now_s - last_s) * 1e3)
                last_s = now_s
                text = json.loads(line.removeprefix(b"data: "))["text"]
        return text
