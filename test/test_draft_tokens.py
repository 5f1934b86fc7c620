"""Tokens and log-probabilities do not depend on drafts, however many of them are right.

The whole runtime but its processes, in one process, as in `test_token_identity.py`.
"""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.forced_drafts import ForcedDrafts
from support.local_pipeline import LocalPipeline
from support.quantized_models import quantized_model
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.requests import GREEDY, LogprobRows, LogprobSpec, Request, SamplingSpec, StopRules

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

SPLITS = {1: (6,), 2: (2, 4), 3: (1, 3, 2)}
COMPILED = {"dtype": "bfloat16", "attention_backend": "cpu", "layer_kernels": "cpu"}
# Depths, and shares of drafts that are wrong: none, some and all.
WAYS = ((1, 0.3), (2, 1.0), (3, 0.0), (3, 0.5))
# How a row is computed is nothing to a draft, nor to where layers are cut.
FEW_WAYS = ((1, 0.3), (3, 0.5))
SAMPLINGS = (
    GREEDY,
    SamplingSpec(temperature=0.8, seed=3),
    SamplingSpec(temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, seed=4),
    SamplingSpec(
        temperature=0.7,
        seed=5,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((7, 1.5), (11, -3.0)),
        min_new_tokens=9,
        masked_token_ids=tuple(range(40, 60)),
    ),
)


def make_requests(count: int = 6, max_new_tokens: int = 24) -> list[Request]:
    """Prompts of 1 to 60 tokens, two of three with log-probabilities, one with stop tokens."""
    numbers = random.Random(7)
    requests = []
    for index in range(count):
        prompt = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.choice((1, 17, 60)))]
        stops = StopRules(max_new_tokens, frozenset(range(0, VOCAB_SIZE, 20) if index == 4 else ()))
        logprobs = LogprobSpec(index % 2 * len(prompt), 3, (1, 5)) if index % 3 else None
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        requests.append(Request(f"request-{index}", prompt, sampling, stops, logprobs=logprobs))
    return requests


def new_pipeline(model: str | Path, layer_counts: Sequence[int], **flags: Any) -> LocalPipeline:
    return LocalPipeline(
        tiny_model(model) if isinstance(model, str) else model,
        layer_counts,
        scheduling=SchedulingArgs(page_size=4),
        throttle=ThrottleArgs(max_prefill_tokens=24, min_prefill_tokens=4, prefill_spread_steps=3),
        **flags,
    )


def logprob_rows(request: Request) -> list[bytes]:
    """The arrays of all rows, however these were cut into runs."""
    runs = request.logprob_runs
    fields = LogprobRows.__struct_fields__[1:]
    return [b"".join(getattr(run, field) for run in runs) for field in fields]


def outcome(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [
        (one.output_ids, one.finish, one.num_logprob_rows, logprob_rows(one)) for one in requests
    ]


def force_drafts(
    pipeline: LocalPipeline, expected: Sequence[Request], wrong_share: float
) -> ForcedDrafts:
    outputs = {one.request_id: one.output_ids for one in expected}
    return ForcedDrafts(pipeline.scheduler, outputs, wrong_share)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3", COMPILED),
        ("qwen3", COMPILED | {"dtype": "float32"}),
        ("qwen3", COMPILED | {"kv_cache_dtype": "int8"}),
        ("qwen3", COMPILED | {"kv_cache_dtype": "fp8_e4m3"}),
        ("qwen3", COMPILED | {"quantization": "w8a8_int8"}),
        ("qwen3-moe", COMPILED),
        ("qwen3-layer-types", COMPILED),
    ],
    ids=["dense", "fp32", "int8 pages", "fp8 pages", "int8 weights", "experts", "windows"],
)
def test_bits_are_those_without_drafts(name: str, flags: dict[str, Any]) -> None:
    assert_bits_are_the_same(name, flags, WAYS if flags is COMPILED else FEW_WAYS)


# How rows are rounded is nothing to where numbers are stored: each format in turn, one both ways.
@pytest.mark.parametrize(
    ("format_name", "quantization"),
    [
        ("pack-quantized", None),
        ("pack-quantized", "w4a8_int8"),
        ("gptq v2, ordered", "w4a8_int8"),
        ("awq", None),
    ],
)
def test_so_they_are_with_weights_of_four_bits(format_name: str, quantization: str | None) -> None:
    path = quantized_model(format_name).path
    assert_bits_are_the_same(path, COMPILED | {"quantization": quantization})


@pytest.mark.parametrize("format_name", ["fp8", "fp8 blocks", "float-quantized"])
def test_so_they_are_with_fp8_weights(format_name: str) -> None:
    assert_bits_are_the_same(quantized_model(format_name).path, COMPILED)


def assert_bits_are_the_same(
    model: str | Path, flags: dict[str, Any], ways: Sequence[tuple[int, float]] = FEW_WAYS
) -> None:
    expected = make_requests()
    new_pipeline(model, SPLITS[1], **flags).run(expected)
    for num_stages, wrong_share in ways:
        pipeline = new_pipeline(model, SPLITS[num_stages], **flags)
        drafts = force_drafts(pipeline, expected, wrong_share)
        requests = make_requests()
        pipeline.run(requests)
        assert outcome(requests) == outcome(expected)
        assert drafts.num_drafted > 50
        assert (drafts.num_accepted > 0) == (wrong_share < 1.0)
        assert (drafts.num_accepted == drafts.num_drafted) == (wrong_share == 0.0)


# Which stages are lost, and when, does not depend on the log, so each log has one draw.
@pytest.mark.parametrize(("log_pages", "seed"), [(None, 0), (12, 1), (256, 0)])
def test_though_pages_run_out_and_stages_are_lost(log_pages: int | None, seed: int) -> None:
    """A pool for about two requests and kills in the middle: pages that only wrong drafts have
    begun are lost, retracted, logged and owed as others are."""
    expected = make_requests()
    new_pipeline("qwen3", SPLITS[1], **COMPILED).run(expected)
    pipeline = new_pipeline("qwen3", SPLITS[3], num_pages=44, log_pages=log_pages, **COMPILED)
    drafts = force_drafts(pipeline, expected, 0.4)
    requests = make_requests()
    pipeline.run(requests, partial(lose_some, pipeline, random.Random(seed)))
    assert outcome(requests) == outcome(expected)
    assert 0 < drafts.num_accepted < drafts.num_drafted
    assert sum(one.num_retractions for one in requests)


def lose_some(pipeline: LocalPipeline, numbers: random.Random, step: int) -> None:
    if step % 9 == 5:
        pipeline.lose(*numbers.sample(range(3), numbers.choice((1, 1, 2))))


def test_while_layers_move() -> None:
    expected = make_requests()
    new_pipeline("qwen3", SPLITS[1], **COMPILED).run(expected)
    pipeline = new_pipeline("qwen3", SPLITS[2], **COMPILED)
    drafts = force_drafts(pipeline, expected, 0.4)
    plans = iter(((3, 3), (1, 5), (4, 2)))
    migration = pipeline.core.migration

    def move(step: int) -> None:
        if step % 8 == 3 and (plan := next(plans, None)) is not None:
            migration.move_to(plan, 0.0)

    requests = make_requests()
    pipeline.run(requests, move)
    assert outcome(requests) == outcome(expected)
    assert drafts.num_accepted > 0
    assert [one.outcome for one in migration.history] == [MoveOutcome.DONE] * 3
