"""Streamed requests of a live server, and the stages that are killed under them."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import psutil
import requests
from support.live_server import ANSWER_S, LiveServer

PROMPTS = ("<|user|>Hello", "<|user|>What is 17 + 25?", "abc")
NUM_TOKENS = 300
FOR_MINUTES = {"max_new_tokens": 20_000, "ignore_eos": True, "temperature": 0}


@dataclass
class Stream:
    """A streamed request in a thread of its own; `ids` are the tokens that have come."""

    url: str
    prompt: str
    options: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    errors: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> "Stream":
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), "a stream was left waiting"
        return self

    def _run(self) -> None:
        sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        body = {"text": self.prompt, "sampling_params": sampling, "stream": True} | self.options
        try:
            with requests.post(
                f"{self.url}/generate", json=body, stream=True, timeout=ANSWER_S
            ) as response:
                for line in response.iter_lines():
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except requests.RequestException as error:
            self.errors.append(error)

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        assert chunk["output_ids"][: len(self.ids)] == self.ids, "a token that was sent changed"
        self.ids, self.last = chunk["output_ids"], chunk

    def assert_whole(self, expected: "Stream") -> None:
        assert self.errors == []
        assert self.ids == expected.ids
        assert self.last["text"] == expected.last["text"]
        info = self.last["meta_info"]
        assert info["finish_reason"]["type"] == "length"
        assert info["completion_tokens"] == NUM_TOKENS
        assert info["prompt_tokens"] == expected.last["meta_info"]["prompt_tokens"]


def streams_of(server: LiveServer) -> list[Stream]:
    return [Stream(server.url, prompt) for prompt in PROMPTS]


def kill_stage(server: LiveServer, stage: int) -> None:
    psutil.Process(server.facts()["stage_pids"][stage]).kill()
