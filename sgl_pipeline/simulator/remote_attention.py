"""Decode attention of some requests on other instances, in virtual time.

A layer takes max(local attention, send + remote attention + receive) and the rest of its work
(Adrenaline, arXiv 2503.20552): `LocalAttention` are the times without what is computed elsewhere,
`RemoteAttention.wait_s` is what a stage has to wait beyond them.
"""

from dataclasses import dataclass, field

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import Request
from sgl_pipeline.simulator.pipeline_costs import AttentionSeconds
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.throttle.attention_offload import AttentionWork, is_hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """The way of one layer's rows to the executors and back.

    `latency_s` passes each way; a row takes `row_bytes` there (query, key and value) and back (its
    result) together. `speed` is that of the executors' attention over that of the decode instance.
    """

    latency_s: float
    bytes_per_s: float
    row_bytes: int
    speed: float

    def exchange_s(self, num_rows: int) -> float:
        """The way there and back of `num_rows` rows."""
        return 2 * self.latency_s + num_rows * self.row_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class LocalAttention:
    """The times of `parts` without the attention that is computed elsewhere."""

    parts: AttentionSeconds

    def layer_s(self, shape: StepShape) -> float:
        whole_s = self.parts.layer_s(shape)
        if not shape.num_remote:
            return whole_s
        return whole_s - self.parts.attention_s(shape) + self.attention_s(shape)

    def attention_s(self, shape: StepShape) -> float:
        return self.parts.attention_s(shape.attended_here)

    def embedding_s(self, shape: StepShape) -> float:
        return self.parts.embedding_s(shape)

    def tail_s(self, shape: StepShape) -> float:
        return self.parts.tail_s(shape)


@dataclass(slots=True)
class RemoteAttention:
    """The executors of one decode pipeline, whose stages have `layer_counts` layers.

    With `fills_waits` a stage that waits computes the next step meanwhile, if there is one.
    `requests` are those that are offloaded.
    """

    parts: AttentionSeconds
    costs: ExchangeCosts
    layer_counts: tuple[int, ...]
    fills_waits: bool = False
    requests: set[Request] = field(default_factory=set)
    _last: tuple[StepShape, float] | None = None

    def shape(self, microbatch: Microbatch) -> StepShape:
        """The step, with the attention of offloaded requests elsewhere."""
        return StepShape.of(microbatch, self.requests)

    def wait_s(self, stage: int, shape: StepShape) -> float:
        """Seconds for which the step waits on that stage."""
        if not shape.num_remote:
            return 0.0
        if self._last is None or self._last[0] is not shape:
            self._last = (shape, self.layer_wait_s(shape))
        return self.layer_counts[stage] * self._last[1]

    def layer_wait_s(self, shape: StepShape) -> float:
        """The wait of one layer, behind its local attention."""
        trip_s = self.costs.exchange_s(shape.num_remote) + self._remote_s(shape.attended_elsewhere)
        return max(0.0, trip_s - self.parts.attention_s(shape.attended_here))

    def hides(self, offloaded: AttentionWork, local: AttentionWork) -> bool:
        """True if no layer would have to wait with such requests, the stages' steps being equal."""
        here, elsewhere = self._share(local), self._share(offloaded)
        return is_hidden(
            self.parts.attention_s(here),
            self._remote_s(elsewhere),
            self.costs.exchange_s(elsewhere.num_decodes),
        )

    def _remote_s(self, shape: StepShape) -> float:
        return self.parts.attention_s(shape) / self.costs.speed

    def _share(self, work: AttentionWork) -> StepShape:
        """The decodes of one of as many steps as there are stages."""
        rows = -(-work.requests // len(self.layer_counts))
        return StepShape((), (work.tokens // max(1, work.requests),) * rows, rows)
