"""What penalties, logit bias and min_new_tokens make of a row of logits: one token at a time.

The judge of `pp_runner/output/logit_adjustments.py`, in Python floats, from SGLang's rules alone.
"""

import math
from collections import Counter
from collections.abc import Sequence

from sgl_pipeline.requests import SamplingSpec


def adjusted_by_hand(
    logits: Sequence[float], spec: SamplingSpec, output_ids: Sequence[int]
) -> list[float]:
    """The logits [V] that the sampler must see after `output_ids` have been drawn."""
    adjusted = []
    counts = Counter(output_ids)
    for token, logit in enumerate(logits):
        count = counts[token]
        logit -= spec.frequency_penalty * count
        if count:
            logit -= spec.presence_penalty
            if logit > 0:
                logit /= spec.repetition_penalty
            else:
                logit *= spec.repetition_penalty
        for biased, bias in spec.logit_bias:
            if biased == token:
                logit += bias
        if len(output_ids) < spec.min_new_tokens and token in spec.masked_token_ids:
            logit = -math.inf
        adjusted.append(logit)
    return adjusted
