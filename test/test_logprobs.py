"""Log-probabilities do not depend on how a request was served: transformers gives the same.

The whole runtime but its processes, in one process, as in `test_token_identity.py`.
"""

import random
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.adjusted_logits import adjusted_by_hand
from support.greedy_oracle import reference_model
from support.local_pipeline import FASTEST, LocalPipeline
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import GREEDY, LogprobSpec, Request, SamplingSpec, StopRules

pytestmark = pytest.mark.slow

SPLITS = {1: (6,), 2: (2, 4), 4: (2, 1, 1, 2)}
CHUNKED = {"max_prefill_tokens": 24, "min_prefill_tokens": 4, "prefill_spread_steps": 3}
WHOLE = {"policy": "sarathi", "max_prefill_tokens": 2048}
FASTEST_IN_FP32 = FASTEST | {"dtype": "float32"}
# In fp32 our kernels and transformers' add up in different orders.
TOLERANCE = 1e-4


def reference_logprobs(path: Path, request: Request) -> torch.Tensor:
    """[N, V]: row p tells of the token at p + 1, of the prompt or drawn by the request's rules."""
    return _reference_logprobs(
        path, tuple(request.prompt_ids), tuple(request.output_ids), request.sampling
    )


@cache
@torch.inference_mode()
def _reference_logprobs(
    path: Path, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...], sampling: SamplingSpec
) -> torch.Tensor:
    tokens = torch.tensor([prompt_ids + output_ids])
    logits = reference_model(path)(tokens).logits[0].clone()
    for count, position in enumerate(range(len(prompt_ids) - 1, logits.shape[0])):
        row = adjusted_by_hand(logits[position].tolist(), sampling, output_ids[:count])
        temperature = 1.0 if sampling.is_greedy else sampling.temperature
        logits[position] = torch.tensor(row) / temperature
    return logits.log_softmax(dim=-1)


def assert_logprobs(path: Path, request: Request) -> None:
    """Fails unless all that came back to `request` is what transformers gives, each row once."""
    spec = request.logprobs
    assert spec is not None
    reference = reference_logprobs(path, request)
    start = min(spec.prompt_start, len(request.prompt_ids) - 1)
    end = len(request.prompt_ids) - 1 + max(1, len(request.output_ids))
    tokens = request.prompt_ids + request.output_ids
    reference = reference[start:end].clamp_min(torch.finfo(torch.float32).min)
    chosen, top, top_ids, of_token_ids = rows_of(request)
    assert len(chosen) == request.num_logprob_rows == len(reference)
    for row, token in enumerate(tokens[start + 1 : end + 1]):
        assert_close(chosen[row], reference[row, token])
    assert_close(top, reference.topk(spec.num_top).values)
    assert_close(top, reference.gather(1, torch.tensor(top_ids, dtype=torch.int64)))
    assert_close(of_token_ids, reference[:, list(spec.token_ids)])
    assert all(len(set(row)) == spec.num_top for row in top_ids.tolist())


