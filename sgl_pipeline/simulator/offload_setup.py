"""Attention offload of a simulated deployment: what prefill servers lend, and its bounds."""

from dataclasses import dataclass

from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.models import BYTES_PER_NUMBER, ModelShape
from sgl_pipeline.simulator.pipeline_costs import AttentionSeconds
from sgl_pipeline.simulator.remote_attention import ExchangeCosts
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.throttle.attention_offload import (
    AttentionMemory,
    Reading,
    compute_bound,
    memory_bound,
    offload_bound,
)

# Decodes by which the speeds of attention on two kinds of cards are compared.
_TYPICAL_DECODES = StepShape((), (1024,) * 64, 64)
# Batches up to which the kernels other than attention are looked at.
_LARGEST_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOffload:
    """The executors beside prefill, and the rule.

    They have `compute_share` of the prefill cards' processors, which prefill lacks, and with it
    `bandwidth_share` of their memory bandwidth: 20 % of an A100's give 60 % (Adrenaline). Of the
    prefill servers' pools `lent_share` is for offloaded requests. A layer's rows take `latency_s`
    each way and `bytes_per_s`.

    `reading` and `only_hidden` are those of the rule. `bound` None: by the formulas, where other
    kernels than attention may take `rest_growth` of their time for one row, and requests have
    `mean_tokens`. With `fills_waits` a stage computes another step while one waits.
    """

    compute_share: float = 0.2
    bandwidth_share: float = 0.6
    lent_share: float = 0.8
    latency_s: float = 14e-6
    bytes_per_s: float = 317e9
    bound: float | None = None
    reading: Reading = "either"
    only_hidden: bool = True
    rest_growth: float = 1.5
    mean_tokens: int = 512
    fills_waits: bool = False

    def speed(self, prefill: Cluster, decode: Cluster, per_decode: float) -> float:
        """The executors' attention over that of a decode server, a stage of each; `per_decode`
        prefill servers lend to it. Stages that share an executor share its bandwidth; a prefill
        server of more stages than the decode server has no more of them at work at a time."""
        cards = decode.parts().attention_s(_TYPICAL_DECODES) / prefill.parts().attention_s(
            _TYPICAL_DECODES
        )
        depths = min(1.0, prefill.num_stages / decode.num_stages)
        return self.bandwidth_share * cards * depths * per_decode

    def lent_tokens(self, prefill: Cluster) -> int:
        """Tokens of each prefill server's pool that are for offloaded requests."""
        return int(self.lent_share * prefill.kv_pool_tokens())

    def ratio_bound(self, prefill: Cluster, decode: Cluster, per_decode: float) -> float:
        """OB of one decode server."""
        if self.bound is not None:
            return self.bound
        own_tokens = decode.kv_pool_tokens()
        token_bytes = decode.shape.kv_bytes_per_layer_token * decode.shape.num_layers
        lent_bytes = per_decode * self.lent_tokens(prefill) * token_bytes
        memory_ratio = memory_bound(
            [AttentionMemory(lent_bytes, self.speed(prefill, decode, per_decode))],
            AttentionMemory(own_tokens * token_bytes, 1.0),
        )
        batch = max(1, own_tokens // self.mean_tokens)
        most = decode.num_stages * most_batch(decode.parts(), self.rest_growth)
        return offload_bound(memory_ratio, compute_bound(batch, most))

    def exchange(self, shape: ModelShape, speed: float) -> ExchangeCosts:
        """The costs of the way there and back."""
        numbers = 2 * shape.num_query_heads + 2 * shape.num_kv_heads
        return ExchangeCosts(
            latency_s=self.latency_s,
            bytes_per_s=self.bytes_per_s,
            row_bytes=numbers * shape.head_dim * BYTES_PER_NUMBER,
            speed=speed,
        )


def most_batch(parts: AttentionSeconds, growth: float) -> int:
    """B_max: the most decodes of a step for which all but the attention of a layer takes no more
    than `growth` of what it takes for one."""

    def rest_s(batch: int) -> float:
        shape = StepShape((), (1,) * batch, batch)
        return parts.layer_s(shape) - parts.attention_s(shape)

    low, high = 1, _LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if rest_s(middle) <= growth * rest_s(1) else (low, middle)
    return low
