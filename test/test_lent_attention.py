"""Tokens and logits do not depend on where attention is computed: a pipeline that leaves the
attention of some requests to the stages of another one, at any two depths and splits, has the bits
of a pipeline that attends to all by itself.

Real stages, sockets and keys of two servers; what their schedulers order is the test's.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters import host_directory, open_port
from support.driven_stages import Driven, DrivenStages, LendingStages
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.requests import GREEDY, SamplingSpec

pytestmark = pytest.mark.slow

NUM_REQUESTS, OUTPUT_TOKENS = 5, 10
# With pages of 4 tokens the rests of these prompts have 1, 2, 3, 4 and 1 tokens.
PROMPT_TOKENS = (61, 58, 47, 36, 21)
SEEDED = SamplingSpec(temperature=0.9, seed=5)
DEPTHS = [((6,), (6,)), ((2, 4), (6,)), ((6,), (1, 5)), ((4, 2), (1, 3, 2))]
KERNELS = {"attention_backend": "cpu", "layer_kernels": "cpu"}
NOBODY, SOME, ALL = frozenset[int](), frozenset({1, 3}), frozenset(range(NUM_REQUESTS))


def prompt_of(number: int) -> list[int]:
    return [
        (7 * number * at + at * at + number) % VOCAB_SIZE for at in range(PROMPT_TOKENS[number])
    ]


def sampling_of(number: int) -> SamplingSpec:
    return SEEDED if number % 2 else GREEDY


@cache
def alone(model: str = "qwen3", **stage: Any) -> list[Driven]:
    stages = DrivenStages(tiny_model(model), (6,), **KERNELS, **stage)
    requests = [
        stages.new_request(prompt_of(number), OUTPUT_TOKENS, sampling_of(number))
        for number in range(NUM_REQUESTS)
    ]
    stages.run(requests, OUTPUT_TOKENS)
    return requests


class Pair:
    """The stages of a prefill server, whose run directory and port these are, and of a decode
    server."""

    prefill: LendingStages
    decode: DrivenStages

    def __init__(self, directory: Path) -> None:
        self._open = ExitStack()
        self._runs = [host_directory(directory / name) for name in ("P", "D")]
        self._address, _ = self._open.enter_context(open_port(self._runs[0]))

    def start(
        self,
        counts: tuple[tuple[int, ...], tuple[int, ...]] = ((6,), (6,)),
        model: Path | None = None,
        **stage: Any,
    ) -> None:
        path, stage = model or tiny_model("qwen3"), KERNELS | stage
        self.prefill = LendingStages(path, counts[0], self._runs[0], self._address, **stage)
        self._open.callback(self.prefill.close)
        self.decode = DrivenStages(path, counts[1], self._runs[1], **stage)
        self._open.callback(self.decode.close)
        self.use_peer()

    def use_peer(self) -> None:
        for runner in self.decode.runners:
            runner.offload.use((self.prefill.place,))

    def request(self, number: int, is_offloaded: bool) -> Driven:
        prompt = prompt_of(number)
        lease, num_lent = None, 0
        if is_offloaded:
            lease, num_lent = self.prefill.lend(prompt, OUTPUT_TOKENS)
        return self.decode.new_request(prompt, OUTPUT_TOKENS, sampling_of(number), lease, num_lent)

    def requests(self, offloaded: frozenset[int]) -> list[Driven]:
        return [self.request(number, number in offloaded) for number in range(NUM_REQUESTS)]

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def assert_equal(requests: list[Driven], others: list[Driven]) -> None:
    for one, other in zip(requests, others, strict=True):
        assert one.output_ids == other.output_ids
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize("offloaded", [NOBODY, SOME, ALL], ids=["none", "some", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("counts", DEPTHS, ids=str)
def test_attention_on_another_server_has_the_same_bits(
    pair: Pair,
    counts: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: str,
    offloaded: frozenset[int],
) -> None:
    pair.start(counts, dtype=dtype)
    requests = pair.requests(offloaded)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone(dtype=dtype))
    has_work = [report.offloaded is not None for report in pair.decode.reports]
    assert any(has_work) == bool(offloaded)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("offloaded", [SOME, ALL], ids=["some", "all"])
def test_codes_of_eight_bits_are_written_as_they_are(
    pair: Pair, offloaded: frozenset[int], kv_cache_dtype: str
) -> None:
    stage = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    pair.start(((2, 4), (3, 3)), **stage)
    requests = pair.requests(offloaded)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone(**stage))


@pytest.mark.parametrize("model", ["qwen3-moe", "qwen3-layer-types", "mistral-window"])
def test_experts_and_windows(pair: Pair, model: str) -> None:
    pair.start(((4, 2), (1, 5)), tiny_model(model))
    requests = pair.requests(SOME)
    pair.decode.run(requests, OUTPUT_TOKENS)
    assert_equal(requests, alone(model))
