"""What made-up steps cost a worker, part by part.

Measured by `pp_runner/`, sent in a `MeasuredCosts` or `MeasuredParts`, weighed by `migration/`.
"""

from typing import NamedTuple

import msgspec

from sgl_pipeline.step_work import StepWork


class MadeUpStep(NamedTuple):
    """A step to be timed: `decodes` requests with `context_tokens` each before the token that they
    add, and `prompt_tokens` of one more from position `prompt_start`, which does not sample yet."""

    decodes: int
    context_tokens: int
    prompt_tokens: int
    prompt_start: int = 0

    def __str__(self) -> str:
        return f"{self.decodes} decodes and {self.prompt_tokens} prompt tokens"

    @property
    def work(self) -> StepWork:
        """What its time depends on."""
        return StepWork(
            tokens=self.decodes + self.prompt_tokens,
            decodes=self.decodes,
            decode_attended_tokens=self.decodes * (self.context_tokens + 1),
            prefill_attended_tokens=self.prompt_tokens
            * (2 * self.prompt_start + self.prompt_tokens + 1)
            // 2,
            samples=self.decodes,
        )


# Token throttling mixes both kinds of tokens in every step. As many of a prompt for each one drawn
# as in Azure's conversation trace (4.5; those in `simulator/data` have 1.4 to 73): the head has
# a fifth of the rows that a layer has.
TYPICAL_STEP = MadeUpStep(decodes=32, context_tokens=512, prompt_tokens=144)


class StageCosts(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds that a `TYPICAL_STEP` takes one worker: in each layer of the model, in the
    embedding, and in the head with the sampler."""

    layers_ms: tuple[float, ...]
    embedding_ms: float
    head_ms: float

    def scaled(self, factor: float) -> "StageCosts":
        """The costs of a worker that takes `factor` as long."""
        return StageCosts(
            tuple(factor * layer_ms for layer_ms in self.layers_ms),
            factor * self.embedding_ms,
            factor * self.head_ms,
        )


class PartSample(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds of a made-up step in the parts of a model: in a layer of each kind, in the order
    in which the kinds appear, in the embedding and in the tail (norm, head and sampler)."""

    work: StepWork
    kinds_ms: tuple[float, ...]
    embedding_ms: float
    tail_ms: float
