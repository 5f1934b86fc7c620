"""What the time of a step depends on, in five numbers.

Made from a `Microbatch` or from the `StepRecord` that it becomes; read by `migration/`, whose
predictor turns it into milliseconds.
"""

from typing import NamedTuple

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.trace import StepRecord


class StepWork(NamedTuple):
    """`tokens` are all rows of the step, `decodes` those of them that continue an output, `samples`
    those that go through the head.

    What is attended to counts apart: a decode reads keys that no other row shares, the rows of a
    prompt read theirs together. On one core of an AMD EPYC the former took ten times as long a pair
    of row and token (0.27 B model, bf16: 0.11 against 0.011 us a layer).
    """

    tokens: int
    decodes: int
    decode_attended_tokens: int
    prefill_attended_tokens: int
    samples: int

    @classmethod
    def of(cls, microbatch: Microbatch) -> "StepWork":
        """The work of a step that was decided."""
        by_decodes = microbatch.decode_attended_tokens
        return cls(
            microbatch.num_tokens,
            microbatch.num_decodes,
            by_decodes,
            microbatch.attended_tokens - by_decodes,
            microbatch.num_samples,
        )

    @classmethod
    def of_record(cls, record: StepRecord) -> "StepWork":
        """The work of a step that has ended."""
        return cls(
            record.prefill_tokens + record.decodes,
            record.decodes,
            record.decode_attended_tokens,
            record.attended_tokens - record.decode_attended_tokens,
            record.samples,
        )
