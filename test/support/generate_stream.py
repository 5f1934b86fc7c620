"""Asks the servers of `benchmark/peers/generate_route.py`, in this process."""

import json
from typing import Any

from fastapi.testclient import TestClient


def stream_answer(client: TestClient, prompt: str, num_tokens: int) -> list[dict[str, Any]]:
    """The events of a streamed answer of so many tokens, all but the closing one."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": num_tokens}, "stream": True}
    lines = client.post("/generate", json=body).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
