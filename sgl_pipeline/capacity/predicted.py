"""The load served in virtual time: the predicting side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.capacity.load import CapacityLoad, tokens_per_s
from sgl_pipeline.capacity.rate_trial import Round
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import RequestLatency
from sgl_pipeline.simulator.experiment import Cluster, MeasuredPipeline, simulate
from sgl_pipeline.simulator.fleet_command import show_progress
from sgl_pipeline.simulator.predicted_pipeline import PredictedPipeline
from sgl_pipeline.simulator.summary import latency
from sgl_pipeline.simulator.workload import SimulatedRequest

SimulatedServer = Cluster | MeasuredPipeline | PredictedPipeline
# Virtual seconds between requests that are served alone: any answer is over by then.
_GAP_S = 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The simulator's own core on `pipeline`; a first token comes `front_ms` later than its
    scheduler has it (HTTP, tokenizer, detokenizer)."""

    pipeline: SimulatedServer
    throttle: ThrottleArgs
    scheduling: SchedulingArgs
    load: CapacityLoad
    front_ms: float = 0.0

    def serve(self, rate_per_s: float, round_number: int) -> Round:
        """A `Serve`."""
        label = f"{self.throttle.policy} at {rate_per_s:.3g} req/s"
        return self._round(self.load.requests(rate_per_s, round_number), label)

    def alone(self, count: int) -> Round:
        """The first requests, one by one."""
        return self._round(self.load.apart(count, _GAP_S), "each request alone")

    def under(self, policy: str) -> "Predicted":
        """The same server with another policy and its own limits.

        Raises ConfigurationError where it does not take the other knobs.
        """
        return replace(self, throttle=replace(self.throttle, policy=policy))

    def at_pace(self, slowness: float, front_ms: float) -> "Predicted":
        """The same server on a machine whose stages take `slowness` times as long."""
        pipeline = self.pipeline
        if isinstance(pipeline, Cluster):
            raise ConfigurationError("a pipeline of --device cards is not on this machine")
        slowed = replace(pipeline, slowness=pipeline.slowness * slowness)
        return replace(self, pipeline=slowed, front_ms=front_ms)

    def _round(self, requests: Sequence[SimulatedRequest], label: str) -> Round:
        progress = show_progress(label, len(requests))
        simulation = simulate(self.pipeline, self.throttle, self.scheduling, requests, progress)
        found = [latency(served) for served in simulation.requests]
        ends = [one.finished_s for one in simulation.requests if one.finished_s is not None]
        is_served = [one is not None for one in found]
        return Round(
            tuple(self._with_front(one) for one in found),
            tokens_per_s(requests, is_served, max(ends, default=0.0) - requests[0].arrival_s),
        )

    def _with_front(self, one: RequestLatency | None) -> RequestLatency | None:
        return None if one is None else one._replace(ttft_ms=one.ttft_ms + self.front_ms)


def pace(predicted: Round, measured: Round) -> tuple[float, float]:
    """The measured time per token as a multiple of the predicted one (without any, the time to the
    first token), and the milliseconds of a first token that this factor does not explain. Both
    rounds have the same requests, each alone."""
    pairs = [
        (one, other)
        for one, other in zip(predicted.latencies, measured.latencies, strict=True)
        if one is not None and other is not None
    ]
    tpots = [(a.tpot_ms, b.tpot_ms) for a, b in pairs if a.tpot_ms and b.tpot_ms]
    predicted_ttft_ms, measured_ttft_ms = (
        fmean(pair[place].ttft_ms for pair in pairs) for place in (0, 1)
    )
    if not tpots:
        return measured_ttft_ms / predicted_ttft_ms, 0.0
    slowness = fmean(b for _, b in tpots) / fmean(a for a, _ in tpots)
    return slowness, max(0.0, measured_ttft_ms - slowness * predicted_ttft_ms)
