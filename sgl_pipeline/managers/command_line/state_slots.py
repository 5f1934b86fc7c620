"""The number of state slots, from SGLang's flags and the memory of this host.

Of the flags for such models SGLang has many more: they tune its own pools and are refused
(`upstream_fields.py`, `exec.mamba`).
"""

import argparse
import logging
from pathlib import Path

from sgl_pipeline.args.checks import at_least, require
from sgl_pipeline.host_memory import available_memory_bytes

logger = logging.getLogger(__name__)

SLOTS_FLAG, RATIO_FLAG = "--max-mamba-cache-size", "--mamba-full-memory-ratio"
INTERVAL_FLAG = "--mamba-track-interval"
DEFAULT_RATIO = 0.9  # SGLang's
# With the radix cache, slots for each request that may run: its own, and two of snapshots. SGLang
# counts on as many (MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO).
SLOTS_PER_REQUEST = 3


def settle_state_slots(
    options: argparse.Namespace, slot_bytes: int, max_running_requests: int, weight_bytes: int
) -> int:
    """The number of state slots of a model whose slot takes `slot_bytes` in all layers; 0 for one
    without states (0 bytes).

    It is `--max-mamba-cache-size`, else one for each of `max_running_requests` and, with the radix
    cache, twice as many for snapshots; or as many as fit into the share of memory that SGLang gives
    to states: beside `weight_bytes` of weights, `ratio / (1 + ratio)`. Raises ConfigurationError
    for flags that cannot be honored, or where not one slot fits.
    """
    slots, ratio = options.max_mamba_cache_size, options.mamba_full_memory_ratio
    interval = options.mamba_track_interval
    if not slot_bytes:
        for flag, value in ((SLOTS_FLAG, slots), (RATIO_FLAG, ratio), (INTERVAL_FLAG, interval)):
            require(value is None, f"{flag} {value} is for models with states; this one has none")
        return 0
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
    room_bytes = max(0, available_memory_bytes() - weight_bytes) * ratio / (1.0 + ratio)
    num_fitting = int(room_bytes // slot_bytes)
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


def weight_file_bytes(model_path: str) -> int:
    """Bytes of the weights in the model directory."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