def assert_close(numbers: np.ndarray, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(numbers, expected.numpy(), atol=TOLERANCE, rtol=TOLERANCE)


def rows_of(request: Request) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Chosen [N], top [N, num_top], their ids, and those of the named ids: all runs together."""
    spec = request.logprobs
    assert spec is not None

    def joined(field: str, dtype: type, width: int) -> np.ndarray:
        parts = [getattr(run, field) for run in request.logprob_runs]
        return np.frombuffer(b"".join(parts), dtype).reshape(request.num_logprob_rows, width)

    return (
        joined("chosen", np.float32, 1)[:, 0],
        joined("top", np.float32, spec.num_top),
        joined("top_ids", np.int32, spec.num_top),
        joined("of_token_ids", np.float32, len(spec.token_ids)),
    )


def make_requests(
    count: int, *, max_new_tokens: int = 6, sampling: SamplingSpec = GREEDY, wanted: bool = True
) -> list[Request]:
    """Prompts that share their first half or not, and that want everything, something or nothing.

    Every sixth only scores its prompt: it generates nothing.
    """
    numbers = random.Random(count)
    shared = [numbers.randrange(VOCAB_SIZE) for _ in range(40)]
    requests = []
    for index in range(count):
        prompt = shared + [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(2, 20))]
        end = len(prompt)
        specs = [
            LogprobSpec(0, 5, (3, 3, 300)),
            None,
            LogprobSpec(end),
            LogprobSpec(17, 0, (7,)),
            LogprobSpec(end - 2, 128),
            LogprobSpec(33, 2),
        ]
        request = Request(
            f"request-{index}",
            prompt,
            msgspec.structs.replace(sampling, seed=index),
            StopRules(max_new_tokens=0 if index % 6 == 4 else max_new_tokens),
            logprobs=specs[index % 6] if wanted else None,
        )
        requests.append(request)
    return requests


def assert_all(name: str, requests: list[Request]) -> None:
    for request in requests:
        if request.logprobs is None:
            assert not request.logprob_runs
        else:
            assert_logprobs(tiny_model(name), request)


@pytest.mark.compiler
@pytest.mark.parametrize("throttle", [CHUNKED, WHOLE], ids=["chunked", "whole"])
def test_they_equal_transformers_at_every_depth_and_are_the_same_bits(throttle):
    """Beside requests without any, whose greedy tokens and those of all others stay as they are."""
    served = {}
    for num_stages, layer_counts in SPLITS.items():
        pipeline = LocalPipeline(
            tiny_model("qwen3"),
            layer_counts,
            throttle=ThrottleArgs(**throttle),
            attention_backend="cpu",
            layer_kernels="cpu",
        )
        served[num_stages] = make_requests(12)
        pipeline.run(served[num_stages])
        prefills = [c.request for m in pipeline.microbatches for c in m.chunks if not c.is_decode]
        assert (len(prefills) > len(set(prefills))) == (throttle is CHUNKED)
    assert_all("qwen3", served[1])
    plain = make_requests(12, wanted=False)
    whole = LocalPipeline(tiny_model("qwen3"), (6,), attention_backend="cpu", layer_kernels="cpu")
    whole.run(plain)
    for num_stages in SPLITS:
        for request, first, alone in zip(served[num_stages], served[1], plain, strict=True):
            assert request.output_ids == alone.output_ids
            if request.logprobs is not None:
                assert [a.tobytes() for a in rows_of(request)] == [
                    a.tobytes() for a in rows_of(first)
                ]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("radix_cache", [True, False])
def test_a_hit_in_the_prefix_cache_ends_where_they_begin(page_size, radix_cache):
    pipeline = LocalPipeline(
        tiny_model("llama3-rope"),
        (3, 3),
        num_pages=1024 // page_size,
        scheduling=SchedulingArgs(page_size=page_size, radix_cache=radix_cache),
        throttle=ThrottleArgs(**CHUNKED),
    )
    first, second = make_requests(12), make_requests(12)
    pipeline.run(first)
    pipeline.run(second)
    assert_all("llama3-rope", first + second)
    for request in second:
        limit = len(request.prompt_ids) - 1
        if request.logprobs is not None:
            limit = min(limit, request.logprobs.prompt_start)
        assert request.cached_tokens == (limit // page_size * page_size if radix_cache else 0)


@pytest.mark.parametrize("num_stages", SPLITS)
def test_after_retractions_every_row_has_come_once(num_stages):
    """A pool for about two requests: the others are retracted, before and after their prompt."""
    pipeline = LocalPipeline(
        tiny_model("mistral-sharded"),
        SPLITS[num_stages],
        num_pages=26,
        scheduling=SchedulingArgs(page_size=4),
        throttle=ThrottleArgs(pause_free_share=0.0, **CHUNKED),
        **FASTEST_IN_FP32,
    )
    requests = make_requests(9, max_new_tokens=24)
    pipeline.run(requests)
    assert any(request.num_retractions and request.logprobs for request in requests)
    assert_all("mistral-sharded", requests)


def test_a_prompt_that_is_retracted_half_way_goes_on_where_it_was():
    pipeline = LocalPipeline(
        tiny_model("qwen3"),
        (3, 3),
        scheduling=SchedulingArgs(preemption_threshold=0, max_running_requests=1, page_size=4),
        throttle=ThrottleArgs(policy="sarathi", max_prefill_tokens=16, min_prefill_tokens=1),
    )
    low, high = make_requests(1)[0], make_requests(1)[0]
    high.request_id, high.priority = "high", 1
    high.prompt_ids = high.prompt_ids[::-1]
    pipeline.scheduler.add(low)
    assert pipeline.schedule()
    pipeline.complete()
    assert (low.num_logprob_rows, low.first_logits_position) == (16, 16)
    pipeline.run([high])
    assert low.num_retractions == 1
    assert_all("qwen3", [low, high])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_they_are_what_the_sampler_drew_from_after_penalties_bias_and_temperature(temperature):
    sampling = SamplingSpec(
        temperature=temperature,
        top_k=20,
        top_p=0.9,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((7, 2.5), (11, -100.0)),
        min_new_tokens=4,
        masked_token_ids=(3, 300),
    )
    requests = make_requests(6, sampling=sampling, max_new_tokens=8)
    LocalPipeline(tiny_model("qwen3"), (2, 4), throttle=ThrottleArgs(**CHUNKED)).run(requests)
    assert_all("qwen3", requests)
