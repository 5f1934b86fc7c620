"""Masks against one bit at a time."""

import math
import random
from array import array

import pytest
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.output.logit_adjustments import plan_logit_adjustments
from sgl_pipeline.pp_runner.output.token_masks import (
    allows_no_other,
    forbidden_tokens,
    plan_token_masks,
)
from sgl_pipeline.requests import GREEDY, SamplingSpec
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

CPU = torch.device("cpu")
VOCAB_SIZE = 70  # no multiple of 8 or 32


def packed(allowed: set[int]) -> bytes:
    words = [0] * -(-VOCAB_SIZE // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return b"".join(word.to_bytes(4, "little") for word in words)


def chunk(mask: bytes, *, samples: bool = True, spec: SamplingSpec = GREEDY) -> MirroredChunk:
    request = MirroredRequest(0, spec, 2, array("i", [1, 2]), array("i"))
    return MirroredChunk(request, 0, 2, samples, mask)


def test_exactly_the_forbidden_tokens_of_masked_rows_become_minus_infinity() -> None:
    numbers = random.Random(1)
    allowed = [set(numbers.sample(range(VOCAB_SIZE), k)) for k in (1, 7, 69)]
    chunks = [
        chunk(b""),
        chunk(packed(allowed[0])),
        chunk(b"", samples=False),
        chunk(b""),
        chunk(packed(allowed[1])),
        chunk(packed(allowed[2])),
        chunk(b""),
    ]
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.tolist()
    masks = plan_token_masks(chunks, CPU)
    assert masks is not None
    masks.apply_to(logits)
    free = set(range(VOCAB_SIZE))
    rows = [free, allowed[0], free, allowed[1], allowed[2], free]
    for row, tokens in enumerate(rows):
        for token in range(VOCAB_SIZE):
            expected = before[row][token] if token in tokens else -math.inf
            assert logits[row, token].item() == expected


def test_the_tokens_that_other_devices_forbid_are_those_without_a_bit() -> None:
    numbers = random.Random(2)
    allowed = [set(numbers.sample(range(VOCAB_SIZE), k)) for k in (0, 1, 35, 70)]
    masks = torch.stack(
        [torch.frombuffer(bytearray(packed(one)), dtype=torch.uint8) for one in allowed]
    )
    expected = [[token not in one for token in range(VOCAB_SIZE)] for one in allowed]
    assert forbidden_tokens(masks, VOCAB_SIZE).tolist() == expected


@pytest.mark.parametrize("chunks", [[], [chunk(b"")]], ids=["no rows", "no mask"])
def test_a_step_without_masks_plans_none(chunks: list[MirroredChunk]) -> None:
    assert plan_token_masks(chunks, CPU) is None


def test_a_complete_grammar_may_end_before_the_minimum_and_another_may_not() -> None:
    """Else no token at all would be left."""
    spec = SamplingSpec(min_new_tokens=9, masked_token_ids=(3, 69))
    complete, open_ended = packed({3, 69}), packed({3, 69, 5})
    assert allows_no_other(complete, (3, 69))
    assert not allows_no_other(open_ended, (3, 69))
    chunks = [chunk(complete, spec=spec), chunk(open_ended, spec=spec)]
    logits = torch.zeros(2, VOCAB_SIZE)
    for planned in (plan_logit_adjustments(chunks, CPU), plan_token_masks(chunks, CPU)):
        assert planned is not None
        planned.apply_to(logits)
    assert [torch.isfinite(row).nonzero().flatten().tolist() for row in logits] == [[3, 69], [5]]


def test_no_bias_brings_a_forbidden_token_back() -> None:
    chunks = [chunk(packed({4}), spec=SamplingSpec(logit_bias=((7, 1e30), (4, -1e30))))]
    logits = torch.zeros(1, VOCAB_SIZE)
    for planned in (plan_logit_adjustments(chunks, CPU), plan_token_masks(chunks, CPU)):
        assert planned is not None
        planned.apply_to(logits)
    assert logits.argmax().item() == 4
    assert torch.isfinite(logits).sum() == 1


def test_masks_of_different_lengths_are_an_error() -> None:
    whole = packed({1})
    with pytest.raises(ProtocolError, match=f"{len(whole) - 1}, {len(whole)}"):
        plan_token_masks([chunk(whole), chunk(whole[:-1])], CPU)
