"""transformers as the judge of greedy outputs.

One teacher-forced pass over prompt and output tells for every output token whether it is the
reference's choice. Where the two best logits differ by less than 1e-4 in fp32 either counts; such
ties are counted, so that a test can print how often that happened.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from support.adjusted_logits import adjusted_by_hand
from transformers import AutoModelForCausalLM, PreTrainedModel

from sgl_pipeline.requests import GREEDY, SamplingSpec

TIE = 1e-4


@cache
def reference_model(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def count_ties(
    path: Path,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    sampling: SamplingSpec = GREEDY,
) -> int:
    """`ties_of` the checkpoint `path`. Many tests of a session compare the same tokens: each is
    computed once."""
    return _ties_of_checkpoint(path, tuple(prompt_ids), tuple(output_ids), sampling)


@cache
def _ties_of_checkpoint(
    path: Path, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...], sampling: SamplingSpec
) -> int:
    return ties_of(reference_model(path), prompt_ids, output_ids, sampling)


@torch.inference_mode()
def ties_of(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    sampling: SamplingSpec = GREEDY,
) -> int:
    """How many of `output_ids` were ties that went the other way; fails where one is wrong.

    `sampling` is greedy; its penalties, bias and min_new_tokens are applied to the reference.
    """
    tokens = torch.tensor([[*prompt_ids, *output_ids]])
    logits = model(tokens).logits[0, len(prompt_ids) - 1 : -1]
    if sampling != GREEDY:
        rows = [
            adjusted_by_hand(row, sampling, output_ids[:count])
            for count, row in enumerate(logits.tolist())
        ]
        logits = torch.tensor(rows)
    chosen = logits.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
    below_best = logits.amax(dim=1) - chosen
    wrong = (below_best >= TIE).nonzero().flatten().tolist()
    assert not wrong, f"output tokens {wrong} of {list(output_ids)} are not the reference's"
    return int((below_best > 0).sum())
