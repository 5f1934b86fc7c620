"""Reports the server's load in `/v1/loads`, for routers and load balancers.

The scheduler process writes a snapshot into a small file in the run directory, which upstream's
TokenizerManager maps and reads (`entrance/http_front.py` has its path). Upstream keeps its own
file in /dev/shm, where it outlives a server that was killed. A report never delays a step: it is
written between steps, a few times a second.
"""

import os
import time

from sglang.srt.managers.load_snapshot import (
    DisaggregationMetrics,
    LoadSnapshot,
    MemoryMetrics,
    QueueMetrics,
    ShmLoadSnapshotWriter,
)

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.args.disaggregation_args import Mode
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.pipeline_state import PipelineState, RoomsState

_THROUGHPUT_WINDOW_S = 1.0
_GIB = 2**30


def loads_path(run_directory: str) -> str:
    """The file that the scheduler process writes and upstream's front reads."""
    return os.path.join(run_directory, "loads")


class LoadReport:
    """The file, and the little that is known only from one report to the next. `mode` is the role
    of this server in disaggregation."""

    def __init__(
        self, path: str, args: SchedulingArgs, capacity: PipelineCapacity, mode: Mode = "null"
    ) -> None:
        self._mode = mode
        self._writer = ShmLoadSnapshotWriter(path, dp_size=1, dp_rank=0)
        self._page_size = args.page_size
        self._max_running_requests = args.most_running_requests
        # Of all layers, wherever they are; stages keep room for more than they have.
        page_bytes = capacity.plan.num_layers * capacity.layer_page_bytes
        self._memory = MemoryMetrics(
            weight_gb=round(sum(stage.weight_bytes for stage in capacity.stages) / _GIB, 3),
            kv_cache_gb=round(capacity.num_pages * page_bytes / _GIB, 3),
            graph_gb=0.0,
            token_capacity=capacity.num_pages * args.page_size,
        )
        self._window_start_s = 0.0
        self._window_start_decodes = 0
        self._decodes_per_s = 0.0

    def publish(self, state: PipelineState) -> LoadSnapshot:
        """Writes how things stand, and returns it as upstream counts it."""
        elapsed_s = state.now_s - self._window_start_s
        if elapsed_s >= _THROUGHPUT_WINDOW_S:
            self._decodes_per_s = (state.decoded_tokens - self._window_start_decodes) / elapsed_s
            self._window_start_s, self._window_start_decodes = state.now_s, state.decoded_tokens
        snapshot = self._snapshot(state)
        self._writer.write(snapshot)
        return snapshot

    def close(self) -> None:
        self._writer.close()

    def _snapshot(self, state: PipelineState) -> LoadSnapshot:
        """Upstream's fields (`load_inquirer.py`, get_loads). Those that only its own scheduler can
        fill keep upstream's "nothing": utilization, busy time, moments of decode times. Who was
        retracted waits again, and is counted there."""
        load = state.load
        used_tokens = (load.total_pages - load.free_pages) * self._page_size
        total_tokens = used_tokens + state.queued_tokens
        return LoadSnapshot(
            timestamp=time.time(),
            num_running_reqs=state.running_requests,
            num_waiting_reqs=state.waiting_requests,
            num_waiting_uncached_tokens=load.waiting_tokens,
            num_used_tokens=used_tokens,
            num_total_tokens=total_tokens,
            num_active_tokens=total_tokens,
            max_total_num_tokens=load.total_pages * self._page_size,
            max_running_requests=self._max_running_requests,
            token_usage=round(max(1.0 - load.free_share, state.state_usage), 4),
            gen_throughput=round(self._decodes_per_s, 2),
            cache_hit_rate=round(state.cache_hit_rate, 4),
            total_prefill_uncached_tokens=state.prefill_tokens,
            memory=self._memory,
            disaggregation=_disaggregation(self._mode, state.rooms),
            queues=QueueMetrics(
                waiting=state.waiting_requests,
                grammar=state.compiling_requests,
                paused=0,
                retracted=0,
                prealloc_ready=0,
            ),
        )


def _disaggregation(mode: Mode, rooms: RoomsState | None) -> DisaggregationMetrics:
    """Upstream's counts of rooms, and means since the start."""
    if rooms is None:
        return DisaggregationMetrics(mode=mode)
    waiting, moving = rooms.bootstrap_requests, rooms.transfer_requests
    is_prefill, transfer_s = rooms.mode == "prefill", rooms.transfer_s
    return DisaggregationMetrics(
        mode=mode,
        prefill_bootstrap_queue_reqs=waiting if is_prefill else 0,
        prefill_inflight_queue_reqs=moving if is_prefill else 0,
        decode_prealloc_queue_reqs=0 if is_prefill else waiting,
        decode_transfer_queue_reqs=0 if is_prefill else moving,
        kv_transfer_speed_gb_s=rooms.loaded_bytes / _GIB / transfer_s if transfer_s else 0.0,
        kv_transfer_latency_ms=rooms.mean_transfer_ms,
    )
