"""Tokens of models whose layers keep states are transformers', at any depth and in any chunks."""

import random
from pathlib import Path

import pytest
from support.greedy_oracle import count_ties
from support.hybrid_stages import HandledRequest, HybridStages
from support.tiny_models import HYBRID_MODELS, VOCAB_SIZE, tiny_model

SPLITS = [(6,), (4, 2), (1, 3, 2)]
WHOLE = 1000
KERNELS = {
    "torch": {"attention_backend": "torch", "layer_kernels": "torch"},
    "compiled": {"attention_backend": "cpu", "layer_kernels": "cpu"},
}
with_and_without_kernels = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("compiled", marks=pytest.mark.compiler)]
)


def prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCAB_SIZE) for _ in range(length)]


def assert_greedy(path: Path, request: HandledRequest) -> None:
    ties = count_ties(path, request.prompt_ids, request.output_ids)
    print(f"{len(request.output_ids)} greedy tokens, {ties} ties below 1e-4 went the other way")


@with_and_without_kernels
@pytest.mark.parametrize("layer_counts", SPLITS, ids=lambda counts: f"pp{len(counts)}")
@pytest.mark.parametrize("name", HYBRID_MODELS)
def test_chunks_of_any_length(name: str, layer_counts: tuple[int, ...], kernels: str) -> None:
    path = tiny_model(name)
    stages = HybridStages(path, layer_counts, **KERNELS[kernels])
    outputs = []
    for slot, chunk in enumerate((1, 7, 64, WHOLE)):
        request = stages.open(prompt(5, 90), slot)
        stages.finish(request, chunk, 12)
        assert_greedy(path, request)
        outputs.append(request.output_ids)
    assert all(one == outputs[0] for one in outputs)
    assert len({*outputs[0]}) > 4, "the model repeats itself"
