"""The bound on offloaded attention of a decode server, from measured rates and predicted times."""

from collections.abc import Sequence

from sgl_pipeline.step_work import StepTimes, StepWork
from sgl_pipeline.throttle.attention_offload import (
    AttentionMemory,
    compute_bound,
    memory_bound,
    offload_bound,
)

# A batch is too large where its kernels beside attention take over this many times one row's.
REST_GROWTH = 1.5
_LARGEST_BATCH = 4096


def measured_bound(
    lent_tokens: Sequence[int],
    own_tokens: int,
    remote_rate: float,
    local_rate: float,
    mean_tokens: float,
    pipeline_depth: int,
    times: StepTimes | None,
) -> float:
    """OB of a decode server.

    Args:
        lent_tokens: tokens that each prefill server lends.
        own_tokens: tokens of its own pool.
        remote_rate: of one executor, as `local_rate`, in tokens attended to a second.
        mean_tokens: tokens of a decoding request.
        pipeline_depth: steps in flight, over which its decodes are shared out.
        times: None: they are not known, and only memory bounds.
    """
    lent = [AttentionMemory(tokens, remote_rate) for tokens in lent_tokens]
    ratio = memory_bound(lent, AttentionMemory(own_tokens, local_rate))
    if times is None:
        return ratio
    batch = max(1, int(own_tokens / max(1.0, mean_tokens)))
    return offload_bound(ratio, compute_bound(batch, pipeline_depth * most_batch(times)))


def most_batch(times: StepTimes) -> int:
    """B_max: the most decodes of a step for which all but attention takes no more than REST_GROWTH
    of what it takes for one."""

    def rest_ms(batch: int) -> float:
        return times.step_ms(StepWork(batch, batch, 0, 0, batch))

    low, high = 1, _LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        if rest_ms(middle) <= REST_GROWTH * rest_ms(1):
            low = middle
        else:
            high = middle
    return low
