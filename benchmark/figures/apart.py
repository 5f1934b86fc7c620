"""The cards, the loads and the systems that the figures of prefill and decode apart share.

Llama-2-13B on A100 of 80 GB is Adrenaline's larger model: 0.8 MB of KV for a token, so a decode
card is full with about a hundred requests of ShareGPT's lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmark.figures.figure import Options, Row
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.simulator.disaggregation import (
    Disaggregation,
    FleetRun,
    simulate_disaggregated,
    simulate_mixed,
)
from sgl_pipeline.simulator.experiment import LINKS, Cluster
from sgl_pipeline.simulator.fleet_summary import summarize_fleet
from sgl_pipeline.simulator.offload_setup import AttentionOffload
from sgl_pipeline.simulator.peer_pages import PeerLink
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds, poisson_arrivals
from sgl_pipeline.status_line import StatusLine, bar

MODEL, DEVICE = "Llama-2-13B", "a100-80g"
NVLINK = PeerLink(latency_s=LINKS["nvlink"][0], bytes_per_s=LINKS["nvlink"][1])
SCHEDULING = SchedulingArgs(max_running_requests=16384)
THROTTLE = ThrottleArgs(policy="throttle")
# Nothing decodes beside a prompt on a prefill server: it need not be spread over steps.
PREFILL_POLICY = "sarathi"
LONG_ANSWERS = "long answers"


def cluster(num_stages: int = 1) -> Cluster:
    """A pipeline of so many cards."""
    return Cluster(model=MODEL, device=DEVICE, link="nvlink", num_stages=num_stages)


def load(name: str, rate_per_s: float, options: Options) -> list[SimulatedRequest]:
    """The first requests of a trace, or made-up ones with long answers, as a Poisson process."""
    if name == LONG_ANSWERS:
        requests = _long_answers(options)
    else:
        requests = load_trace(name, options.num_requests)
    return poisson_arrivals(requests, rate_per_s, Random(options.seed))


def mean_tokens(requests: Sequence[SimulatedRequest]) -> int:
    """The mean length of a request in the middle of its answer."""
    total = sum(one.input_tokens + one.output_tokens // 2 for one in requests)
    return max(1, total // len(requests))


def _long_answers(options: Options) -> list[SimulatedRequest]:
    """Answers of a thousand tokens on average to short questions, as a model that reasons gives."""
    random, ids = Random(options.seed + 1), TokenIds()
    return [
        SimulatedRequest(
            arrival_s=0.0,
            prompt=(ids.fresh(random.randint(50, 300)),),
            output=ids.fresh(100 + int(min(3900, random.expovariate(1 / 900)))),
        )
        for _ in range(options.num_requests)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Devices and how they are used: pipelines of `mixed_stages` each, or a `Disaggregation`."""

    name: str
    mixed_pipelines: int = 0
    mixed_stages: int = 1
    apart: Disaggregation | None = None

    def run(self, workload: Sequence[SimulatedRequest], target: LatencyTarget | None = None) -> Row:
        """The row of a run."""
        progress = _progress(self.name, len(workload))
        if self.apart is not None:
            result = simulate_disaggregated(self.apart, THROTTLE, SCHEDULING, workload, progress)
        else:
            pipeline = cluster(self.mixed_stages)
            result = simulate_mixed(
                pipeline, self.mixed_pipelines, THROTTLE, SCHEDULING, workload, progress
            )
        bound = 0.0 if self.apart is None else self.apart.bound
        return {"system": self.name, "bound": bound} | numbers(result, target)


def apart(
    servers: tuple[int, int] = (1, 1),
    stages: tuple[int, int] = (1, 1),
    offload: AttentionOffload | None = None,
    link: PeerLink = NVLINK,
    extra_steps: int = 0,
) -> Disaggregation:
    """Prefill and decode servers, the stages of each, and more steps in flight on the latter. A
    prompt is loaded as soon as it fits, as by vLLM, on which Adrenaline is built."""
    return Disaggregation(
        prefill=cluster(stages[0]),
        decode=cluster(stages[1]),
        link=link,
        num_prefills=servers[0],
        num_decodes=servers[1],
        prefill_policy=PREFILL_POLICY,
        extra_decode_steps=extra_steps,
        reserved_tokens=0,
        offload=offload,
    )


def numbers(run: FleetRun, target: LatencyTarget | None = None) -> Row:
    """The columns that these figures share, in the units of their names."""
    summary = summarize_fleet(run, target)
    serving = summary.serving
    return {
        "output_tokens_per_s": serving.output_tokens_per_s,
        "ttft_ms": serving.ttft_ms.mean,
        "ttft_p99_ms": serving.ttft_ms.p99,
        "prefill_ms": summary.prefill_ms.mean,
        "handover_ms": summary.handover_ms.mean,
        "tpot_ms": serving.tpot_ms.mean,
        "tpot_p99_ms": serving.tpot_ms.p99,
        "itl_p99_ms": serving.itl_ms.p99,
        "e2e_ms": serving.e2e_ms.mean,
        "requests_running": summary.requests_running,
        "decode_batch": summary.decode_batch,
        "offloaded_share": summary.offloaded_share,
        "most_held_share": summary.most_held_share,
        "num_retractions": serving.num_retractions,
        "num_failed": serving.num_failed,
        "target_share": serving.target_share,
        "goodput_per_device": summary.goodput_per_device,
    }


def _progress(label: str, num_requests: int) -> Callable[[int, float], None]:
    line = StatusLine(interval_s=0.5)

    def show(num_ended: int, now_s: float) -> None:
        line.show(f"{label}: {bar(num_ended, num_requests)} requests, {now_s:.0f} s simulated")
        if num_ended == num_requests:
            line.clear()

    return show
