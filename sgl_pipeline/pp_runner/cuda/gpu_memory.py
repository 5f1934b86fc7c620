"""Estimates a GPU stage's memory besides its weights and KV pages, and the rest for the pages.

Arithmetic only: it asks no device. An estimate that was never measured is a constant with a name.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.output.sampler import sampler_memory_bytes, settling_memory_bytes

# Of each process, for the CUDA context and the code of its kernels. Only where several processes
# share a GPU: the context of one alone is measured.
CONTEXT_BYTES = 512 * 2**20
# Buffers of one NCCL communicator, by default settings.
_COMMUNICATOR_BYTES = 256 * 2**20
# The largest step: prompt tokens by the default of --chunked-prefill-size, and decodes by that of
# --max-running-requests. More of either uses memory that --mem-fraction-static leaves free.
CHUNK_ROWS = 2048
_STEP_DECODES = 256
_STEP_ROWS = CHUNK_ROWS + _STEP_DECODES
_FP32_BYTES = 4
# Of a product with quantized weights (`layer_kernels/gpu_quantized.py`), beside its row and its
# result: codes; and sums of int8 as integers and in fp32.
ROUNDED_INPUT_BYTES, EXACT_SUM_BYTES = 1, 4 + 4


class CardMemory(NamedTuple):
    """The memory of one GPU when a stage's weights have been loaded.

    torch holds `reserved_bytes` of it for this process, which includes the weights.
    """

    total_bytes: int
    free_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """Bytes that a stage takes after its pool has been sized."""

    attention_bytes: int  # FlashInfer's workspaces, the graphs and the page that pads them
    link_bytes: int
    layer_bytes: int  # the activations of a step
    head_bytes: int  # logits and sampler, on the last stage

    @property
    def total_bytes(self) -> int:
        return self.attention_bytes + self.link_bytes + self.layer_bytes + self.head_bytes


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Bytes for KV pages. With `has_more` a higher --mem-fraction-static would give more."""

    num_bytes: int
    has_more: bool


def stage_needs(
    spec: DecoderSpec,
    itemsize: int,
    *,
    attention_bytes: int,
    stage: int,
    num_stages: int,
    has_nccl: bool,
) -> StageNeeds:
    """The needs of `stage`, in a model whose weights take `itemsize` bytes each.

    Args:
        has_nccl: whether its links are NCCL's.
    """
    num_boundaries = (stage > 0) + (stage < num_stages - 1)
    # One step's rows arrive or leave while another's are computed.
    link_bytes = num_boundaries * 2 * _STEP_ROWS * spec.hidden_size * itemsize
    if has_nccl:
        # One communicator of all stages, and one for each boundary.
        link_bytes += (1 + num_boundaries) * _COMMUNICATOR_BYTES
    is_last = stage == num_stages - 1
    return StageNeeds(
        attention_bytes=attention_bytes,
        link_bytes=link_bytes,
        layer_bytes=_STEP_ROWS * layer_row_bytes(spec, itemsize),
        head_bytes=_head_bytes(spec, itemsize) if is_last else 0,
    )


def layer_row_bytes(spec: DecoderSpec, itemsize: int) -> int:
    """An upper bound of the memory that one row of a step keeps alive within a layer."""
    heads = (2 * spec.num_query_heads + 2 * spec.num_kv_heads) * spec.head_dim
    row_bytes = (6 * spec.hidden_size + 2 * heads + 3 * spec.intermediate_size) * itemsize
    if spec.quantization is not None:
        inputs = max(spec.hidden_size, spec.intermediate_size, spec.num_query_heads * spec.head_dim)
        outputs = max(spec.hidden_size, heads, 2 * spec.intermediate_size)
        row_bytes += ROUNDED_INPUT_BYTES * inputs + EXACT_SUM_BYTES * outputs
    if (experts := spec.experts) is not None:
        # Each expert of a row has a row of its own; their results are mixed in fp32.
        numbers = 3 * spec.hidden_size + 3 * experts.inner_size
        mixed_bytes = 2 * spec.hidden_size * _FP32_BYTES
        row_bytes += experts.experts_per_token * (numbers * itemsize + mixed_bytes)
    return row_bytes


def kv_room(
    card: CardMemory, needs: StageNeeds, memory_fraction: float, num_sharing: int
) -> KvRoom:
    """The room for KV pages of one of `num_sharing` stages with the same GPU.

    Weights and pages take at most `memory_fraction` of it, as with upstream's
    --mem-fraction-static, and never the stage's other needs or the memory of other programs.
    """
    share_bytes = card.total_bytes // num_sharing
    used_bytes = card.total_bytes - card.free_bytes
    if num_sharing == 1:
        outside_bytes = used_bytes - card.reserved_bytes
    else:
        # It is not known which other stages have loaded their weights: they are assumed to be as
        # large as this stage's. If this is wrong, a stage with larger weights sets the size of the
        # pool.
        own_bytes = card.reserved_bytes + CONTEXT_BYTES
        of_others_bytes = max(0, used_bytes - num_sharing * own_bytes)
        outside_bytes = CONTEXT_BYTES + -(-of_others_bytes // num_sharing)
    by_fraction = int(card.total_bytes * memory_fraction) // num_sharing - card.reserved_bytes
    by_needs = share_bytes - outside_bytes - card.reserved_bytes - needs.total_bytes
    return KvRoom(min(by_fraction, by_needs), has_more=by_fraction < by_needs)


def _head_bytes(spec: DecoderSpec, itemsize: int) -> int:
    """Logits as the product gives them and in fp32, the drawn tokens, and the log-probabilities
    with a copy; also the logits of the previous step, whose tokens are on their way, and the memory
    to draw some of them again."""
    num_logits = _STEP_DECODES * spec.vocab_size
    logits_bytes = num_logits * (itemsize + 4 * _FP32_BYTES)
    sampler_bytes = sampler_memory_bytes(spec.vocab_size, _STEP_DECODES)
    return logits_bytes + sampler_bytes + settling_memory_bytes(spec.vocab_size, _STEP_DECODES)
