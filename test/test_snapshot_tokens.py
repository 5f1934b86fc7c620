"""Tokens of models with states are transformers' where requests begin behind cached snapshots."""

import random

import pytest
from support.greedy_oracle import count_ties
from support.local_pipeline import LocalPipeline
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import GREEDY, Request, StopRules

pytestmark = pytest.mark.slow

KERNELS = {
    "torch": {"attention_backend": "torch", "layer_kernels": "torch"},
    "compiled": {"attention_backend": "cpu", "layer_kernels": "cpu"},
}


SPLITS = pytest.mark.parametrize(
    ("kernels", "layer_counts", "num_state_slots"),
    [
        ("torch", (4, 2), 8),
        pytest.param("compiled", (1, 3, 2), 8, marks=pytest.mark.compiler),
        pytest.param("compiled", (6,), 3, marks=pytest.mark.compiler),
    ],
)


@SPLITS
def test_shared_prefixes(kernels: str, layer_counts: tuple[int, ...], num_state_slots: int) -> None:
    path = tiny_model("qwen3.5")
    pipeline = LocalPipeline(
        path,
        layer_counts,
        scheduling=SchedulingArgs(page_size=4, num_state_slots=num_state_slots),
        throttle=ThrottleArgs(policy="sarathi", max_prefill_tokens=24, min_prefill_tokens=4),
        **KERNELS[kernels],
    )
    numbers = random.Random(3)
    shared = [numbers.randrange(VOCAB_SIZE) for _ in range(42)]
    requests = []
    for number in range(9):
        own = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))]
        prompt = shared + own if number % 3 else shared[: 10 + number]
        requests.append(Request(f"{number}", prompt, GREEDY, StopRules(max_new_tokens=8)))
    pipeline.run(requests)
    again = [
        Request(f"again {one.request_id}", one.prompt_ids, GREEDY, one.stops) for one in requests
    ]
    pipeline.run(again)
    pipeline.scheduler.check_invariants()
    chunks = [chunk for step in pipeline.microbatches for chunk in step.chunks]
    assert any(chunk.state_source is not None for chunk in chunks)
    assert any(chunk.snapshots for chunk in chunks)
    assert pipeline.scheduler.num_cached_tokens > len(shared)
    for one, other in zip(requests, again, strict=True):
        count_ties(path, one.prompt_ids, one.output_ids)
        assert one.output_ids == other.output_ids


@pytest.mark.parametrize("interval", [4, 16])
@SPLITS
def test_turns_of_a_chat_begin_behind_the_last_answer(
    kernels: str, layer_counts: tuple[int, ...], num_state_slots: int, interval: int
) -> None:
    path = tiny_model("qwen3.5")
    scheduling = SchedulingArgs(
        page_size=4, num_state_slots=num_state_slots, track_interval=interval
    )
    pipeline = LocalPipeline(path, layer_counts, scheduling=scheduling, **KERNELS[kernels])
    numbers = random.Random(interval)
    chats = [[numbers.randrange(VOCAB_SIZE) for _ in range(9 + chat)] for chat in range(2)]
    for turn in range(3):
        requests = [
            Request(f"{chat} {turn}", [*tokens], GREEDY, StopRules(max_new_tokens=21 + 5 * chat))
            for chat, tokens in enumerate(chats)
        ]
        pipeline.run(requests)
        for tokens, request in zip(chats, requests, strict=True):
            count_ties(path, request.prompt_ids, request.output_ids)
            if turn and num_state_slots > 2 * len(chats):
                # Behind the answer: the last tokens of the prompt are new.
                assert request.cached_tokens >= (len(request.prompt_ids) - 4) // interval * interval
            new = [numbers.randrange(VOCAB_SIZE) for _ in range(3)]
            tokens[:] = [*request.prompt_ids, *request.output_ids, *new]
    decodes = [one for step in pipeline.microbatches for one in step.chunks if one.is_decode]
    assert any(one.state_source is not None for one in decodes)
