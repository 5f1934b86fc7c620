"""The command's flags, and the load, target and server that they ask for."""

import argparse
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_pipeline.args import POLICIES, SchedulingArgs, ThrottleArgs, require
from sgl_pipeline.args.flags import add_early_flags, flags_of, read_section, section_words
from sgl_pipeline.capacity.load import CapacityLoad, LengthRange
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.managers.planning.stage_flags import add_stage_flags, stage_words
from sgl_pipeline.simulator.experiment import LINKS
from sgl_pipeline.simulator.fleet_command import positive
from sgl_pipeline.simulator.kernel_costs import DEVICES
from sgl_pipeline.simulator.traces import SHIPPED

_NO_POLICY = [field.name for field, _ in flags_of(ThrottleArgs) if field.name != "policy"]


def make_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="sgl-pipeline capacity",
        description="Finds the highest request rate at which enough requests are within latency "
        "targets: by simulation, and with --measure on this machine.",
    )
    add = parser.add_argument
    add("--model", "--model-path", required=True, help="directory or hub id; with --device a name")
    add("--ttft-ms", type=positive, help="limit of the time to the first token")
    add("--tpot-ms", type=positive, help="limit of the mean time per further token")
    add("--goodput", type=_share, default=0.9, help="share of requests within both limits")
    add("--json", metavar="FILE", help="writes all results to this file")
    _add_load(parser.add_argument_group("load"))
    _add_pipeline(parser.add_argument_group("pipeline that is simulated, or started"))
    _add_measuring(parser.add_argument_group("measuring"))
    policies = parser.add_argument_group("throttle and scheduler, as of the server")
    policies.add_argument(
        "--policy",
        type=_policies,
        action="extend",
        help="of the throttle; several, separated by commas or repeated, are compared with the "
        "first one (default: throttle-time, or that of --url)",
    )
    policies.add_argument(
        "--rate",
        type=_rates,
        help="requests a second at which policies are compared, such as 2,4 (default: 0.8, 1 and "
        "1.2 times the capacity of the first one)",
    )
    add_early_flags(policies, ThrottleArgs, *_NO_POLICY)
    add_early_flags(policies, SchedulingArgs)
    return parser


def _add_load(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--trace",
        help=f"lengths of a trace ({', '.join(SHIPPED)}), or of a CSV with the columns "
        "input_tokens and output_tokens",
    )
    add("--input-tokens", type=_count, default=256, help="most of a prompt, without --trace")
    add("--output-tokens", type=_count, default=64, help="most of an answer, without --trace")
    add("--range-ratio", type=_share, default=0.25, help="least, as a share of the most")
    add("--requests", type=_count, default=100, help="of each round (default: 100)")
    add("--rounds", type=_count, help="at each rate (default: 5, with --measure 2)")
    add("--seed", type=int, default=0, help="of lengths and arrivals")
    add("--hit-rate", type=float, default=0.0, help="share of each prompt that others have too")
    add("--sharing-requests", type=_count, default=16, help="requests that share one prefix")


def _add_pipeline(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--pp", type=_count, default=2, help="stages (default: 2)")
    add_stage_flags(group)
    add(
        "--costs",
        type=Path,
        metavar="FILE",
        help="of sgl-pipeline fit; by default the one it saved",
    )
    add("--calibrate", metavar="FILE", help="step times of a server's --trace-path, in its place")
    add("--device", choices=DEVICES, help="a card with kernel tables, in its place")
    add("--link", choices=LINKS, default="net73", help="between cards of --device")
    add("--pp-layer-partition", help="a split such as 9,7; by default by time")
    add("--max-total-tokens", type=_count, help="KV tokens; with --measure the server's")


def _add_measuring(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--measure", action="store_true", help="start such a server and load it, besides")
    add("--url", help="load this running server of ours in its place; it must be idle")
    add("--api-key", help="of --url; its admin key to compare policies")
    add("--server-flags", default="", help="further flags of the server that is started")


def target_of(options: argparse.Namespace) -> LatencyTarget:
    """Raises ConfigurationError without any limit."""
    require(
        options.ttft_ms is not None or options.tpot_ms is not None,
        "say --ttft-ms, --tpot-ms or both: without a target any rate is within it",
    )
    return LatencyTarget(ttft_ms=options.ttft_ms or math.inf, tpot_ms=options.tpot_ms or math.inf)


def load_of(options: argparse.Namespace) -> CapacityLoad:
    """Raises ConfigurationError for a load that cannot be."""
    require(0.0 <= options.hit_rate < 1.0, f"--hit-rate {options.hit_rate} must be in [0, 1)")
    lengths = LengthRange(
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        ratio=options.range_ratio,
    )
    return CapacityLoad(
        source=options.trace or lengths,
        num_requests=options.requests,
        seed=options.seed,
        hit_rate=options.hit_rate,
        sharing_requests=options.sharing_requests,
    )


def throttle_of(options: argparse.Namespace) -> ThrottleArgs:
    """The throttle's settings, with the first policy. Raises ConfigurationError."""
    policy = options.policy[0] if options.policy else ThrottleArgs().policy
    return read_section(ThrottleArgs, options, policy=policy)


def throttle_in_force(knobs: Mapping[str, Any], policy: str) -> ThrottleArgs:
    """The throttle of a running server with these knobs, under that policy."""
    values = {name: value for name, value in knobs.items() if name != "accounting"}
    return ThrottleArgs(**(values | {"policy": policy}))


def scheduling_of(options: argparse.Namespace) -> SchedulingArgs:
    """Raises ConfigurationError."""
    return read_section(SchedulingArgs, options)


def server_words(options: argparse.Namespace) -> list[str]:
    """The flags of the server to start."""
    words = ["--model-path", options.model, "--pp", str(options.pp)]
    words += shlex.split(" ".join(stage_words(options)))
    words += [*section_words(throttle_of(options)), *section_words(scheduling_of(options))]
    for flag, value in (
        ("--max-total-tokens", options.max_total_tokens),
        ("--pp-layer-partition", options.pp_layer_partition),
    ):
        words += [] if value is None else [flag, str(value)]
    return words + shlex.split(options.server_flags)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in POLICIES]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is unknown; choose from {', '.join(POLICIES)}"
        )
    return names


def _rates(text: str) -> tuple[float, ...]:
    return tuple(positive(one) for one in text.split(","))


def _share(text: str) -> float:
    value = positive(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"must be a share in (0, 1], got {text}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, got {text}")
    return value
