"""The number of state slots, from SGLang's flags and the memory of this host.

Of the flags for such models SGLang has many more: they tune its own pools and are refused
(`upstream_fields.py`, `exec.mamba`).
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sgl_pipeline.args import MigrationArgs, StageArgs
from sgl_pipeline.args.checks import at_least, require
from sgl_pipeline.host_memory import available_memory_bytes
from sgl_pipeline.pipeline.assignment import workers_of_host
from sgl_pipeline.pp_runner.base.layer_counts import most_layers
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.weight_sizes import WeightSizes
from sgl_pipeline.stage_plan import StagePlan

logger = logging.getLogger(__name__)

SLOTS_FLAG, RATIO_FLAG = "--max-mamba-cache-size", "--mamba-full-memory-ratio"
INTERVAL_FLAG = "--mamba-track-interval"
DEFAULT_RATIO = 0.9  # SGLang's
# With the radix cache, slots for each request that may run: its own, and two of snapshots. SGLang
# counts on as many (MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO).
SLOTS_PER_REQUEST = 3


class HeldBytes(NamedTuple):
    """Bytes that the stages of a host hold: of the states of one slot, and of weights."""

    slot_bytes: int
    weight_bytes: int


def host_loads(
    spec: DecoderSpec, plan: StagePlan, stages: StageArgs, migration: MigrationArgs, num_hosts: int
) -> list[HeldBytes]:
    """The bytes held on each host of a model with states, whose stages start under `plan`; with the
    layers that `migration` may bring, where memory is kept free for them."""
    assert spec.state is not None
    sizes = WeightSizes(spec, getattr(torch, stages.dtype))
    have_states = [one is not None for one in spec.states]
    layer_bytes = spec.state.bytes_per_slot(stages.dtype)
    last = plan.num_stages - 1
    slots, weights = [], []
    for stage, most in enumerate(migration.max_layers(plan)):
        own = plan.layers_of(stage)
        num_states = sum(have_states[layer] for layer in own)
        if migration.mode != "off":
            num_states = most_layers(have_states, most).with_states
        slots.append(num_states * layer_bytes)
        held = (*own, *migration.layers_to_load(plan, stage))
        weights.append(sizes.of_stage(held, is_first=stage == 0, is_last=stage == last))
    hosts = [workers_of_host(plan.num_stages, num_hosts, rank) for rank in range(num_hosts)]
    return [
        HeldBytes(sum(slots[stage] for stage in own), sum(weights[stage] for stage in own))
        for own in hosts
    ]


def refuse_slots_without_states(options: argparse.Namespace) -> None:
    """Raises ConfigurationError for flags that do nothing for a model without states."""
    values = {
        SLOTS_FLAG: options.max_mamba_cache_size,
        RATIO_FLAG: options.mamba_full_memory_ratio,
        INTERVAL_FLAG: options.mamba_track_interval,
    }
    for flag, value in values.items():
        require(value is None, f"{flag} {value} is for models with states; this one has none")


def settle_state_slots(
    options: argparse.Namespace,
    loads: Callable[[], Sequence[HeldBytes]],
    max_running_requests: int,
) -> int:
    """The number of state slots of a model that has states.

    It is `--max-mamba-cache-size`, else one for each of `max_running_requests` and, with the radix
    cache, twice as many for snapshots; or as many as fit, on the host with the least room, into the
    share of memory that SGLang gives to states: beside the weights, `ratio / (1 + ratio)`. All
    hosts are taken to have the memory of this one. Raises ConfigurationError for flags
    that cannot be honored, or where not one slot fits.
    """
    slots, ratio = options.max_mamba_cache_size, options.mamba_full_memory_ratio
    interval = options.mamba_track_interval
    require(
        interval is None or not options.disable_radix_cache,
        f"{INTERVAL_FLAG} {interval} does nothing beside --disable-radix-cache: there are no "
        "snapshots; give one",
    )
    if slots is not None:
        at_least(1)(SLOTS_FLAG, slots)
        require(ratio is None, f"{RATIO_FLAG} {ratio} does nothing beside {SLOTS_FLAG}; give one")
        return int(slots)
    ratio = DEFAULT_RATIO if ratio is None else ratio
    require(0.0 < ratio < float("inf"), f"{RATIO_FLAG} {ratio} must be above 0")
    available_bytes = available_memory_bytes()
    num_fitting, room_bytes, slot_bytes = min(
        _fitting(load, available_bytes, ratio / (1.0 + ratio))
        for load in loads()
        if load.slot_bytes
    )
    require(
        num_fitting >= 1,
        f"{RATIO_FLAG} {ratio} leaves {room_bytes / 2**20:.0f} MiB for states, and one slot takes "
        f"{slot_bytes / 2**20:.0f} MiB; raise it or use more hosts",
    )
    if num_fitting < max_running_requests:
        logger.warning(
            "%d requests run at once, not %d (--max-running-requests): %d state slots of %.1f MiB "
            "fit into the share of memory that is for states (%s %s)",
            num_fitting,
            max_running_requests,
            num_fitting,
            slot_bytes / 2**20,
            RATIO_FLAG,
            ratio,
        )
    slots_each = 1 if options.disable_radix_cache else SLOTS_PER_REQUEST
    return min(num_fitting, slots_each * max_running_requests)


def _fitting(load: HeldBytes, available_bytes: int, share: float) -> tuple[int, float, int]:
    """The slots that fit on a host, the room for them, and the bytes of one."""
    room_bytes = max(0, available_bytes - load.weight_bytes) * share
    return int(room_bytes // load.slot_bytes), room_bytes, load.slot_bytes
