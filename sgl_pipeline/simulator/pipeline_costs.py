"""The times of a step on each stage, on the way between them and in the scheduler process.

Put together from a `PartSeconds` (kernel tables or a fit of our own stages), a layer split, a link
and the host's overheads; read by `virtual_pipeline.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Protocol

from sgl_pipeline.simulator.step_shape import StepShape


class PartSeconds(Protocol):
    """Seconds of the parts that a stage may hold."""

    def layer_s(self, shape: StepShape) -> float:
        """One decoder layer."""

    def embedding_s(self, shape: StepShape) -> float:
        """Work of the first stage alone."""

    def tail_s(self, shape: StepShape) -> float:
        """Work of the last stage alone: final norm, lm_head and sampling."""


class AttentionSeconds(PartSeconds, Protocol):
    """Parts whose attention is known apart."""

    def attention_s(self, shape: StepShape) -> float:
        """The part of `layer_s` that is attention."""


@dataclass(frozen=True, slots=True)
class ScaledTail:
    """`parts` with a tail that takes `factor` times as long: another sampler's work."""

    parts: AttentionSeconds
    factor: float

    def layer_s(self, shape: StepShape) -> float:
        return self.parts.layer_s(shape)

    def attention_s(self, shape: StepShape) -> float:
        return self.parts.attention_s(shape)

    def embedding_s(self, shape: StepShape) -> float:
        return self.parts.embedding_s(shape)

    def tail_s(self, shape: StepShape) -> float:
        return self.factor * self.parts.tail_s(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLink:
    """A link between neighboring stages. `bytes_per_token` is a row of the residual stream."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    bytes_per_token: int = 0

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds for which the rows of one step take the link."""
        return num_tokens * self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Processor time per step: a part for the step and a part for each chunk or token in it.
    `transit_s` is what messages take from the scheduler to the stages and back, together.

    `preparation` says where a stage's building of its inputs lies: `hidden` beside its kernels
    (metadata first, gLLM section 3.4), `early` after its last step but before its activations have
    to be there, or `coupled` to the activations and so on the critical path (vLLM 0.8, ~17 % of its
    time by gLLM's account).
    """

    schedule_step_s: float = 0.0
    schedule_chunk_s: float = 0.0
    prepare_step_s: float = 0.0
    prepare_chunk_s: float = 0.0
    result_step_s: float = 0.0
    result_token_s: float = 0.0
    transit_s: float = 0.0
    preparation: Literal["hidden", "early", "coupled"] = "hidden"

    def schedule_s(self, num_chunks: int) -> float:
        return self.schedule_step_s + num_chunks * self.schedule_chunk_s

    def prepare_s(self, num_chunks: int) -> float:
        return self.prepare_step_s + num_chunks * self.prepare_chunk_s

    def result_s(self, num_tokens: int) -> float:
        return self.result_step_s + num_tokens * self.result_token_s

    def inputs_s(self, free_s: float, plan_s: float, prepare_s: float) -> float:
        """The moment at which a stage can have built its inputs, without the activations."""
        if self.preparation == "hidden":
            return max(free_s, plan_s + prepare_s)
        return max(free_s, plan_s) + prepare_s

    def start_s(self, free_s: float, plan_s: float, input_s: float, prepare_s: float) -> float:
        """The moment at which a stage is free and has the plan, the activations and its inputs."""
        if self.preparation == "coupled":
            return max(free_s, input_s) + prepare_s
        return max(self.inputs_s(free_s, plan_s, prepare_s), input_s)


class PipelineTiming(Protocol):
    """All that `virtual_pipeline.py` asks: `PipelineCosts`, or the `FittedCosts` of a real run."""

    @property
    def num_stages(self) -> int: ...
    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each stage."""

    @property
    def host(self) -> HostCosts: ...
    def link_after(self, stage: int) -> SimulatedLink:
        """To the next stage; of the last one, the way of its results to the scheduler, beyond
        `HostCosts.transit_s`."""

    def stage_seconds(self, shape: StepShape, step_id: int) -> tuple[float, ...]:
        """Compute time of the step on every stage."""

    def under(self, layer_counts: tuple[int, ...]) -> "PipelineTiming":
        """The same pipeline with that split. Raises ConfigurationError where layers are unknown."""

    def seconds_before(self, shape: StepShape, stage: int, layer: int) -> float:
        """Seconds of the step on that stage before that layer."""


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """`layer_counts[s]` layers on stage `s`; `stage_slowness[s]` multiplies all its times, and
    `layer_weights[i]` those of layer `i` (none: 1 each). `links[s]` is the link after stage `s`
    (none: `link` between all stages)."""

    stage: PartSeconds
    layer_counts: tuple[int, ...]
    link: SimulatedLink = SimulatedLink()
    host: HostCosts = HostCosts()
    stage_slowness: tuple[float, ...] = ()
    layer_weights: tuple[float, ...] = ()
    links: tuple[SimulatedLink, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.layer_counts)

    def link_after(self, stage: int) -> SimulatedLink:
        """As `PipelineTiming`."""
        if self.links:
            return self.links[stage]
        return self.link if stage + 1 < self.num_stages else SimulatedLink()

    def under(self, layer_counts: tuple[int, ...]) -> "PipelineCosts":
        """The same pipeline with another split of the same layers."""
        assert sum(layer_counts) == sum(self.layer_counts)
        return replace(self, layer_counts=layer_counts)

    def stage_seconds(self, shape: StepShape, step_id: int) -> tuple[float, ...]:
        """Compute time of the step on every stage, the same for equal steps."""
        layer_s = self.stage.layer_s(shape)
        seconds = [weight * layer_s for weight in self._weights]
        seconds[0] += self.stage.embedding_s(shape)
        seconds[-1] += self.stage.tail_s(shape)
        if self.stage_slowness:
            seconds = [s * slow for s, slow in zip(seconds, self.stage_slowness, strict=True)]
        return tuple(seconds)

    def seconds_before(self, shape: StepShape, stage: int, layer: int) -> float:
        """Seconds of the step on that stage before that layer, which it has."""
        first = sum(self.layer_counts[:stage])
        seconds = self._weight(first, layer) * self.stage.layer_s(shape)
        if stage == 0:
            seconds += self.stage.embedding_s(shape)
        return seconds * (self.stage_slowness[stage] if self.stage_slowness else 1.0)

    @property
    def _weights(self) -> Sequence[float]:
        """The weights of the layers of each stage."""
        if not self.layer_weights:
            return self.layer_counts
        ends = accumulate(self.layer_counts)
        counts = self.layer_counts
        return [self._weight(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def _weight(self, first: int, end: int) -> float:
        return sum(self.layer_weights[first:end]) if self.layer_weights else end - first
