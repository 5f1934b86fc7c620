"""What a typical step costs a worker, part by part.

Measured by `pp_runner/`, sent in a `MeasuredCosts`, weighed by `migration/`.
"""

from typing import NamedTuple

import msgspec


class TypicalStep(NamedTuple):
    """A step as a busy server runs it: `decodes` requests with `context_tokens` each before the
    token that they add, and `prompt_tokens` of one more, which does not sample yet."""

    decodes: int
    context_tokens: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.decodes} decodes and {self.prompt_tokens} prompt tokens"


# Token throttling mixes both kinds of tokens in every step. As many of a prompt for each one drawn
# as in Azure's conversation trace (4.5; those in `simulator/data` have 1.4 to 73): the head has
# a fifth of the rows that a layer has.
TYPICAL_STEP = TypicalStep(decodes=32, context_tokens=512, prompt_tokens=144)


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
