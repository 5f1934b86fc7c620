"""Measured costs of made-up steps on a worker, part by part."""

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

    def within(self, context_length: int) -> "MadeUpStep":
        """The same step, with requests no longer than a model allows."""
        most = context_length - 1
        prompt_tokens = min(self.prompt_tokens, most)
        return MadeUpStep(
            self.decodes,
            min(self.context_tokens, most),
            prompt_tokens,
            min(self.prompt_start, most - prompt_tokens),
        )

    @property
    def work(self) -> StepWork:
        """The work that determines its time."""
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


class PartSample(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds of a made-up step in the parts of a model: in a layer of each kind, in the order
    in which the kinds appear, in the embedding and in the tail (norm, head and sampler)."""

    work: StepWork
    kinds_ms: tuple[float, ...]
    embedding_ms: float
    tail_ms: float


class PartSizes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a model's parts: the weights of each layer, of the embedding and of the head with
    its norm, and the KV of one page in one layer of a page of `page_size` tokens. A layer of
    `state_layers` has no pages, but `state_bytes`: the states of all slots."""

    layers_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    page_layer_bytes: int
    page_size: int
    state_layers: tuple[int, ...] = ()
    state_bytes: int = 0

    def weight_bytes(self, start: int, end: int) -> int:
        """Bytes of a stage with layers [start, end), and with the model's ends if it has them."""
        total = sum(self.layers_bytes[start:end])
        if start == 0:
            total += self.embedding_bytes
        if end == len(self.layers_bytes):
            total += self.head_bytes
        return total

    def num_pages(self, start: int, end: int, memory_bytes: int) -> int:
        """Number of pages that fit beside the stage's weights and states; negative where these do
        not fit."""
        num_states = sum(start <= layer < end for layer in self.state_layers)
        room_bytes = memory_bytes - self.weight_bytes(start, end) - num_states * self.state_bytes
        return room_bytes // (max(1, end - start - num_states) * self.page_layer_bytes)


class PartCosts(msgspec.Struct, frozen=True, array_like=True):
    """A model's parts as one worker measured them. `kinds[l]` is the place of layer `l`'s kind in
    the times of `samples`; the worker may fill `memory_bytes` with weights and pages."""

    kinds: tuple[int, ...]
    samples: tuple[PartSample, ...]
    sizes: PartSizes
    memory_bytes: int


class StageCosts(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds of a `TYPICAL_STEP` on one worker: in each layer of the model, in the embedding,
    and in the head with the sampler."""

    layers_ms: tuple[float, ...]
    embedding_ms: float
    head_ms: float

    @classmethod
    def of(cls, kinds: tuple[int, ...], sample: PartSample) -> "StageCosts":
        """The sample, layer by layer."""
        return cls(
            tuple(sample.kinds_ms[kind] for kind in kinds), sample.embedding_ms, sample.tail_ms
        )

    def scaled(self, factor: float) -> "StageCosts":
        """The costs of a worker that takes `factor` times as long."""
        return StageCosts(
            tuple(factor * layer_ms for layer_ms in self.layers_ms),
            factor * self.embedding_ms,
            factor * self.head_ms,
        )
