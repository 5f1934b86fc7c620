"""The flags, and the rows, of `run --pd`: prefill and decode on pipelines of their own."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sgl_pipeline.args import POLICIES, SchedulingArgs, ThrottleArgs, require
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.simulator.disaggregation import Disaggregation, simulate_disaggregated
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.fleet_summary import FleetSummary, summarize_fleet
from sgl_pipeline.simulator.offload_setup import AttentionOffload
from sgl_pipeline.simulator.peer_pages import PeerLink
from sgl_pipeline.simulator.workload import SimulatedRequest
from sgl_pipeline.status_line import StatusLine, bar

PROGRESS_INTERVAL_S = 0.5
_HEADER = (
    "policy             req/s  out tok/s  TTFT mean/p99 ms  prefill  handover  TPOT mean/p99 ms"
    "  ITL p99 ms  held  offloaded  good/s/device"
)


def add_fleet_flags(group: "argparse._ArgumentGroup") -> None:
    """The flags of `run` for prefill and decode apart."""
    add = group.add_argument
    add(
        "--pd",
        type=_pair,
        metavar="P:D",
        help="prefill on P pipelines and decode on D others, behind one router",
    )
    add(
        "--pd-pp",
        type=_pair,
        metavar="P:D",
        default=(1, 1),
        help="stages of each prefill and of each decode pipeline",
    )
    add(
        "--pd-link-gb-per-s",
        type=positive,
        metavar="GB",
        default=25.0,
        help="of pages between two servers, at each end of the link",
    )
    add("--pd-link-latency-ms", type=_latency, metavar="MS", default=0.05, help="each way")
    add(
        "--pd-prefill-policy",
        choices=POLICIES,
        help="of the prefill pipelines; by default --policy",
    )
    add(
        "--pd-offload",
        action="store_true",
        help="attention of some decodes on the prefill pipelines (Adrenaline)",
    )
    add(
        "--pd-offload-bound",
        type=positive,
        metavar="RATIO",
        help="of offloaded to local attention; by default from memory, bandwidth and batch",
    )
    add(
        "--pd-offload-latency-ms",
        type=_latency,
        metavar="MS",
        default=AttentionOffload().latency_s * 1e3,
        help="of a layer's rows, each way",
    )


@dataclass(slots=True)
class FleetCommand:
    """One row for each policy and rate, and a JSON line where it was asked for."""

    options: argparse.Namespace
    cluster: Cluster
    scheduling: SchedulingArgs
    target: LatencyTarget | None
    _setup: Disaggregation | None = None

    def row(
        self, throttle: ThrottleArgs, rate_per_s: float, workload: Sequence[SimulatedRequest]
    ) -> None:
        """Simulates and prints one row."""
        if self._setup is None:
            self._setup = self._set_up()
            print(self._describe(self._setup), _HEADER, sep="\n")
        progress = show_progress(f"{throttle.policy} at {rate_per_s:g} req/s", len(workload))
        run = simulate_disaggregated(self._setup, throttle, self.scheduling, workload, progress)
        summary = summarize_fleet(run, self.target)
        print(_row(throttle.policy, rate_per_s, summary), flush=True)
        if self.options.json is not None:
            line = {"policy": throttle.policy, "rate_per_s": rate_per_s, "summary": summary}
            with Path(self.options.json).open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")

    def _set_up(self) -> Disaggregation:
        options = self.options
        require(options.hosts is None, "--pd has one link; leave out --hosts")
        require(options.pp is None, "--pd-pp says how many stages there are; leave out --pp")
        require(options.trace_path is None, "--trace-path is of one pipeline; leave out --pd")
        require(
            options.pd_offload or options.pd_offload_bound is None,
            "--pd-offload-bound needs --pd-offload",
        )
        depths = options.pd_pp
        offload = AttentionOffload(
            bound=options.pd_offload_bound, latency_s=options.pd_offload_latency_ms * 1e-3
        )
        return Disaggregation(
            prefill=replace(self.cluster, num_stages=depths[0]),
            decode=replace(self.cluster, num_stages=depths[1]),
            num_prefills=options.pd[0],
            num_decodes=options.pd[1],
            link=PeerLink(
                latency_s=options.pd_link_latency_ms * 1e-3,
                bytes_per_s=options.pd_link_gb_per_s * 1e9,
            ),
            prefill_policy=options.pd_prefill_policy,
            offload=offload if options.pd_offload else None,
        )

    def _describe(self, setup: Disaggregation) -> str:
        sides = " and ".join(
            f"{number} x {what} (layers {one.layers}, {tokens} tokens of KV)"
            for what, number, one, tokens in (
                ("prefill", setup.num_prefills, setup.prefill, setup.prefill_pool_tokens),
                ("decode", setup.num_decodes, setup.decode, setup.decode_pool_tokens),
            )
        )
        offload = f", offload bound {setup.bound:.2f}" if setup.offload is not None else ""
        return f"simulated: {self.cluster.model} on {self.cluster.device}, {sides}{offload}"


def _row(policy: str, rate: float, summary: FleetSummary) -> str:
    serving = summary.serving
    goodput = "-" if summary.goodput_per_device is None else f"{summary.goodput_per_device:.3f}"
    return (
        f"{policy:17} {rate:6g} {serving.output_tokens_per_s:10.0f} "
        f"{serving.ttft_ms.mean:9.0f} {serving.ttft_ms.p99:7.0f} {summary.prefill_ms.mean:8.0f} "
        f"{summary.handover_ms.mean:9.0f} {serving.tpot_ms.mean:9.1f} {serving.tpot_ms.p99:7.1f} "
        f"{serving.itl_ms.p99:11.1f} {summary.most_held_share:5.0%} "
        f"{summary.offloaded_share:10.0%} {goodput:>14}"
    )


def show_progress(label: str, num_requests: int) -> Callable[[int, float], None]:
    """Keeps one line of the terminal up to date."""
    line = StatusLine(interval_s=PROGRESS_INTERVAL_S)

    def show(num_finished: int, now_s: float) -> None:
        whole = bar(num_finished, num_requests)
        line.show(f"{label}: {whole} requests, {now_s:.0f} s simulated")
        if num_finished == num_requests:
            line.clear()

    return show


def positive(text: str) -> float:
    """The number above 0 that `text` is; for argparse."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _latency(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _pair(text: str) -> tuple[int, int]:
    numbers = text.split(":")
    if len(numbers) != 2 or not all(one.isdecimal() and int(one) > 0 for one in numbers):
        raise argparse.ArgumentTypeError(f"must be two numbers from 1 such as 1:2, got {text}")
    return int(numbers[0]), int(numbers[1])
