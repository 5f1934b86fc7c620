"""The OpenVINO peer steps while there are requests, with a stand-in of its pipeline.

The stand-in answers a prompt with its last id, counted upwards, one token a step; tokens wait in it
until they are read.
"""

import argparse
import dataclasses
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fastapi.testclient import TestClient
from support.generate_stream import stream_answer

from benchmark.models.make_model import write_tokenizer
from benchmark.peers.generate_route import make_app

FAILING_ID = 666


@dataclasses.dataclass
class Handle:
    prompt: list[int]
    settings: Any
    unread: list[int] = dataclasses.field(default_factory=list)
    num_made: int = 0

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        output = types.SimpleNamespace(generated_ids=[self.unread.pop(0)])
        return {0: output}


class Pipeline:
    made: ClassVar[list["Pipeline"]] = []

    def __init__(self, path: str, scheduling: Any, device: str, properties: dict) -> None:
        self.scheduling, self.properties = scheduling, properties
        self.handles: list[Handle] = []
        Pipeline.made.append(self)

    def add_request(self, number: int, ids: np.ndarray, settings: Any) -> Handle:
        assert number == len(self.handles) and ids.dtype == np.int64 and ids.shape[0] == 1
        self.handles.append(Handle(ids[0].tolist(), settings))
        return self.handles[-1]

    def step(self) -> None:
        running = [one for one in self.handles if one.num_made < one.settings.max_new_tokens]
        assert running, "a step without requests"
        for handle in running:
            if handle.prompt[-1] == FAILING_ID:
                raise RuntimeError("no pages")
            handle.num_made += 1
            handle.unread.append(handle.prompt[-1] + handle.num_made)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    genai = types.SimpleNamespace(
        SchedulerConfig=types.SimpleNamespace,
        GenerationConfig=types.SimpleNamespace,
        ContinuousBatchingPipeline=Pipeline,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", types.SimpleNamespace(Tensor=lambda ids: ids))
    monkeypatch.delitem(sys.modules, "benchmark.peers.openvino_serve", raising=False)
    from benchmark.peers import openvino_serve

    yield openvino_serve
    monkeypatch.delitem(sys.modules, "benchmark.peers.openvino_serve", raising=False)


@pytest.fixture
def client(module: Any, tmp_path: Path) -> Iterator[TestClient]:
    write_tokenizer(1000, tmp_path)
    options = argparse.Namespace(
        model_path=str(tmp_path),
        threads=2,
        cache_gib=1,
        max_batch_tokens=64,
        kv_cache_precision="bf16",
        disable_prefix_cache=True,
    )
    app = make_app(options.model_path, lambda: module.OpenVinoBatching(options))
    with TestClient(app) as client:
        yield client


def test_requests_beside_each_other_get_all_of_their_tokens(client: TestClient) -> None:
    asked = {"<300>": 4, "<301><400>": 7, "<500>": 2}
    with ThreadPoolExecutor(len(asked)) as clients:
        answers = clients.map(lambda prompt: stream_answer(client, prompt, asked[prompt]), asked)
        for (prompt, num_tokens), events in zip(asked.items(), answers, strict=True):
            last = int(prompt[-4:-1])
            text = "".join(f"<{last + number}>" for number in range(1, num_tokens + 1))
            assert events[-1]["text"] == text
            counts = [event["meta_info"]["completion_tokens"] for event in events]
            assert counts == sorted(set(counts)) and counts[-1] == num_tokens
            assert events[-1]["meta_info"]["prompt_tokens"] == prompt.count("<")
    assert all(handle.settings.ignore_eos for handle in Pipeline.made[-1].handles)


def test_it_waits_for_the_next_request_when_all_are_answered(client: TestClient) -> None:
    assert len(stream_answer(client, "<300>", 3)) <= 3
    assert stream_answer(client, "<700>", 2)[-1]["text"] == "<701><702>"


def test_the_pipeline_is_told_of_threads_precision_and_caches(client: TestClient) -> None:
    pipeline = Pipeline.made[-1]
    assert pipeline.scheduling.enable_prefix_caching is False
    assert pipeline.properties == {
        "INFERENCE_NUM_THREADS": 2,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
    }


def test_a_step_that_fails_fails_the_requests_and_those_to_come(client: TestClient) -> None:
    for prompt in (f"<{FAILING_ID}>", "<300>"):
        with pytest.raises(RuntimeError, match="no pages"):
            stream_answer(client, prompt, 3)
