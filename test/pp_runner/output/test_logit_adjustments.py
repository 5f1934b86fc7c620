"""Penalties, logit bias and min_new_tokens against one token at a time in Python floats."""

import itertools
import math
import random
from array import array

import pytest
import torch
from support.adjusted_logits import adjusted_by_hand

from sgl_pipeline.pp_runner.output.logit_adjustments import plan_logit_adjustments
from sgl_pipeline.requests import GREEDY, SamplingSpec
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

CPU = torch.device("cpu")
VOCAB_SIZE = 40
FEATURES = {
    "frequency_penalty": {"frequency_penalty": 0.7},
    "presence_penalty": {"presence_penalty": -1.1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": ((3, 2.5), (39, -100.0), (8, 0.25))},
    "min_new_tokens": {"min_new_tokens": 12, "masked_token_ids": (0, 3, 7)},
}
SUBSETS = [
    names for size in range(len(FEATURES) + 1) for names in itertools.combinations(FEATURES, size)
]


def spec_with(names: tuple[str, ...]) -> SamplingSpec:
    return SamplingSpec(**{name: value for key in names for name, value in FEATURES[key].items()})


def sampling_chunk(
    spec: SamplingSpec, output_ids: list[int], prompt_ids: list[int] | None = None
) -> MirroredChunk:
    """The decode that draws the token after `output_ids`."""
    prompt_ids = [5, 6, 7] if prompt_ids is None else prompt_ids
    tokens = array("i", prompt_ids + output_ids)
    request = MirroredRequest(0, spec, len(prompt_ids), tokens, array("i"))
    return MirroredChunk(request, len(tokens) - 1, 1, samples=True)


def adjusted(chunks: list[MirroredChunk], logits: torch.Tensor) -> torch.Tensor:
    result = logits.clone()
    adjustments = plan_logit_adjustments(chunks, CPU)
    if adjustments is not None:
        adjustments.apply_to(result)
    return result


def mixed_microbatch() -> tuple[list[MirroredChunk], torch.Tensor]:
    """Every subset of the features three times, in random order, and a logits row for each."""
    numbers = random.Random(2)
    chunks = [
        sampling_chunk(
            spec_with(names),
            [numbers.randrange(VOCAB_SIZE // 2) for _ in range(numbers.randrange(25))],
        )
        for names in SUBSETS * 3
    ]
    numbers.shuffle(chunks)
    logits = torch.randn((len(chunks), VOCAB_SIZE), generator=torch.Generator().manual_seed(2))
    return chunks, logits * 3


def output_of(chunk: MirroredChunk) -> list[int]:
    return list(chunk.request.tokens[chunk.request.prompt_length :])


def test_every_combination_in_one_microbatch_equals_a_walk_over_single_tokens():
    chunks, logits = mixed_microbatch()
    result = adjusted(chunks, logits)
    for chunk, row, before in zip(chunks, result.tolist(), logits.tolist(), strict=True):
        spec = chunk.request.sampling
        expected = adjusted_by_hand(before, spec, output_of(chunk))
        assert row == pytest.approx(expected, abs=1e-5), spec
        if spec == SamplingSpec():
            assert row == before


def test_a_row_gets_the_same_logits_alone_and_in_a_mixed_microbatch():
    chunks, logits = mixed_microbatch()
    together = adjusted(chunks, logits)
    for row, chunk in enumerate(chunks):
        assert torch.equal(adjusted([chunk], logits[row : row + 1])[0], together[row])


def test_rows_are_those_of_the_chunks_that_sample():
    spec = SamplingSpec(logit_bias=((2, 1.0),))
    unfinished = sampling_chunk(spec, [])
    unfinished = MirroredChunk(unfinished.request, 0, 2, samples=False)
    chunks = [unfinished, sampling_chunk(GREEDY, [1]), unfinished, sampling_chunk(spec, [1])]
    expected = torch.zeros(2, VOCAB_SIZE)
    expected[1, 2] = 1.0
    assert torch.equal(adjusted(chunks, torch.zeros(2, VOCAB_SIZE)), expected)


def test_a_prefill_after_a_retraction_counts_the_output_in_it():
    """All tokens are computed again in one chunk, of which the output is a part."""
    spec = spec_with(("frequency_penalty", "repetition_penalty"))
    decode = sampling_chunk(spec, [9, 9, 11])
    again = MirroredChunk(decode.request, 0, len(decode.request.tokens), samples=True)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    assert torch.equal(adjusted([again], logits), adjusted([decode], logits))


def test_a_hand_worked_row():
    # Token 1 came twice, token 2 once; token 3 is in the prompt only.
    spec = SamplingSpec(
        frequency_penalty=0.5,
        presence_penalty=1.0,
        repetition_penalty=2.0,
        logit_bias=((1, 10.0), (4, -1.0)),
        min_new_tokens=4,
        masked_token_ids=(0,),
    )
    logits = torch.tensor([[9.0, 6.0, 1.0, 5.0, 0.5]])
    chunk = sampling_chunk(spec, [1, 2, 1], prompt_ids=[3, 3])
    # 1: (6 - 2 * 0.5 - 1) / 2 + 10; 2: (1 - 0.5 - 1) * 2
    assert adjusted([chunk], logits).tolist() == [[-math.inf, 12.0, -1.0, 5.0, -0.5]]


def test_stop_tokens_are_free_from_the_first_token_after_the_minimum():
    spec = SamplingSpec(min_new_tokens=2, masked_token_ids=(4,))
    for num_outputs, is_forbidden in ((0, True), (1, True), (2, False), (3, False)):
        chunk = sampling_chunk(spec, [1] * num_outputs)
        (row,) = adjusted([chunk], torch.zeros(1, VOCAB_SIZE)).tolist()
        assert (row[4] == -math.inf) == is_forbidden
        assert row.count(0.0) == VOCAB_SIZE - is_forbidden


def test_no_bias_and_no_penalty_unmasks_a_stop_token():
    spec = SamplingSpec(
        logit_bias=((4, 1e30),),
        presence_penalty=-2.0,
        repetition_penalty=1e-300,
        min_new_tokens=9,
        masked_token_ids=(4,),
    )
    (row,) = adjusted([sampling_chunk(spec, [4, 4, 5])], torch.zeros(1, VOCAB_SIZE)).tolist()
    assert row[4] == -math.inf
    assert not any(math.isnan(logit) for logit in row)


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [sampling_chunk(GREEDY, [1, 2]), sampling_chunk(SamplingSpec(top_p=0.5), [])],
        [sampling_chunk(SamplingSpec(min_new_tokens=2, masked_token_ids=(4,)), [1, 1])],
    ],
    ids=["no rows", "no feature", "minimum reached"],
)
def test_a_step_that_needs_none_plans_none(chunks):
    assert plan_logit_adjustments(chunks, CPU) is None


def test_a_plan_does_not_change_when_the_request_grows():
    chunk = sampling_chunk(spec_with(("frequency_penalty",)), [9])
    adjustments = plan_logit_adjustments([chunk], CPU)
    assert adjustments is not None
    chunk.request.tokens.extend([9, 9, 9])
    logits = torch.zeros(1, VOCAB_SIZE)
    adjustments.apply_to(logits)
    assert logits[0, 9].item() == pytest.approx(-0.7)
