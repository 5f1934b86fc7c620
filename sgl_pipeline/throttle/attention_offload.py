"""Decides which requests decode with their attention on prefill instances: bounds and rule.

After Adrenaline (arXiv 2503.20552). A decode instance (here "local") computes everything of its
requests but the attention of those that are offloaded, which executors beside prefill compute over
keys and values that stay there. All ratios are of offloaded to local attention work. Pure: the
decode scheduler and the simulator use the same functions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# The paper's Algorithm 1 names two conditions; whether one is enough is not certain.
Reading = Literal["either", "both"]


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """The memory that attention may use on one instance, and the rate at which it is read there."""

    num_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Decoding requests whose attention is computed in one place, and their tokens in all."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: "AttentionWork") -> "AttentionWork":
        return AttentionWork(self.requests + other.requests, self.tokens + other.tokens)


def memory_bound(lent: Iterable[AttentionMemory], own: AttentionMemory) -> float:
    """OB_mem: the largest ratio that the executors' memory holds and that they read in the time in
    which the decode instance reads its own."""
    lent = tuple(lent)
    room = sum(one.num_bytes for one in lent) / own.num_bytes
    rate = sum(one.bytes_per_s for one in lent) / own.bytes_per_s
    return min(room, rate)


def compute_bound(batch_in_memory: int, most_batch: int) -> float:
    """OB_comp: the ratio that fills the batch up to `most_batch`, where kernels other than
    attention stop being nearly free; `batch_in_memory` requests fit without offload within the
    limit on the time per token (B_max and B_TPOT)."""
    return max(0.0, (most_batch - batch_in_memory) / batch_in_memory)


def offload_bound(memory_ratio: float, compute_ratio: float) -> float:
    """OB."""
    return min(memory_ratio, compute_ratio)


def is_hidden(local_s: float, remote_s: float, exchange_s: float) -> bool:
    """True if the way to the executors and back and their attention take no longer than the local
    attention of the same layer."""
    return exchange_s + remote_s <= local_s


def should_offload(
    offloaded: AttentionWork,
    local: AttentionWork,
    most_tokens: int,
    bound: float,
    reading: Reading = "either",
) -> bool:
    """True if a request that begins to decode, and may reach `most_tokens` tokens, is offloaded.

    C1: even at that length it and the offloaded requests stay within `bound` of the local ones. C2:
    those that are offloaded are within it, by tokens and by requests. A decision stands for the
    life of the request. Nothing is offloaded that no local attention covers.
    """
    if not local.requests or bound <= 0.0:
        return False
    covers_longest = offloaded.tokens + most_tokens <= bound * local.tokens
    is_within = (
        offloaded.tokens <= bound * local.tokens and offloaded.requests <= bound * local.requests
    )
    if reading == "both":
        return covers_longest and is_within
    return covers_longest or is_within
