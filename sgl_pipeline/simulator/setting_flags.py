"""The flags that say what is simulated: pipeline, requests, scheduler and latencies.

`command_setting.py` makes the simulator's parts from them.
"""

import argparse

from sgl_pipeline.args import (
    MIGRATION_WEIGHTS,
    POLICIES,
    SCHEDULE_POLICIES,
    MigrationArgs,
    SchedulingArgs,
    ThrottleArgs,
)
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.args.tier_args import PREFETCH_POLICIES, WRITE_POLICIES
from sgl_pipeline.simulator.draft_flags import add_draft_flags
from sgl_pipeline.simulator.experiment import LINKS, SERVER_RULES
from sgl_pipeline.simulator.fleet_command import positive
from sgl_pipeline.simulator.kernel_costs import DEVICES
from sgl_pipeline.simulator.models import KV_CACHE_DTYPES, MODELS, QUANTIZATIONS
from sgl_pipeline.simulator.traces import SHIPPED

DEFAULT_POLICIES = (ThrottleArgs().policy, "throttle", "sarathi")


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, a group for each part of the setting."""
    _add_pipeline(parser.add_argument_group("pipeline"))
    _add_requests(parser.add_argument_group("requests"))
    _add_scheduling(parser.add_argument_group("policy and scheduler"))
    _add_migration(parser.add_argument_group("layers that move"))
    add_draft_flags(parser.add_argument_group("drafts"))
    _add_store(parser.add_argument_group("store of pages beyond the KV pool"))
    goodput = parser.add_argument_group("limits of goodput")
    goodput.add_argument("--target-ttft-ms", "--ttft-ms", type=positive, help="first token")
    goodput.add_argument(
        "--target-tpot-ms", "--tpot-ms", type=positive, help="mean time per further token"
    )


def _add_pipeline(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--model", default="Qwen2.5-32B", choices=MODELS)
    add("--device", default="a100-40g-pcie", choices=DEVICES)
    add(
        "--quantization",
        default="none",
        choices=QUANTIZATIONS,
        help="of the layers' weights, as the server's flag; fp8 on cards with a table of it",
    )
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="of keys and values, as the server's flag; fp8_e4m3 on cards with a table of it",
    )
    add("--link", default="net73", choices=LINKS)
    add("--pp", type=int, help="pipeline stages, a card each; by default 4")
    add(
        "--hosts",
        metavar="FILE",
        help="JSON of hosts in order and the links between them (sgl_pipeline/host_network.py); "
        "--link joins the cards of one host",
    )
    add(
        "--calibrate",
        metavar="FILE",
        help="take the step times from a trace of our server (--trace-path), not from model, "
        "device and link",
    )
    add("--pool-tokens", type=int, help="tokens that the KV pool holds")
    add("--mem-fraction-static", type=float, default=0.9)


def _add_requests(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--trace",
        default="azure_conv",
        help=f"a shipped trace ({', '.join(SHIPPED)}) or a CSV with the columns input_tokens, "
        "output_tokens and perhaps arrival_s",
    )
    add("--requests", type=int, help="requests of the trace to take, from its start")
    add("--arrivals", choices=("poisson", "recorded"), default="poisson")
    add("--seed", type=int, default=0, help="of the Poisson arrivals")
    add("--hit-rate", type=float, default=0.0, help="share of each prompt that others have too")
    add("--sharing-requests", type=int, default=16, help="requests that share one prefix")


def _add_scheduling(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--policy",
        type=_policies,
        default=DEFAULT_POLICIES,
        help=f"one or more, separated by commas (default: {','.join(DEFAULT_POLICIES)}, the first "
        "of which is the server's)",
    )
    add("--extra-steps-in-flight", type=int, default=0)
    add("--page-size", type=int, default=16)
    add("--schedule-policy", choices=SCHEDULE_POLICIES, default="fcfs")
    add(
        "--max-overtakes",
        type=int,
        default=SchedulingArgs().max_overtakes,
        help="with --schedule-policy lpm or dfs-weight, as the server's flag",
    )
    add("--max-running-requests", type=int, default=1024)
    add(
        "--max-mamba-cache-size",
        type=int,
        default=SchedulingArgs().num_state_slots,
        help="state slots, of which each running request owns one and cached prefixes take the "
        "rest, as the server's flag; 0: the model has no states",
    )
    add(
        "--mamba-track-interval",
        type=int,
        help="tokens after which decodes leave snapshots of their states, as the server's flag",
    )
    add("--disable-radix-cache", action="store_true")


def _add_migration(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    defaults = MigrationArgs()
    add(
        "--migration",
        choices=("off", "auto"),
        default=defaults.mode,
        help="whether the planner moves layers between stages while requests run",
    )
    add("--migration-window", type=int, default=defaults.window_steps)
    add("--migration-spare-layers", type=int, default=defaults.spare_layers)
    add("--migration-weights", choices=MIGRATION_WEIGHTS, default=defaults.weights)
    add(
        "--state-mib",
        type=positive,
        metavar="MIB",
        help="of a request in each of three layers of four, which take them along when they move; "
        "with --max-mamba-cache-size",
    )
    add(
        "--forecast",
        choices=("tables", "online"),
        default="tables",
        help="planner and policy predict by costs fitted beforehand to the tables, or to the "
        "steps that they see",
    )


def _add_store(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--store-capacity-gb",
        type=positive,
        metavar="GB",
        help="size of a store that is empty at first; without it there is none",
    )
    add(
        "--store-read-gb-per-s",
        type=positive,
        default=2.0,
        metavar="GB",
        help="read by each stage, beside what it writes",
    )
    add("--store-write-gb-per-s", type=positive, default=1.0, metavar="GB", help="by each stage")
    add(
        "--store-save-gb-per-s",
        type=positive,
        default=StoreConfig().save_bytes_per_s / 1e9,
        metavar="GB",
        help="most that a stage saves, as the server's save_bytes_per_s",
    )
    add(
        "--store-latency-ms",
        type=float,
        default=1.0,
        metavar="MS",
        help="before an answer of the store and before the first byte of a transfer",
    )
    add(
        "--hicache-write-policy",
        choices=WRITE_POLICIES,
        default=SERVER_RULES.write_policy,
        help="when a page is saved, as the server's flag",
    )
    add(
        "--hicache-storage-prefetch-policy",
        choices=PREFETCH_POLICIES,
        default=SERVER_RULES.wait_policy,
        help="how long a request waits for a load, as the server's flag",
    )


def _policies(text: str) -> tuple[str, ...]:
    policies = tuple(text.split(","))
    if unknown := set(policies) - set(POLICIES):
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(POLICIES)}"
        )
    return policies
